"""Commands made from functions: options, types, defaults and help come from what they call.

    app = make_app("Train and search.")

    @command(app, "results.tuning:tune")
    def tune(output: Output, model: Path, photos: str, **options: Any) -> None:
        '''Choose the settings of a model.'''

`tune` gets the parameters of `listwise.results.tuning.tune` in place of `**options`: their types
and defaults from its signature, their help from the section `Args:` of its docstring. The function
is read from its file and not imported, since PyTorch takes seconds. A pydantic model can stand in
place of a function: its fields are the options. The command's own parameters come from its own
signature and docstring; where that has no help, from the function with a parameter of that name.
What the docstring has from `Examples:` on is shown below the options; indented lines are commands.

Positional parameters become arguments, keyword-only parameters options; those of `like` that have a
default are options too. Parameters that nobody can type (callbacks, objects) are left out. The
command is called with what was given, and with nothing else: a default is applied by the function
that has it. A list of numbers is typed with commas, any other list by repeating the option.
"""

import ast
import inspect
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel, NonNegativeInt, TypeAdapter, ValidationError
from typer.core import TyperCommand, TyperGroup

from listwise.cli.output import SPELLINGS, Output, as_typed
from listwise.errors import InputError

PACKAGE = Path(__file__).parent.parent
REQUIRED = inspect.Parameter.empty
Box = tuple[float, float, float, float]
Function = TypeVar("Function", bound=Callable[..., None])
Like = str | type[BaseModel]

TYPES: dict[str, Any] = {"str": str, "int": int, "float": float, "bool": bool, "Path": Path}
METAVARS = {str: "TEXT", int: "INTEGER", float: "FLOAT", Path: "PATH", NoneType: "none"}
# Headings of the settings that only --help-all shows.
RARE = "Other settings", "Settings of"
NUMBERS, CORNERS = "NUMBERS", "X0,Y0,X1,Y1"
# What the help calls a value, in words for an error message.
EXPECTED = {
    "INTEGER": "a non-negative whole number",
    "FLOAT": "a number",
    NUMBERS: "numbers separated by commas",
    CORNERS: "four numbers x0,y0,x1,y1",
}

