"""A trained network on a benchmark, plain and whitened; nothing is chosen by these figures."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from listwise.data import Images
from listwise.data.catalog import Benchmark
from listwise.descriptors import Model, Whitening
from listwise.files import write_text
from listwise.results import describe_benchmark
from listwise.studies.outcome import read_study_json

JUDGED_FILE = "judged.json"
PLAIN, WHITENED = "plain", "whitened"


@dataclass(frozen=True, eq=False)
class StudyBenchmark:
    """A benchmark that a study's networks are evaluated on, and how.

    The whitening is learned on `whiten_on` and keeps `dim` dimensions, all that vary by default.
    """

    benchmark: Benchmark
    whiten_on: Images
    dim: int | None = None
    max_side: int | None = None
    workers: int | None = None

    @property
    def photo_count(self) -> int:
        """Number of photos that are described for one network."""
        return self.benchmark.photo_count + len(self.whiten_on)

    def evaluate(
        self, model: Model, on_progress: Callable[[int], object] = lambda count: None
    ) -> dict[str, float]:
        """Mean AP of a model without whitening: "Medium plain", "Medium whitened" ..."""
        how: Any = {"max_side": self.max_side, "workers": self.workers}
        plain = describe_benchmark(model, self.benchmark, on_progress, **how)
        others = model.describe(self.whiten_on, on_progress=on_progress, **how)
        whitening = Whitening.learn([others.descriptors], self.dim)
        return {
            f"{protocol} {kind}": result.mAP
            for kind, described in ((PLAIN, plain), (WHITENED, plain.whiten(whitening)))
            for protocol, result in described.evaluate().items()
        }

    def evaluate_once(
        self,
        folder: Path,
        network: str,
        model: Callable[[], Model],
        on_progress: Callable[[int], object] = lambda count: None,
    ) -> dict[str, float]:
        """`evaluate`, or the figures that an earlier call for the same network left in the folder.

        `network` says which one it is, in words that differ where networks do; `model` opens it.
        """
        path = folder / JUDGED_FILE
        how: dict[str, Any] = {
            "network": network,
            "benchmark": self.benchmark.name,
            "photos": self.photo_count,
            "dim": self.dim,
            "max_side": self.max_side,
        }
        kept = read_study_json(path) if path.exists() else {}
        if kept.get("how") == how:
            return dict(kept["mAP"])
        found = self.evaluate(model(), on_progress)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"how": how, "mAP": found}, indent=2) + "\n")
        return found
