from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from listwise.errors import InputError, validated
from listwise.search.options import SearchHow, SearchOptions
from listwise.settings import NESTED, CropSettings, TrainConfig, make_config, read_settings

PAPER = Path(__file__).parents[1] / "configs" / "paper.yaml"


def names(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields)


def test_the_paper_config_lists_every_setting_with_its_default():
    content = yaml.safe_load(PAPER.read_text())
    assert content.keys() == names(TrainConfig)
    for name, model in NESTED.items():
        assert content[name].keys() == names(model)
    nested = {name for name, value in TrainConfig() if isinstance(value, BaseModel)}
    assert nested == NESTED.keys()
    assert make_config(read_settings(PAPER), "paper") == TrainConfig()


def test_the_defaults_are_those_of_section_4_2():
    config = TrainConfig()
    assert (config.backbone, config.pooling, config.loss, config.bins) == (
        "resnet101",
        "gem",
        "ap",
        20,
    )
    assert (config.batch_size, config.updates, config.crops.size) == (4096, 200, 800)
    assert (config.learning_rate, config.weight_decay, config.warmup) == (1e-4, 1e-6, 0)
    assert config.class_weights
    assert config.classes_per_batch is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("batchsize: 3", ["'batchsize'", "did you mean batch_size?"]),
        ("crops: {sise: 3}", ["'crops.sise'", "did you mean size?"]),
        ("batch_size: many", ["batch_size", "integer"]),
        ("batch_size: 1", ["batch_size", "2"]),
        ("crops: {size: 2}", ["crops.size", "8"]),
        ("crops: 7", ["crops"]),
        ("crops: {min_area: 0.9, max_area: 0.2}", ["crops", "min_area 0.9 is larger"]),
        ("loss: hinge", ["loss: unknown loss", "ap, tie-aware, triplet"]),
        ("triplet: {form: hinge}", ["triplet.form", "'margin'", "'log-exp'"]),
        ("contrastive: {marging: 1}", ["'contrastive.marging'", "did you mean margin?"]),
        ("micro_batch: some", ["micro_batch must be", "integer", "or ", "'auto'"]),
        ("micro_batch: 0", ["micro_batch must be", "1"]),
        ("learning_rate: .inf", ["learning_rate", "finite"]),
        ("- a\n- b", ["name: value"]),
        ("a: [1", ["is not YAML"]),
        ("1: 2", ["1"]),
    ],
)
def test_a_bad_config_is_one_line_that_names_file_and_fault(tmp_path, text, said):
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_settings(path)
    message = str(caught.value)
    assert "\n" not in message
    for part in ("my.yaml", *said):
        assert part in message


def test_a_config_that_cannot_be_read_is_an_error(tmp_path):
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"backbone: \xe9")
    reason = "cannot read the config"
    for path, said in {tmp_path / "none.yaml": reason, tmp_path: reason, latin: "not YAML"}.items():
        with pytest.raises(InputError, match=said):
            read_settings(path)


def test_a_config_is_not_filled_up(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("batch_size: 64\nlearning_rate: 1e-3\ncrops:\n  size: 64\n")
    settings = read_settings(path)
    assert settings == {"batch_size": 64, "learning_rate": "1e-3", "crops": {"size": 64}}
    config = make_config(settings, "my")
    assert config.learning_rate == 1e-3
    assert config.crops == CropSettings(size=64)
    path.write_text("# nothing\n")
    assert read_settings(path) == {}


def test_a_config_survives_being_written_as_yaml():
    config = make_config({"patience": 3, "crops": {"size": 64}, "learning_rate": 3e-7}, "here")
    again = yaml.safe_load(yaml.safe_dump(config.model_dump()))
    assert make_config(again, "there") == config


@pytest.mark.parametrize(
    ("name", "meant"),
    [("lr", "learning_rate"), ("epochs", "updates"), ("bakbone", "backbone"), ("imgsz", "crops")],
)
def test_an_unknown_setting_is_answered_with_the_nearest_one(name, meant):
    with pytest.raises(InputError, match=f"unknown setting {name!r}; did you mean `{meant}`\\?$"):
        make_config({name: 1})
    with pytest.raises(InputError, match=r"unknown setting 'crops.sise'; did you mean `size`\?"):
        make_config({"crops": {"sise": 8}})
    with pytest.raises(InputError, match="unknown setting 'xyz'; the settings are val_fraction"):
        make_config({"xyz": 1})


@pytest.mark.parametrize(("name", "meant"), [("topk", "k"), ("filter", "where"), ("wher", "where")])
def test_an_unknown_search_option_is_answered_with_the_nearest_one(name, meant):
    with pytest.raises(InputError, match=f"did you mean `{meant}`"):
        validated(SearchOptions, {name: 1})
    typed = set(SearchHow.__annotations__) - {"like", "box", "average"}
    assert typed == set(SearchOptions.model_fields) - {"k"}
