import base64
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from listwise.errors import InputError
from listwise.evaluation import (
    JudgedQueries,
    average_precision,
    evaluate_descriptors,
    evaluate_labelled,
    evaluate_scores,
)
from listwise.results.report import (
    MatchFunction,
    ModelResult,
    ModelSearch,
    TableRow,
    precision_recall_curve,
    report_models,
    write_report,
)

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


def test_a_curve_without_positives_is_nan() -> None:
    assert np.isnan(precision_recall_curve([[], []])[1]).all()


def test_negative_ranks_are_refused() -> None:
    with pytest.raises(InputError, match="0 or more"):
        precision_recall_curve([[3, -1]])


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


def model_of(
    name: str,
    scores: np.ndarray,
    judged: JudgedQueries,
    queries: Sequence[str],
    database: Sequence[str],
    k: int = 10,
    matches: MatchFunction | None = None,
) -> ModelResult:
    search = ModelSearch.of_scores(name, scores, judged, matches)
    return report_models([search], judged, queries, database, k=k)[0]


ONE, ONE_PAIR = np.ones((1, 1)), JudgedQueries.labelled([0], [0], queries=["q"], names=["f"])


def save_photos(folder: Path, names: list[str]) -> list[str]:
    paths = []
    for number, name in enumerate(names):
        paths.append(str(folder / f"{name}.png"))
        color = (37 * number % 256, 91 * number % 256, 53 * number % 256)
        Image.new("RGB", (20, 40), color).save(paths[-1])
    return paths


@pytest.fixture
def models(tmp_path: Path) -> list[ModelResult]:
    scores, truth = example()
    queries, database = save_photos(tmp_path, truth.queries), save_photos(tmp_path, truth.names)
    return [
        model_of("first", scores, truth, queries, database, k=5),
        model_of("second", scores[:, ::-1], truth, queries, database, k=5),
    ]


def read_data(path: Path) -> dict:
    found = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', path.read_text("utf-8"), re.S
    )
    assert len(found) == 1
    return json.loads(found[0])


@pytest.mark.parametrize("k", [1, 5, 100])
def test_lists_follow_the_protocols(k: int) -> None:
    scores, truth = example()
    result = model_of("m", scores, truth, truth.queries, truth.names, k=k)
    figures = evaluate_scores(scores, truth)
    assert list(result.figures) == ["Easy", "Medium", "Hard"]
    easy, hard, unclear = truth.grades.values()
    for protocol, level, right, passed in (
        ("Easy", figures["Easy"], (easy,), (hard, unclear)),
        ("Medium", figures["Medium"], (easy, hard), (unclear,)),
        ("Hard", figures["Hard"], (hard,), (easy, unclear)),
    ):
        assert result.figures[protocol] == level.figures
        assert list(level.figures) == ["mAP", "mP@1", "mP@5", "mP@10"]
        for number, query in enumerate(result.queries):
            wanted = {int(i) for part in right for i in part[number]}
            junk = {int(i) for part in passed for i in part[number]}
            expected, rank, hidden, skipped = [], 0, 0, []
            for place in sorted(range(30), key=lambda i: (-scores[number, i], i)):
                if rank == k:
                    break
                if place in junk:
                    skipped.append((f"photo{place}", "junk", None))
                    continue
                # Junk counts only once something after it counts.
                shown = [entry for entry in expected if entry[1] == "junk"]
                room = 3 - len(shown)
                expected += skipped[:room]
                hidden += len(skipped[room:])
                skipped = []
                rank += 1
                expected.append((f"photo{place}", "right" if place in wanted else "wrong", rank))
            ranked = query.lists[protocol]
            assert [(e.name, e.mark, e.rank) for e in ranked.entries] == expected
            assert ranked.hidden_junk == hidden
            assert ranked.positives == len(wanted)
            assert ranked.found == sum(mark == "right" for _, mark, _ in expected)
            ap = level.per_query_ap[number]
            assert ranked.ap == (None if np.isnan(ap) else ap)
            for entry in ranked.entries:
                assert entry.score == scores[number, int(entry.name.removeprefix("photo"))]


