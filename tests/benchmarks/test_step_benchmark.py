import pytest
import torch
from tiny_net import TINY_NET

from listwise.benchmarks import step as benchmark
from listwise.errors import InputError


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_each_way_is_measured_on_the_same_network():
    rows = list(benchmark.run("cpu", TINY_NET, size=48, batch=32, micro_batch=16))
    assert [row.method for row in rows] == list(benchmark.CPU_METHODS)
    for row in rows:
        assert row.measured == 32
        assert min(row.forward, row.both, row.step) > 0
        assert row.ratio == pytest.approx(row.step / rows[0].step)
        assert row.minutes == pytest.approx(200 * 32 / row.step / 60)
    # A step is a forward and a forward with backward: the machine may be busy in one of them.
    assert sum(1 / row.forward for row in rows) < sum(2 / row.step for row in rows)
    plain, precise, autocast, folded = rows
    assert plain.gradient_error < 1e-3
    assert precise.gradient_error < 1e-3
    assert folded.gradient_error < 1.5 * autocast.gradient_error < 1


def test_measuring_leaves_the_network_as_it_was():
    device = torch.device("cpu")
    net = benchmark.make_net(TINY_NET, 64, device)
    before = net.fingerprint()
    images, labels = benchmark.make_batch(32, 64)
    step = benchmark.make_step(benchmark.FOLDED, net, 8)
    assert benchmark.whole_steps(step, images, labels, 1) > 0
    assert net.fingerprint() == before
    assert all(p.grad is None for p in net.parameters())


def test_costs_are_those_of_the_convolutions():
    net = benchmark.make_net("resnet18", 64, torch.device("cpu"))
    costs = benchmark.convolution_costs(net, 224)
    # 1.81 billion products for an image of 224, of which the classifier has half a million.
    assert sum(work for work, _ in costs) / 2 == pytest.approx(1.81e9, rel=0.01)
    stem_work, stem_bytes = costs[0]
    assert stem_work == 2 * 64 * 112 * 112 * 3 * 7 * 7
    assert stem_bytes == 2 * (3 * 224 * 224 + 64 * 112 * 112)
    assert len(costs) == 20


def test_images_of_a_batch_differ():
    images, labels = benchmark.make_batch(136, 32)
    assert len(images.flatten(1).unique(dim=0)) == 136
    assert labels.bincount().eq(benchmark.CLASS_SIZE).all()


def test_small_batches_are_refused():
    with pytest.raises(InputError, match="a multiple of 4, and 32 or more"):
        list(benchmark.run("cpu", "test_resnet", size=64, batch=30))


@pytest.mark.parametrize("device", ["nowhere", "cuda:99"])
def test_devices_that_are_not_there_are_refused(device):
    with pytest.raises(InputError, match=device):
        list(benchmark.run(device, "test_resnet", size=64, batch=32))
