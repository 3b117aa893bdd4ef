import os
import resource
import stat
import threading

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from listwise.files import write_tensors, write_text


def test_a_file_has_the_permissions_of_an_ordinary_one(tmp_path):
    write_text(tmp_path / "state", "")
    ordinary = tmp_path / "ordinary"
    ordinary.write_text("")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("state", "ordinary")]
    assert modes[0] == modes[1]


def test_a_reader_never_sees_a_part_of_a_text_file(tmp_path):
    path = tmp_path / "notes"
    texts = {letter * 200_000 for letter in "ab"}
    write_text(path, "a" * 200_000)
    done = threading.Event()

    def write() -> None:
        for i in range(40):
            write_text(path, "ab"[i % 2] * 200_000)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(path.read_text())
    writer.join()
    assert seen <= texts


def test_tensors_that_share_memory_come_back(tmp_path):
    shared = torch.arange(12.0).view(3, 4)
    write_tensors(tmp_path / "new" / "a", {"x": shared, "turned": shared.T}, {"of": "torch"})
    write_tensors(tmp_path / "b", {"x": torch.arange(3)})
    found = load_file(tmp_path / "new" / "a")
    assert torch.equal(found["turned"], shared.T)
    assert load_file(tmp_path / "b")["x"].tolist() == [0, 1, 2]


def test_a_full_disk_leaves_the_old_tensors(tmp_path):
    path = tmp_path / "state"
    write_tensors(path, {"x": torch.zeros(4)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match=str(path)):
            write_tensors(path, {"x": torch.ones(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load_file(path)["x"].tolist() == [0, 0, 0, 0]
    assert os.listdir(tmp_path) == ["state"]


def test_the_library_of_the_format_reads_the_tensors(tmp_path):
    generator = torch.Generator().manual_seed(0)
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)
    tensors = {
        f"ü {kind}": torch.randn(3, 5, generator=generator).mul(9).to(kind).t() for kind in kinds
    }
    tensors |= {
        "bits": torch.tensor([True, False]),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "number": torch.tensor(2.5),
        "nothing": torch.empty(0, 4),
        "complex": torch.tensor([1 + 2j]),
        "small": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
        "unsigned": torch.tensor([1, 2], dtype=torch.uint16),
        "shared": tensors["ü torch.float32"][1:],
    }
    write_tensors(tmp_path / "a" / "b.safetensors", tensors, {"text": '"ß'})
    with safe_open(tmp_path / "a" / "b.safetensors", framework="pt") as file:
        assert file.metadata() == {"text": '"ß'}
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.safetensors"]
