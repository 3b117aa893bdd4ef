"""Starting kernels in little of the host's time, and hearing from them.

At a few thousand images the kernels of a loss take less than a millisecond, so what Python does
between them counts.
"""

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class Launch:
    """A kernel whose constants and whole numbers stay the same from call to call.

    Triton looks at all arguments at each launch to find the compiled kernel that fits them. Here
    it is found at the first launch and kept. Tensors must then keep their types and start at
    multiples of 16 bytes, and numbers must not change, but for those of `do_not_specialize`.
    The kernel is a function made by `triton.jit`, its constants last and in this order; options
    are `num_warps` and the like.
    """

    def __init__(self, kernel: Any, options: dict[str, int], constants: dict[str, Any]) -> None:
        self.kernel, self.options, self.constants = kernel, options, constants
        self._compiled: Any = None

    def __call__(self, programs: int, *arguments: Any) -> None:
        """Start a number of programs."""
        if self._compiled is None:
            start = self.kernel[(programs,)]
            # Triton's interpreter has no compiled kernel and returns none.
            self._compiled = start(*arguments, **self.constants, **self.options)
        else:
            self._compiled[(programs, 1, 1)](*arguments, *self.constants.values())


class Mailbox:
    """Host memory that a kernel of this device writes to, and the host reads once it is there."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._event = torch.cuda.Event() if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._room = torch.empty(0)

    def room(self, count: int) -> torch.Tensor:
        """At least that many float32 numbers to be written by a kernel, which must start next."""
        if len(self._room) < count:
            self._room = torch.empty(count, dtype=torch.float32, pin_memory=self._on_gpu)
        return self._room

    def sent(self) -> None:
        """Note that the kernel was started."""
        if self._event is not None:
            self._event.record()

    def read(self, count: int) -> NDArray[np.float32]:
        """The numbers, after a wait for the kernel."""
        if self._event is not None:
            self._event.synchronize()
        return self._room.numpy()[:count]


_MAILBOXES = threading.local()


def mailbox(device: torch.device) -> Mailbox:
    """This thread's mailbox for a device."""
    boxes: dict[str, Mailbox] = vars(_MAILBOXES)
    if str(device) not in boxes:
        boxes[str(device)] = Mailbox(device)
    return boxes[str(device)]