def test_the_curves_leave_junk_out() -> None:
    scores, truth = example()
    result = model_of("m", scores, truth, truth.queries, truth.names)
    ranks = []
    for number, row in enumerate(scores):
        junk = {*truth.grades["junk"][number], *truth.grades["easy"][number]}
        order = [i for i in sorted(range(30), key=lambda i: (-row[i], i)) if i not in junk]
        ranks.append([order.index(i) for i in truth.grades["hard"][number]])
    recall, precision = result.curves["Hard"]
    assert precision == pytest.approx([plain_curve(ranks, r) for r in recall])


def test_scores_of_another_shape_or_nan_and_missing_paths_are_refused() -> None:
    judged = JudgedQueries.labelled([0, 0])
    with pytest.raises(InputError, match=r"\(2, 2\)"):
        model_of("m", np.zeros((2, 3)), judged, "ab", "ab")
    with pytest.raises(InputError, match="NaN"):
        model_of("m", np.full((2, 2), np.nan), judged, "ab", "ab")
    with pytest.raises(InputError, match="give one for each"):
        model_of("m", np.zeros((2, 2)), judged, "ab", "a")


def labelled(count: int, most: int) -> tuple[dict[str, np.ndarray], np.ndarray, list[ModelResult]]:
    random = np.random.default_rng(3)
    labels = np.arange(count) % 9
    labels[-1] = 99  # alone: no query
    vectors = {}
    for name, noise in (("near", 0.5), ("far", 1.5)):
        rows = random.normal(size=(100, 16))[labels] + noise * random.normal(size=(count, 16))
        vectors[name] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    names = [f"photo{i}" for i in range(count)]
    judged = JudgedQueries.labelled(labels, queries=names)
    searches = [search_of(name, rows, rows, judged) for name, rows in vectors.items()]
    classes = [f"class{label}" for label in labels]
    models = report_models(searches, judged, names, names, k=6, most=most, classes=classes)
    return vectors, labels, models


def search_of(
    name: str, queries: np.ndarray, database: np.ndarray, judged: JudgedQueries
) -> ModelSearch:
    results = evaluate_descriptors(queries, database, judged)
    return ModelSearch(name, lambda rows: queries[rows] @ database.T, results)


def test_labelled_sets_show_the_worst_queries_and_some_others() -> None:
    vectors, labels, results = labelled(60, most=20)
    lowest = []
    for query in range(59):
        others = np.arange(60) != query
        lowest.append(
            min(
                average_precision((rows @ rows[query])[others], (labels == labels[query])[others])
                for rows in vectors.values()
            )
        )
    worst = {f"photo{i}" for i in np.argsort(lowest)[:10]}
    shown = [query.name for query in results[0].queries]
    assert len(set(shown)) == len(shown) == 20
    assert worst < set(shown)
    assert [query.name for query in results[1].queries] == shown
    assert "20 of 59" in results[0].note


def test_the_chart_has_all_queries_and_the_classes_their_mean(tmp_path: Path) -> None:
    vectors, labels, results = labelled(60, most=20)
    path = write_report(tmp_path / "report.html", "t", results)
    chart = read_data(path)["chart"]
    assert chart["names"] == [f"photo{i}" for i in range(59)]
    assert [chart["names"][place] for place in chart["places"]] == [
        query.name for query in results[0].queries
    ]
    for model, rows in enumerate(vectors.values()):
        expected = []
        for query in range(59):
            others = np.arange(60) != query
            right = labels == labels[query]
            expected.append(average_precision((rows @ rows[query])[others], right[others]))
        assert chart["ap"][model][0] == pytest.approx(expected, abs=6e-5)
        means = {
            f"class{label}": np.mean(np.array(expected)[labels[:59] == label]) for label in range(9)
        }
        found = results[model].classes
        assert {each.name: each.ap["Labels"] for each in found} == pytest.approx(means)
        assert {each.name: each.queries for each in found} == {
            f"class{label}": int((labels[:59] == label).sum()) for label in range(9)
        }
    page = path.read_text("utf-8")
    shown = re.findall(r'<tr><th scope="row">(class\d)</th>', page)
    assert shown == sorted(means, key=means.__getitem__)
    assert "All 9 classes" in page
    assert "difference" in page[page.index('id="classes"') :]


