"""The report: every number, list and photo of the page against plain computations."""

import base64
import io
import json
import math
import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from listwise.data import Images, LabelledImages
from listwise.data.catalog import Benchmark
from listwise.errors import InputError
from listwise.evaluation import (
    JudgedQueries,
    average_precision,
    evaluate_descriptors,
    evaluate_scores,
)
from listwise.results.report import ModelSearch, precision_recall_curve, write_report

Many = list[list[int]]


def plain_curve(lists: Many, recall: float) -> float:
    """Best precision at any depth whose recall is at least that asked for, mean over queries."""
    best = []
    for ranks in lists:
        if not ranks:
            continue
        reached = [0.0]
        for depth in range(1, max(ranks) + 2):
            found = sum(rank < depth for rank in ranks)
            if found >= recall * len(ranks) - 1e-9:
                reached.append(found / depth)
        best.append(max(reached))
    return sum(best) / len(best)


@given(
    st.lists(st.lists(st.integers(0, 40), unique=True, max_size=8), min_size=1, max_size=5).filter(
        any
    ),
    st.sampled_from([2, 5, 11, 101]),
)
def test_the_curve_is_the_mean_interpolated_precision(lists: Many, points: int) -> None:
    recall, precision = precision_recall_curve(lists, points)
    assert recall == pytest.approx([i / (points - 1) for i in range(points)])
    assert precision == pytest.approx([plain_curve(lists, r) for r in recall], abs=1e-12)
    assert (np.diff(precision) <= 1e-12).all()
    assert np.isnan(precision_recall_curve([[] for _ in lists])[1]).all()
    with pytest.raises(InputError, match="0 or more"):
        precision_recall_curve([*lists, [-1]])


def example(queries: int = 6, names: int = 30, seed: int = 0) -> tuple[np.ndarray, JudgedQueries]:
    """Scores with ties, and judgments; the last query has no hard positive."""
    random = np.random.default_rng(seed)
    parts: list[list[np.ndarray]] = [[], [], []]
    for query in range(queries):
        order = random.permutation(names)
        sizes = (7, 0, 4) if query == queries - 1 else (7, 4, 4)
        for part, cut in zip(parts, np.split(order, np.cumsum(sizes))[:3], strict=True):
            part.append(cut.astype(np.int64))
    truth = JudgedQueries.revisited(
        [f"photo{i}" for i in range(names)],
        [f"query{i}" for i in range(queries)],
        [(2.0, 4.0, 10.0, 16.0)] * queries,
        easy=parts[0],
        hard=parts[1],
        junk=parts[2],
    )
    return np.round(random.random((queries, names)), 1), truth


def benchmark_of(judged: JudgedQueries, queries: list[str], database: list[str]) -> Benchmark:
    parts = (Images(tuple(paths), tuple(paths), None) for paths in (database, queries))
    return Benchmark("toy", *parts, judged)


def save_photos(folder: Path, names: list[str], size: tuple[int, int] = (20, 40)) -> list[str]:
    paths = []
    for number, name in enumerate(names):
        paths.append(str(folder / f"{name}.png"))
        color = (37 * number % 256, 91 * number % 256, 53 * number % 256)
        Image.new("RGB", size, color).save(paths[-1])
    return paths


@pytest.fixture
def toy(tmp_path: Path) -> tuple[np.ndarray, Benchmark]:
    scores, truth = example()
    paths = save_photos(tmp_path, truth.queries), save_photos(tmp_path, truth.names)
    return scores, benchmark_of(truth, *paths)


def searches_of(scores: np.ndarray, benchmark: Benchmark) -> list[ModelSearch]:
    tables = {"first": scores, "second": scores[:, ::-1]}
    return [ModelSearch.of_scores(name, each, benchmark.judged) for name, each in tables.items()]


def report(
    folder: Path, searches: list[ModelSearch], benchmark: Benchmark, **options: object
) -> tuple[dict, str]:
    """Write a report: the data of its script, and its text."""
    path = write_report(folder / "report.html", "A <title>", searches, benchmark, **options)
    text = path.read_text("utf-8")
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(found), text


