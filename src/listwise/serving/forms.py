"""Forms with photos: read into memory within the limits, checked, and described in OpenAPI."""

import asyncio
import io
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Annotated, Any, TypeVar, cast

from fastapi import HTTPException, Query, Request
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    StringConstraints,
    WithJsonSchema,
    create_model,
)
from starlette.formparsers import MultiPartException, MultiPartParser

from listwise.data.images import Box
from listwise.errors import InputError, validated
from listwise.search.entries import LABEL
from listwise.search.hits import Query as SearchQuery
from listwise.search.options import SearchOptions
from listwise.serving.batching import WorkQueue, address_of
from listwise.serving.server import Limits

Model = TypeVar("Model", bound=BaseModel)

FIELDS = 32
"""Maximum number of fields that are not photos."""
FIELD_BYTES = 100_000
# A longer form has photos: without them it is short, and 1,000 marked keys take 20 kB.
LONG_FORM = 32_768
K = 60
"""Default number of results."""
MARKS = 1000
"""Maximum number of entries in a list of keys."""
ATTRIBUTE_BYTES = 10_000
"""Maximum size of the attributes of a photo."""
PHOTOS = {
    "type": "array",
    "items": {"type": "string", "format": "binary"},
    "description": "Image files: JPEG, PNG, WebP, AVIF, HEIC, TIFF, GIF or BMP.",
}

Start = Annotated[int, Query(ge=0, le=2**31)]
"""Number of items to skip."""


class Upload(io.BytesIO):
    """The content of an image file, and its name on the client's machine."""

    def __init__(self, name: str, content: bytes) -> None:
        super().__init__(content)
        self.name = name


@dataclass
class Form:
    """The photos and the other fields of a request."""

    photos: list[Upload] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)

    def read(self, model: type[Model]) -> Model:
        """The fields as a model; a 400 error names a field that is unknown or wrong."""
        try:
            return validated(model, {name: text for name, text in self.fields.items() if text})
        except InputError as error:
            raise HTTPException(400, str(error)) from None


class FormReader:
    """Reads forms into memory.

    Attributes:
        held_bytes: bytes of the forms that are in use.
    """

    def __init__(self, limits: Limits) -> None:
        self.held_bytes = 0
        self._limits = limits
        self._by_address: Counter[str] = Counter()

    @asynccontextmanager
    async def read(self, request: Request, queue: WorkQueue[Any, Any]) -> AsyncIterator[Form]:
        """Read the form of a request; its bytes count as held until the context ends.

        A form with photos is refused before it is read if the queue would refuse its work.
        """
        limits, address = self._limits, address_of(request)
        declared = request.headers.get("content-length", "")
        if not declared.isdecimal():
            raise HTTPException(411, "the header Content-Length is required")
        size = int(declared)
        if size > limits.body_bytes:
            raise _too_large("the request", limits.body_bytes)
        if size > LONG_FORM:
            queue.check_room(address)
        share = self._by_address[address] + size
        if self.held_bytes + size > limits.held_bytes or share > limits.held_bytes_per_address:
            reason = "too many uploads at the same time: try again"
            raise HTTPException(503, reason, {"Retry-After": "1"})
        self.held_bytes += size
        self._by_address[address] = share
        try:
            yield await self._parse(request)
        finally:
            self.held_bytes -= size
            self._by_address[address] -= size
            self._by_address = +self._by_address  # without addresses that hold nothing

    async def _parse(self, request: Request) -> Form:
        limits = self._limits
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise HTTPException(400, "send photos as multipart/form-data (curl -F photos=@FILE)")
        parser = _Parser(
            request.headers,
            request.stream(),
            max_files=limits.photos,
            max_fields=FIELDS,
            max_part_size=FIELD_BYTES,
        )
        try:
            async with asyncio.timeout(limits.upload_seconds):
                parsed = await parser.parse()
        except TimeoutError:
            reason = f"the upload took longer than {limits.upload_seconds:g} s"
            raise HTTPException(408, reason) from None
        except MultiPartException as error:
            raise HTTPException(400, f"the form cannot be read: {error.message}") from None
        form = Form()
        for name, value in parsed.multi_items():
            if (name == "photos") == isinstance(value, str):
                raise HTTPException(400, "send files, and only files, as photos (photos=@FILE)")
            if isinstance(value, str):
                form.fields[name] = value
                continue
            shown, content = _file_name(value.filename or ""), value.file.read()
            if len(content) > limits.upload_bytes:
                raise _too_large(shown, limits.upload_bytes)
            # Browsers send a part without name and content for an empty file input.
            if content or value.filename:
                form.photos.append(Upload(shown, content))
        return form


