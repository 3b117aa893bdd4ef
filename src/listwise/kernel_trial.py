"""A small Triton kernel that shows whether Triton works on a device."""

import torch
import triton
import triton.language as tl


def kernel_doubles(device: torch.device) -> bool:
    """Return whether a kernel on a device doubles 16 numbers in bfloat16."""
    numbers = torch.ones(16, dtype=torch.bfloat16, device=device)
    _double_kernel[(1,)](numbers)
    return numbers.float().sum().item() == 32


@triton.jit
def _double_kernel(numbers):  # type: ignore[no-untyped-def]
    place = numbers + tl.arange(0, 16)
    tl.store(place, (tl.load(place).to(tl.float32) * 2.0).to(numbers.dtype.element_ty))
