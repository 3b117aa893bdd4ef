from pathlib import Path

import pytest

from listwise.data.catalog.ground_truth import read_oxford_ground_truth
from listwise.errors import InputError

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
