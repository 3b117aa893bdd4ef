"""The folder of a run: its files, and the record of its data and settings."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from listwise.errors import InputError
from listwise.files import read_json, write_text
from listwise.models.storage import read_network

if TYPE_CHECKING:
    from listwise.training.plan import TrainPlan

CONFIG_FILE, RUN_FILE = "config.yaml", "run.json"
CHECKPOINT_FILE, MODEL_FOLDER = "checkpoint.safetensors", "model"
# Files of a run that trains from an index, see listwise.feedback.
INDEX_FILE, TABLE_FILE = "index.json", "labels.csv"
# Settings that may be edited before a run is resumed: they depend on the machine.
_FREE = ("device", "workers", "checkpoint_every")


def start_run(run: Path, plan: "TrainPlan", photos: str = "") -> None:
    """Create the folder of a new run; run.json is written last and marks it as a run.

    Args:
        run: the folder.
        plan: photos and settings.
        photos: a sentence that says where decoded photos are kept.
    """
    import torch
    import yaml

    from listwise import __version__

    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot create the run folder {run} ({error.strerror}): choose another `run_folder`"
        ) from error
    settings = yaml.safe_dump(plan.config.model_dump(), sort_keys=False)
    write_text(run / CONFIG_FILE, settings)
    about = {
        "data": str(plan.data.resolve()),
        "data_fingerprint": plan.fingerprint(),
        "settings_fingerprint": _digest(yaml.safe_load(settings)),
        "listwise": __version__,
        "torch": torch.__version__,
        **({"photos": photos} if photos else {}),
    }
    write_text(run / RUN_FILE, json.dumps(about, indent=2) + "\n")


def reopen_run(run: Path, plan: "TrainPlan") -> None:
    """Check that data and best model of a run are unchanged, and remove unfinished files."""
    if read_run(run)["data_fingerprint"] != plan.fingerprint():
        raise InputError(
            f"{plan.data} has other photos or labels than {run} was trained on: start a new run"
        )
    # The run may end without a better model, and would then present a damaged one as its result.
    if (run / MODEL_FOLDER).exists() and (run / CHECKPOINT_FILE).exists():
        read_network(run / MODEL_FOLDER)
    # safetensors first writes to a hidden file .tmp….
    for unfinished in (*run.rglob("*.tmp"), *run.rglob(".tmp*")):
        unfinished.unlink()


def read_run(run: str | Path) -> dict[str, str]:
    """Read the data path, data fingerprint and versions of a run."""
    path = Path(run) / RUN_FILE
    if not path.is_file():
        raise InputError(
            f"{run} is not a training run: expected {RUN_FILE}; "
            "give the folder that listwise train wrote"
        )
    about = read_json(path, "was not written by listwise train")
    if not {"data", "data_fingerprint"} <= about.keys():
        raise InputError(
            f"{path} was not written by listwise train: it does not contain the data path"
        )
    return about


def is_index_run(run: str | Path, about: dict[str, str]) -> bool:
    """Return whether a run trains from an index; `about` is what `read_run` returned.

    Its photos are in a table in its folder. The folder may also have these files from an earlier
    attempt that did not start, and then hold a run that trains on other photos.
    """
    table = (Path(run) / TABLE_FILE).resolve()
    return (Path(run) / INDEX_FILE).is_file() and about["data"] == str(table)


def check_settings(run: str | Path, about: dict[str, str], settings: dict[str, Any]) -> None:
    """Raise an `InputError` if settings of a run that affect its result have changed.

    Args:
        run: the folder of the run.
        about: what `read_run` returned.
        settings: the settings in its config file.
    """
    # Runs of earlier versions have no fingerprint of their settings.
    if about.get("settings_fingerprint") not in (None, _digest(settings)):
        raise InputError(
            f"{Path(run) / CONFIG_FILE} is damaged or was edited after the run was started: "
            "restore it, or start a new run with it"
        )


def check_unused(run: str | Path) -> None:
    """Raise an `InputError` if a folder contains a run already."""
    if (Path(run) / RUN_FILE).exists():
        raise InputError(
            f'{run} contains a run already: resume it with `resume="{run}"`, or choose another '
            "`run_folder`"
        )


def _digest(settings: dict[str, Any]) -> str:
    kept = {name: value for name, value in settings.items() if name not in _FREE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
