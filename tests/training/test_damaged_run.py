"""One wrong byte in a file of a training run: resuming refuses it, or ends with the same result."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file
from training_examples import SETTINGS as SMALL
from training_examples import Witness

from listwise.descriptors import load_model
from listwise.errors import InputError
from listwise.training import Trainer, prepare, resume

SOAK = bool(os.environ.get("LISTWISE_SOAK"))
FLIPS = 40 if SOAK else 2  # bytes of each file, the first and the last among them
TEXT_FLIPS = 400 if SOAK else 3  # of the small files that people can edit
SETTINGS = SMALL | {"val_fraction": 0.25, "batch_size": 8, "updates": 2}
SETTINGS |= {"validate_every": 1, "checkpoint_every": 1}


@pytest.fixture(scope="module")
def interrupted(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted after the checkpoint of its first update; leave it as it is."""
    run = tmp_path_factory.mktemp("interrupted") / "run"
    with pytest.raises(KeyboardInterrupt):
        Trainer(prepare(photos, SETTINGS), run, Witness(stop_at=2)).fit()
    return run


@pytest.fixture
def run(interrupted: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(interrupted, tmp_path / "run"))


def finish(run: Path, messages: Witness | None = None) -> object:
    """Resume a run, and return everything that its result consists of."""
    result = resume(run, messages).fit()
    load_model(result.model, "cpu")
    tensors = load_file(run / "checkpoint.safetensors")
    for name, value in load_file(result.model / "model.safetensors").items():
        tensors[f"model.{name}"] = value
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("images_per_second", None)  # differs from run to run
    numbers = (result.first_map, result.best_map, result.best_update, result.updates)
    return {name: value.numpy().tobytes() for name, value in tensors.items()}, numbers, lines


def test_a_flipped_bit_is_refused_or_changes_no_result(
    run: Path, interrupted: Path, tmp_path: Path
) -> None:
    generator = np.random.default_rng(0)
    expected = finish(shutil.copytree(interrupted, tmp_path / "sound"))
    files = [path for path in sorted(interrupted.rglob("*")) if path.is_file()]
    refused: dict[str, list[str]] = {}
    noted = 0
    for path in files:
        name = str(path.relative_to(interrupted))
        content = path.read_bytes()
        count = TEXT_FLIPS if path.suffix in (".yaml", ".json", ".jsonl") else FLIPS
        places = [0, len(content) - 1, *generator.integers(0, len(content), count - 2)]
        for place in places:
            shutil.rmtree(run)
            shutil.copytree(interrupted, run)
            changed = bytearray(content)
            changed[place] ^= 1 << int(generator.integers(8))
            (run / name).write_bytes(changed)
            messages = Witness()
            try:
                state, numbers, lines = finish(run, messages)
            except InputError as error:
                refused.setdefault(name, []).append(str(error))
                continue
            assert (state, numbers) == expected[:2], f"{name}, byte {place}"
            # Metrics of earlier updates do not affect the training: a note reports the damage.
            reported = any("metrics.jsonl" in line for line in messages.lines)
            assert lines == expected[2] or reported, f"{name}, byte {place}"
            noted += reported
    for name in ("checkpoint.safetensors", "model/model.safetensors"):
        assert len(refused[name]) == FLIPS
    assert len(refused["config.yaml"]) > TEXT_FLIPS // 4
    assert len(refused["run.json"]) > TEXT_FLIPS // 4
    assert noted > TEXT_FLIPS // 2
    for message in (message for messages in refused.values() for message in messages):
        assert "\n" not in message
    counts = {name: len(messages) for name, messages in refused.items()}
    print(f"{len(files)} files; refused by file: {counts}; {noted} notes")


def test_settings_of_the_machine_may_be_edited(run: Path) -> None:
    path = run / "config.yaml"
    settings = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(settings | {"workers": 1, "checkpoint_every": 2}))
    assert resume(run).plan.config.workers == 1
    path.write_text(yaml.safe_dump(settings | {"learning_rate": 2e-3}))
    with pytest.raises(InputError, match=r"config\.yaml is damaged or was edited"):
        resume(run)
