"""Start GPU kernels with little work on the host, and read their results.

With a few thousand images the kernels of a loss take less than a millisecond, so the time that
Python takes between them matters.
"""

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class Launch:
    """A kernel that is started many times with the same constants and integers.

    At each launch, Triton inspects all arguments to find the compiled kernel that fits them. This
    class finds it at the first launch and keeps it. All later launches must therefore pass tensors
    of the same types that start at multiples of 16 bytes, and the same integers, except for those
    of `do_not_specialize`.

    Args:
        kernel: a function decorated with `triton.jit`.
        options: options of Triton such as `num_warps`.
        constants: the constants, which are the last arguments of the kernel, in their order.
    """

    def __init__(self, kernel: Any, options: dict[str, int], constants: dict[str, Any]) -> None:
        self.kernel, self.options, self.constants = kernel, options, constants
        self._compiled: Any = None

    def __call__(self, programs: int, *arguments: Any, columns: int = 1) -> None:
        """Start this many programs of the kernel, times `columns` along its second axis."""
        if self._compiled is None:
            start = self.kernel[(programs, columns)]
            # Triton's interpreter returns no compiled kernel.
            self._compiled = start(*arguments, **self.constants, **self.options)
        else:
            self._compiled[(programs, columns, 1)](*arguments, *self.constants.values())


class HostBuffer:
    """Host memory that a kernel writes to, and that the host reads when the kernel has finished."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._event = torch.cuda.Event() if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._memory = torch.empty(0)

    def reserve(self, count: int) -> torch.Tensor:
        """Return memory for at least `count` float32 numbers, for the next kernel to fill."""
        if len(self._memory) < count:
            self._memory = torch.empty(count, dtype=torch.float32, pin_memory=self._on_gpu)
        return self._memory

    def record(self) -> None:
        """Record that the kernel was started."""
        if self._event is not None:
            self._event.record()

    def read(self, count: int) -> NDArray[np.float32]:
        """Wait for the kernel, and return the numbers."""
        if self._event is not None:
            self._event.synchronize()
        return self._memory.numpy()[:count]


_BUFFERS = threading.local()


def host_buffer(device: torch.device) -> HostBuffer:
    """Return the buffer of this thread for a device."""
    buffers: dict[str, HostBuffer] = vars(_BUFFERS)
    if str(device) not in buffers:
        buffers[str(device)] = HostBuffer(device)
    return buffers[str(device)]