class _Parser(MultiPartParser):
    spool_max_size = 1 << 40  # photos stay in memory, where their bytes are counted


def _file_name(name: str) -> str:
    """The name of a file as printable text on one line."""
    shown = name.replace("\\", "/").rpartition("/")[2]
    return "".join(c for c in shown if c.isprintable())[:200] or "photo"


def _too_large(what: str, limit: int) -> HTTPException:
    reason = f"{what} has more than the {limit / 1e6:g} MB allowed"
    return HTTPException(413, f"{reason}; listwise serve --max-upload sets another limit")


def _split(given: Any) -> list[str]:
    """The parts of a text with commas, or of several such texts."""
    text = ",".join(map(str, given)) if isinstance(given, list | tuple) else str(given)
    return text.split(",") if text.strip() else []


def _four(box: Any) -> Any:
    if not (isinstance(box, list) and len(box) == 4):
        raise InputError(f"a box is [x0, y0, x1, y1] in pixels, not {box!r:.60}")
    return box


def _no_formula(name: str, field: str = "name") -> str:
    if name.startswith(("=", "+", "-", "@")):
        raise InputError(
            f"`{field}` must not begin with {name[0]}, which spreadsheets read as a formula"
        )
    return name


def _attribute(value: Any) -> str:
    """The text of a value of JSON; empty for null."""
    if not isinstance(value, str | int | float | None) or value in (inf, -inf) or value != value:
        raise InputError("`attributes`: a value must be a text, a number, true, false or null")
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def merge_attributes(*parts: Mapping[str, str]) -> dict[str, str]:
    """Return all attributes of a photo, of which later ones win; an empty text removes one."""
    merged = {name: text for part in parts for name, text in part.items()}
    try:
        return _attributes({name: text for name, text in merged.items() if text})
    except InputError as error:
        raise HTTPException(400, str(error)) from None


def _attributes(values: dict[str, str]) -> dict[str, str]:
    if len(json.dumps(values, ensure_ascii=False).encode()) > ATTRIBUTE_BYTES:
        raise InputError(f"`attributes`: those of a photo have more than {ATTRIBUTE_BYTES} bytes")
    if "" in values or "\0" in "".join([*values, *values.values()]):
        raise InputError("`attributes`: a name is empty, or a text has a zero byte")
    if label := values.get(LABEL):
        if label != " ".join(label.split()):
            raise InputError("`label` must be one line without spaces around it")
        _no_formula(label, LABEL)
    return values


def _text(example: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "examples": [example]})


_Box = Annotated[Box, BeforeValidator(_four)]
_Key = Annotated[int, WithJsonSchema({"type": "string"})]
_Keys = Annotated[
    tuple[_Key, ...],
    BeforeValidator(_split),
    Field(max_length=MARKS),
    WithJsonSchema(
        {"type": "string", "pattern": "^([0-9]{1,19}(,[0-9]{1,19})*)?$", "examples": ["123,456"]}
    ),
]
_Attributes = Annotated[
    dict[str, Annotated[str, BeforeValidator(_attribute)]], AfterValidator(_attributes)
]
_Name = Annotated[
    str, StringConstraints(strip_whitespace=True, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")
]


class Examples(BaseModel):
    """The fields of a search that are not options."""

    boxes: Annotated[Json[list[_Box | None] | None], _text("[[10, 20, 300, 400]]")] = Field(
        None,
        description="JSON list: for each photo [x0, y0, x1, y1] in pixels of the upright photo, "
        "or null for the whole photo.",
    )
    keys: Annotated[Json[list[_Key]] | None, _text('["123", "456"]')] = Field(
        None, description="JSON list: keys of entries that are further examples."
    )


class MarkForm(BaseModel):
    """The fields of the request that stores marks."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    box: Annotated[Json[_Box | None], _text("[10, 20, 300, 400]")] = Field(
        None,
        description="JSON list: the part of the photo that was searched for, [x0, y0, x1, y1] in "
        "pixels of the upright photo.",
    )
    entry: _Key | None = Field(
        None, description="The key of the entry that was searched for, instead of a photo."
    )
    same: _Keys = Field(
        default_factory=tuple,
        description="Keys of entries that show the same thing as the query, separated by commas; "
        f"at most {MARKS}.",
    )
    different: _Keys = Field(
        default_factory=tuple,
        description="Keys of entries that show something else, as in `same`.",
    )
    by: _Name = Field("", description="The name of the person who marks.")
    ranks: Annotated[
        Json[dict[_Key, Annotated[int, Field(gt=0, lt=2**31)]]] | None,
        _text('{"123": 1, "456": 7}'),
    ] = Field(
        None,
        description="JSON object: the places of marked entries in the results, from 1.",
    )


class LabelForm(BaseModel):
    """The fields of the request that names the class of entries."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[_Name, AfterValidator(_no_formula)] = Field(
        "",
        description="The name of the class; without it, the label is removed. It must not begin "
        "with =, +, - or @.",
    )
    keys: _Keys = Field(
        default_factory=tuple,
        description=f"Keys of entries, separated by commas; at most {MARKS}.",
    )


