"""The options of a search, for Python, the command line, the HTTP interface and the search page."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from listwise.search.entries import Names
from listwise.search.filters import Filter, as_filter

if TYPE_CHECKING:
    from listwise.data.images import Box

RefineMethod = Literal["superglobal", "diffusion"]


def _listed(names: Any) -> Any:
    """One or several ids or keys as a tuple."""
    return (names,) if isinstance(names, str | int) else tuple(names or ())


EntryNames = Annotated[tuple[str | int, ...], BeforeValidator(_listed)]
"""Ids or keys of entries."""


def _text(where: Any) -> Any:
    """The text of a filter, which is checked."""
    found = as_filter(where)
    return None if found is None else found.text


FilterText = Annotated[str | None, BeforeValidator(_text)]
"""The text of a filter on attributes."""


class SearchHow(TypedDict, total=False):
    """The options of `Index.search`, for editors that complete and check them."""

    like: Names
    box: "Box | Sequence[Box | None] | None"
    average: bool
    start: int
    expand: bool | None
    refine: RefineMethod | None
    rerank: bool
    quality: Literal["fast", "best"]
    where: str | Filter | None
    min_score: float | None
    min_probability: float | None
    same: Names
    different: Names
    exclude: Names
    marks: bool


class SearchOptions(BaseModel):
    """The options of a search.

    Each option is declared here once: `Index.search` takes it as a keyword argument, `listwise
    search` as a flag, and a server as a field or parameter.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    k: int = Field(10, ge=1, description="Maximum number of results")
    start: int = Field(
        0, ge=0, description="Number of results to skip, for the next page of results"
    )
    expand: bool | None = Field(
        None,
        description="Expand the query with its nearest entries (αQE). By default if the model of "
        "the index was tuned to it, and none of `refine`, `min_probability`, `same` and "
        "`different` is given",
    )
    refine: RefineMethod | None = Field(
        None,
        description="Re-rank the first results by their global descriptors: superglobal the first "
        "400, diffusion the first 2000",
    )
    rerank: bool = Field(
        False,
        description="Re-rank the first 100 results by spatial verification. With diffusion, they "
        "are verified first, and diffusion starts from those that match",
    )
    quality: Literal["fast", "best"] = Field(
        "fast", description="Quality of the results: best stands for `rerank` and diffusion"
    )
    where: FilterText = Field(
        None,
        description="Filter on the attributes of the results",
        examples=["price < 100 and color = 'red'"],
    )
    min_score: float | None = Field(None, description="Minimum score of a result")
    min_probability: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Minimum probability that a result shows the same thing as the query, from 0 "
        "to 1. The model must be calibrated. It cannot be combined with `expand` or marked entries",
    )
    same: EntryNames = Field(
        (),
        description="Entries that show the same thing as the query. They move the query toward "
        "them, and are the first results",
    )
    different: EntryNames = Field(
        (),
        description="Entries that show something else. They move the query away from them, and are "
        "the last results",
    )
    exclude: EntryNames = Field((), description="Entries that are not returned")
    marks: bool = Field(
        False,
        description="Use the stored marks of the query too, which must be one photo or one entry; "
        "`same` and `different` take precedence",
    )

    @model_validator(mode="before")
    @classmethod
    def _best(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("quality") == "best":
            return {**given, "rerank": True, "refine": given.get("refine") or "diffusion"}
        return given

    @property
    def filter(self) -> Filter | None:
        """The filter on the attributes."""
        return as_filter(self.where)

    @property
    def marked(self) -> bool:
        """Whether results were marked."""
        return bool(self.same or self.different)

    @property
    def diffuses(self) -> bool:
        """Whether diffusion comes after the verification, and starts from what it matched."""
        return self.rerank and self.refine == "diffusion"
