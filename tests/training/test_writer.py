import threading

import pytest
import torch

from listwise.training.run.writer import WAITING, FileWriter


def test_tasks_run_in_order_while_the_caller_continues():
    writer, done, go = FileWriter(), [], threading.Event()
    writer.submit(go.wait)
    for number in range(WAITING - 1):
        writer.submit(lambda number=number: done.append(number))
    assert done == []
    go.set()
    writer.close()
    assert done == [*range(WAITING - 1)]


def test_few_tasks_wait():
    writer, started = FileWriter(), threading.Event()
    go = threading.Event()
    writer.submit(lambda: started.set() or go.wait())
    for _ in range(WAITING - 1):
        writer.submit(lambda: None)
    started.wait()
    more = threading.Thread(target=writer.submit, args=(lambda: None,))
    more.start()
    more.join(0.2)
    assert more.is_alive()
    go.set()
    more.join()
    writer.close()


def test_an_error_is_raised_and_ends_the_writing():
    writer, done, go = FileWriter(), [], threading.Event()

    def fail():
        go.wait()
        raise OSError("disk full")

    writer.submit(fail)
    writer.submit(lambda: done.append(1))
    go.set()
    with pytest.raises(OSError, match="disk full"):
        writer.close()
    assert done == []
    assert "files" not in {thread.name.partition("_")[0] for thread in threading.enumerate()}


def test_newer_saves_replace_those_that_wait():
    writer, done, go = FileWriter(), [], threading.Event()
    started = threading.Event()

    def model(update):
        writer.submit_model(lambda: done.append(("model", update)))

    def checkpoint(update):
        writer.submit_checkpoint(lambda: done.append(("checkpoint", update)))

    model(0)
    writer.submit(lambda: started.set() or go.wait())
    started.wait()
    checkpoint(1)  # its network is on the disk
    for update in (2, 4, 6):
        model(update)
        checkpoint(update)
    checkpoint(7)  # must not be on the disk without the network of update 6
    go.set()
    writer.close()
    assert done == [
        ("model", 0),
        ("checkpoint", 1),
        ("model", 6),
        ("checkpoint", 7),
    ]


def test_a_save_that_has_started_is_completed():
    writer, done = FileWriter(), []
    started, go = threading.Event(), threading.Event()
    writer.submit_model(lambda: started.set() or (go.wait() and done.append("model 0")))
    started.wait()
    writer.submit_checkpoint(lambda: done.append("checkpoint 0"))
    writer.submit_model(lambda: done.append("model 2"))
    writer.submit_checkpoint(lambda: done.append("checkpoint 2"))
    go.set()
    writer.close()
    assert done == ["model 0", "checkpoint 0", "model 2", "checkpoint 2"]


def test_a_closed_writer_can_be_used_again():
    writer, done = FileWriter(), []
    for number in range(2):
        writer.submit(lambda number=number: done.append(number))
        writer.close()
    assert done == [0, 1]


def test_a_copy_has_the_values_of_the_time_when_it_was_made():
    writer = FileWriter()
    weights = {"a": torch.ones(3), "b": torch.zeros(2, 2)}
    copies = writer.copy(weights)
    for tensor in weights.values():
        tensor.fill_(7)
    assert torch.equal(copies.result()["a"], torch.ones(3))
    assert torch.equal(copies.result()["b"], torch.zeros(2, 2))
    writer.close()
    assert "copies" not in {thread.name.partition("_")[0] for thread in threading.enumerate()}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_copies_that_wait_take_no_memory_of_the_gpu():
    writer, go = FileWriter(), threading.Event()
    weights = {"a": torch.ones(2**22, device="cuda"), "b": torch.zeros(3)}
    before = torch.cuda.memory_allocated()
    writer.submit(go.wait)
    copies = [writer.copy(weights) for _ in range(3)]
    weights["a"].fill_(7)
    assert all(copy.result()["a"].eq(1).all() for copy in copies)
    assert torch.cuda.memory_allocated() == before
    go.set()
    writer.close()