def test_of_very_many_queries_the_chart_has_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("listwise.results.report.build._CHARTED", 30)
    _, _, results = labelled(60, most=20)
    assert len(results[0].names) == len(results[0].ap["Labels"]) == 30
    shown = [query.name for query in results[0].queries]
    assert [results[0].names[place] for place in results[0].places] == shown
    assert "The chart shows the AP of 30 queries" in results[0].note


def test_a_labelled_query_is_not_in_its_own_list() -> None:
    vectors, labels, results = labelled(60, most=100)
    assert results[0].note == ""
    for result in results:
        rows = vectors[result.name]
        assert len(result.queries) == 59
        lists = []
        for query in result.queries:
            number = int(query.name.removeprefix("photo"))
            order = sorted(set(range(60)) - {number}, key=lambda i: -float(rows[i] @ rows[number]))
            right = ["right" if labels[i] == labels[number] else "wrong" for i in order]
            entries = query.lists["Labels"].entries
            assert [entry.name for entry in entries] == [f"photo{i}" for i in order[:6]]
            assert [entry.mark for entry in entries] == right[:6]
            lists.append([rank for rank, mark in enumerate(right) if mark == "right"])
            precisions = [(i + 1) / (rank + 1) for i, rank in enumerate(lists[-1])]
            assert query.lists["Labels"].ap == pytest.approx(np.mean(precisions))
        recall, precision = result.curves["Labels"]
        assert precision == pytest.approx([plain_curve(lists, r) for r in recall])
        figures = result.figures["Labels"]
        assert figures["mAP"] == evaluate_labelled(rows, labels).mAP
        assert list(figures) == ["mAP", "mAP@R", "Recall@1", "Recall@2", "Recall@4", "Recall@8"]


def test_a_list_as_long_as_the_set_does_not_show_the_query() -> None:
    vectors = np.eye(4)[[0, 0, 1, 1]] + 0.1
    labels = [0, 0, 1, 1]
    judged = JudgedQueries.labelled(labels, queries=list("abcd"))
    (result,) = report_models([search_of("m", vectors, vectors, judged)], judged, "abcd", "abcd")
    for query in result.queries:
        names = [entry.name for entry in query.lists["Labels"].entries]
        assert sorted([*names, query.name]) == ["a", "b", "c", "d"]


def test_a_gallery_is_searched_in_place_of_the_others() -> None:
    queries, gallery = np.eye(3)[[0, 1, 2]], np.eye(3)[[1, 0, 0, 1]]
    labels, gallery_labels = ["x", "y", "z"], ["y", "x", "y", "y"]
    names = ["q0", "q1", "q2"]
    judged = JudgedQueries.labelled(labels, gallery_labels, names=list("abcd"), queries=names)
    (result,) = report_models([search_of("m", queries, gallery, judged)], judged, names, "abcd")
    found = {
        query.name: [(entry.name, entry.mark) for entry in query.lists["Labels"].entries]
        for query in result.queries
    }
    assert found == {  # nothing is labelled z
        "q0": [("b", "right"), ("c", "wrong"), ("a", "wrong"), ("d", "wrong")],
        "q1": [("a", "right"), ("d", "right"), ("b", "wrong"), ("c", "right")],
    }


def test_the_original_protocol_has_good_and_ok_positives() -> None:
    scores, truth = example()
    oxford = JudgedQueries.oxford(
        truth.names,
        truth.queries,
        truth.boxes,
        good=truth.grades["easy"],
        ok=truth.grades["hard"],
        junk=truth.grades["junk"],
    )
    paths = truth.queries, truth.names
    result = model_of("m", scores, oxford, *paths)
    medium = model_of("m", scores, truth, *paths)
    assert result.figures == {"Original": medium.figures["Medium"]}
    assert [query.lists["Original"] for query in result.queries] == [
        query.lists["Medium"] for query in medium.queries
    ]


