import io
import re

from rich.console import Console

from listwise.training.view import LiveTrainView


def play(view):
    view.start(0, 20)
    view.progress("validating", 0, 30)
    view.progress("validating", 12, 30)
    view.progress("validating", 30, 30)
    view.validation(0, 0.25, best=True)
    for update in range(1, 11):
        view.advance(update - 0.5, 100 - 10 * update + 5)
        view.advance(update, 100 - 10 * update + 40)
        view.update(update, {"loss": 0.5 - update / 100, "images_per_second": 321.4})
    view.message("a photo of [brackets] " + "and a long path " * 10)
    view.validation(10, 0.5, best=True)
    view.validation(10, 0.125, best=False)
    view.close()


def record(terminal):
    file = io.StringIO()
    play(LiveTrainView(Console(file=file, force_terminal=terminal, width=110)))
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())


def test_without_a_terminal_there_is_one_line_per_validation():
    lines = record(terminal=False).splitlines()
    assert len(lines) == 5
    assert lines[0] == "update   0  validation mAP 25.0  best so far"
    assert lines[1] == "update 1  about 2 min left"
    assert "[brackets]" in lines[2]
    assert lines[2].endswith("and a long path ")
    assert lines[3].startswith("update  10  loss 0.4000  validation mAP 50.0  321 images/s")
    assert lines[3].endswith("40 s left  best so far")
    assert "12.5" in lines[4]
    assert "best" not in lines[4]


def test_a_terminal_shows_the_progress_of_updates():
    bars = [line for line in re.split(r"[\r\n]+", record(terminal=True)) if "training" in line]
    for part in ("10/20", "loss 0.4000", "validation mAP 12.5", "321 images/s", " left"):
        assert part in bars[-1]
