"""What is kept between the launches of a kernel, and what comes back to the host."""

import threading

import torch

from listwise.losses.launches import Launch, host_buffer


class Kernel:
    """Notes how it is started, as a function of Triton's or as what that compiled to."""

    def __init__(self, compiled=None):
        self.compiled, self.started = compiled, []

    def __getitem__(self, grid):
        def start(*arguments, **options):
            self.started.append((grid, arguments, options))
            return self.compiled

        return start


def test_the_compiled_kernel_is_found_once():
    compiled = Kernel()
    kernel = Kernel(compiled)
    launch = Launch(kernel, {"num_warps": 8}, {"BINS": 20, "ROWS": 32})
    launch(3, "a", 1)
    launch(5, "b", 2)
    launch(6, "c", 3, columns=7)
    assert kernel.started == [((3, 1), ("a", 1), {"BINS": 20, "ROWS": 32, "num_warps": 8})]
    assert compiled.started == [
        ((5, 1, 1), ("b", 2, 20, 32), {}),
        ((6, 7, 1), ("c", 3, 20, 32), {}),
    ]


def test_the_interpreter_compiles_nothing():
    kernel = Kernel()
    launch = Launch(kernel, {}, {"BINS": 20})
    launch(3, "a")
    launch(5, "b")
    assert [grid for grid, _, _ in kernel.started] == [(3, 1), (5, 1)]


def test_a_host_buffer_grows_and_belongs_to_a_thread():
    device = torch.device("cpu")
    buffer = host_buffer(device)
    buffer.reserve(2)[:2] = torch.tensor([1.0, 2.0])
    buffer.record()
    assert buffer.read(2).tolist() == [1, 2]
    assert len(buffer.reserve(1000)) >= 1000
    assert host_buffer(device) is buffer
    others = []
    thread = threading.Thread(target=lambda: others.append(host_buffer(device)))
    thread.start()
    thread.join()
    assert others[0] is not buffer
