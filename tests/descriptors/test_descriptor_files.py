import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_examples import texture
from read_only import call_where_read_only
from tiny_net import TINY_NET

from listwise import __version__
from listwise.descriptors import (
    DescriptorFile,
    DescriptorHeader,
    DescriptorWriter,
    Model,
    load_model,
)
from listwise.descriptors import storage as module
from listwise.descriptors.storage import is_descriptor_file
from listwise.errors import InputError
from listwise.models import RetrievalNet
from listwise.settings import ExtractSettings


def write(path, count, dim=6, pieces=1, **header):
    """A file of `count` rows, written in pieces; gives what was written."""
    generator = np.random.default_rng(count)
    rows = generator.standard_normal((count, dim)).astype(np.float32)
    ids = [f"photo {i}.jpg" for i in range(count)]
    sizes = generator.integers(1, 4000, (count, 2))
    with DescriptorWriter(path, dim, DescriptorHeader(**{"model": "abc", **header})) as writer:
        for part in np.array_split(np.arange(count), pieces):
            writer.write([ids[i] for i in part], sizes[part], rows[part])
    return ids, sizes, rows


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 8), st.integers(1, 25))
def test_what_is_written_is_read(tmp_path, count, pieces, dim, rows):
    path = tmp_path / "file.parquet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ROW_GROUP", 16)
        ids, sizes, written = write(path, count, dim, pieces)
    file = DescriptorFile.open(path)
    assert (len(file), file.dim, file.ids) == (count, dim, tuple(ids))
    np.testing.assert_array_equal(file.sizes, sizes)
    np.testing.assert_array_equal(file.read(), written)
    batches = list(file.batches(rows))
    assert all(len(batch) <= rows and batch.dtype == np.float32 for batch in batches)
    np.testing.assert_array_equal(np.concatenate(batches), written)
    groups = pq.ParquetFile(path).metadata
    assert groups.num_row_groups == -(-count // 16)
    assert list(tmp_path.iterdir()) == [path]


def test_the_header_is_kept_and_other_programs_can_read_the_rows(tmp_path):
    how = ExtractSettings(max_side=640, scales=(1.0, 0.5), power=2.5, precision="bfloat16")
    known = {"model": "m1", "whitened": True, "settings": how, "unreadable": ("b: no",)}
    ids, sizes, rows = write(tmp_path / "a.parquet", 5, **known)
    header = DescriptorFile.open(tmp_path / "a.parquet").header
    assert dict(header) == {**known, "listwise": __version__, "format_version": 1}
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.column_names == ["id", "width", "height", "descriptor"]
    assert table.column("descriptor").type == pa.list_(
        pa.field("item", pa.float32(), nullable=False), 6
    )
    np.testing.assert_array_equal(np.array(table.column("descriptor").to_pylist()), rows)
    assert table.column("height").to_pylist() == sizes[:, 1].tolist()
    assert table.column("id").to_pylist() == ids


def test_another_models_descriptors_are_refused(tmp_path):
    write(tmp_path / "a.parquet", 3, model="made by me")
    file = DescriptorFile.open(tmp_path / "a.parquet")
    file.require("made by me")
    with pytest.raises(InputError, match=r"another model.*cannot be compared") as error:
        file.require("made by you")
    assert "\n" not in str(error.value)


def test_a_failed_block_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.parquet"
    _, _, old = write(path, 4)

    def fail():
        with DescriptorWriter(path, 6, DescriptorHeader(model="new")) as writer:
            writer.write(["x"], [(1, 1)], np.ones((1, 6)))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    np.testing.assert_array_equal(DescriptorFile.open(path).read(), old)
    assert list(tmp_path.iterdir()) == [path]


def test_rows_that_do_not_fit_are_refused(tmp_path):
    for ids, rows, message in (
        (["a", "b"], np.ones((1, 6)), r"\[2, 6\], not \[1, 6\]"),
        (["a"], np.ones((1, 5)), r"\[1, 6\], not \[1, 5\]"),
        (["a", "b"], np.array([[1.0] * 6, [np.nan] * 6]), "descriptor of b is not finite"),
    ):
        with (
            pytest.raises(InputError, match=message),
            DescriptorWriter(tmp_path / "a.parquet", 6, DescriptorHeader(model="m")) as writer,
        ):
            writer.write(ids, [(1, 1)] * len(ids), rows)
    with pytest.raises(InputError, match="cannot write"):
        DescriptorWriter(tmp_path / "no folder" / "a", 6, DescriptorHeader(model="m")).__enter__()


def test_files_that_are_none_are_one_line(tmp_path):
    good = tmp_path / "good.parquet"
    write(good, 50)
    content = good.read_bytes()
    pq.write_table(pa.table({"path": ["a.jpg"]}), tmp_path / "table.parquet")

    def headed(**header):
        schema = pq.read_schema(good).with_metadata({"listwise": json.dumps(header)})
        pq.write_table(schema.empty_table(), tmp_path / "headed.parquet")
        return (tmp_path / "headed.parquet").read_bytes()

    cases = {
        "missing": (None, "no descriptor file"),
        "empty": (b"", "damaged"),
        "text": (b"hello" * 100, "damaged"),
        "cut": (content[: len(content) // 2], "damaged"),
        "headless": (content[100:], "damaged"),
        "newer": (headed(model="m", format_version=9), "newer Listwise"),
        "table": ((tmp_path / "table.parquet").read_bytes(), "not one of descriptors"),
        "header": (headed(model=5), "its header cannot be read"),
    }
    for name, (damage, message) in cases.items():
        path = tmp_path / name
        if damage is not None:
            path.write_bytes(damage)
        with pytest.raises(InputError, match=message) as error:
            DescriptorFile.open(path).read()
        assert "\n" not in str(error.value)
    assert is_descriptor_file(good)
    assert not any(is_descriptor_file(tmp_path / name) for name in ("missing", "cut", "table"))
    with pytest.raises(InputError, match="damaged"):
        DescriptorFile.open(tmp_path)


def test_a_file_that_was_replaced_is_noticed(tmp_path):
    path = tmp_path / "a.parquet"
    write(path, 5, model="mine")
    file = DescriptorFile.open(path)
    write(path, 5, model="another")
    with pytest.raises(InputError, match="replaced while it was in use"):
        file.read()


def test_memory_while_reading_does_not_depend_on_the_length(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROW_GROUP", 256)
    path = tmp_path / "long.parquet"
    write(path, 256 * 60, dim=64, pieces=60)
    group = 256 * 64 * 4
    before = pa.total_allocated_bytes()
    most = 0
    for batch in DescriptorFile.open(path).batches():
        most = max(most, pa.total_allocated_bytes() - before)
        del batch
    assert path.stat().st_size > 60 * group
    assert group <= most < 8 * group


def test_model_and_descriptors_that_may_only_be_read(tmp_path):
    folder = tmp_path / "model"
    model = Model(RetrievalNet(TINY_NET, weights="random"))
    rows = model.save(folder).encode(texture(0, (60, 40)))
    write(folder / "a.parquet", 3)

    def use():
        with pytest.raises(PermissionError):
            (folder / "new").touch()
        loaded = load_model(folder, "cpu")
        np.testing.assert_array_equal(loaded.encode(texture(0, (60, 40))), rows)
        assert DescriptorFile.open(folder / "a.parquet").read().shape == (3, 6)

    call_where_read_only(folder, use)
