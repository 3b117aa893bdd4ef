"""Model cards: Markdown that describes a model, written from its files."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from listwise.models.storage import ModelInfo
from listwise.pages import render_text

METRICS_FILE = "metrics.jsonl"
CURVE_ROWS = 12
Results = Mapping[str, Mapping[str, float]]


def write_card(
    info: ModelInfo,
    dim: int,
    folder: Path | None,
    name: str,
    license: str,
    results: Results | None,
) -> str:
    """Return a model card: data, settings, training curve, results and license, in Markdown.

    Args:
        info: the settings of the model.
        dim: the length of its descriptors.
        folder: its folder; `metrics.jsonl` in the folder of its run has the training curve.
        name: its name; empty for that of its folder.
        license: an identifier such as apache-2.0.
        results: metrics by benchmark, such as `listwise.evaluate(...).figures`.
    """
    run = folder and folder.parent
    known = run if folder and folder.name == "model" else folder
    origin = shorten_paths(info.network.provenance)
    training = origin.get("training")
    given = training.get("settings", {}) if isinstance(training, dict) else {}
    settings: dict[str, Any] = {}
    for setting, value in given.items():
        inner = value if isinstance(value, dict) else {"": value}
        settings |= {f"{setting}.{key}" if key else setting: each for key, each in inner.items()}
    return render_text(
        "card.md",
        name=name or (known.name if known else "") or "model",
        license=license,
        dim=dim,
        network=info.network,
        origin=origin,
        whitening=info.whitening,
        training=training,
        settings=settings,
        curve=_curve(run / METRICS_FILE) if training and run else [],
        tuned=info.tuned,
        results=results,
        metrics=dict.fromkeys(chain.from_iterable((results or {}).values())),
    )


def shorten_paths(value: Any) -> Any:
    """Replace absolute paths in the texts of JSON values by the names of their files or folders."""
    if isinstance(value, dict):
        return {key: shorten_paths(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [shorten_paths(each) for each in value]
    if not isinstance(value, str):
        return value
    # A path may contain spaces, and is the end of the text.
    return re.sub(
        r"(^|(?<=\s))(/|[A-Za-z]:\\).*$",
        lambda path: re.split(r"[/\\]", path[0].rstrip("/\\"))[-1],
        value,
    )


def _curve(file: Path) -> list[tuple[int, float | None, float]]:
    """Return update, loss and validation mAP of some validations of a run."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        with suppress(ValueError, KeyError, TypeError):  # cut off by a crash, or no validation
            entry = json.loads(line)
            rows.append((entry["update"], entry.get("loss"), entry["validation_map"]))
    return [*rows[: -1 : max(1, -(-len(rows) // CURVE_ROWS))], *rows[-1:]]
