"""Every `--help` reads well: whole words, values as typed, real defaults, examples that parse."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from listwise.cli.main import app
from listwise.cli.output import with_flags
from listwise.cli.settings import given_settings
from listwise.plugins import BUILT_IN, check_name
from listwise.settings import NESTED, TrainConfig, make_config

# Values of the paper, all of them in section 4.2, "Implementation details and parameter study".
PAPER = {
    "--backbone": "resnet101",  # "In all experiments we use ResNet-101"
    "--batch-size": "4096",  # "We use B = 4096 in all subsequent experiments"
    "--class-weights": "on",  # "to weight equally all classes inside a batch"
    "--crops-size": "800",  # "cropped to a fixed size of 800 x 800"
    "--learning-rate": "0.0001",  # "a linearly decaying rate starting from 1e-4"
    "--updates": "200",  # "that decreases to 0 after 200 iterations"
}


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every group and command, with the words typed for it."""
    yield words, command
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, (*words, name))


COMMANDS = dict(commands(typer.main.get_command(app)))
LEAVES = {words: command for words, command in COMMANDS.items() if not hasattr(command, "commands")}


SHOWN: dict[tuple[tuple[str, ...], int], str] = {}


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def help_of(listwise, monkeypatch):
    """The help of a command at a width; each is made once."""

    def show(words, width=80):
        if (words, width) not in SHOWN:
            monkeypatch.setenv("COLUMNS", str(width))
            code, out, err = listwise(*words, "--help")
            assert (code, err) == (0, "")
            SHOWN[words, width] = out
        return SHOWN[words, width]

    return show


def test_there_are_commands_to_look_at():
    assert len(COMMANDS) > 35
    assert {("train",), ("index", "build"), ("study", "losses")} <= set(LEAVES)


@pytest.mark.parametrize(
    "width", [80, *(pytest.param(width, marks=pytest.mark.thorough) for width in (60, 120))]
)
def test_lines_fit_and_no_word_is_broken(help_of, width):
    for words, command in COMMANDS.items():
        out = help_of(words, width)
        if width >= 80:  # commands in examples are not broken
            assert max(map(len, out.splitlines())) <= width, words
        text = one_line(out)
        assert one_line(command.help) in text
        for parameter in command.params:
            assert one_line(parameter.help) in text, (words, parameter.name)
            assert max(parameter.opts, key=len) in text or parameter.metavar in text
        assert "…" not in out


def test_values_have_a_name_and_flags_have_none(help_of):
    for words, command in COMMANDS.items():
        out = help_of(words)
        assert not re.search(r"<\w+>", out), words
        for parameter in command.params:
            flag = parameter.param_type_name == "option" and parameter.is_flag
            assert bool(parameter.metavar) != flag, (words, parameter.name)
            if not flag:
                assert re.search(rf"(^|\W){re.escape(parameter.metavar)}", out), words


def test_defaults_are_written_plainly(help_of):
    for words in COMMANDS:
        out = one_line(help_of(words))
        assert "[default: (" not in out
        for word in ("None", "True", "False", "PosixPath"):
            assert f"default: {word}" not in out, words
    train = one_line(help_of(("train",)))
    assert "[default: off if the largest class has more than twice" in train
    assert "the smallest, except with --adapter; paper: on]" in train
    assert "computed once. [default: off]" in train
    assert "--projection INTEGER|none" in train
    assert "none adds no layer. [default: none]" in train
    assert "listwise-demo]" in help_of(("demo",))
    assert "--codebook PATH Codebook learned from other photos. [required]" in one_line(
        help_of(("local", "evaluate"))
    )


def test_the_paper_is_named_where_it_gives_the_value(help_of):
    for words, command in LEAVES.items():
        defaults = {each.opts[0]: str(each.show_default) for each in command.params}
        found = {
            flag: default.partition("paper: ")[2]
            for flag, default in defaults.items()
            if "paper:" in default
        }
        assert found.items() <= PAPER.items(), words
        assert one_line(help_of(words)).count("paper:") == len(found)
        if words == ("train",):
            assert found == PAPER


def test_settings_are_named_as_flags(help_of):
    dotted = [f"{group}.{name}" for group, model in NESTED.items() for name in model.model_fields]
    several = [name for name in TrainConfig.model_fields if "_" in name]
    for words in COMMANDS:
        out = help_of(words)
        assert [name for name in (*dotted, *several) if name in out] == []


def test_values_are_accepted_as_the_help_names_them():
    train = LEAVES["train",]
    checked = 0
    for parameter in train.params:
        for value in (parameter.metavar or "").split("|"):
            if value.islower():
                context = train.make_context("train", [parameter.opts[0], value])
                if parameter.name not in ("preset",):
                    make_config(given_settings(context.params))
                checked += 1
    assert checked > 10
    for kind in BUILT_IN:
        sentence = next(p.help for p in train.params if p.name == kind)
        named = sentence.partition(": ")[2].partition(", or")[0].split(", ")
        assert tuple(named) == BUILT_IN[kind]
        assert [check_name(kind, name) for name in named] == named


def examples(command: Any) -> list[list[str]]:
    """The commands in a help text, as words without environment variables and torchrun."""
    text = (command.epilog or "").replace("\\\n", " ")
    lines = (line for line in text.splitlines() if line.startswith("  "))
    words = [shlex.split(line, comments=True) for line in lines]
    return [each[each.index("listwise") + 1 :] for each in words]


def test_every_command_has_examples_that_parse(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop").mkdir()  # an index that does not exist is refused
    for words, command in COMMANDS.items():
        found = examples(command)
        assert any(tuple(each[: len(words)]) == words for each in found), words
        for example in found:
            path = next(
                each
                for each in sorted(COMMANDS, key=len, reverse=True)
                if tuple(example[: len(each)]) == each
            )
            COMMANDS[path].make_context("listwise", example[len(path) :])


def test_help_is_one_sentence_per_option():
    for words, command in COMMANDS.items():
        for text in (command.help, *(parameter.help for parameter in command.params)):
            assert text[0].isupper() or text[0] == "α", (words, text)
            assert text.endswith("."), (words, text)


def test_a_setting_in_an_error_is_a_flag(monkeypatch):
    monkeypatch.setattr("sys.argv", ["listwise", "train"])
    assert with_flags("`crops.size` must be 8") == "--crops-size must be 8"


def test_a_switch_in_a_message_is_a_flag_that_exists(monkeypatch):
    monkeypatch.setattr("sys.argv", ["listwise", "label"])
    assert with_flags("give `labels=False`") == "give --no-labels"
    assert with_flags("give `labels=True` or `merge=True`") == "give --labels or --merge"
    assert with_flags("lower `inliers` to `inliers=6`") == "lower --inliers to --inliers 6"
