"""What one training run of a study came to."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from listwise.errors import InputError
from listwise.files import read_json, write_text

OUTCOME_FILE = "outcome.json"


@dataclass(frozen=True)
class Outcome:
    """A run's figures; mAP from 0 to 1.

    `kept` is False for a run whose learning rate another one has beaten in validation.
    `untrained_map` is the validation mAP before the first update, `judged` that of the network
    with the best validation mAP on a benchmark, by protocol, plain and whitened.
    """

    variant: str
    value: int | None
    seed: int
    learning_rate: float
    validation_map: float
    untrained_map: float
    best_update: int
    updates: int
    backwards: int
    forwards: int
    hyper_parameters: int
    seconds: float
    kept: bool = True
    judged: dict[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """One level of names and values, as in the table of all runs."""
        row = asdict(self)
        judged: dict[str, float] = row.pop("judged")
        return row | {column_name(name): value for name, value in judged.items()}


# Whether it is kept depends on the other runs; the benchmark's figures have a file of their own.
_OF_THE_RUN = {entry.name for entry in fields(Outcome)} - {"kept", "judged"}


@dataclass
class StudyResults:
    """What is known so far: every finished run, and the untrained network on the benchmark."""

    outcomes: list[Outcome] = field(default_factory=list)
    untrained: dict[str, float] = field(default_factory=dict)

    @property
    def untrained_map(self) -> float:
        """Validation mAP before the first update, mean over the runs."""
        return sum(run.untrained_map for run in self.outcomes) / len(self.outcomes)

    def kept(self, variant: str) -> list[Outcome]:
        """The runs that count of a variant, by seed."""
        return [run for run in self.outcomes if run.kept and run.variant == variant]


def column_name(name: str) -> str:
    """The name of a benchmark's figure in the table of all runs."""
    return f"{name.lower().replace(' ', '_')}_map"


def write_outcome(run: Path, outcome: Outcome) -> None:
    """Leave the sign that a run is finished."""
    content = {name: value for name, value in asdict(outcome).items() if name in _OF_THE_RUN}
    write_text(run / OUTCOME_FILE, json.dumps(content, indent=2) + "\n")


def read_outcome(run: Path) -> Outcome | None:
    """The outcome of a finished run; None if it is not finished."""
    path = run / OUTCOME_FILE
    if not path.exists():
        return None
    content = read_study_json(path)
    if content.keys() != _OF_THE_RUN:
        raise InputError(f"{path} was not written by this version: give another `out`")
    return Outcome(**content)


def read_study_json(path: Path) -> dict[str, Any]:
    """An object that a study has written."""
    return read_json(path, "was not written by a study: remove it")
