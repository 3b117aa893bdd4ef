"""Bias, sum, ReLU and zeros in one pass, by Triton's interpreter and on a GPU."""

import os

import pytest
import torch
from interpreter import run_script

pytest.importorskip("triton", minversion="3.3")

SCRIPT = """
import itertools, sys
import torch
from listwise.models.epilogue import finish_convolution
from listwise.optional import runs_triton

device = sys.argv[1]
assert runs_triton(torch.device(device))
torch.manual_seed(0)
sizes = torch.tensor([[7, 9], [3, 4], [7, 2]], dtype=torch.int32, device=device)
kinds = [(torch.float32, 24), (torch.bfloat16, 300)]  # the interpreter is slow
if device == "cuda" or sys.argv[2]:
    kinds = list(itertools.product((torch.float32, torch.bfloat16), (24, 64, 300)))
options = itertools.product(kinds, *[(False, True)] * 3)
for (dtype, channels), add, relu, mask in options:
    maps = torch.randn(2, 3, channels, 7, 9, device=device).to(dtype)
    output, other = (each.to(memory_format=torch.channels_last) for each in maps)
    bias = torch.randn(channels, device=device).to(dtype)
    expected = output.double() + bias.double()[:, None, None]
    if add:
        expected += other
    if relu:
        expected = expected.relu()
    if mask:
        output[1, :, 3:] = torch.inf  # as a max pooling may leave it
        for photo, (height, width) in zip(expected, sizes.tolist(), strict=True):
            photo[:, height:] = 0
            photo[:, :, width:] = 0
    found = finish_convolution(output, bias, other if add else None, relu, sizes if mask else None)
    assert found is output
    torch.testing.assert_close(found, expected.to(dtype))
"""


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
        ),
    ],
)
def test_one_pass_is_the_sum_of_its_parts(device):
    run_script(SCRIPT, device, os.environ.get("LISTWISE_SOAK", ""))
