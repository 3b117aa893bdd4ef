"""Plots: well-formed, and every figure where it belongs."""

import math
import re
import xml.etree.ElementTree as ET

import pytest

from listwise.studies.plots import Panel, Point, Spread, draw

SVG = "{http://www.w3.org/2000/svg}"
NUMBERS = [
    Point("32", Spread((0.40, 0.44)), 32),
    Point("64", Spread((0.50, 0.50)), 64),
    Point("256", Spread((0.61,)), 256),
]


def circles(svg, kind):
    found = ET.fromstring(svg).iter(f"{SVG}circle")
    return [(float(c.get("cx")), float(c.get("cy"))) for c in found if c.get("class") == kind]


def ticks(svg, axis):
    """Places of the labels with numbers, by number."""
    anchor = {"x": "middle", "y": "end"}[axis]
    found = {}
    for text in ET.fromstring(svg).iter(f"{SVG}text"):
        if text.get("text-anchor") == anchor and re.fullmatch(r"[\d.]+", text.text):
            found[float(text.text)] = float(text.get(axis))
    return found


def test_points_lie_where_axis_and_ticks_say():
    svg = draw("Batch size", [Panel("mAP", NUMBERS, 0.35)], "batch size B")
    means = circles(svg, "mean")
    assert len(means) == 3
    up = {tick: y - 4 for tick, y in ticks(svg, "y").items()}
    (low, low_y), *_, (high, high_y) = sorted(up.items())
    for point, (_, y) in zip(NUMBERS, means, strict=True):
        expected = low_y + (100 * point.spread.mean - low) / (high - low) * (high_y - low_y)
        assert y == pytest.approx(expected, abs=0.2)
    across = ticks(svg, "x")
    assert [across[point.value] for point in NUMBERS] == [x for x, _ in means]
    first, second, third = (x for x, _ in means)
    share = math.log(64 / 32) / math.log(256 / 32)
    assert (second - first) / (third - first) == pytest.approx(share, abs=0.005)
    bar = next(e for e in ET.fromstring(svg).iter(f"{SVG}path") if e.get("class") == "error")
    ends = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", bar.get("d"))]
    percent = (high_y - low_y) / (high - low)
    assert (ends[1] - ends[0]) / percent == pytest.approx(200 * math.sqrt(2 * 0.02**2), abs=0.1)
    # A single seed has neither an error bar nor values of its own.
    assert len(circles(svg, "each")) == 4
    assert svg.count('class="error"') == 2
    assert "untrained 35.0" in svg


def test_names_stand_in_rows_and_are_escaped():
    points = [Point("a & <b>", Spread((0.2, 0.3))), Point("c", Spread((0.9, 0.8)))]
    svg = draw("Losses <&>", [Panel("x < y", points, 0.1), Panel("z", points)])
    root = ET.fromstring(svg)
    names = [t.text for t in root.iter(f"{SVG}text") if t.get("class") == "name"]
    assert names == ["a & <b>", "c"] * 2
    means = circles(svg, "mean")
    assert len(means) == 4
    assert means[0][0] < means[1][0]
    assert means[0][1] < means[1][1]
    assert means[2][0] > means[0][0] + 300  # the second panel is beside the first
    assert "a &amp; &lt;b&gt;: 25.0 ± 7.1 (2 seeds)" in svg


@pytest.mark.parametrize("axis", [None, "bins"])
def test_nothing_yet_and_a_single_value_can_be_drawn(axis):
    ET.fromstring(draw("t", [Panel("p", [])], axis))
    svg = draw("t", [Panel("p", [Point("20", Spread((0.5,)), 20)])], axis)
    assert len(circles(svg, "mean")) == 1
