"""The files that the study of peers writes, and its verdict."""

from collections.abc import Sequence

import numpy as np

from listwise.files import write_text
from listwise.studies.outputs import PLOT_FILE, RESULTS_FILE, TABLE_FILE, markdown, write_csv
from listwise.studies.peers import LISTWISE, PeerOutcome, PeersPlan
from listwise.studies.plots import Panel, Point, Spread, draw
from listwise.training.run.view import readable_time

METRICS = ("Recall@1", "mAP@R")
TITLE = "Listwise and losses of pytorch-metric-learning"


def write_peers(peers: PeersPlan, outcomes: Sequence[PeerOutcome], command: str = "") -> None:
    """Write `results.csv`, `table.md` and `plot.svg`; `table.md` shows `command`."""
    write_csv(peers.out / RESULTS_FILE, [outcome.row() for outcome in outcomes])
    text = [f"# {TITLE}\n", _about(peers), peers_table(outcomes), f"{verdict(outcomes)}\n"]
    if len(outcomes) < peers.count:
        text.append(f"So far {len(outcomes)} of {peers.count} runs are finished.\n")
    if command:
        text.append(f"```sh\n{command}\n```\n")
    write_text(peers.out / TABLE_FILE, "\n".join(text))
    panels = [
        Panel(f"{name}, %", [Point(m, s) for m, s in _spreads(outcomes, name).items()])
        for name in METRICS
    ]
    write_text(peers.out / PLOT_FILE, draw(TITLE, panels, None))


def peers_table(outcomes: Sequence[PeerOutcome]) -> str:
    """Format the Markdown table: one row per recipe."""
    header = ["recipe", "seeds", *METRICS, "time", "updates", "images"]
    metrics = [_spreads(outcomes, name) for name in METRICS]
    rows = []
    for method in metrics[0]:
        runs = [run for run in outcomes if run.method == method]
        row = [method, str(len(runs)), *(spreads[method].percent() for spreads in metrics)]
        row.append(readable_time(float(np.mean([run.seconds for run in runs]))))
        row += [f"{np.mean([getattr(run, cost) for run in runs]):,.0f}" for cost in _COSTS]
        rows.append(row)
    return markdown(header, rows)


_COSTS = ("updates", "backwards")


def verdict(outcomes: Sequence[PeerOutcome]) -> str:
    """Return one sentence that compares Listwise with the best other recipe in each metric.

    A difference that is smaller than the larger of the two deviations between seeds is called
    about equal.
    """
    parts = []
    for name in METRICS:
        others = _spreads(outcomes, name)
        ours = others.pop(LISTWISE, None)
        if ours is None or not others:
            return "The comparison needs a run of Listwise and one of another recipe."
        best = max(others, key=lambda method: others[method].mean)
        gap = ours.mean - others[best].mean
        noise = max(ours.deviation or 0.0, others[best].deviation or 0.0)
        word = "about equal to" if abs(gap) < noise else "ahead of" if gap > 0 else "behind"
        shown = f"{100 * ours.mean:.1f} against {100 * others[best].mean:.1f}"
        parts.append(f"{word} {best} in {name} ({shown})")
    times = {
        method: float(np.mean([run.seconds for run in outcomes if run.method == method]))
        for method in dict.fromkeys(run.method for run in outcomes)
    }
    own = times.pop(LISTWISE)
    fastest = min(times, key=lambda method: times[method])
    ratio = own / times[fastest]
    return f"Listwise is {' and '.join(parts)}, in {ratio:.2f} × the time of {fastest}."


def _spreads(outcomes: Sequence[PeerOutcome], name: str) -> dict[str, Spread]:
    """Return the values of a metric for each recipe, in the order of the runs."""
    return {
        method: Spread(tuple(run.figures[name] for run in outcomes if run.method == method))
        for method in dict.fromkeys(run.method for run in outcomes)
    }


def _about(peers: PeersPlan) -> str:
    """Describe in a paragraph what is compared."""
    config, recipe, plan = peers.plan.config, peers.recipe, peers.plan
    return (
        f"{config.backbone} with {config.pooling} and {config.projection} dimensions. "
        f"Test: {len(peers.test)} photos of {len(peers.test.class_names)} classes. "
        f"listwise: {len(plan.train)} training photos of {len(plan.train.class_names)} classes, "
        f"{len(plan.validation)} validation photos of {len(plan.validation.class_names)} other "
        f"classes, crops of {config.crops.size} pixels, batches of {config.batch_size}; tested on "
        f"whole photos with a long side of at most {config.val_max_side} pixels. "
        f"Other recipes: {len(peers.train)} training photos of {len(peers.train.class_names)} "
        f"classes, {recipe.epochs} epochs, batches of {recipe.batch_size}, crops of {recipe.crop} "
        f"pixels; tested on center crops of {recipe.crop} pixels of photos with a short side of "
        f"{recipe.resize}. Metrics in percent, mean ± sample standard deviation over seeds; time "
        "of the training with its validations.\n"
    )
