"""The files that a study writes: `results.csv`, `table.md` and `plot.svg`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from listwise.files import write_csv, write_text
from listwise.pages import render_text
from listwise.progress import readable_time
from listwise.studies.definitions import Variant
from listwise.studies.plan import Outcome, StudyPlan, StudyResults
from listwise.studies.plots import Panel, Point, Spread, draw

RESULTS_FILE, TABLE_FILE, PLOT_FILE = "results.csv", "table.md", "plot.svg"
VALIDATION = "validation"


def write_outputs(study_plan: StudyPlan, results: StudyResults, command: str = "") -> None:
    """Write the three files from the finished runs; `table.md` shows `command`."""
    write_files(
        study_plan.out,
        study_plan.study.title,
        [render_text("study.md", plan=study_plan), table(study_plan, results)],
        [run.row() for run in results.outcomes],
        _panels(study_plan, results),
        command,
        axis=study_plan.study.axis,
        count=study_plan.count,
    )


def write_files(
    out: Path,
    title: str,
    text: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    panels: Sequence[Panel],
    command: str = "",
    *,
    axis: str | None = None,
    count: int = 0,
) -> None:
    """Write the three files into a folder; creates it if necessary.

    Args:
        out: the folder.
        title: heading of the table and the plot.
        text: what `table.md` shows.
        rows: rows of `results.csv`; columns that a row does not have are empty.
        panels: panels of the plot.
        command: command that `table.md` shows.
        axis: label of the axis of the plot, if the variants are numbers.
        count: number of rows when all runs are finished.
    """
    out.mkdir(parents=True, exist_ok=True)
    names = _columns(rows)
    write_csv(out / RESULTS_FILE, [names, *([row.get(name) for name in names] for row in rows)])
    parts = [f"# {title}\n", *text]
    if len(rows) < count:
        parts.append(f"So far {len(rows)} of {count} runs are finished.\n")
    if command:
        parts.append(f"```sh\n{command}\n```\n")
    write_text(out / TABLE_FILE, "\n".join(parts))
    write_text(out / PLOT_FILE, draw(title, panels, axis))


def table(study_plan: StudyPlan, results: StudyResults) -> str:
    """Format the Markdown table: one row per variant with a finished run."""
    # The columns of metrics; those of the benchmark are a protocol, plain or whitened.
    metrics = {f"{VALIDATION} mAP": VALIDATION} | {name: name for name in results.untrained}
    axis = study_plan.study.axis or "variant"
    rows = []
    if results.outcomes:
        values = (results.untrained_map, *results.untrained.values())
        shown = (Spread((value,)).percent() for value in values)
        rows.append({axis: "untrained", "seeds": ""} | dict(zip(metrics, shown, strict=True)))
    for variant in study_plan.variants:
        runs = results.kept(variant.name)
        if not runs:
            continue
        row = {axis: _shown(variant), "seeds": str(len(runs))}
        row |= {name: figure_spread(runs, each).percent() for name, each in metrics.items()}
        if len(study_plan.rates) > 1:
            row["learning rate"] = f"{runs[0].learning_rate:g}"
        for cost in ("updates", "backwards", "forwards"):
            row[cost] = f"{np.mean([getattr(run, cost) for run in runs]):,.0f}"
        if study_plan.study.name in ("losses", "rivals"):
            row["hyper-parameters"] = str(runs[0].hyper_parameters)
        row["time"] = readable_time(float(np.mean([run.seconds for run in runs])))
        rows.append(row)
    if not study_plan.study.axis and len(study_plan.variants) == 2:
        rows += _difference(study_plan.variants, results, metrics)
    return markdown(rows)


def _panels(study_plan: StudyPlan, results: StudyResults) -> list[Panel]:
    """Return a panel for validation, and one per protocol of the benchmark, whitened."""
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
    return panels


def figure_spread(runs: Sequence[Outcome], name: str) -> Spread:
    """Collect one metric of some runs."""
    return Spread(
        tuple(run.validation_map if name == VALIDATION else run.judged[name] for run in runs)
    )


def _difference(
    variants: Sequence[Variant], results: StudyResults, metrics: Mapping[str, str]
) -> list[dict[str, str]]:
    """Return the row of differences between two variants, seed by seed."""
    first, second = ({run.seed: run for run in results.kept(each.name)} for each in variants)
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return []
    row = {"variant": f"{variants[0].name} − {variants[1].name}", "seeds": str(len(seeds))}
    for name, each in metrics.items():
        ours, theirs = (figure_spread([runs[s] for s in seeds], each) for runs in (first, second))
        gains = (a - b for a, b in zip(ours.values, theirs.values, strict=True))
        row[name] = Spread(tuple(gains)).percent("+")
    return [row]


def _shown(variant: Variant) -> str:
    return variant.name if variant.value is None else f"{variant.value:g}"


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Format a Markdown table; all columns but the first are right-aligned.

    Cells of columns that a row does not have are empty.
    """
    names = _columns(rows)
    cells = [[row.get(name, "") for name in names] for row in rows]
    lines = [names, ["---", *["---:"] * (len(names) - 1)], *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of all columns, in the order of the rows."""
    return list(dict.fromkeys(name for row in rows for name in row))
