"""Kills commands at random moments, with their workers, then repeats them and compares the results.

Each command runs in a forked process, so that the imports are paid for once.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import scenarios
from safetensors.torch import load_file
from scenarios import in_child, names, rows_of, sha

import listwise.cli.main
import listwise.data.pipeline
from listwise.descriptors.extract import PART
from listwise.search import open_index

WORKERS = ("--workers", "2")
TRAIN = """--backbone test_resnet.r160_in1k --weights random --val-fraction 0.25 --batch-size 12
--crops-size 32 --updates 5 --patience none --validate-every 2 --checkpoint-every 1 --device cpu"""


class Build(scenarios.Build):
    """`listwise index build` with all photos."""

    def __init__(self, work: Path, photos: Path) -> None:
        super().__init__(work, photos)
        self.folder = photos
        self.photos = sorted(map(str, photos.rglob("*.jpg")))

    def command(self) -> list[str]:
        """What a user types, and types again after a kill."""
        device = ("--device", "cpu", *WORKERS)
        where = (str(self.index), str(self.folder), "--model", str(self.model))
        return ["index", "build", *where, *device]


class Add(Build):
    """`listwise index add` of all photos to an index that has some of them."""

    first = 12

    def command(self) -> list[str]:
        device = ("--device", "cpu", *WORKERS)
        return ["index", "add", str(self.index), str(self.folder), *device]


class Remove(Build):
    """`listwise index remove` of the photos of a folder."""

    first = 48
    done = "has no entry for"  # the killed command has removed everything

    def command(self) -> list[str]:
        return ["index", "remove", str(self.index), str(self.folder / "class3")]

    def observe(self) -> Any:
        with open_index(self.index) as index:
            return {"vectors": rows_of(index)}


class Extract(scenarios.Extract):
    """`listwise extract`."""

    def command(self) -> list[str]:
        where = (str(self.model), str(self.photos), str(self.file))
        return ["extract", *where, "--device", "cpu", *WORKERS]


class Train(scenarios.Train):
    """`listwise train`, resumed; from the start where there is nothing to resume."""

    def command(self) -> list[str]:
        run = str(self.work / "run")
        if Path(run, "run.json").exists():
            return ["train", "--resume", run]
        return ["train", str(self.photos), "--run-folder", run, *TRAIN.split(), *WORKERS]

    def observe(self) -> Any:
        run = self.work / "run"
        files = [run / name for name in ("checkpoint.safetensors", "model/model.safetensors")]
        tensors = {
            f"{file.name} {key}": sha(value.numpy())
            for file in files
            for key, value in load_file(file).items()
        }
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            line.pop("images_per_second", None)
        left = [name for name in names(self.work) if "tfevents" not in name]
        return {"tensors": tensors, "metrics": lines, "files": left}


COMMANDS = {kind.__name__.lower(): kind for kind in (Build, Add, Remove, Extract, Train)}


def start(arguments: list[str], log: Path) -> int:
    """Run a command in a process group of its own; returns its process id."""
    process = os.fork()
    if process:
        return process
    os.setsid()
    # A few photos are several parts for several workers, as many photos are.
    PART["cpu"] = 8
    listwise.data.pipeline.START_BYTES = 2**10
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = ["listwise", *arguments]
    code = 1
    try:
        listwise.cli.main.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def wait(process: int) -> int:
    """The exit code of a process."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def kill(leader: int) -> tuple[int, int]:
    """Kill a process group: the exit code of its leader, and the number of other processes."""
    others = 0
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(ProcessLookupError):
            others += int(process) != leader and os.getpgid(int(process)) == leader
    with suppress(ProcessLookupError):  # it is not a group yet, or has ended
        os.killpg(leader, signal.SIGKILL)
    return wait(leader), others


class Trial:
    """One command, killed again and again."""

    def __init__(self, name: str, folder: Path, photos: Path, seed: int) -> None:
        self.base, self.work, self.log = folder / "base", folder / "work", folder / "log"
        self.operation = COMMANDS[name](self.work, photos)
        self.chance = random.Random(f"{seed} {name}")
        self.work.mkdir(parents=True)
        in_child(self.operation.prepare)
        self.work.rename(self.base)
        self.restore()
        started = time.monotonic()
        self.finish()
        self.seconds = time.monotonic() - started
        _, self.expected = in_child(self.operation.observe)
        self.kills = self.with_workers = self.repeated = 0

    def restore(self) -> None:
        """Put the folder back to what it was before the command."""
        scenarios.shutil.rmtree(self.work, ignore_errors=True)
        scenarios.shutil.copytree(self.base, self.work)

    def finish(self) -> None:
        """Run the command to its end."""
        self.check(wait(start(self.operation.command(), self.log)))

    def check(self, code: int, repeated: bool = False) -> None:
        """Fail unless the command has ended well, or has nothing left to do."""
        message = self.log.read_text()
        done = getattr(self.operation, "done", None)
        nothing_left = repeated and code == 2 and done and done in message
        assert code == 0 or nothing_left, f"exit code {code}: {message}"

    def disturb(self) -> None:
        """Kill the command, and often the repeated one too; then let it end, and compare."""
        self.restore()
        killed = False
        while not killed or self.chance.random() < 0.4:
            process = start(self.operation.command(), self.log)
            time.sleep(self.chance.uniform(0, self.seconds))
            code, workers = kill(process)
            if code != -signal.SIGKILL:  # it has ended before
                self.check(code, repeated=killed)
                break
            killed = True
            self.kills += 1
            self.with_workers += workers > 0
            in_child(lambda: self.operation.check_interrupted(self.expected))
        if killed:
            self.check(wait(start(self.operation.command(), self.log)), repeated=True)
            self.repeated += 1
        _, found = in_child(self.operation.observe)
        assert found == self.expected, f"{found} instead of {self.expected}"


def main(name: str, folder: Path, photos: str, kills: int, seed: int = 0) -> dict[str, Any]:
    """Kill a command so many times, or a few times more."""
    trial = Trial(name, folder, Path(photos), seed)
    failures: list[str] = []
    while trial.kills < kills and len(failures) < 5:
        try:
            trial.disturb()
        except AssertionError as failed:
            failures.append(f"after {trial.kills} kills: {failed}")
    return {
        "points": kills,
        "interrupted": trial.kills,
        "with_workers": trial.with_workers,
        "repeated": trial.repeated,
        "failures": failures,
    }
