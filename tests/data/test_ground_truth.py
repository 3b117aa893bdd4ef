import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from listwise.data.catalog.ground_truth import read_ground_truth, read_oxford_ground_truth
from listwise.data.pickles import read_pickle_restricted
from listwise.errors import InputError

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def dump(path: Path, content: Any, protocol: int = 2) -> Path:
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


def example() -> dict[str, Any]:
    return {
        "imlist": ["a", "b", "c", "d"],
        "qimlist": ["q", "r"],
        "gnd": [
            {"bbx": [0.5, 1, 20, 30], "easy": [0], "hard": [2], "junk": [3]},
            {"bbx": [1, 2, 3, 4], "easy": [], "hard": [1, 0], "junk": []},
        ],
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("numpy", [False, True])
def test_reads_plain_lists_and_numpy_everywhere(tmp_path: Path, protocol: int, numpy: bool) -> None:
    content = example()
    if numpy:
        content["imlist"] = np.array(content["imlist"], dtype=object)
        content["qimlist"] = np.array(content["qimlist"])
        for judgment in content["gnd"]:
            for key in ("easy", "hard", "junk"):
                judgment[key] = np.array(judgment[key], dtype=np.uint16)
            judgment["bbx"] = [np.float32(number) for number in judgment["bbx"]]
    truth = read_ground_truth(dump(tmp_path / "gnd.pkl", content, protocol))
    assert (truth.names, truth.queries) == (["a", "b", "c", "d"], ["q", "r"])
    assert truth.boxes == [(0.5, 1.0, 20.0, 30.0), (1.0, 2.0, 3.0, 4.0)]
    found = {name: [part.tolist() for part in grade] for name, grade in truth.grades.items()}
    assert found == {"easy": [[0], []], "hard": [[2], [1, 0]], "junk": [[3], []]}
    assert {part.dtype for grade in truth.grades.values() for part in grade} == {np.dtype(np.int64)}


VALUES: list[Any] = [
    [1, -(2**80), 1.5, True, None, "grüß", b"\x00\xff", (1, (2,)), {"k": {3, 4}}, frozenset("ab")],
    np.arange(12, dtype=">i4").reshape(3, 4),
    np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    np.arange(24, dtype=np.int16).reshape(2, 3, 4).transpose(1, 0, 2),
    np.array([["a", "bcd"]]),
    np.zeros((0, 3), dtype=np.float16),
    np.array(3.5),
    np.float64(1e-300),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_plain_data_comes_back_as_it_was(tmp_path: Path, value: Any, protocol: int) -> None:
    back = read_pickle_restricted(dump(tmp_path / "value.pkl", value, protocol))
    assert type(back) is type(value)
    np.testing.assert_equal(back, value)
    if isinstance(value, np.ndarray):
        assert (back.dtype, back.shape) == (value.dtype, value.shape)


def test_arrays_of_objects_are_read_to_their_depths(tmp_path: Path) -> None:
    inner = np.empty(2, dtype=object)
    inner[:] = [np.arange(3), "text"]
    outer = np.empty((1, 2), dtype=object)
    outer[0, 0], outer[0, 1] = inner, [np.int8(5)]
    back = read_pickle_restricted(dump(tmp_path / "value.pkl", outer))
    assert back[0, 0][0].tolist() == [0, 1, 2]
    assert back[0, 0][1] == "text"
    assert back[0, 1] == [5]


def test_numpy_1_module_names_are_known(tmp_path: Path) -> None:
    written = pickle.dumps(np.arange(3), protocol=2).replace(b"numpy._core.", b"numpy.core.")
    assert b"numpy.core.multiarray" in written
    (tmp_path / "old.pkl").write_bytes(written)
    assert read_pickle_restricted(tmp_path / "old.pkl").tolist() == [0, 1, 2]


class Call:
    """Pickles as a call of `function`, which unpickling would run."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.arguments


def hidden_in_an_array(trap: Any) -> Any:
    array = np.empty(1, dtype=object)
    array[0] = trap
    return array


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "hide", [lambda trap: trap, lambda trap: {"gnd": [trap]}, hidden_in_an_array]
)
def test_code_is_refused_and_not_run(tmp_path: Path, protocol: int, hide: Any) -> None:
    mark = tmp_path / "ran"
    traps = {
        "system": Call(os.system, f"touch {mark}"),
        "eval": Call(eval, f"open({str(mark)!r}, 'w')"),
        "exec": Call(exec, f"open({str(mark)!r}, 'w')"),
        "getattr": Call(getattr, "text", "upper"),
        "open": Call(open, str(mark), "w"),
    }
    for name, trap in traps.items():
        path = dump(tmp_path / "trap.pkl", hide(trap), protocol)
        with pytest.raises(InputError, match=rf"trap\.pkl.*{name}"):
            read_pickle_restricted(path)
    assert not mark.exists()


HAND_WRITTEN = {
    # getattr(numpy.ndarray, "...") and further
    "getattr chain": b"cbuiltins\ngetattr\n(cnumpy\nndarray\nS'__class__'\ntR.",
    "dotted name": b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__class__\x93.",
    "module inside numpy": b"cnumpy.testing._private.utils\nrunstring\n(S'1'\n(dtR.",
    "copyreg": b"ccopyreg\n_reconstructor\n(cbuiltins\nobject\ncbuiltins\nobject\nNtR.",
    "instance opcode": b"(S'id'\nios\nsystem\n.",
    "extension registry": b"\x82\x01.",
    "persistent id": b"Psomething\n.",
    "state of a function": b"cnumpy\ndtype\n(dS'make'\nI1\nsb.",
    "function as a value": b"cnumpy\ndtype\n.",
    "other codec": b"c_codecs\nencode\n(S'aa'\nS'zlib'\ntR.",
    "structured dtype": b"cnumpy\ndtype\n(S'i8,O'\ntR.",
    "array without parts": b"cnumpy.core.multiarray\n_reconstruct\n(tR.",
    "itself inside": b"]q\x00h\x00a.",
    "nothing": b"",
    "cut short": pickle.dumps(example())[:-20],
    "text": b"imlist,qimlist",
}


@pytest.mark.parametrize("content", HAND_WRITTEN.values(), ids=HAND_WRITTEN.keys())
def test_crafted_files_are_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "crafted.pkl").write_bytes(content)
    with pytest.raises(InputError, match=r"crafted\.pkl") as caught:
        read_pickle_restricted(tmp_path / "crafted.pkl")
    assert "\n" not in str(caught.value)


def test_raw_bytes_cannot_become_object_pointers(tmp_path: Path) -> None:
    array = np.array([1], dtype="i8")
    written = pickle.dumps(array, protocol=2).replace(
        b"X\x02\x00\x00\x00i8", b"X\x02\x00\x00\x00O8"
    )
    (tmp_path / "forged.pkl").write_bytes(written)
    value = None
    with pytest.raises(InputError, match=r"forged\.pkl"):
        value = read_pickle_restricted(tmp_path / "forged.pkl")
    assert value is None


def test_shared_parts_are_read_once(tmp_path: Path) -> None:
    value: list[Any] = []
    for _ in range(60):  # 2**60 leaves if every path were walked
        value = [value, value]
    assert len(read_pickle_restricted(dump(tmp_path / "value.pkl", value))) == 2


def broken(**changes: Any) -> dict[str, Any]:
    content = example()
    content["gnd"][1].update(changes)
    return content


MISTAKES: dict[str, tuple[Any, str]] = {
    "a list": ([1, 2], "expected a dict"),
    "no imlist": ({k: v for k, v in example().items() if k != "imlist"}, "'imlist' is missing"),
    "a name for a list": ({**example(), "qimlist": "q"}, "'qimlist' should be a list"),
    "too few judgments": (
        {**example(), "gnd": example()["gnd"][:1]},
        "2 queries but 1 judgments",
    ),
    "no hard": (
        {**example(), "gnd": [{"bbx": [0, 0, 1, 1], "easy": [], "junk": []}] * 2},
        "query q: the key 'hard' is missing",
    ),
    "judgment is a list": ({**example(), "gnd": [[], []]}, "query q: expected a dict"),
    "index too large": (broken(junk=[4]), "query r: 'junk' names image 4, but imlist has 4"),
    "negative index": (broken(easy=[3, -1]), "query r: 'easy' names image -1"),
    "fractional index": (broken(easy=[1.5]), "query r: 'easy' should be a flat list of whole"),
    "nested indices": (broken(easy=[[2]]), "query r: 'easy' should be a flat list of whole"),
    "judged twice": (broken(junk=[1]), "query r: an image is judged twice"),
    "box swapped": (broken(bbx=[3, 2, 1, 4]), "query r: 'bbx' should be left, top, right, bottom"),
    "box empty": (broken(bbx=[3, 2, 3, 4]), "query r: 'bbx' should be left, top, right, bottom"),
    "box NaN": (broken(bbx=[0, 0, float("nan"), 4]), "query r: 'bbx' should be left"),
    "box of three": (broken(bbx=[1, 2, 3]), "query r: 'bbx' should be four numbers"),
    "box of words": (broken(bbx=["a", 2, 3, 4]), "query r: 'bbx' should be four numbers"),
}


@pytest.mark.parametrize(("content", "reason"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_named(tmp_path: Path, content: Any, reason: str) -> None:
    path = dump(tmp_path / "gnd.pkl", content)
    with pytest.raises(InputError) as caught:
        read_ground_truth(path)
    assert str(caught.value).startswith(str(path))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


# Text files of the original benchmarks

NAMES = [f"all_souls_{i:06d}" for i in range(6)] + ["paris_defense_000605"]


def write(folder: Path, name: str, query: str, *lists: list[str]) -> None:
    (folder / f"{name}_query.txt").write_text(query + "\n")
    for kind, images in zip(("good", "ok", "junk"), lists, strict=True):
        (folder / f"{name}_{kind}.txt").write_text("".join(f"{image}\n" for image in images))


def test_reads_the_public_layout(tmp_path: Path) -> None:
    write(
        tmp_path,
        "defense_1",
        "paris_defense_000605 1 2 3 4",
        ["paris_defense_000605"],
        [],
        [NAMES[1], "gone_000001"],
    )
    write(
        tmp_path,
        "all_souls_1",
        "oxc1_all_souls_000003 136.5 34.1 648.5 955.7",
        [NAMES[3], NAMES[0]],
        [NAMES[5]],
        [],
    )
    truth = read_oxford_ground_truth(tmp_path, NAMES)
    assert truth.names == NAMES
    assert truth.queries == ["all_souls_000003", "paris_defense_000605"]
    assert truth.boxes == [(136.5, 34.1, 648.5, 955.7), (1, 2, 3, 4)]
    assert [part.tolist() for part in truth.grades["good"]] == [[3, 0], [6]]
    assert [part.tolist() for part in truth.grades["ok"]] == [[5], []]
    assert [part.tolist() for part in truth.grades["junk"]] == [[], [1]]


GOOD = "oxc1_all_souls_000003 1 2 3 4"


@pytest.mark.parametrize(
    ("query", "good", "junk", "reason"),
    [
        ("oxc1_all_souls_000003 1 2 3", [NAMES[0]], [], "four numbers"),
        ("", [NAMES[0]], [], "four numbers"),
        ("oxc1_all_souls_000003 3 2 1 4", [NAMES[0]], [], "left, top"),
        (GOOD, ["nowhere_000001"], [], "nowhere_000001 is not among"),
        (GOOD, [NAMES[0]], [NAMES[0]], "judged twice"),
    ],
)
def test_bad_files_are_refused(
    tmp_path: Path, query: str, good: list[str], junk: list[str], reason: str
) -> None:
    write(tmp_path, "x_1", query, good, [], junk)
    with pytest.raises(InputError, match=reason) as error:
        read_oxford_ground_truth(tmp_path, NAMES)
    assert "x_1_query.txt" in str(error.value)


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no file ends in _query\.txt"):
        read_oxford_ground_truth(tmp_path, NAMES)
    write(tmp_path, "x_1", GOOD, [NAMES[0]], [], [])
    (tmp_path / "x_1_ok.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"x_1_ok\.txt: not UTF-8 text"):
        read_oxford_ground_truth(tmp_path, NAMES)
    (tmp_path / "x_1_ok.txt").unlink()
    with pytest.raises(InputError, match=r"x_1_ok\.txt: cannot be read"):
        read_oxford_ground_truth(tmp_path, NAMES)
