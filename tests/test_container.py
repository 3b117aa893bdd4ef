"""The command of the container: it indexes a mounted folder of photos, and serves it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

DOCKERFILE = Path(__file__).parents[1] / "Dockerfile"


@pytest.mark.parametrize("mounted", [True, False], ids=["photos", "index"])
def test_it_serves_a_mounted_folder(photos, tmp_path, mounted):
    """The command runs here without a container, in folders that stand for the mounted ones."""
    lines = DOCKERFILE.read_text(encoding="utf-8")
    shell, flag, script, name = json.loads(re.search(r"^ENTRYPOINT (.*)$", lines, re.MULTILINE)[1])
    index, source = tmp_path / "index", tmp_path / "photos"
    shutil.copytree(photos / "class0", source)
    program = tmp_path / "bin" / "listwise"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m listwise "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "LISTWISE_TOKEN": "token"}
    environment["PATH"] = f"{program.parent}:{os.environ['PATH']}"
    if not mounted:
        command = [program, "index", "build", index, source, "--device", "cpu"]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        shutil.rmtree(source)
    script = script.replace("/photos", str(source)).replace("/index", str(index))
    command = [shell, flag, script, name, str(index), "--port", "0", "--device", "cpu"]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        line = next(line for line in server.stdout if line.startswith("serving "))
        assert line.startswith("serving 6 photos of ")
        (port,) = re.findall(r"http://localhost:(\d+)", line)
        with urllib.request.urlopen(f"http://localhost:{port}/health", timeout=30) as answer:
            assert answer.status == 200
    finally:
        server.send_signal(signal.SIGTERM)  # it replaces the shell
        server.wait(60)
