"""What a study leaves to read: `results.csv`, `table.md` and `plot.svg`."""

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


def write_outputs(made: StudyPlan, findings: StudyResults, command: str = "") -> None:
    """Rewrite the three files from the finished runs; the table shows `command`."""
    write_csv(made.out / RESULTS_FILE, [run.row() for run in findings.outcomes])
    text = [f"# {made.study.title}\n", about(made), table(made, findings)]
    if len(findings.outcomes) < made.count:
        text.append(f"So far {len(findings.outcomes)} of {made.count} runs are finished.\n")
    if command:
        text.append(f"```sh\n{command}\n```\n")
    write_text(made.out / TABLE_FILE, "\n".join(text))
    write_text(made.out / PLOT_FILE, plot(made, findings))


def about(made: StudyPlan) -> str:
    """What all runs have in common, in a paragraph."""
    plan, config = made.plan, made.plan.config
    rate = f"Learning rate {made.rates[0]:g}."
    if len(made.rates) > 1:
        tried = ", ".join(f"{rate:g}" for rate in made.rates)
        rate = f"Learning rates {tried}, the best in validation of each variant's first seed."
    return (
        f"{config.backbone} with {config.pooling}, crops of {config.crops.size}. "
        f"{len(plan.train)} photos of {len(plan.train.class_names)} classes to train on, "
        f"{len(plan.validation)} of {len(plan.validation.class_names)} others to validate with; "
        f"each run sees {made.images:,} training images. {rate} "
        "mAP in percent, mean ± sample deviation over seeds; "
        "the network of each run is the best in validation.\n"
    )


def table(made: StudyPlan, findings: StudyResults) -> str:
    """The Markdown table: a row for each variant that has a finished run."""
    names = list(findings.untrained)  # the benchmark's figures: a protocol, plain or whitened
    costly = made.study.name == "losses"
    header = [made.study.axis or "variant", "seeds", f"{VALIDATION} mAP", *names]
    header += ["learning rate"] if len(made.rates) > 1 else []
    header += ["updates", "backwards", "forwards"]
    header += ["hyper-parameters"] if costly else []
    header += ["time"]
    rows = []
    if findings.outcomes:
        judged = [Spread((findings.untrained[name],)).percent() for name in names]
        cells = ["untrained", "", Spread((findings.untrained_map,)).percent(), *judged]
        rows.append(cells + [""] * (len(header) - len(cells)))
    for variant in made.variants:
        runs = findings.kept(variant.name)
        if not runs:
            continue
        row = [_shown(variant), str(len(runs))]
        row += [figure_spread(runs, name).percent() for name in (VALIDATION, *names)]
        row += [f"{runs[0].learning_rate:g}"] if len(made.rates) > 1 else []
        for cost in ("updates", "backwards", "forwards"):
            row.append(f"{np.mean([getattr(run, cost) for run in runs]):,.0f}")
        row += [str(runs[0].hyper_parameters)] if costly else []
        rows.append([*row, readable_time(float(np.mean([run.seconds for run in runs])))])
    rows += _difference(made, findings, len(header))
    return markdown(header, rows)


def plot(made: StudyPlan, findings: StudyResults) -> str:
    """The SVG: a panel for validation and one for each protocol of the benchmark, whitened."""
    whitened = [name for name in findings.untrained if name.endswith("whitened")]
    panels = []
    for name in (VALIDATION, *whitened):
        points = [
            Point(_shown(variant), figure_spread(runs, name), variant.value)
            for variant in made.variants
            if (runs := findings.kept(variant.name))
        ]
        reference = findings.untrained.get(name)
        if name == VALIDATION and findings.outcomes:
            reference = findings.untrained_map
        panels.append(Panel(f"{name[:1].upper()}{name[1:]} mAP, %", points, reference))
    return draw(made.study.title, panels, made.study.axis)


def figure_spread(runs: Sequence[Outcome], name: str) -> Spread:
    """A figure of some runs."""
    return Spread(
        tuple(run.validation_map if name == VALIDATION else run.judged[name] for run in runs)
    )


def _difference(made: StudyPlan, findings: StudyResults, width: int) -> list[list[str]]:
    """Of two variants that are names, how much the first is ahead, seed by seed."""
    if made.study.axis or len(made.variants) != 2:
        return []
    first, second = ({run.seed: run for run in findings.kept(v.name)} for v in made.variants)
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return []
    cells = [f"{made.variants[0].name} − {made.variants[1].name}", str(len(seeds))]
    for name in (VALIDATION, *findings.untrained):
        ours, theirs = (figure_spread([runs[s] for s in seeds], name) for runs in (first, second))
        gains = (a - b for a, b in zip(ours.values, theirs.values, strict=True))
        cells.append(Spread(tuple(gains)).percent("+"))
    return [cells + [""] * (width - len(cells))]


def _shown(variant: Variant) -> str:
    return variant.name if variant.value is None else f"{variant.value:g}"


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows under the names that any of them has; a missing value is empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers, on the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
