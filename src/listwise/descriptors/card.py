"""Model cards: Markdown that describes a model, written from its files."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from listwise.models.storage import ModelInfo, ModelSettings

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
    name = name or (known.name if known else "") or "model"
    origin = shorten_paths(info.network.provenance)
    training = origin.get("training")
    parts = [_head(license), f"# {name.rpartition('/')[2]}", _use(name, dim)]
    parts.append("## Network\n\n" + _rows(_network(info, origin, dim)))
    if isinstance(training, dict):
        parts.append("## Training\n\n" + _training(training))
        curve = _curve(run / METRICS_FILE) if run and (run / METRICS_FILE).is_file() else []
        if curve:
            head = ["update", "loss", "validation mAP"]
            parts.append("## Training curve\n\n" + _table(head, curve))
    if info.tuned is not None:
        parts.append("## Settings\n\n" + _rows(_settings(info.tuned)))
    if results:
        parts.append("## Results\n\n" + _results(results))
    parts.append(f"## License\n\n{license}")
    return "\n\n".join(parts) + "\n"


def _head(license: str) -> str:
    """Return the YAML that the Hugging Face Hub reads."""
    return f"""---
license: {json.dumps(license)}
library_name: listwise
pipeline_tag: image-feature-extraction
tags: ["image-retrieval", "image-feature-extraction"]
---"""


def _use(name: str, dim: int) -> str:
    source = f"hub:{name}" if "/" in name else name
    return (
        f"This model turns a photo into a descriptor of {dim} dimensions. Photos of the same thing "
        "have similar descriptors.\n\n"
        "```python\nimport listwise\n\n"
        f'model = listwise.load("{source}")\nvectors = model.encode(["a.jpg", "b.jpg"])\n```'
    )


def _network(info: ModelInfo, origin: Mapping[str, Any], dim: int) -> dict[str, object]:
    config, learned = info.network, "none"
    if info.whitening is not None:
        count = info.whitening.learned_from
        learned = info.whitening.method + (f", from {count:,} descriptors" if count else "")
    return {
        "backbone": config.backbone,
        "first weights": origin.get("weights") or "unknown",
        "pooling": config.pooling,
        "projection": config.projection or "none",
        "whitening": learned,
        "dimensions": dim,
        "RGB mean": config.mean,
        "RGB standard deviation": config.std,
    }


def _training(training: Mapping[str, Any]) -> str:
    named = {"data": "data", "Listwise": "listwise"}
    found = {label: training[name] for label, name in named.items() if name in training}
    if "validation_map" in training:
        found["validation mAP"] = f"{100 * training['validation_map']:.1f}"
        found["best update"] = training.get("update", "")
    lines = []
    for name, given in training.get("settings", {}).items():
        inner = given if isinstance(given, dict) else {"": given}
        flat = {f"{name}.{key}" if key else name: value for key, value in inner.items()}
        lines += [f"{key}: {value}\n" for key, value in flat.items() if value is not None]
    folded = f"<details><summary>Settings</summary>\n\n```yaml\n{''.join(lines)}```\n\n</details>"
    return f"{_rows(found)}\n\n{folded}"


def shorten_paths(value: Any) -> Any:
    """Replace absolute paths in the texts of JSON values by the names of their files or folders."""
    if isinstance(value, dict):
        return {key: shorten_paths(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [shorten_paths(each) for each in value]
    if not isinstance(value, str):
        return value
    # A path may contain spaces, and is the end of the text.
    return re.sub(r"(^|(?<=\s))(/|[A-Za-z]:\\).*$", lambda path: _name(path[0]), value)


def _name(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def _curve(file: Path) -> list[list[str]]:
    """Return update, loss and validation mAP of some validations of a run."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError, KeyError, TypeError):  # cut off by a crash, or no validation
            entry = json.loads(line)
            value, loss = f"{100 * entry['validation_map']:.1f}", entry.get("loss")
            rows.append([str(entry["update"]), "" if loss is None else f"{loss:.4f}", value])
    return [*rows[: -1 : max(1, -(-len(rows) // CURVE_ROWS))], *rows[-1:]]


def _settings(tuned: ModelSettings) -> dict[str, object]:
    found: dict[str, object] = {
        "longer side of photos": tuned.max_side or "original size",
        "scales": ", ".join(f"{scale:g}" for scale in tuned.scales),
    }
    if tuned.expansion is not None:
        found["query expansion"] = f"k = {tuned.expansion.k}, α = {tuned.expansion.alpha:g}"
    if tuned.photos:
        gain = f"{100 * tuned.start_map:.1f} -> {100 * tuned.validation_map:.1f}"
        found["validation mAP, before and after tuning"] = gain
    return found


def _results(results: Results) -> str:
    names = list(dict.fromkeys(name for metrics in results.values() for name in metrics))
    lines = [
        [row, *(f"{100 * metrics[name]:.1f}" if name in metrics else "" for name in names)]
        for row, metrics in results.items()
    ]
    return _table(["", *names], lines)


def _rows(values: Mapping[str, object]) -> str:
    return _table(["", ""], [[name, str(value)] for name, value in values.items()])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines
    )
