"""What a machine has to compute with, and that other work on it does not stop this one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from listwise.machine import Machine, core_count, cpu_quota

ONE, TWO = "sys/fs/cgroup/cpu/docker/x/", "sys/fs/cgroup/"
OF_ONE = "5:cpuset:/\n4:cpu,cpuacct:/docker/x\n1:name=systemd:/\n"
NESTED = {
    f"{TWO}a/cpu.max": "800000 100000\n",
    f"{TWO}a/b/cpu.max": "300000 100000\n",
    f"{TWO}a/b/c/cpu.max": "max 100000\n",
    f"{TWO}other/cpu.max": "100000 100000\n",
}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {f"{TWO}cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {}, None),
        ("0::/user\n", {f"{TWO}cpu.max": "max 1", f"{TWO}user/cpu.max": "max 100000\n"}, None),
        ("0::/a/b/c\n", NESTED, 3),  # the smallest quota of the groups above counts
        (OF_ONE, {f"{ONE}cpu.cfs_quota_us": "200000", f"{ONE}cpu.cfs_period_us": "50000\n"}, 4),
        (OF_ONE, {f"{ONE}cpu.cfs_quota_us": "-1\n", f"{ONE}cpu.cfs_period_us": "50000\n"}, None),
        (None, {}, None),
    ],
)
def test_the_quota_of_a_container(tmp_path, groups, files, expected):
    for name, text in (files | ({"proc/self/cgroup": groups} if groups else {})).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == expected


def test_processes_of_torchrun_share_the_cores(monkeypatch):
    everything = core_count()
    assert Machine.detect("cpu").cores == everything
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert core_count() == max(1, everything // 2)


# Beside it two processes do nothing but compute, on the two cores that the measured one has.
MEASURED = """
import os, subprocess, sys, time
os.sched_setaffinity(0, {cores})
from listwise.machine import set_torch_environment
set_torch_environment()
import torch
from listwise.models import RetrievalNet

net = RetrievalNet("tf_efficientnet_lite0", weights="random").eval()
images = torch.zeros(2, 3, 160, 160)

@torch.inference_mode()
def seconds(threads):
    torch.set_num_threads(threads)
    started = time.perf_counter()
    net(images)
    return time.perf_counter() - started

seconds(1), seconds(2)
busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
one, two = [], []
for _ in range(3):  # in turn, so that whatever else the machine does slows both
    one.append(seconds(1))
    two.append(seconds(2))
for process in busy:
    process.kill()
    process.wait()
print(sum(two) / sum(one))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs processor affinity")
def test_a_command_beside_other_work_is_not_much_slower_than_on_one_thread():
    # With threads that spin while they wait it takes some seven to thirteen times as long.
    cores = set(sorted(os.sched_getaffinity(0))[:2])
    if len(cores) < 2:
        pytest.skip("needs two cores")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP", "GOMP"))
    }
    environment["PYTHONPATH"] = str(Path(__file__).parents[1] / "src")
    command = [sys.executable, "-c", MEASURED.format(cores=cores)]
    options = {"capture_output": True, "text": True, "check": True, "env": environment}
    ratios = []
    while len(ratios) < 3 and (not ratios or ratios[-1] >= 3):  # other programs may disturb it
        ratios.append(float(subprocess.run(command, **options).stdout))
    assert min(ratios) < 3
