"""Every `--help` reads well, its examples parse, and the source of the commands stays plain."""

import re

import pytest
from command_line import all_commands, parse, typed_commands

from listwise.settings import NESTED, TrainConfig

# Values of the paper, all of them in section 4.2, "Implementation details and parameter study".
PAPER = {
    "--backbone": "resnet101",  # "In all experiments we use ResNet-101"
    "--batch-size": "4096",  # "We use B = 4096 in all subsequent experiments"
    "--class-weights": "on",  # "to weight equally all classes inside a batch"
    "--crops-size": "800",  # "cropped to a fixed size of 800 x 800"
    "--learning-rate": "0.0001",  # "a linearly decaying rate starting from 1e-4"
    "--updates": "200",  # "that decreases to 0 after 200 iterations"
}
COMMANDS = all_commands()
TRAIN = {max(each.opts, key=len): each for each in COMMANDS["train",].params}


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def help_of(run, monkeypatch):
    """The help of a command at a width."""

    def show(words, width=80):
        monkeypatch.setenv("COLUMNS", str(width))
        everything = any("--help-all" in each.opts for each in COMMANDS[words].params)
        return run(*words, "--help-all" if everything else "--help")

    return show


@pytest.mark.parametrize("width", [80, pytest.param(120, marks=pytest.mark.thorough)])
def test_lines_fit_and_every_option_is_explained(help_of, width):
    assert len(COMMANDS) > 35
    for words, command in COMMANDS.items():
        out = help_of(words, width)
        assert max(map(len, out.splitlines())) <= width, words
        text = re.sub(r"\s", "", out)  # a line may end after a hyphen
        for each in (words, *(other for other in COMMANDS if other[:-1] == words)):
            assert re.sub(r"\s", "", COMMANDS[each].help) in text, each
        for parameter in command.params:
            flag = parameter.param_type_name == "option" and parameter.is_flag
            assert bool(parameter.metavar) != flag, (words, parameter.name)
            assert max(parameter.opts, key=len) in text or parameter.metavar in text
            assert re.sub(r"\s", "", parameter.help) in text, (words, parameter.name)
        for wrong in ("…", "None", "PosixPath", "[default: (", "`"):
            assert wrong not in out, words


@pytest.mark.parametrize("words", [("train",), ("study", "bins")], ids=" ".join)
def test_help_shows_the_main_settings_and_help_all_the_others(run, help_of, words):
    short, whole = run(*words, "--help"), help_of(words)
    assert "--help-all" in short
    for flag in ("--backbone", "--batch-size", "--crops-size", "--updates", "--minutes"):
        assert (flag in short) == (flag in whole)
    assert "--backbone" in short
    for flag in ("--crops-hue", "--triplet-margin", "--weight-decay"):
        assert flag not in short
        assert flag in whole
    assert 20 <= short.count("\n  --") <= 35
    assert whole.count("\n  --") > 60


def test_defaults_are_those_of_the_functions_and_of_the_paper(help_of):
    train = one_line(help_of(("train",)))
    assert "[default: off if the largest class has more than twice" in train
    assert "the smallest, except with --adapter; paper: on]" in train
    assert "--projection INTEGER|none" in train
    assert "none adds no layer. [default: none]" in train
    assert "[default: listwise-demo]" in one_line(help_of(("demo",)))
    assert "[default: 0.8]" in one_line(help_of(("index", "duplicates")))
    assert "--codebook PATH Codebook learned from other photos. [required]" in one_line(
        help_of(("local", "evaluate"))
    )
    paper = {flag: re.search(r"paper: (\S+)\]", each.help) for flag, each in TRAIN.items()}
    assert {flag: found[1] for flag, found in paper.items() if found} == PAPER


def test_settings_are_named_as_flags(help_of):
    dotted = [f"{group}.{name}" for group, model in NESTED.items() for name in model.model_fields]
    several = [name for name in TrainConfig.model_fields if "_" in name]
    for words in COMMANDS:
        out = help_of(words)
        assert [name for name in (*dotted, *several) if name in out] == []
    flags = [name.replace(".", "-") for name in dotted]
    flags += [name for name in TrainConfig.model_fields if name not in NESTED]
    assert {f"--{name.replace('_', '-')}" for name in flags} <= set(TRAIN)


def test_every_command_has_examples_that_parse():
    for words, command in COMMANDS.items():
        examples = [
            each
            for line in (command.epilog or "").replace("\\\n", " ").splitlines()
            if line.startswith("  ")
            for each in typed_commands(line)
        ]
        assert words in [parse(each)[: len(words)] for each in examples], words
