"""Write the files of a run in a thread, while training continues."""

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

# Tasks that may wait; each holds a copy of what it writes.
WAITING = 4


class FileWriter:
    """Runs tasks that write files one after the other, in a thread.

    A task must not use tensors that training changes: give it a `copy`. After an error, no later
    task runs.
    """

    def __init__(self) -> None:
        self._files: ThreadPoolExecutor | None = None
        self._copies: ThreadPoolExecutor | None = None
        self._tasks: deque[Future[object]] = deque()

    def copy(self, tensors: Mapping[str, Tensor]) -> Future[dict[str, Tensor]]:
        """Copy tensors to host memory, as they are now.

        The copies on the GPU are freed after some milliseconds, so those that wait to be written
        take no memory of the GPU.
        """
        clones = {key: tensor.detach().clone() for key, tensor in tensors.items()}
        devices = {clone.device for clone in clones.values() if clone.is_cuda}
        made = {each: torch.cuda.current_stream(each).record_event() for each in devices}
        self._copies = self._copies or ThreadPoolExecutor(1, "copies")
        return self._copies.submit(_to_host, clones, made)

    def submit(self, task: Callable[[], object]) -> None:
        """Run a task after all earlier ones; raise the error of an earlier one that failed."""
        while self._tasks and (self._tasks[0].done() or len(self._tasks) >= WAITING):
            self._tasks.popleft().result()
        self._files = self._files or ThreadPoolExecutor(1, "files")
        earlier = self._tasks[-1] if self._tasks else None
        self._tasks.append(self._files.submit(_run, task, earlier))

    def close(self) -> None:
        """Wait until all files are written; raise the error of a task that failed."""
        try:
            while self._tasks:
                self._tasks.popleft().result()
        finally:
            self._tasks.clear()
            for threads in (self._files, self._copies):
                if threads is not None:
                    threads.shutdown()
            self._files = self._copies = None


def _to_host(
    clones: dict[str, Tensor], made: dict[torch.device, torch.cuda.Event]
) -> dict[str, Tensor]:
    """Copy tensors to host memory when they are made, and remove them from the dictionary."""
    for device, event in made.items():
        with torch.cuda.device(device):  # this thread would start the first GPU otherwise
            event.synchronize()
    # On streams of their own: the copies would wait for, and delay, the next update.
    copies = {}
    for key in list(clones):
        clone = clones.pop(key)
        if clone.is_cuda:
            with torch.cuda.stream(_side_stream(clone.device)):
                copies[key] = clone.cpu()
        else:
            copies[key] = clone
    return copies


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _STREAMS[device]


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _run(task: Callable[[], object], earlier: Future[object] | None) -> object:
    if earlier is not None:
        earlier.result()
    return task()
