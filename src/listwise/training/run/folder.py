"""A run's folder: which files it holds, and what it says about its data and settings."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from listwise.errors import InputError
from listwise.files import read_json, write_text

if TYPE_CHECKING:
    from listwise.training.plan import TrainPlan

CONFIG_FILE, RUN_FILE = "config.yaml", "run.json"
CHECKPOINT_FILE, MODEL_FOLDER = "checkpoint.safetensors", "model"


def start_run(run: Path, plan: "TrainPlan") -> None:
    """Make the folder of a new run; it is a run once it has its last file."""
    import torch
    import yaml

    from listwise import __version__

    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the run's folder {run}: {error.strerror}") from error
    write_text(run / CONFIG_FILE, yaml.safe_dump(plan.config.model_dump(), sort_keys=False))
    about = {
        "data": str(plan.data.resolve()),
        "data_fingerprint": plan.fingerprint(),
        "listwise": __version__,
        "torch": torch.__version__,
    }
    write_text(run / RUN_FILE, json.dumps(about, indent=2) + "\n")


def reopen_run(run: Path, plan: "TrainPlan") -> None:
    """Check that a run's data are as they were, and remove what a kill has left."""
    if read_run(run)["data_fingerprint"] != plan.fingerprint():
        raise InputError(
            f"{run} was trained on other photos or labels than {plan.data} has: start a new run"
        )
    # safetensors writes into a hidden .tmp… of its own first.
    for left_by_a_kill in (*run.rglob("*.tmp"), *run.rglob(".tmp*")):
        left_by_a_kill.unlink()


def read_run(run: str | Path) -> dict[str, str]:
    """What a run's folder says about its data and versions."""
    path = Path(run) / RUN_FILE
    if not path.is_file():
        raise InputError(f"{run} is not a run to resume: it has no {RUN_FILE}")
    about = read_json(path, "was not written by listwise train")
    if not {"data", "data_fingerprint"} <= about.keys():
        raise InputError(f"{path} was not written by listwise train: it does not name its data")
    return about


def check_unused(run: str | Path) -> None:
    """Refuse a folder that holds a run: two runs would mix."""
    if (Path(run) / RUN_FILE).exists():
        raise InputError(
            f'{run} holds a run already: continue it with `resume="{run}"`, or choose another '
            "folder as `run_folder`"
        )