def test_the_page_holds_every_photo_once(models: list[ModelResult], tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    path = write_report(
        tmp_path / "report.html", "t", models, on_progress=lambda *counts: done.append(counts)
    )
    assert path == tmp_path / "report.html"
    data = read_data(path)
    shown = {
        entry.path
        for model in models
        for query in model.queries
        for ranked in query.lists.values()
        for entry in ranked.entries
    } | {query.path for query in models[0].queries}
    assert path.read_text("utf-8").count("data:image/jpeg") == len(data["photos"]) == len(shown)
    assert done == [(i + 1, len(shown)) for i in range(len(shown))]
    for model in range(2):
        for number, query in enumerate(models[model].queries):
            for place, protocol in enumerate(("Easy", "Medium", "Hard")):
                ranked, written = query.lists[protocol], data["queries"][number]["lists"][model]
                assert written[place]["ap"] == ranked.ap
                for entry, (photo, score, mark, rank) in zip(
                    ranked.entries, written[place]["entries"], strict=True
                ):
                    assert data["names"][photo] == entry.name
                    assert (score, mark, rank) == (entry.score, entry.mark, entry.rank)
                    picture = base64.b64decode(data["photos"][photo].split(",")[1])
                    kept = Image.open(io.BytesIO(picture)).convert("RGB").getpixel((5, 5))
                    real = Image.open(entry.path).getpixel((5, 5))
                    assert kept == pytest.approx(real, abs=8)
    assert data["queries"][0]["box"] == [0.1, 0.1, 0.5, 0.4]  # of 20 × 40 pixels


SIZES = (20, 40, 20, 40)


def shared_points(query: int, image: int) -> np.ndarray | None:
    """Points in two photos of `SIZES`, none for every third image."""
    if image % 3 == 0:
        return None
    count = {1: 0, 2: 5}.get(image % 6, 200)
    points = np.random.default_rng([query, image]).random((count, 4))
    return points * np.subtract(SIZES, 1)


def test_points_are_shown_as_parts_of_the_photos(tmp_path: Path) -> None:
    scores, truth = example()
    queries, database = save_photos(tmp_path, truth.queries), save_photos(tmp_path, truth.names)
    asked = []

    def points_of(query: int, image: int) -> np.ndarray | None:
        asked.append((query, image))
        return shared_points(query, image)

    plain = model_of("m", scores, truth, queries, database)
    result = model_of("m", scores, truth, queries, database, matches=points_of)
    assert len(set(asked)) == len(asked)
    shown = set()
    for number, (query, without) in enumerate(zip(result.queries, plain.queries, strict=True)):
        for protocol, ranked in query.lists.items():
            for entry, same in zip(ranked.entries, without.lists[protocol].entries, strict=True):
                assert replace(entry, inliers=None, matches=None) == same
                image = int(entry.name.removeprefix("photo"))
                shown.add((number, image))
                points = shared_points(number, image)
                if points is None:
                    assert (entry.inliers, entry.matches) == (None, None)
                    continue
                assert entry.inliers == len(points)
                expected = {
                    tuple(round((at + 0.5) / size, 9) for at, size in zip(row, SIZES, strict=True))
                    for row in points.tolist()
                }
                matches = {tuple(round(part, 9) for part in match) for match in entry.matches}
                assert matches <= expected
                assert len(matches) == len(entry.matches) == min(60, len(points))
    assert shown == set(asked)  # and nothing is asked of photos that are not shown


def test_points_in_large_turned_photos(tmp_path: Path) -> None:
    query, found = str(tmp_path / "q.jpg"), str(tmp_path / "f.jpg")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (400, 200)).save(query, exif=turned)  # upright it is 200 × 400
    Image.new("RGB", (100, 50)).save(found)
    points = [[199.5, 399.5, 49.5, 24.5], [49.5, 99.5, -30, 90]]
    result = model_of("m", ONE, ONE_PAIR, [query], [found], matches=lambda query, image: points)
    (entry,) = result.queries[0].lists["Labels"].entries
    assert entry.inliers == 2
    assert entry.matches == ((1.0, 1.0, 0.5, 0.5), (0.25, 0.25, 0.0, 1.0))


