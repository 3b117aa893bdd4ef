"""Use an installed wheel: the command, the loss, and the message of an extra if it is missing."""

import importlib.util
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch

import listwise
from listwise.losses import QuantizedAPLoss

listwise_command = Path(sys.executable).with_name("listwise")


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([listwise_command, *arguments], capture_output=True, text=True)


assert Path(listwise.__file__).is_relative_to(sys.prefix), listwise.__file__
assert run("--version").stdout.split()[-1] == version("listwise") == listwise.__version__

descriptors = torch.nn.functional.normalize(torch.randn(20, 8), dim=1).requires_grad_()
QuantizedAPLoss()(descriptors, torch.arange(20) // 4).backward()
assert descriptors.grad is not None
assert descriptors.grad.abs().sum() > 0

refused = run("index", "info", sys.prefix)
assert refused.returncode == 2, refused
missing = importlib.util.find_spec("faiss") is None
expected = "pip install 'listwise[index]'" if missing else f"no index at {sys.prefix}"
assert expected in refused.stderr, refused
assert not list(Path(listwise.__file__).parent.rglob("test_*")), "tests are in the wheel"
assert importlib.util.find_spec("benchmarks") is None, "benchmarks are in the wheel"
print(f"the wheel of listwise {listwise.__version__} works")
