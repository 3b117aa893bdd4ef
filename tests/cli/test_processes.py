"""The command line as its users have it: processes that are started, killed and go together."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time

import programs
import pytest
import torch
from safetensors.torch import load_file

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "150"}
TRAIN = """train {data} --run-folder {run} --backbone test_resnet.r160_in1k --weights random
--val-fraction 0.4 --batch-size 12 --micro-batch 8 --crops-size 32 --updates {updates}
--learning-rate 1e-3 --patience none --validate-every 2 --checkpoint-every 3 --device cpu
--workers 1"""


def train_arguments(data, run, updates):
    return TRAIN.format(data=data, run=run, updates=updates).split()


def finish(arguments):
    done = subprocess.run(arguments, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def metrics(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("images_per_second", None)
    return lines


def wait_for(process, condition):
    """Wait for something a run does; True if it came before the run was over."""
    end = time.monotonic() + 180
    while process.poll() is None:
        assert time.monotonic() < end
        if condition():
            return True
        time.sleep(0.002)
    return False


def was_killed(process, condition=lambda: False):
    """Kill a run at a moment; True if it had not ended before."""
    if wait_for(process, condition):
        process.kill()
    process.wait()
    # Killed or done, not ended by an error; orphaned workers may complain of a kill.
    assert process.returncode in (0, -signal.SIGKILL), process.errors()
    return process.returncode == -signal.SIGKILL


def test_commands_without_a_network_do_not_import_torch(model, run, photos, tmp_path):
    """PyTorch takes seconds to import."""
    index, folder = str(tmp_path / "index"), photos / "class0"
    run("index", "build", index, folder, "--model", model, "--device", "cpu", "--workers", 0)
    main = "import sys; sys.modules['torch'] = None; from listwise.cli.main import main; main()"
    for words in (
        ("index", "info", index),
        ("index", "list", index, "--count", "2"),
        ("index", "marks", index, "--conflicts"),
        ("index", "check", index, "--photos"),
        ("index", "remove", index, "0.jpg"),
        ("index", "remove", index, str(folder)),
        ("index", "discard", index),
        ("download", "--list"),
    ):
        finish([sys.executable, "-c", main, *words])


@pytest.mark.slow
def test_killed_again_and_again_it_ends_as_if_nothing_had_been(photos, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    unbroken = programs.listwise(*train_arguments(photos, whole, 8), env=ENVIRONMENT)
    first = programs.listwise(*train_arguments(photos, run, 8), env=ENVIRONMENT)
    kills = [was_killed(first, (run / "model").exists)]  # within the first validation
    # Such files are there for too short a while to be sure to see one from here.
    dying = (programs.run_and_die, "*/checkpoint.safetensors.*", 2)
    resume = ("train", "--resume", str(run))
    kills += [was_killed(programs.Program(*dying, *resume, env=ENVIRONMENT))]
    later = programs.listwise(*resume, env=ENVIRONMENT)
    kills += [was_killed(later, lambda: (run / "metrics.jsonl").read_bytes().count(b"\n") > 4)]
    last = programs.listwise(*resume, env=ENVIRONMENT)
    assert last.wait(120) == 0, last.errors()
    assert unbroken.wait(120) == 0, unbroken.errors()

    assert sum(kills) >= 2  # the last one may come too late
    assert {path.suffix for path in run.rglob("*")}.isdisjoint({".tmp", ".partial"})
    assert metrics(run) == metrics(whole)
    assert [line["update"] for line in metrics(run)] == list(range(9))
    for name in ("checkpoint.safetensors", "model/model.safetensors"):
        expected, found = load_file(whole / name), load_file(run / name)
        assert expected.keys() == found.keys()
        for key in expected:
            assert torch.equal(expected[key], found[key]), (name, key)


def test_an_interrupt_says_how_to_go_on(photos, tmp_path):
    run = tmp_path / "run"
    process = programs.listwise(*train_arguments(photos, run, 400), env=ENVIRONMENT)
    assert wait_for(process, (run / "checkpoint.safetensors").exists)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to the workers too
    _, err = process.communicate(timeout=180)
    assert process.returncode == 130
    assert err == f"listwise: stopped; resume with: listwise train --resume {run}\n"


def together(*arguments):
    """What two processes print that torchrun starts, or that have its environment."""
    if os.environ.get("LISTWISE_SOAK"):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return finish([*torchrun, "--nproc-per-node", "2", "-m", "listwise", *arguments]).stdout
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    both = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    both |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    processes = [
        programs.listwise(*arguments, env={**ENVIRONMENT, **both, **rank}) for rank in ranks
    ]
    outputs = [process.communicate(120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return "".join(out for out, _ in outputs)


@pytest.mark.slow
def test_two_processes_train_like_one(photos, tmp_path):
    alone = programs.listwise(*train_arguments(photos, tmp_path / "one", 4), env=ENVIRONMENT)
    assert alone.wait(120) == 0, alone.errors()
    broken = tmp_path / "broken.csv"
    images = [path for folder in sorted(photos.iterdir()) for path in sorted(folder.iterdir())]
    rows = [f"{path},{path.parent.name}" for path in images]
    broken.write_text("\n".join(["path,label", *rows, "missing.jpg,class0"]))
    out = together(*train_arguments(broken, tmp_path / "two", 4))
    assert out.count("note: skipped 1 photo that cannot be used") == 1
    assert out.count("the model is in") == 1
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert len(one) == len(two) == 5
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for name in ("loss", "validation_map", "learning_rate"):
            assert a.get(name) == pytest.approx(b.get(name), abs=1e-5)
        assert a.get("backwards") == b.get("backwards")
    a, b = (load_file(tmp_path / name / "checkpoint.safetensors") for name in ("one", "two"))
    for key in a:
        if key.startswith("net."):
            torch.testing.assert_close(a[key], b[key], rtol=0, atol=1e-4)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"]])
def test_help_and_version_come_at_once(arguments):
    def computing():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = computing()
    finish([sys.executable, "-m", "listwise", *arguments])
    assert computing() - before < 1  # seconds, whatever else the machine does
