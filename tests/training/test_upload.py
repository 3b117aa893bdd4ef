import pytest
import torch

from listwise.training.forward import upload_ahead


def test_crops_that_need_no_upload_are_not_copied():
    crops = torch.arange(10).split(3)
    assert [id(c) for c in upload_ahead(crops, torch.device("cpu"))] == [id(c) for c in crops]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("place", ["pinned", "pageable", "cuda"])
def test_they_arrive_whole_and_in_order(place):
    images = torch.randint(0, 256, (40, 3, 256, 256), dtype=torch.uint8)
    sent = {"pinned": images.pin_memory, "pageable": images.clone, "cuda": images.cuda}[place]()
    device = torch.device("cuda")
    sums = []
    for crop in upload_ahead(sent.split(4), device):
        near = crop.to(device)
        busy = torch.rand(2000, 2000, device=device)
        for _ in range(20):
            busy = torch.tanh(busy @ busy)
        sums.append(near.long().sum((1, 2, 3)) + busy[0, 0].mul(0).long())
    assert torch.equal(torch.cat(sums).cpu(), images.long().sum((1, 2, 3)))
