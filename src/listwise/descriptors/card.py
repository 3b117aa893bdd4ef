"""Model cards: Markdown that describes a model, written from its files."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from listwise.descriptors.tuned import TunedSettings
from listwise.descriptors.whitening import Whitening
from listwise.models.storage import NetConfig

METRICS_FILE = "metrics.jsonl"
CURVE_ROWS = 12
Results = Mapping[str, Mapping[str, float]]


def write_card(
    name: str,
    config: NetConfig,
    dim: int,
    whitening: Whitening | None,
    tuned: TunedSettings | None,
    *,
    run: Path | None = None,
    license: str = "unknown",
    results: Results | None = None,
) -> str:
    """Return a model card: data, settings, training curve, results and license, in Markdown.

    Args:
        name: the name of the model.
        config: the config of its network, which records the training.
        dim: the length of the descriptors.
        whitening: the whitening.
        tuned: the tuned settings.
        run: the folder of the training run; its `metrics.jsonl` has the training curve.
        license: an identifier such as apache-2.0.
        results: metrics by benchmark, such as `listwise.evaluate(...).figures`.
    """
    training: Any = config.provenance.get("training")
    training = training if isinstance(training, dict) else {}
    parts = [_head(license), f"# {name.rpartition('/')[2]}", _use(name, config, dim)]
    parts.append("## Network\n\n" + _rows(_network(config, dim, whitening)))
    if training:
        parts.append("## Training\n\n" + _training(training))
        curve = _curve(run)
        if curve:
            parts.append("## Training curve\n\n" + curve)
    if tuned is not None:
        parts.append("## Settings\n\n" + _rows(_settings(tuned)))
    if results:
        parts.append("## Results\n\n" + _results(results))
    parts.append(f"## License\n\n{license}")
    return "\n\n".join(parts) + "\n"


def _head(license: str) -> str:
    """Return the YAML that the Hugging Face Hub reads."""
    lines = {
        "license": json.dumps(license),
        "library_name": "listwise",
        "pipeline_tag": "image-feature-extraction",
        "tags": '["image-retrieval", "image-feature-extraction"]',
    }
    return "\n".join(["---", *(f"{key}: {value}" for key, value in lines.items()), "---"])


def _use(name: str, config: NetConfig, dim: int) -> str:
    source = f"hub:{name}" if "/" in name else name
    return (
        f"This model turns a photo into a descriptor of {dim} dimensions. Photos of the same thing "
        "have similar descriptors.\n\n"
        "```python\nimport listwise\n\n"
        f'model = listwise.load("{source}")\nvectors = model.encode(["a.jpg", "b.jpg"])\n```'
    )


def _network(config: NetConfig, dim: int, whitening: Whitening | None) -> dict[str, object]:
    learned = "none"
    if whitening is not None:
        count = whitening.info.learned_from
        learned = whitening.info.method + (f", from {count:,} descriptors" if count else "")
    weights = config.provenance.get("weights")
    return {
        "backbone": config.backbone,
        "first weights": shorten_paths(str(weights)) if weights else "unknown",
        "pooling": config.pooling,
        "projection": config.projection or "none",
        "whitening": learned,
        "dimensions": dim,
        "RGB mean": config.mean,
        "RGB standard deviation": config.std,
    }


def _training(training: Mapping[str, Any]) -> str:
    found: dict[str, object] = {}
    if "data" in training:
        found["data"] = shorten_paths(str(training["data"]))
    if "validation_map" in training:
        found["validation mAP"] = f"{100 * training['validation_map']:.1f}"
        found["best update"] = training.get("update", "")
    found["Listwise"] = training.get("listwise", "")
    settings = training.get("settings", {})
    flat = {
        f"{name}.{inner}" if inner else name: value
        for name, given in settings.items()
        for inner, value in (given.items() if isinstance(given, dict) else [("", given)])
        if value is not None
    }
    lines = "\n".join(f"{name}: {shorten_paths(value)}" for name, value in flat.items())
    folded = f"<details><summary>Settings</summary>\n\n```yaml\n{lines}\n```\n\n</details>"
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


def _curve(run: Path | None) -> str:
    """Return a table of the validations of a run; empty if it has none."""
    file = None if run is None else run / METRICS_FILE
    if file is None or not file.is_file():
        return ""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # a line that a crash cut off
            continue
        if isinstance(entry, dict) and entry.get("validation_map") is not None:
            rows.append(entry)
    step = max(1, -(-len(rows) // CURVE_ROWS))
    shown = [*rows[:-1:step], *rows[-1:]]
    lines = [
        [
            str(entry.get("update", "")),
            "" if entry.get("loss") is None else f"{entry['loss']:.4f}",
            f"{100 * entry['validation_map']:.1f}",
        ]
        for entry in shown
    ]
    return _table(["update", "loss", "validation mAP"], lines) if lines else ""


def _settings(tuned: TunedSettings) -> dict[str, object]:
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
