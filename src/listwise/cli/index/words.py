"""How the index commands write numbers."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from listwise.search.store import TuningResult


def count_photos(count: int) -> str:
    """A number of photos: 1 photo, 2 photos."""
    return "1 photo" if count == 1 else f"{count} photos"


def describe_search(tuned: "TuningResult") -> str:
    """How an index searches, and what was measured."""
    return (
        f"search: {tuned.method}; recall@10 {tuned.recall:.3f}, {tuned.milliseconds:.1f} ms per "
        f"query, {readable_bytes(tuned.memory)} of memory"
    )


def readable_bytes(count: float) -> str:
    """A size for people: 500 B, 1.2 MB."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.0f} B" if units[0] == "B" else f"{count:.1f} {units[0]}"


def readable_fact(name: str, value: Any) -> str:
    """A value of `Index.info` for people."""
    if isinstance(value, int) and name in ("bytes", "memory"):
        return readable_bytes(value)
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items() if v is not None)
    return f"{value:.3g}" if isinstance(value, float) else str(value)
