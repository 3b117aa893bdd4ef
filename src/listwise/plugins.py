"""The names of losses and poolings: those built in, and those that installed packages bring.

A package brings one by an entry point in the group `listwise.losses` or `listwise.poolings`. Names
are read from the metadata of the packages; a package is imported when its part is used.
"""

from typing import TYPE_CHECKING, Any, Final, Literal

from listwise.errors import InputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Kind = Literal["loss", "pooling"]

BUILT_IN: Final[dict[Kind, tuple[str, ...]]] = {
    "loss": ("ap", "tie-aware", "triplet", "contrastive", "fastap", "smoothap", "multi-similarity"),
    "pooling": ("gem", "mac", "spoc", "rmac", "crow"),
}
GROUPS: Final[dict[Kind, str]] = {"loss": "listwise.losses", "pooling": "listwise.poolings"}
CUSTOM: Final = "custom:"


def custom_name(part: object) -> str:
    """What a config records of an object that the user made: `custom:module.ClassName`."""
    named = part if hasattr(part, "__qualname__") else type(part)
    return f"{CUSTOM}{named.__module__}.{named.__qualname__}"


def check_name(kind: Kind, name: str) -> str:
    """The name, if it is that of a part built in, of an installed one, or of a custom object."""
    if name not in BUILT_IN[kind] and not name.startswith(CUSTOM):
        _find(kind, name)
    return name


def load_installed(kind: Kind, name: str) -> Any:
    """What the entry point of that name refers to; its package is imported."""
    point = _find(kind, name)
    try:
        return point.load()
    except Exception as error:  # whatever the package raises when it is imported
        reason = f"{type(error).__name__}: {error}"
        raise InputError(
            f"the {kind} {name!r} of an installed package, {point.value}, cannot be loaded "
            f"({reason})"
        ) from error


def _find(kind: Kind, name: str) -> "EntryPoint":
    from importlib.metadata import entry_points  # slow to import

    found = {point.name: point for point in entry_points(group=GROUPS[kind])}
    if name in found:
        return found[name]
    installed = ", ".join(sorted(found)) or "none"
    raise InputError(
        f"no {kind} is called {name!r}: choose one of {', '.join(BUILT_IN[kind])}, or one that an "
        f"installed package brings ({installed})"
    )