@pytest.mark.parametrize("k", [1, 5, 100])
def test_lists_follow_the_protocols(k: int, tmp_path: Path) -> None:
    scores, truth = example()
    search = ModelSearch.of_scores("m", scores, truth)
    data, _ = report(tmp_path, [search], benchmark_of(truth, truth.queries, truth.names), k=k)
    figures = evaluate_scores(scores, truth)
    easy, hard, unclear = truth.grades.values()
    assert data["protocols"] == ["Easy", "Medium", "Hard"]
    for place, (right, passed) in enumerate(
        (((easy,), (hard, unclear)), ((easy, hard), (unclear,)), ((hard,), (easy, unclear)))
    ):
        for number, query in enumerate(data["queries"]):
            wanted = {int(i) for part in right for i in part[number]}
            junk = {int(i) for part in passed for i in part[number]}
            expected, rank, hidden, skipped = [], 0, 0, []
            for image in sorted(range(30), key=lambda i: (-scores[number, i], i)):
                if rank == k:
                    break
                score = scores[number, image]
                if image in junk:
                    skipped.append([f"photo{image}", score, "junk", None])
                    continue
                # Junk counts only once something after it counts.
                room = 3 - sum(entry[2] == "junk" for entry in expected)
                expected += skipped[:room]
                hidden += len(skipped[room:])
                skipped = []
                rank += 1
                mark = "right" if image in wanted else "wrong"
                expected.append([f"photo{image}", score, mark, rank])
            ranked = query["lists"][0][place]
            assert [[data["names"][photo], *rest] for photo, *rest in ranked["entries"]] == expected
            assert (ranked["hidden"], ranked["positives"]) == (hidden, len(wanted))
            assert ranked["found"] == sum(entry[2] == "right" for entry in expected)
            ap = figures[data["protocols"][place]].per_query_ap[number]
            assert ranked["ap"] == (None if np.isnan(ap) else ap)


LABELS = np.arange(60) % 9
LABELS[-1] = 99  # alone: no query


@pytest.fixture
def labelled() -> tuple[list[np.ndarray], list[ModelSearch], Benchmark]:
    """Scores of two models on a labelled set, without each photo's own; its searches."""
    random = np.random.default_rng(3)
    names = tuple(f"photo{i}" for i in range(60))
    images = LabelledImages.from_names(
        Images(names, names, None), [f"class{label}" for label in LABELS], None
    )
    benchmark = Benchmark.of_labels("labelled", images)
    tables, searches = [], []
    for noise in (0.5, 1.5):
        rows = random.normal(size=(100, 16))[LABELS] + noise * random.normal(size=(60, 16))
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        searches.append(search_of(f"noise {noise}", rows, rows, benchmark.judged))
        tables.append(rows @ rows.T)
    return tables, searches, benchmark


def search_of(
    name: str, queries: np.ndarray, database: np.ndarray, judged: JudgedQueries
) -> ModelSearch:
    results = evaluate_descriptors(queries, database, judged)
    return ModelSearch(name, lambda rows: queries[rows] @ database.T, results)


def plain_ap(table: np.ndarray) -> list[float]:
    """AP of each labelled query among the others."""
    found = []
    for query in range(59):
        others = np.arange(60) != query
        right = LABELS[query] == LABELS
        found.append(average_precision(table[query][others], right[others]))
    return found


def test_a_large_set_shows_the_worst_queries_some_others_and_all_classes(
    labelled: tuple, tmp_path: Path
) -> None:
    tables, searches, benchmark = labelled
    data, text = report(tmp_path, searches, benchmark, most=20)
    ap = np.array([plain_ap(table) for table in tables])
    worst = {f"photo{i}" for i in np.argsort(ap.min(axis=0))[:10]}
    shown = [query["name"] for query in data["queries"]]
    assert len(set(shown)) == len(shown) == 20
    assert worst < set(shown)
    assert "20 of 59" in text
    chart = data["chart"]
    assert chart["names"] == [f"photo{i}" for i in range(59)]
    assert [chart["names"][place] for place in chart["places"]] == shown
    for model, expected in enumerate(ap):
        assert chart["ap"][model][0] == pytest.approx(expected, abs=6e-5)
    table = text[text.index('id="classes"') :]
    rows = re.findall(
        r'row">(class\d)</th><td>(\d)</td>\s*<td.*?>(.*?)<.*?<td.*?>(.*?)<', table, re.S
    )
    members = [LABELS[:59] == label for label in range(9)]
    means = [[f"{100 * each[own].mean():.1f}" for each in ap] for own in members]
    order = sorted(range(9), key=lambda label: ap[1][members[label]].mean())
    assert rows == [(f"class{i}", str(members[i].sum()), *means[i]) for i in order]
    assert "All 9 classes" in table
    assert "difference" in table


