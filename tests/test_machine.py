"""What a machine has to compute with, and that other work on it does not stop this one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from listwise.machine import Machine, core_count, cpu_quota, shared_cores


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_quota_of_a_container(tmp_path):
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"})
    assert cpu_quota(tmp_path) == 1.5


def test_no_quota(tmp_path):
    assert cpu_quota(tmp_path) is None
    write(tmp_path, {"proc/self/cgroup": "0::/user.slice\n", "sys/fs/cgroup/cpu.max": "max 100000"})
    assert cpu_quota(tmp_path) is None
    write(tmp_path, {"sys/fs/cgroup/user.slice/cpu.max": "max 100000\n"})
    assert cpu_quota(tmp_path) is None


def test_the_smallest_quota_of_the_groups_above_counts(tmp_path):
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b/c\n",
            "sys/fs/cgroup/a/cpu.max": "800000 100000\n",
            "sys/fs/cgroup/a/b/cpu.max": "300000 100000\n",
            "sys/fs/cgroup/a/b/c/cpu.max": "max 100000\n",
            "sys/fs/cgroup/other/cpu.max": "100000 100000\n",
        },
    )
    assert cpu_quota(tmp_path) == 3


@pytest.mark.parametrize(("quota", "expected"), [("200000", 4), ("-1", None)])
def test_the_quota_of_version_one(tmp_path, quota, expected):
    write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpuset:/\n4:cpu,cpuacct:/docker/x\n1:name=systemd:/\n",
            "sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us": f"{quota}\n",
            "sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us": "50000\n",
        },
    )
    assert cpu_quota(tmp_path) == expected


def test_processes_of_torchrun_share_the_cores(monkeypatch):
    everything = core_count()
    assert Machine.detect("cpu").cores == everything
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert core_count() == max(1, everything // 2)


def test_no_more_threads_than_cores_and_the_users_number_comes_back():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(core_count() + 3)
        with shared_cores():
            assert torch.get_num_threads() == core_count()
        assert torch.get_num_threads() == core_count() + 3
    finally:
        torch.set_num_threads(before)


# Beside it two processes do nothing but compute, on the two cores that the measured one has.
MEASURED = """
import os, subprocess, sys, time
os.sched_setaffinity(0, {cores})
{prepare}
import torch
from listwise.data import DecodedPhoto
from listwise.models import RetrievalNet
from listwise.models.embed import PhotoNet, embed_decoded

net = RetrievalNet("tf_efficientnet_lite0", weights="random").eval()
describe = PhotoNet(net, None)
photos = [DecodedPhoto(torch.zeros(3, 160, 160, dtype=torch.uint8), (160, 160), (160, 160))] * 2

def seconds(threads):
    torch.set_num_threads(threads)
    started = time.perf_counter()
    embed_decoded(photos, describe, net.dim, torch.device("cpu"))
    return time.perf_counter() - started

seconds(1), seconds(2)
busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
one, two = [], []
for _ in range(3):  # in turn, so that whatever else the machine does slows both
    one.append(seconds(1))
    two.append(seconds(2))
for process in busy:
    assert process.poll() is None
    process.kill()
    process.wait()
print(sum(two) / sum(one))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs processor affinity")
@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param("", id="library", marks=pytest.mark.thorough),
        pytest.param(
            "from listwise.machine import set_torch_environment; set_torch_environment()",
            id="command",
        ),
    ],
)
def test_a_network_beside_other_work_is_not_much_slower_than_on_one_thread(prepare):
    # With threads that spin while they wait it takes some seven to thirteen times as long.
    cores = set(sorted(os.sched_getaffinity(0))[:2])
    if len(cores) < 2:
        pytest.skip("needs two cores")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP", "GOMP"))
    }
    environment["PYTHONPATH"] = str(Path(__file__).parents[1] / "src")
    command = [sys.executable, "-c", MEASURED.format(cores=cores, prepare=prepare)]
    options = {"capture_output": True, "text": True, "check": True, "env": environment}
    ratios = []
    while len(ratios) < 3 and (not ratios or ratios[-1] >= 3):  # other programs may disturb it
        ratios.append(float(subprocess.run(command, **options).stdout))
    assert min(ratios) < 3