# Help of parameters that several commands have; docstrings override it.
COMMON = {
    "index": "Folder of the index, milvus://HOST:PORT/NAME, or a .db file of milvus-lite.",
    "report": "Write an HTML report to this file.",
    "seed": "Seed of all random numbers.",
    "device": "Device: cpu, cuda, cuda:1, or auto, which uses a GPU if one is available.",
    "data": "Folder that contains the data sets; by default data.",
}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a command; a dot in its name leads into a group of settings."""

    name: str
    type: Any
    default: Any
    help: str
    positional: bool = False
    heading: str = ""  # of a setting, which can be none, and switched on or off

    @property
    def key(self) -> str:
        """The name without a dot, as Typer has it."""
        return self.name.replace(".", "_")

    @property
    def flag(self) -> str:
        """What one types: `--crops-size` for `crops.size`, or `PHOTOS` for an argument."""
        name = self.key.replace("_", "-")
        return name.upper() if self.positional else f"-{name}" if len(name) == 1 else f"--{name}"

    @property
    def members(self) -> tuple[Any, ...]:
        """The types of a union that can be typed, in the order of the annotation."""
        return tuple(kind for kind in _members(self.type) if kind is not object)

    @property
    def listed(self) -> tuple[Any, ...]:
        """The types of the elements, if the value can be a list."""
        lists = (get_args(kind) for kind in self.members if get_origin(kind) in (list, tuple))
        return next((tuple(_members(element)) for element, *_ in lists), ())

    @property
    def element(self) -> tuple[Any, ...]:
        """The types of the elements of a list; of the value itself if it is not a list."""
        return self.listed or self.members

    @property
    def is_flag(self) -> bool:
        """Whether the option has no value."""
        return bool in self.members

    @property
    def repeated(self) -> bool:
        """Whether the value is a list whose elements are given one by one."""
        return bool(self.listed) and (str in self.listed or not {int, float} & {*self.listed})

    @property
    def metavar(self) -> str:
        """What the help writes for the value."""
        if self.positional:
            return self.flag
        if Box in (*self.members, *self.element):
            return CORNERS
        if self.listed and not self.repeated:
            return NUMBERS
        kinds = [kind for kind in self.element if kind is not NoneType or self.heading]
        if str in kinds:  # any text can be typed
            kinds = [Path if Path in kinds else str]
        return "|".join(
            "|".join(map(str, get_args(kind))) if get_origin(kind) is Literal else METAVARS[kind]
            for kind in kinds
        )

    def parse(self, given: Any) -> Any:
        """Return the value for what was typed.

        Raises:
            InputError: it is not of the type of the parameter.
        """
        if isinstance(given, list):
            return [self.parse(text) for text in given]
        if isinstance(given, bool):
            return given
        if given == "none" and self.heading and NoneType in self.members:
            return None
        kinds = (NonNegativeInt if kind is int else kind for kind in self.element)
        kind: Any = reduce(operator.or_, kinds)
        words = [EXPECTED.get(word, word) for word in self.metavar.split("|")]
        parts = given.split(",") if self.metavar in (NUMBERS, CORNERS) else None
        if parts:
            kind = Box if self.metavar == CORNERS else tuple[kind, ...]
        try:
            return TypeAdapter(kind).validate_python(parts or given)
        except ValidationError:
            expected = " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
            raise InputError(f"`{self.name}` must be {expected}, not {given!r}") from None


def make_app(
    about: str = "", examples: str = "", group: type[TyperGroup] = TyperGroup
) -> typer.Typer:
    """Return a program, or a group of commands, with its examples below its help."""
    app = typer.Typer(
        help=about,
        short_help=about,
        epilog=_unwrapped(examples),
        cls=group,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )

    @app.callback(invoke_without_command=True)
    def show_help(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    return app


def command(
    app: typer.Typer,
    *like: Like,
    name: str | None = None,
    json: bool = True,
    heading: str = "",
    main: Collection[str] = (),
    without: Sequence[str] = (),
    defaults: Mapping[str, str] | None = None,
) -> Callable[[Function], Function]:
    """Add a function of an `Output` and of the parameters of a command.

    Args:
        app: the program or group of commands.
        like: functions such as "results.tuning:tune", or pydantic models, whose parameters the
            command has in place of its `**options`.
        name: name of the command, by default that of the function.
        json: whether the command has the option --json, for its `Output`.
        heading: heading in the help above the options of `like`, if they are the settings of a run:
            they can be given as none, and switches as --no-x.
        main: the settings that --help shows; --help-all also shows the others.
        without: parameters of `like` that the command does not have.
        defaults: texts that the help shows as defaults, by parameter.
    """

    def add(function: Function) -> Function:
        merged = _merged(function, like, heading)
        found = [each for each in merged if not {each.name, each.name.split(".")[0]} & {*without}]
        found = [_placed(each, heading, main) if main else each for each in found]
        if json:
            found.append(Parameter("json", bool, False, "print the result as JSON"))
        about, _, rest = (inspect.getdoc(function) or "").partition("\n\n")
        examples = re.search(r"^Examples?:\n.*", rest, re.MULTILINE | re.DOTALL)
        flags = {each.key: each.flag for each in found}

        def run(**given: Any) -> None:
            SPELLINGS.clear()
            SPELLINGS.update(flags)
            given.pop("help_all", None)
            options = _nested(found, given)
            function(Output(options.pop("json", False) if json else False), **options)

        shown = [_for_typer(each, _sentence(each, defaults or {}, flags)) for each in found]
        if main:
            shown.append(HELP_ALL)
        run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        typed = name or function.__name__
        end = _unwrapped(examples[0] if examples else "")
        app.command(typed, cls=_Command, help=about, short_help=about, epilog=end)(run)
        return function

    return add


def _placed(each: Parameter, heading: str, main: Collection[str]) -> Parameter:
    """The parameter with its heading: a setting of the main ones, or one of the others."""
    if not each.heading or each.name in main:
        return replace(each, heading=each.heading and heading)
    return replace(each, heading="Other settings") if each.heading == heading else each


def _show_all(context: typer.Context, given: bool) -> None:
    if given:
        context.meta["all"] = True
        typer.echo(context.get_help())
        raise typer.Exit


HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option(
            "--help-all",
            is_eager=True,
            callback=_show_all,
            help="Show this message with all settings and exit.",
            rich_help_panel="Options",
        ),
    ],
)


def take(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Remove some of the given options, and return them."""
    return {name: options.pop(name) for name in names if name in options}