def test_points_of_a_photo_that_cannot_be_read_are_only_counted(tmp_path: Path) -> None:
    (query,) = save_photos(tmp_path, ["q"])
    gone = [str(tmp_path / "none.jpg")]
    seven = np.ones((7, 4))
    result = model_of("m", ONE, ONE_PAIR, [query], gone, matches=lambda *pair: seven)
    (entry,) = result.queries[0].lists["Labels"].entries
    assert (entry.inliers, entry.matches) == (7, None)
    data = read_data(write_report(tmp_path / "report.html", "t", [result]))
    assert data["matches"] == [[7, []]]


@pytest.mark.parametrize("points", [np.ones((3, 2)), np.ones(4), [[1.0, 2.0, np.nan, 3.0]]])
def test_points_of_another_shape_are_refused(points: np.ndarray, tmp_path: Path) -> None:
    (path,) = save_photos(tmp_path, ["q"])
    with pytest.raises(InputError, match=r"\[m, 4\]"):
        model_of("m", ONE, ONE_PAIR, [path], [path], matches=lambda *pair: points)


def test_a_page_holds_points_once_and_larger_photos_for_them(tmp_path: Path) -> None:
    scores, truth = example()
    paths = save_photos(tmp_path, [*truth.queries, *truth.names])
    for path in paths:
        Image.open(path).resize((300, 600)).save(path)
    asked, among = paths[:6], paths[6:]

    def points_of(query: int, image: int) -> np.ndarray | None:
        points = shared_points(query, image)
        return None if points is None else points * 15

    plain = model_of("plain", scores, truth, asked, among, k=5)
    result = model_of("points", scores, truth, asked, among, k=5, matches=points_of)
    data = read_data(write_report(tmp_path / "report.html", "t", [plain, result]))
    drawn, large = set(), set()
    for number, query in enumerate(result.queries):
        written = data["queries"][number]["lists"]
        for place, ranked in enumerate(query.lists.values()):
            assert all(len(row) == 4 for row in written[0][place]["entries"])
            for row, entry in zip(written[1][place]["entries"], ranked.entries, strict=True):
                if entry.inliers is None:
                    assert len(row) == 4
                    continue
                inliers, points = data["matches"][row[4]]
                assert inliers == entry.inliers
                assert np.reshape(points, (-1, 4)) / 1000 == pytest.approx(
                    np.reshape(entry.matches, (-1, 4)), abs=0.00051
                )
                drawn.add(row[4])
                if entry.matches:
                    large.add(row[0])
    assert drawn == set(range(len(data["matches"])))
    assert len({json.dumps(one) for one in data["matches"]}) == len(data["matches"])
    large |= {query["photo"] for query in data["queries"]}
    assert 0 < len(large) < len(data["photos"])
    for place, uri in enumerate(data["photos"]):
        picture = Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1])))
        assert picture.height == (320 if place in large else 160)


def test_a_page_without_points_holds_nothing_of_them(
    models: list[ModelResult], tmp_path: Path
) -> None:
    text = write_report(tmp_path / "report.html", "t", models).read_text("utf-8")
    assert "matches" not in read_data(tmp_path / "report.html")
    for part in ("function pointsUnder", "openViewer", "dialog.matches", 'class="points"'):
        assert part not in text