def test_a_labelled_query_is_not_in_its_own_list(labelled: tuple, tmp_path: Path) -> None:
    tables, searches, benchmark = labelled
    data, text = report(tmp_path, searches, benchmark, k=6)
    assert len(data["queries"]) == 59
    assert "at random" not in text
    lines = re.findall(r'<polyline class="curve model\d" points="(.*?)"', text)
    for model, table in enumerate(tables):
        lists = []
        for number, query in enumerate(data["queries"]):
            order = sorted(set(range(60)) - {number}, key=lambda i: -float(table[number, i]))
            right = ["right" if LABELS[i] == LABELS[number] else "wrong" for i in order]
            (ranked,) = query["lists"][model]
            found = [(data["names"][photo], mark) for photo, _, mark, _ in ranked["entries"]]
            names = [f"photo{i}" for i in order]
            assert found == list(zip(names, right, strict=True))[:6]
            lists.append([rank for rank, mark in enumerate(right) if mark == "right"])
            precisions = [(i + 1) / (rank + 1) for i, rank in enumerate(lists[-1])]
            assert ranked["ap"] == pytest.approx(np.mean(precisions))
        drawn = [float(point.split(",")[1]) for point in lines[model].split()]
        expected = [226 - 216 * plain_curve(lists, i / 100) for i in range(101)]
        assert drawn == pytest.approx(expected, abs=0.051)


def test_the_page_holds_every_photo_once(toy: tuple, tmp_path: Path) -> None:
    _, benchmark = toy
    done: list[tuple[int, int]] = []
    data, text = report(
        tmp_path, searches_of(*toy), benchmark, on_progress=lambda *counts: done.append(counts)
    )
    entries = [
        entry
        for query in data["queries"]
        for model in query["lists"]
        for ranked in model
        for entry in ranked["entries"]
    ]
    shown = {entry[0] for entry in entries} | {query["photo"] for query in data["queries"]}
    assert shown == set(range(len(data["photos"])))
    assert text.count("data:image/jpeg") == len(shown)
    assert done == [(i + 1, len(shown)) for i in range(len(shown))]
    for photo in {entry[0] for entry in entries}:
        kept = picture(data["photos"][photo]).convert("RGB").getpixel((5, 5))
        path = benchmark.database.paths[int(data["names"][photo].removeprefix("photo"))]
        assert kept == pytest.approx(Image.open(path).getpixel((5, 5)), abs=8)
    assert data["queries"][0]["box"] == [0.1, 0.1, 0.5, 0.4]  # of 20 × 40 pixels


def picture(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1])))


ONE_PAIR = JudgedQueries.labelled([0], [0], queries=["q"], names=["f"])


def one_pair(folder: Path, points: object, query: str, found: str) -> list:
    """What the page says about the points of one pair."""
    search = ModelSearch.of_scores("m", np.ones((1, 1)), ONE_PAIR, lambda *pair: points)
    return report(folder, [search], benchmark_of(ONE_PAIR, [query], [found]))[0]["matches"]