class _Command(TyperCommand):
    """A command whose help groups the options by heading."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return what the line `Usage:` has after the name of the command."""
        arguments = [each for each in self.get_params(ctx) if each.param_type_name == "argument"]
        names = [f"{each.metavar}{'...' if each.nargs == -1 else ''}" for each in arguments]
        pairs = zip(names, arguments, strict=True)
        return ["[OPTIONS]", *(name if each.required else f"[{name}]" for name, each in pairs)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and the options of each section."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            title, left = "Arguments", parameter.metavar or ""
            if parameter.param_type_name == "option":
                title = getattr(parameter, "rich_help_panel", None) or "Options"
                names = ", ".join((*sorted(parameter.opts, key=len), *parameter.secondary_opts))
                left = f"{names} {left}".strip()
            if title.startswith(RARE) and not ctx.meta.get("all"):
                continue
            sections.setdefault(title, []).append((left, getattr(parameter, "help", "") or ""))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def _merged(
    function: Callable[..., None], like: Sequence[Like], heading: str
) -> Iterator[Parameter]:
    """The parameters of a command: its own arguments, those of `like`, and its own options."""
    others = {each.name: each for part in like for each in parameters_of(part, heading)}
    hints, helps = get_type_hints(function), _argument_helps(inspect.getdoc(function) or "")
    own, expands = {}, False
    for name, declared in [*inspect.signature(function).parameters.items()][1:]:
        if declared.kind is declared.VAR_KEYWORD:
            expands = True
            continue
        known = others.get(name)
        help = helps.get(name) or (known.help if known else "") or COMMON.get(name, "")
        positional = declared.kind is declared.POSITIONAL_OR_KEYWORD
        own[name] = Parameter(name, hints[name], declared.default, help, positional)
    yield from (each for each in own.values() if each.positional)
    for each in others.values() if expands else ():
        if each.name not in own:
            yield each
        elif not own[each.name].positional:
            yield own.pop(each.name)
    yield from (each for each in own.values() if not each.positional)


def parameters_of(like: Like, heading: str = "") -> list[Parameter]:
    """Return the parameters of a function, given by name, or the fields of a pydantic model."""
    return list(_fields(like, heading)) if isinstance(like, type) else list(_arguments(like))


def _fields(model: type[BaseModel], heading: str, group: str = "") -> Iterator[Parameter]:
    """The fields of a model; those of a model inside have names with a dot."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            title = f"{heading} of {name.replace('_', '-')}" if heading else ""
            yield from _fields(kind, title, name)
            continue
        default = REQUIRED if field.is_required() else field.default
        path = f"{group}.{name}" if group else name
        yield Parameter(path, kind, default, field.description or "", heading=heading)


def _arguments(name: str) -> Iterator[Parameter]:
    """The parameters of a function that can be typed; the function is not imported."""
    tree, path = _find(name)
    assert isinstance(tree, ast.FunctionDef), name
    helps = _argument_helps(ast.get_docstring(tree) or "")
    for argument, annotation, default, positional in _declared(tree):
        value = REQUIRED if default is None else _constant(default, path)
        text = helps.get(argument) or COMMON.get(argument, "")
        found = Parameter(argument, _type(annotation, path), value, text, positional)
        if set(found.members) - {NoneType} and argument not in ("progress", "command"):
            yield found


def _declared(
    tree: ast.FunctionDef,
) -> Iterator[tuple[str, ast.expr | None, ast.expr | None, bool]]:
    """Name, annotation, default and whether it is an argument, of a function."""
    required: list[ast.expr | None] = [None] * (len(tree.args.args) - len(tree.args.defaults))
    for each, default in zip(tree.args.args, (*required, *tree.args.defaults), strict=True):
        if each.arg != "self":
            yield each.arg, each.annotation, default, default is None
    for each, option in zip(tree.args.kwonlyargs, tree.args.kw_defaults, strict=True):
        yield each.arg, each.annotation, option, False


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _file(module: str) -> Path:
    return PACKAGE.joinpath(*module.split(".")).with_suffix(".py")


def _find(name: str) -> tuple[ast.AST, Path]:
    """The definition with a name such as "search.index:Index.add", and its file."""
    module, _, names = name.partition(":")
    path = _file(module)
    node: Any = _tree(path)
    for part in names.split("."):
        node = next(each for each in node.body if getattr(each, "name", None) == part)
    return node, path


def _lookup(name: str, path: Path) -> tuple[ast.expr, Path] | None:
    """The value that a module gives to a name, there or in the module of Listwise it imports."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if name in [getattr(target, "id", None) for target in targets]:
                return node.value, path
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            package, _, module = (node.module or "").partition(".")
            path = _file(module)
            return _lookup(name, path) if package == "listwise" and path.is_file() else None
    return None


def _type(node: ast.expr | None, path: Path) -> Any:
    """The type that an annotation names; `object` for what cannot be typed."""
    match node:
        case ast.Constant(value=None):
            return NoneType
        case ast.Constant(value=str(text)):
            return _type(ast.parse(text, mode="eval").body, path)
        case ast.Name(id="Box"):
            return Box
        case ast.Name(id=name) if name in TYPES:
            return TYPES[name]
        case ast.Name(id=name):
            found = _lookup(name, path)
            return object if found is None else _type(*found)
        case ast.BinOp(op=ast.BitOr()):
            return _type(node.left, path) | _type(node.right, path)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            return Literal[ast.literal_eval(inner)]
        case ast.Subscript(value=ast.Name(id="Sequence" | "list" | "Iterable"), slice=inner):
            return list[_type(inner, path)]  # type: ignore[misc]
    return object


def _constant(node: ast.expr, path: Path) -> Any:
    """The value of a default, or None if it is computed."""
    if isinstance(node, ast.Name):
        found = _lookup(node.id, path)
        return None if found is None else _constant(*found)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _members(kind: Any) -> Iterator[Any]:
    if get_origin(kind) is Annotated:
        yield from _members(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for each in get_args(kind):
            yield from _members(each)
    else:
        yield kind


def _argument_helps(docstring: str) -> dict[str, str]:
    """The texts of the section `Args:` of a docstring, by argument."""
    section = re.search(r"^(?:Args|Attributes):\n((?: .*\n|\n)*)", docstring + "\n", re.MULTILINE)
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section[1] if section else "", re.M)
    return {name: " ".join(text.split()) for name, text in entries}


def _sentence(each: Parameter, texts: Mapping[str, str], flags: Mapping[str, str]) -> str:
    """The help of a parameter: a sentence, with flags for arguments, and the default."""
    text = as_typed(each.help, flags).replace("`", "")
    text = re.sub(r'"([\w.+/-]+)"', r"\1", text)
    text = text[:1].upper() + text[1:].rstrip(".") + "."
    default = texts.get(each.name, _readable(each))
    if each.default is REQUIRED and not each.positional:
        return f"{text} [required]"
    return f"{text} [default: {default}]" if default else text


def _readable(each: Parameter) -> str:
    """The default as it would be typed; empty if the sentence has to explain it."""
    value = each.default
    if isinstance(value, bool):
        return "on" if value else "off" if each.heading else ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or ("none" if each.heading else "")
    if value is None or value is REQUIRED:
        return "none" if each.heading and value is None else ""
    return str(value)


def _for_typer(each: Parameter, help: str) -> inspect.Parameter:
    """The parameter as Typer takes it: text that `Parameter.parse` reads, or a switch."""
    kind: Any = bool if each.is_flag else list[str] if each.repeated else str
    settings: dict[str, Any] = {"help": help, "show_default": False}
    if each.positional:
        declared = typer.Argument(metavar=each.flag, **settings)
    else:
        paired = each.is_flag and (each.default is not False or each.heading)
        off = f"/--no-{each.flag.removeprefix('--')}" if paired else ""
        metavar = None if each.is_flag else each.metavar
        panel = each.heading or "Options"
        declared = typer.Option(
            f"{each.flag}{off}", metavar=metavar, rich_help_panel=panel, **settings
        )
    return inspect.Parameter(
        each.key,
        inspect.Parameter.KEYWORD_ONLY,
        default=REQUIRED if each.default is REQUIRED else None,
        annotation=Annotated[kind if each.default is REQUIRED else kind | None, declared],
    )


def _nested(parameters: Sequence[Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """The values that were given, those of a group of settings in a dictionary."""
    values: dict[str, Any] = {}
    for each in parameters:
        typed = given[each.key]
        if typed is None or typed == []:
            continue
        group, _, name = each.name.rpartition(".")
        target = values.setdefault(group, {}) if group else values
        target[name] = each.parse(typed)
    return values


def _unwrapped(text: str) -> str:
    """Mark paragraphs with indented lines, which are commands, so that they are not wrapped."""
    blocks = text.strip().split("\n\n")
    return "\n\n".join(f"\b\n{block}" if "\n  " in block else block for block in blocks)
