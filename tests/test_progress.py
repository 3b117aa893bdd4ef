"""Progress bars: on a terminal and in a notebook, and nowhere else."""

import os
import pty
import subprocess
import sys

import pytest

SCRIPT = """
import sys, time
if "notebook" in sys.argv:
    import types
    sys.modules["ipykernel"] = types.ModuleType("ipykernel")
from listwise.progress import counting
with counting("encoding", 40, *[word == "yes" for word in sys.argv[2:]]) as advance:
    for _ in range(40):
        advance(1)
        time.sleep(0.01)
print("done")
"""


def run(kind, *show, terminal=False):
    command = [sys.executable, "-c", SCRIPT, kind, *show]
    if not terminal:
        done = subprocess.run(command, capture_output=True, check=True)
        assert done.stdout == b"done\n"
        return done.stderr.decode()
    ours, theirs = pty.openpty()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=theirs, check=True)
    os.close(theirs)
    text = b""
    try:
        while part := os.read(ours, 4096):
            text += part
    except OSError:  # the end of a terminal
        pass
    os.close(ours)
    return text.decode()


@pytest.mark.skipif(sys.platform != "linux", reason="needs pseudo-terminals")
def test_a_bar_is_shown_where_it_can_be_seen():
    assert "encoding" in run("script", terminal=True)
    assert run("script") == ""  # a file or a pipe
    assert run("script", "no", terminal=True) == ""
    notebook = run("notebook")
    assert "encoding" in notebook
    assert "40/40" in notebook
    assert "\r" in notebook  # one line that is overwritten
    assert "\x1b[1A" not in notebook.rpartition("40/40")[0]
    assert run("notebook", "no") == ""