class AttributesForm(BaseModel):
    """The field of the request that changes the attributes of an entry."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    attributes: Annotated[Json[_Attributes], _text('{"price": 12.5, "color": null}')] = Field(
        description="JSON object: new values of attributes; null removes one, and others stay."
    )


class AddForm(BaseModel):
    """The fields of the request that adds photos."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    attributes: Annotated[
        Json[_Attributes | list[_Attributes | None]] | None, _text('{"price": 12.5}')
    ] = Field(
        None,
        description="JSON object: attributes of all photos. Or a JSON list: for each photo an "
        "object or null.",
    )
    exif: bool = Field(
        False,
        description="Add what the camera wrote into a photo as attributes: date, latitude, "
        "longitude and camera.",
    )

    def of_each(self, photos: int) -> list[dict[str, str]]:
        """The attributes of each of so many photos."""
        given = self.attributes or {}
        if not isinstance(given, list):
            return [given] * photos
        if len(given) != photos:
            reason = f"attributes of {len(given)} photos for {photos} photos: give null for those"
            raise HTTPException(400, f"{reason} without attributes")
        return [each or {} for each in given]


@cache
def search_fields(limits: Limits, *more: type[BaseModel]) -> type[SearchOptions]:
    """The options of a search in requests to a server with these limits, and more fields."""
    most, options = limits.results, SearchOptions.model_fields
    count, start = (options[name].description for name in ("k", "start"))
    fields: dict[str, Any] = {
        "k": (int, Field(min(K, most), ge=1, le=most, description=count)),
        "start": (int, Field(0, ge=0, le=most, description=start)),
    }
    for name, option in options.items():
        if option.annotation == tuple[str | int, ...]:
            # A factory: an empty list, the default, is no text in the description of the field.
            fields[name] = _Keys, Field(default_factory=tuple, description=option.description)
    bases: Any = (*more, SearchOptions)
    found: Any = create_model("SearchFields", __base__=bases, **fields)
    return cast(type[SearchOptions], found)


def form_body(
    model: type[BaseModel] | None, photos: int, required: Sequence[str] = ()
) -> dict[str, Any]:
    """The OpenAPI description of a form with the fields of a model and so many photos."""
    fields: dict[str, Any] = {} if model is None else model.model_json_schema()["properties"]
    for each in fields.values():
        each.pop("title", None)
        if "anyOf" in each:  # a field of a form is text, and is left out instead of null
            each |= next(kind for kind in each.pop("anyOf") if kind["type"] != "null")
        if each.get("default", "") is None:
            del each["default"]
    if photos:
        fields = {"photos": PHOTOS | {"maxItems": photos}} | fields
    schema = {"type": "object", "properties": fields, "required": list(required)}
    body = {"content": {"multipart/form-data": {"schema": schema}}, "required": True}
    return {"requestBody": body}


def search_query(form: Form, limits: Limits) -> SearchQuery:
    """The query that a form describes; a 400 error names a field that is wrong."""
    options: Any = form.read(search_fields(limits, Examples))
    keys, boxes = options.keys or [], options.boxes or [None] * len(form.photos)
    if len(boxes) != len(form.photos):
        reason = f"{len(boxes)} boxes for {len(form.photos)} photos: give a box or null for each"
        raise HTTPException(400, reason)
    examples = len(form.photos) + len(keys)
    if examples > limits.photos:
        raise HTTPException(400, f"{examples} examples are more than the {limits.photos} allowed")
    return SearchQuery(form.photos, boxes, keys, options=options)
