"""The files that a study writes: `results.csv`, `table.md` and `plot.svg`."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from listwise.files import write_text
from listwise.studies.definitions import Variant
from listwise.studies.outcome import Outcome, StudyResults
from listwise.studies.plan import StudyPlan
from listwise.studies.plots import Panel, Point, Spread, draw
from listwise.training.run.view import readable_time

RESULTS_FILE, TABLE_FILE, PLOT_FILE = "results.csv", "table.md", "plot.svg"
VALIDATION = "validation"


def write_outputs(study_plan: StudyPlan, results: StudyResults, command: str = "") -> None:
    """Write the three files from the finished runs; `table.md` shows `command`."""
    write_csv(study_plan.out / RESULTS_FILE, [run.row() for run in results.outcomes])
    text = [f"# {study_plan.study.title}\n", about(study_plan), table(study_plan, results)]
    if len(results.outcomes) < study_plan.count:
        text.append(f"So far {len(results.outcomes)} of {study_plan.count} runs are finished.\n")
    if command:
        text.append(f"```sh\n{command}\n```\n")
    write_text(study_plan.out / TABLE_FILE, "\n".join(text))
    write_text(study_plan.out / PLOT_FILE, plot(study_plan, results))


def about(study_plan: StudyPlan) -> str:
    """Describe in a paragraph what all runs share."""
    plan, config = study_plan.plan, study_plan.plan.config
    rate = f"Learning rate {study_plan.rates[0]:g}."
    if len(study_plan.rates) > 1:
        tried = ", ".join(f"{rate:g}" for rate in study_plan.rates)
        rate = (
            f"Learning rates {tried}; each variant uses the one that is best in validation with "
            "its first seed."
        )
    return (
        f"{config.backbone} with {config.pooling}, crops of {config.crops.size} pixels. "
        f"Training: {len(plan.train)} photos of {len(plan.train.class_names)} classes. "
        f"Validation: {len(plan.validation)} photos of {len(plan.validation.class_names)} other "
        f"classes. {_images_seen(study_plan)} {rate} "
        "mAP in percent, mean ± sample standard deviation over seeds; "
        "each run uses its best network in validation.\n"
    )


def _images_seen(study_plan: StudyPlan) -> str:
    """Describe how many training images a run sees."""
    seen = f"Each run sees {study_plan.images:,} training images."
    more = [variant for variant in study_plan.variants if variant.effort != 1]
    if not more:
        return seen
    names = " or ".join(variant.name for variant in more)
    return f"{seen[:-1]}; a run of {names} sees {more[0].effort:.2f} times as many."


def table(study_plan: StudyPlan, results: StudyResults) -> str:
    """Format the Markdown table: one row per variant with a finished run."""
    names = list(results.untrained)  # results on the benchmark: a protocol, plain or whitened
    costly = study_plan.study.name in ("losses", "rivals")
    header = [study_plan.study.axis or "variant", "seeds", f"{VALIDATION} mAP", *names]
    header += ["learning rate"] if len(study_plan.rates) > 1 else []
    header += ["updates", "backwards", "forwards"]
    header += ["hyper-parameters"] if costly else []
    header += ["time"]
    rows = []
    if results.outcomes:
        judged = [Spread((results.untrained[name],)).percent() for name in names]
        cells = ["untrained", "", Spread((results.untrained_map,)).percent(), *judged]
        rows.append(cells + [""] * (len(header) - len(cells)))
    for variant in study_plan.variants:
        runs = results.kept(variant.name)
        if not runs:
            continue
        row = [_shown(variant), str(len(runs))]
        row += [figure_spread(runs, name).percent() for name in (VALIDATION, *names)]
        row += [f"{runs[0].learning_rate:g}"] if len(study_plan.rates) > 1 else []
        for cost in ("updates", "backwards", "forwards"):
            row.append(f"{np.mean([getattr(run, cost) for run in runs]):,.0f}")
        row += [str(runs[0].hyper_parameters)] if costly else []
        rows.append([*row, readable_time(float(np.mean([run.seconds for run in runs])))])
    rows += _difference(study_plan, results, len(header))
    return markdown(header, rows)


def plot(study_plan: StudyPlan, results: StudyResults) -> str:
    """Draw the SVG: a panel for validation, and one per protocol of the benchmark, whitened."""
    whitened = [name for name in results.untrained if name.endswith("whitened")]
    panels = []
    for name in (VALIDATION, *whitened):
        points = [
            Point(_shown(variant), figure_spread(runs, name), variant.value)
            for variant in study_plan.variants
            if (runs := results.kept(variant.name))
        ]
        reference = results.untrained.get(name)
        if name == VALIDATION and results.outcomes:
            reference = results.untrained_map
        panels.append(Panel(f"{name[:1].upper()}{name[1:]} mAP, %", points, reference))
    return draw(study_plan.study.title, panels, study_plan.study.axis)


def figure_spread(runs: Sequence[Outcome], name: str) -> Spread:
    """Collect one metric of some runs."""
    return Spread(
        tuple(run.validation_map if name == VALIDATION else run.judged[name] for run in runs)
    )


def _difference(study_plan: StudyPlan, results: StudyResults, width: int) -> list[list[str]]:
    """Return the row of differences between two named variants, seed by seed."""
    if study_plan.study.axis or len(study_plan.variants) != 2:
        return []
    first, second = ({run.seed: run for run in results.kept(v.name)} for v in study_plan.variants)
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return []
    cells = [f"{study_plan.variants[0].name} − {study_plan.variants[1].name}", str(len(seeds))]
    for name in (VALIDATION, *results.untrained):
        ours, theirs = (figure_spread([runs[s] for s in seeds], name) for runs in (first, second))
        gains = (a - b for a, b in zip(ours.values, theirs.values, strict=True))
        cells.append(Spread(tuple(gains)).percent("+"))
    return [cells + [""] * (width - len(cells))]


def _shown(variant: Variant) -> str:
    return variant.name if variant.value is None else f"{variant.value:g}"


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as CSV with the columns of all rows; missing values are empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table; all columns but the first are right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
