"""Names of losses and poolings: built in, or provided by installed packages.

A package provides one with an entry point in the group `listwise.losses` or `listwise.poolings`.
Names are read from the metadata of packages; a package is imported when its part is used.
"""

from typing import TYPE_CHECKING, Any, Final, Literal

from listwise.errors import InputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Kind = Literal["loss", "pooling"]

BUILT_IN: Final[dict[Kind, tuple[str, ...]]] = {
    "loss": (
        *("ap", "tie-aware", "triplet", "contrastive", "fastap", "smoothap", "recall-at-k"),
        *("infonce", "roadmap", "multi-similarity", "proxy-anchor"),
        "hierarchical-ap",
    ),
    "pooling": ("gem", "mac", "spoc", "rmac", "crow", "cls", "cls+gem"),
}
GROUPS: Final[dict[Kind, str]] = {"loss": "listwise.losses", "pooling": "listwise.poolings"}
CUSTOM: Final = "custom:"


def custom_name(part: object) -> str:
    """Return the name that a config stores for an object of the user: `custom:module.ClassName`."""
    named = part if hasattr(part, "__qualname__") else type(part)
    return f"{CUSTOM}{named.__module__}.{named.__qualname__}"


def check_name(kind: Kind, name: str) -> str:
    """Return the name if it is built in, provided by a package, or that of a custom object.

    Raises:
        InputError: the name is unknown.
    """
    if name not in BUILT_IN[kind] and not name.startswith(CUSTOM):
        _find(kind, name)
    return name


def load_installed(kind: Kind, name: str) -> Any:
    """Import and return the object to which the entry point of this name refers."""
    point = _find(kind, name)
    try:
        return point.load()
    except Exception as error:  # whatever the package raises when it is imported
        reason = f"{type(error).__name__}: {error}"
        raise InputError(
            f"cannot load the {kind} {name!r} of an installed package ({point.value}): {reason}"
        ) from error


def _find(kind: Kind, name: str) -> "EntryPoint":
    from importlib.metadata import entry_points  # slow to import

    found = {point.name: point for point in entry_points(group=GROUPS[kind])}
    if name in found:
        return found[name]
    installed = ", ".join(sorted(found)) or "none"
    raise InputError(
        f"unknown {kind} {name!r}: choose one of {', '.join(BUILT_IN[kind])}, or one of an "
        f"installed package ({installed})"
    )
