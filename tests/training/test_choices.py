import numpy as np
import pytest

from listwise.data import LabelledImages
from listwise.machine import Machine
from listwise.settings import TrainConfig, make_config
from listwise.training.choices import choose_settings

LAPTOP = Machine("cpu", 8, False)
SERVER = Machine("cuda", 16, True)


def images(count, per_class=10):
    labels = np.arange(count) // per_class
    names = tuple(f"{i}.jpg" for i in range(count))
    classes = tuple(sorted(str(k) for k in range(labels.max() + 1)))
    return LabelledImages(names, names, None, labels, classes, None)


def choose(count, size=(640, 480), machine=LAPTOP, **given):
    photos, sizes = images(count), np.tile(size, (count, 1))
    return choose_settings(make_config(given), photos, sizes, machine)


def value(config, name):
    for part in name.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize("machine", [LAPTOP, SERVER, Machine("cuda:1", 1, False)])
@pytest.mark.parametrize("count", [4, 30, 64, 1000, 50_000])
@pytest.mark.parametrize("size", [(20, 30), (150, 100), (1000, 700), (6000, 4000)])
def test_every_choice_is_possible_and_has_a_reason(machine, count, size):
    config, reasons = choose(count, size, machine)
    default = TrainConfig()
    changed = {n for n in TrainConfig.model_fields if value(config, n) != value(default, n)}
    assert changed <= {name.partition(".")[0] for name in reasons}
    assert all(reasons.values())
    assert config.batch_size <= count
    assert 30 <= config.updates <= 200
    assert config.crops.size % 32 == 0
    assert 64 <= config.crops.size <= max(64, *size)
    assert config.crops.size <= 800
    assert 0 < config.learning_rate <= 1e-4
    assert config.validate_every * 5 < config.updates
    assert config.device == machine.device


def test_crops_of_a_transformer_have_whole_patches():
    config, reasons = choose(1000, (3000, 2000), SERVER, backbone="vit_small_patch14_dinov2")
    assert config.crops.size == 798
    assert "patches of 14 pixels" in reasons["crops.size"]
    config, _ = choose(1000, (70, 60), backbone="vit_small_patch14_dinov2")
    assert config.crops.size == 70


def test_many_photos_and_a_gpu_lead_to_the_settings_of_the_paper():
    config, reasons = choose(50_000, (1600, 1200), SERVER)
    paper = TrainConfig()
    for name in ("backbone", "batch_size", "crops.size", "learning_rate"):
        assert value(config, name) == value(paper, name)
    assert config.precision == "bfloat16"
    assert config.workers == 15
    assert "1200" in reasons["crops.size"]
    assert "800" in reasons["crops.size"]


def test_settings_of_the_user_are_kept_and_need_no_reason():
    given = {
        "crops": {"size": 96},
        "batch_size": 300,
        "patience": None,
        "updates": 7,
        "backbone": "resnet18",
    }
    config, reasons = choose(1000, **given)
    assert config.crops.size == 96
    assert (config.batch_size, config.patience, config.updates) == (300, None, 7)
    assert config.backbone == "resnet18"
    assert not {"crops.size", "batch_size", "patience", "updates", "backbone"} & reasons.keys()
    assert config.val_max_side == 2 * 96  # it is computed from the given crop size
    assert config.crops.flip == 0


def test_a_batch_larger_than_the_data_set_counts_as_the_data_set():
    large, _ = choose(200, batch_size=4096)
    exact, _ = choose(200, batch_size=200)
    assert large.updates == exact.updates
    assert large.learning_rate == exact.learning_rate


def test_mined_tuples_make_the_batch():
    config, reasons = choose(50_000, machine=SERVER, loss="triplet", triplet={"tuples": 512})
    assert "batch_size" not in reasons
    assert config.updates == 10 * 50_000 // (3 * 512) + 1
    assert "at most" not in reasons["updates"]
    small, _ = choose(50_000, machine=SERVER, loss="triplet")
    assert small.learning_rate < config.learning_rate == 1e-4
    assert choose(40, loss="contrastive")[0].updates == 30


def test_classes_of_different_sizes_are_not_weighted():
    even = images(40)
    labels = np.array([0] * 30 + [1] * 10)
    uneven = LabelledImages(even.paths, even.ids, None, labels, ("0", "1"), None)
    sizes = np.tile((640, 480), (40, 1))

    def chosen(photos, **given):
        return choose_settings(make_config(given), photos, sizes, LAPTOP)

    config, reasons = chosen(uneven)
    assert not config.class_weights
    assert reasons["class_weights"].startswith("classes have 10 to 30 photos")
    assert chosen(uneven, class_weights=True)[0].class_weights
    assert chosen(uneven, adapter=True)[0].class_weights
    assert "class_weights" not in chosen(uneven, teacher="m")[1]
    config, reasons = chosen(even)
    assert config.class_weights
    assert "class_weights" not in reasons