def test_points_in_turned_photos_and_in_photos_that_cannot_be_read(tmp_path: Path) -> None:
    query, found = str(tmp_path / "q.jpg"), str(tmp_path / "f.jpg")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (400, 200)).save(query, exif=turned)  # upright it is 200 × 400
    Image.new("RGB", (100, 50)).save(found)
    points = [[199.5, 399.5, 49.5, 24.5], [49.5, 99.5, -30, 90]]
    parts = [1000, 1000, 500, 500, 250, 250, 0, 1000]
    assert one_pair(tmp_path, points, query, found) == [[2, parts]]
    gone = str(tmp_path / "none.jpg")
    assert one_pair(tmp_path, np.ones((7, 4)), query, gone) == [[7, []]]
    for points in (np.ones((3, 2)), np.ones(4), [[1.0, 2.0, np.nan, 3.0]]):
        with pytest.raises(InputError, match=r"\[m, 4\]"):
            one_pair(tmp_path, points, query, found)


def test_a_photo_that_cannot_be_read_is_left_out(toy: tuple, tmp_path: Path) -> None:
    Path(toy[1].queries.paths[0]).write_bytes(b"no photo")
    data, _ = report(tmp_path, searches_of(*toy), toy[1])
    assert data["photos"][data["queries"][0]["photo"]] is None
    assert data["queries"][0]["box"] is None
    assert data["photos"].count(None) == 1


def test_the_table_shows_every_row_and_marks_the_best(toy: tuple, tmp_path: Path) -> None:
    searches = searches_of(*toy)
    table = {
        each.name: {protocol: found.figures for protocol, found in each.results.items()}
        for each in searches
    }
    table["whitened"] = {"Medium": {"mAP": 0.999}, "Hard": {"mAP": math.nan}}
    command = "listwise evaluate <model>"
    _, text = report(tmp_path, searches, toy[1], table=table, command=command, notes=["A note."])
    for said in ("<title>A &lt;title&gt;</title>", "listwise evaluate &lt;model&gt;", ">toy<"):
        assert said in text
    assert '<p class="note">A note.</p>' in text
    lines = re.findall(r"<tr.*?</tr>", text, re.S)
    cells = [
        [unescape(re.sub("<.*?>", "", c)) for c in re.findall(r"<t[dh].*?</t[dh]>", line)]
        for line in lines
    ]
    metrics = ["mAP", "mP@1", "mP@5", "mP@10"]
    assert cells[0] == ["", "Easy", "Medium", "Hard"]
    assert cells[1] == metrics * 3
    figures = [
        [f"{100 * value:.1f}" for found in table[name].values() for value in found.values()]
        for name in ("first", "second")
    ]
    assert cells[2] == ["first", *figures[0]]
    assert cells[3] == ["second", *figures[1]]
    assert cells[4][0] == "difference"
    for before, after, change in zip(*figures, cells[4][1:], strict=True):
        assert float(change.replace("−", "-")) == pytest.approx(float(after) - float(before))
    assert cells[5] == ["whitened", *["–"] * 4, "99.9", *["–"] * 7]
    best = re.findall(r'class="[^"]*best[^"]*">([^<]*)<', lines[5])
    assert best == ["99.9"]
    assert text.count("<polyline") == 6
    assert f"<b>Easy</b> mAP {figures[0][0]} → {figures[1][0]}<" in text


def test_file_names_that_are_no_text_are_written(tmp_path: Path) -> None:
    judged = JudgedQueries.labelled([0], [0], queries=["\udcff"], names=["b"])
    search = ModelSearch.of_scores("\udcff", np.ones((1, 1)), judged)
    data, _ = report(tmp_path, [search], benchmark_of(judged, ["a"], ["b"]))
    assert data["queries"][0]["name"] == "?"


def test_what_cannot_be_shown_is_refused(toy: tuple, tmp_path: Path) -> None:
    judged = JudgedQueries.labelled([0, 0])
    with pytest.raises(InputError, match=r"\(2, 2\)"):
        ModelSearch.of_scores("m", np.zeros((2, 3)), judged)
    with pytest.raises(InputError, match="NaN"):
        ModelSearch.of_scores("m", np.full((2, 2), np.nan), judged)
    with pytest.raises(InputError, match="one or two models"):
        report(tmp_path, [], toy[1])
    with pytest.raises(InputError, match="create it first"):
        report(tmp_path / "none", searches_of(*toy), toy[1])
    assert not (tmp_path / "report.html").exists()
