"""The residual blocks of ResNets for a GPU: the same descriptors, and their kernel."""

import json

import pytest
import torch
from interpreter import run_script, skip_if_interpreter_is_broken
from torch import nn

from listwise.models import RetrievalNet
from listwise.models.backbone import create_backbone
from listwise.models.folding import FoldedCopy
from listwise.models.mixed import MixedNet
from listwise.models.residual import ResidualBlock, finish, replace_blocks

SIZES = [(64, 96), (64, 43), (38, 96), (33, 67)]


def net_of(name, **options):
    torch.manual_seed(0)
    narrow = {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16), **options}
    net = RetrievalNet(create_backbone(name, **narrow)).double().eval()
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5, 1)
            nn.init.normal_(norm.bias)
            norm.running_mean.normal_()
    return net


@torch.no_grad()
def check(net):
    """Compare with the network, photos of one shape and mixed ones; return the number of blocks."""
    photos = torch.rand(len(SIZES), 3, 64, 96, dtype=torch.float64)
    replaced = FoldedCopy(net).net
    replace_blocks(replaced)
    torch.testing.assert_close(replaced(photos), net(photos))
    alone = [net(photos[n : n + 1, :, :h, :w]) for n, (h, w) in enumerate(SIZES)]
    torch.testing.assert_close(MixedNet(replaced)(photos, SIZES), torch.cat(alone))
    return sum(isinstance(module, ResidualBlock) for module in replaced.modules())


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnet50d"])
def test_descriptors_are_those_of_the_network(name):
    assert check(net_of(name)) == 4


def test_other_blocks_stay_as_they_are():
    assert check(net_of("resnet18", block_args={"attn_layer": "se"})) == 0
    hooked = net_of("resnet18")
    hooked.backbone.layer1[0].act2.register_forward_hook(lambda layer, given, found: 2 * found)
    assert check(hooked) == 3
    leaky = net_of("resnet18")
    leaky.backbone.layer2[0].act1 = nn.LeakyReLU()
    leaky.backbone.layer3[0].act2 = nn.Identity()
    assert check(leaky) == 2


SCRIPT = """
import json, sys
import torch
from listwise.models.epilogue import finish_on_gpu
from listwise.models.residual import finish

device, cases = sys.argv[1], json.loads(sys.argv[2])
torch.set_num_threads(1)
found = []
for shape, sizes, add, dtype in cases:
    torch.manual_seed(0)
    last = lambda: torch.randn(shape).to(getattr(torch, dtype)).contiguous(
        memory_format=torch.channels_last
    )
    output, added, bias = last(), last() if add else None, torch.randn(shape[1])
    output[0, 0, 0, 0] = float("nan")
    sizes = None if sizes is None else torch.tensor(sizes, dtype=torch.int32)
    wide = None if added is None else added.double()
    expected = finish(output.double(), bias.double(), wide, sizes)
    there = [None if each is None else each.to(device) for each in (output, bias, added, sizes)]
    finish_on_gpu(*there)
    given = there[0].cpu().double()
    assert given.isnan().equal(expected.isnan()) and given.isnan().sum() == 1
    found.append(float((given - expected).nan_to_num().abs().max()))
print(json.dumps(found))
"""
CASES = [
    ((2, 6, 5, 7), [[5, 7], [3, 2]], True, "float32"),
    ((1, 300, 3, 20), None, True, "float16"),
    ((3, 64, 4, 4), [[1, 1], [4, 4], [2, 3]], False, "float32"),
]


def run(device, cases):
    return json.loads(run_script(SCRIPT, device, json.dumps(cases)))


def test_kernel_in_the_interpreter():
    pytest.importorskip("triton", minversion="3.3")
    skip_if_interpreter_is_broken()
    for (_, _, _, dtype), error in zip(CASES, run("cpu", CASES), strict=True):
        assert error < (1e-6 if dtype == "float32" else 5e-3)


def test_kernel_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    large = ((70, 256, 100, 99), [[100 - n, n + 1] for n in range(70)], True, "bfloat16")
    assert max(run("cuda", [*CASES, large])) < 0.05


def test_finish_is_a_sum_a_relu_and_zeros_outside():
    output, bias = torch.tensor([[[[1.0, -3.0], [2.0, 5.0]]]]), torch.tensor([1.0])
    sizes = torch.tensor([[2, 1]], dtype=torch.int32)
    assert finish(output.clone(), bias).tolist() == [[[[2, 0], [3, 6]]]]
    assert finish(output.clone(), bias, -output, sizes).tolist() == [[[[1, 0], [1, 0]]]]
