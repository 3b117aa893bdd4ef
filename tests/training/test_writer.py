import threading

import pytest

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


def test_a_closed_writer_can_be_used_again():
    writer, done = FileWriter(), []
    for number in range(2):
        writer.submit(lambda number=number: done.append(number))
        writer.close()
    assert done == [0, 1]