def test_many_photos_stay_small(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    queries, names, k = 70, 2600, 40
    noise = Image.fromarray(random.integers(0, 256, (40, 60, 3), np.uint8)).resize((240, 160))
    paths = [str(tmp_path / f"{i}.jpg") for i in range(names)]
    noise.save(paths[0], quality=90)
    for path in paths[1:]:
        Path(path).hardlink_to(paths[0])
    judged = JudgedQueries.labelled(range(queries), range(names))
    scores = random.random((queries, names))
    result = model_of("m", scores, judged, paths[:queries], paths, k=k)
    path = write_report(tmp_path / "report.html", "t", [result])
    assert len(read_data(path)["photos"]) > 1500
    assert path.stat().st_size < 10_000_000


def test_a_photo_that_cannot_be_read_is_left_out(models: list[ModelResult], tmp_path: Path) -> None:
    broken = models[0].queries[0].path
    Path(broken).write_bytes(b"no photo")
    data = read_data(write_report(tmp_path / "report.html", "t", models))
    assert data["photos"][data["queries"][0]["photo"]] is None
    assert data["queries"][0]["box"] is None
    assert data["photos"].count(None) == 1


def test_the_table_shows_every_row_and_marks_the_best(
    models: list[ModelResult], tmp_path: Path
) -> None:
    row = TableRow("whitened", {"Medium": {"mAP": 0.999}, "Hard": {"mAP": math.nan}})
    path = write_report(
        tmp_path / "report.html",
        "Title & more",
        models,
        benchmark="toy",
        command="listwise evaluate <model>",
        date=datetime(2030, 1, 2, 3, 4),
        table=[row],
        notes=["A note."],
    )
    text = path.read_text("utf-8")
    for said in ("<title>Title &amp; more</title>", "listwise evaluate &lt;model&gt;"):
        assert said in text
    assert "2030-01-02 03:04" in text
    assert '<p class="note">A note.</p>' in text
    lines = re.findall(r"<tr.*?</tr>", text)
    cells = [
        [unescape(re.sub("<.*?>", "", c)) for c in re.findall(r"<t[dh].*?</t[dh]>", line)]
        for line in lines
    ]
    metrics = ["mAP", "mP@1", "mP@5", "mP@10"]
    assert cells[0] == ["", "Easy", "Medium", "Hard"]
    assert cells[1] == metrics * 3
    figures = [
        [
            f"{100 * model.figures[protocol][metric]:.1f}"
            for protocol in ("Easy", "Medium", "Hard")
            for metric in metrics
        ]
        for model in models
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


def test_nothing_is_fetched_from_elsewhere(models: list[ModelResult], tmp_path: Path) -> None:
    text = write_report(tmp_path / "report.html", "t", models).read_text("utf-8")
    assert re.findall(r"https?://[^\"' ]*", text) == ["http://www.w3.org/2000/svg"]  # a name only
    assert not re.search(r"<link|@import|url\(|<iframe|\bfetch\(|XMLHttpRequest", text)


def test_file_names_that_are_no_text_are_written(tmp_path: Path) -> None:
    (path,) = save_photos(tmp_path, ["a"])
    judged = JudgedQueries.labelled([0], [0], queries=["\udcff"], names=["b"])
    result = model_of("m", ONE, judged, [path], [path])
    data = read_data(write_report(tmp_path / "report.html", "\udcff", [result]))
    assert data["queries"][0]["name"] == "?"


def test_models_that_cannot_be_compared_are_refused(
    models: list[ModelResult], tmp_path: Path
) -> None:
    scores, truth = example(queries=5)
    other = model_of("other", scores, truth, truth.queries, truth.names)
    path = tmp_path / "report.html"
    with pytest.raises(InputError, match="different queries"):
        write_report(path, "t", [models[0], other])
    fewer = replace(truth, protocols={"Easy": truth.protocols["Easy"]})
    with pytest.raises(InputError, match="different protocols"):
        write_report(path, "t", [other, model_of("x", scores, fewer, truth.queries, truth.names)])
    with pytest.raises(InputError, match="one or two models"):
        write_report(path, "t", [])
    with pytest.raises(InputError, match="create it first"):
        write_report(tmp_path / "none" / "report.html", "t", models)
    assert not path.exists()
