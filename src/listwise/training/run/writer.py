"""Write the files of a run in a thread, while training continues."""

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

# Tasks that may wait; each holds a copy of what it writes.
WAITING = 4


Task = Callable[[], object]


@dataclass
class _Save:
    """Writes the best network if there is a new one, then the checkpoint if there is one."""

    model: Task | None = None
    checkpoint: Task | None = None

    def __call__(self) -> None:
        for task in (self.model, self.checkpoint):
            if task is not None:
                task()


class FileWriter:
    """Runs tasks that write files one after the other, in a thread.

    A task must not use tensors that training changes: give it a `copy`. After an error, no later
    task runs. A network or checkpoint that still waits when a newer one comes is not written, so
    that training does not wait for a slow disk.
    """

    def __init__(self) -> None:
        self._files: ThreadPoolExecutor | None = None
        self._copies: ThreadPoolExecutor | None = None
        self._tasks: deque[Future[object]] = deque()
        self._error: BaseException | None = None
        self._save, self._saving = _Save(), Future[object]()

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

    def submit(self, task: Task) -> Future[object]:
        """Run a task after all earlier ones; raise the error of an earlier one that failed."""
        while self._tasks and (self._tasks[0].done() or len(self._tasks) >= WAITING):
            self._tasks.popleft().result()
        self._files = self._files or ThreadPoolExecutor(1, "files")
        self._tasks.append(self._files.submit(self._run, task))
        return self._tasks[-1]

    def submit_model(self, task: Task) -> None:
        """Write the best network.

        A network that waits is replaced, together with its checkpoint, which would not match the
        network on the disk.
        """
        if self._save.model is not None:
            self._withdraw()
        self._submit_save(_Save(task))

    def submit_checkpoint(self, task: Task) -> None:
        """Write a checkpoint, after the best network; replace a checkpoint that waits."""
        waiting = self._save.model if self._withdraw() else None
        self._submit_save(_Save(waiting, task))

    def _withdraw(self) -> bool:
        """Remove the last save from the tasks, unless it has started."""
        withdrawn = self._saving in self._tasks and self._saving.cancel()
        if withdrawn:
            self._tasks.remove(self._saving)
        return withdrawn

    def _submit_save(self, save: _Save) -> None:
        self._save, self._saving = save, self.submit(save)

    def _run(self, task: Task) -> object:
        if self._error is not None:
            raise self._error
        try:
            return task()
        except BaseException as error:
            self._error = error
            raise

    def close(self) -> None:
        """Wait until all files are written; raise the error of a task that failed."""
        try:
            while self._tasks:
                self._tasks.popleft().result()
        finally:
            self._tasks.clear()
            self._error = None
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
