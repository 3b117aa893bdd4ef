"""The HTTP interface: search, entries, health and metrics, and the web page."""

import io
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path, PurePath
from typing import Annotated, Any

from anyio import to_thread
from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import ClientDisconnect

from listwise import __version__
from listwise.data.images import ImageError, TooManyPixelsError, load_image
from listwise.errors import InputError
from listwise.search.duplicates import THRESHOLD
from listwise.search.entries import NoEntryError
from listwise.search.filling import thumbnail_from_photo
from listwise.search.filters import Facet, FacetKind, FilterError, as_filter
from listwise.search.hits import Query as SearchQuery
from listwise.search.hits import QueryError, SearchResult
from listwise.search.index import Index
from listwise.search.options import FilterText
from listwise.search.views import DuplicateView, EntryView, Result
from listwise.serving.batching import CLIENT_GONE
from listwise.serving.feedback import add_feedback
from listwise.serving.forms import (
    AddForm,
    AttributesForm,
    Examples,
    K,
    Start,
    form_body,
    merge_attributes,
    search_fields,
    search_query,
)
from listwise.serving.guard import Guard, failure
from listwise.serving.server import ServeSettings
from listwise.serving.service import JPEG, PHOTO_SIDE, Service, jpeg
from listwise.serving.upload_folder import AddedView

STATIC = Path(__file__).parent / "static"
METRICS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {}}, "description": "Metrics in the format of Prometheus."}
}
ERRORS = {
    TooManyPixelsError: 413,
    ImageError: 400,
    FilterError: 400,
    QueryError: 400,
    NoEntryError: 404,
    ClientDisconnect: CLIENT_GONE,
    RequestValidationError: 400,
}
"""Mistakes of a client with their status; other errors are those of the server."""
Where = Annotated[
    FilterText, Query(description="Filter on attributes, such as `price < 100 and color = 'red'`.")
]


class LimitsView(BaseModel):
    """Limits of a request."""

    upload_bytes: int
    pixels: int
    photos: int
    results: int


class Info(BaseModel):
    """The index, and what a client may do.

    `max_side` is the long side in pixels that photos are reduced to; null for their original size.
    """

    name: str
    entries: int
    max_side: int | None
    dim: int
    model: str
    whitened: bool
    calibrated: bool
    expands: bool
    engine: str
    can_write: bool
    can_mark: bool
    token_needed: bool
    instance: str
    limits: LimitsView


class Page(BaseModel):
    """A page of entries, and the total number of entries."""

    entries: list[EntryView]
    total: int


class FacetValue(BaseModel):
    """A value of an attribute, and the number of entries that have it."""

    value: str
    count: int


class FacetView(BaseModel):
    """An attribute, and what its values are.

    `values` has the values, the most frequent first, if there are at most 20. `lowest` and
    `highest` are those of numbers and dates.
    """

    name: str
    kind: FacetKind
    lowest: str
    highest: str
    values: list[FacetValue]

    @staticmethod
    def of(facet: Facet) -> "FacetView":
        """The JSON of a facet."""
        values = [FacetValue(value=value, count=count) for value, count in facet.values]
        return FacetView(**vars(facet) | {"values": values})


class Facets(BaseModel):
    """Attributes that the entries can be filtered by."""

    facets: list[FacetView]


class Answer(BaseModel):
    """Results of a search, best first; `more` if a later `start` returns others.

    `matching` is the number of entries that match the filter, all without one. `verified` is the
    number of photos, of the first 100, that re-ranking has compared with the query.
    """

    milliseconds: float
    expanded: bool
    refined: bool
    reranked: bool
    verified: int
    more: bool
    matching: int
    results: list[Result]

    @staticmethod
    def of(found: SearchResult, seconds: float, most: int) -> "Answer":
        """The JSON of the results of a search, of which clients get at most the first `most`."""
        options = found.query.options
        verified = sum(hit.inliers is not None for hit in found.hits)
        end = options.start + options.k
        return Answer(
            milliseconds=round(1000 * seconds, 2),
            expanded=found.expand,
            refined=options.refine is not None,
            reranked=verified > 0,
            verified=verified,
            more=len(found.hits) > end and end < most,
            matching=found.matching,
            results=list(map(Result.found, found.page)),
        )


class Duplicates(BaseModel):
    """A page of groups of duplicates, and the total number of groups."""

    groups: list[DuplicateView]
    total: int


class Removed(BaseModel):
    """The number of removed entries."""

    removed: int


class Health(BaseModel):
    """The state of the server."""

    status: str
    entries: int


class Failure(BaseModel):
    """The reason of an error, in one line."""

    error: str


def create_app(index: Index, settings: ServeSettings, memory: int = 0) -> FastAPI:
    """The ASGI app of a server; `server_config` has the uvicorn settings that belong to it.

    Args:
        index: the index to serve.
        settings: settings of the server.
        memory: its maximum memory in bytes, for the metrics; 0 if it is not known.

    Examples:
        >>> app = create_app(open_index("shop"), ServeSettings())     # doctest: +SKIP
        >>> uvicorn.Server(server_config(app, Limits())).run()         # doctest: +SKIP
    """
    service = Service(index, settings)
    what = "Maximum memory of the server, if clients use all limits at the same time"
    service.metrics.watch("maximum_memory_bytes", what, lambda: memory)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await to_thread.run_sync(service.close)

    app = FastAPI(
        title="Listwise",
        version=__version__,
        description="Search for photos by example.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        generate_unique_id_function=lambda route: route.name,
        responses={"4XX": {"model": Failure}, "5XX": {"model": Failure}},
        dependencies=[Depends(_check_parameters)],
    )
    app.add_middleware(Guard, settings=settings, metrics=service.metrics)
    _answer_errors(app)
    _add_searches(app, service)
    _add_entries(app, service)
    add_feedback(app, service)
    _add_pages(app, service)
    return app


async def _check_parameters(request: Request) -> None:
    """Refuse a query parameter that a route of the interface does not have.

    Links to the page may have parameters of other programs, such as `utm_source`.
    """
    path, method = request.scope["route"].path, request.method.lower()
    if not path.startswith("/api/"):
        return
    operation = request.app.openapi()["paths"][path][method]
    known = [each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"]
    unknown = sorted(set(request.query_params) - set(known))
    if unknown:
        use = f"use {', '.join(known)}" if known else "this address has none"
        raise HTTPException(400, f"unknown parameter {unknown[0][:60]!r}: {use}")


def _add_searches(app: FastAPI, service: Service) -> None:
    limits = service.limits
    fields, form = search_fields(limits), form_body(search_fields(limits, Examples), limits.photos)

    async def answer(query: SearchQuery, request: Request) -> Answer:
        started = time.monotonic()
        found = await service.search(query, request)
        return Answer.of(found, time.monotonic() - started, limits.results)

    @app.post("/api/search", openapi_extra=form)
    async def search(request: Request) -> Answer:
        """Search by photos, by parts of photos, by entries, or by several of these together."""
        # A search that cannot be answered in time is refused before its photos are read.
        async with service.forms.read(request, service.photo_searches) as form:
            query = search_query(form, limits)
            if "no-cache" in request.headers.get("cache-control", ""):
                await to_thread.run_sync(service.engine.refresh)
            return await answer(query, request)

    @app.get("/api/entries/{key}/similar")
    async def similar(
        request: Request,
        key: int,
        options: Annotated[fields, Query()],  # type: ignore[valid-type]
    ) -> Answer:
        """Search by an entry; the entry itself is not among the results."""
        return await answer(SearchQuery(entries=[key], options=options), request)


def _add_entries(app: FastAPI, service: Service) -> None:
    limits = service.limits

    @app.get("/api/entries")
    async def entries(
        request: Request,
        start: Start = 0,
        count: Annotated[int, Query(ge=1, le=limits.results)] = min(K, limits.results),
        where: Where = None,
    ) -> Page:
        """List entries; their order is the same until the index changes."""
        chosen = as_filter(where)

        def read() -> Page:
            found = service.store.entries(chosen, start, count)
            return Page(entries=list(map(EntryView.of, found)), total=service.store.count(chosen))

        return await service.read(read, request)

    @app.get("/api/entries/{key}")
    def entry(key: int) -> EntryView:
        """Return an entry."""
        return EntryView.of(service.entry(key))

    @app.get("/api/entries/{key}/thumbnail", response_class=Response, responses=JPEG)
    async def thumbnail(request: Request, key: int) -> Response:
        """Return a small JPEG file of an entry's photo."""
        stored = await to_thread.run_sync(service.store.thumbnail, key)
        if stored:  # as for almost all entries, so that the entry itself is not read
            return jpeg(stored, request)
        entry = await to_thread.run_sync(service.entry, key)
        return await service.picture(partial(thumbnail_from_photo, entry), entry, request)

    @app.get("/api/entries/{key}/photo", response_class=Response, responses=JPEG)
    async def photo(request: Request, key: int) -> Response:
        """Return a JPEG file of an entry's photo, its long side reduced to 1600 pixels."""
        entry = await to_thread.run_sync(service.entry, key)

        def screen_photo() -> bytes:
            file = io.BytesIO()
            load_image(entry.path, max_side=PHOTO_SIDE).save(file, "JPEG", quality=88)
            return file.getvalue()

        return await service.picture(screen_photo, entry, request)

    @app.post("/api/entries", openapi_extra=form_body(AddForm, limits.photos, ["photos"]))
    async def add(request: Request) -> AddedView:
        """Add photos to the index, with attributes. Requires the token."""
        async with service.forms.read(request, service.writes) as form:
            fields = form.read(AddForm)
            if not form.photos:
                raise HTTPException(400, "no photos to add: send some (curl -F photos=@FILE)")
            attributes = fields.of_each(len(form.photos))
            uploads = await service.folder_for(form.photos)

            def write() -> AddedView:
                with service.engine.room_for(form.photos):
                    return uploads.add(form.photos, attributes, fields.exif)

            # Once begun, this finishes even if the client disconnects.
            added = await service.write(write, request)
        service.forget_facets()
        return added

    @app.patch("/api/entries/{key}", openapi_extra=form_body(AttributesForm, 0, ["attributes"]))
    async def change(request: Request, key: int) -> EntryView:
        """Change attributes of an entry. Requires the token."""
        async with service.forms.read(request, service.writes) as form:
            if form.photos:
                raise HTTPException(400, "send attributes and no photos")
            values = form.read(AttributesForm).attributes

        def write() -> EntryView:
            entry = service.entry(key)
            merge_attributes(entry.attributes, values)
            service.store.set_attributes([entry.key], values)
            return EntryView.of(service.entry(key))

        changed = await service.write(write, request)
        service.forget_facets()
        return changed

    @app.delete("/api/entries/{key}")
    async def remove(request: Request, key: int) -> Removed:
        """Remove an entry from the index. Requires the token."""
        return Removed(removed=await service.write(partial(service.remove, key), request))

    @app.post("/api/entries/{key}/restore")
    async def restore(request: Request, key: int) -> EntryView:
        """Undo the removal of an entry, one of the last hundred. Requires the token."""
        return EntryView.of(await service.write(partial(service.restore, key), request))

    @app.get("/api/duplicates", response_model=Duplicates)
    async def duplicates(
        threshold: Annotated[float, Query(ge=0.5, le=1)] = THRESHOLD,
        mirrored: bool = False,
        start: Start = 0,
        count: Annotated[int, Query(ge=1, le=limits.results)] = min(K, limits.results),
    ) -> Response:
        """List groups of photos that are in the index more than once, by their thumbnails.

        The first request compares all photos. If that takes longer than the time limit, the answer
        is 503, and a later request returns the groups.
        """
        found = await service.duplicates(threshold, mirrored)

        def answer() -> str:
            page = found[start : start + count]
            groups = [DuplicateView.of(group, limits.results, service.uploaded) for group in page]
            return Duplicates(groups=groups, total=len(found)).model_dump_json()

        # In a thread: large groups would stop the event loop.
        return Response(await to_thread.run_sync(answer), media_type="application/json")

    @app.get("/api/facets")
    async def facets(request: Request) -> Facets:
        """List the attributes: numbers, dates or texts, with their values if they are few."""
        found = await service.read(service.facets, request)
        return Facets(facets=list(map(FacetView.of, found)))


def _add_pages(app: FastAPI, service: Service) -> None:
    settings, limits = service.settings, service.limits
    engine = str(service.store.info()["engine"])

    @app.get("/api/info")
    def info() -> Info:
        """Describe the index, and what a client may do."""
        header = service.store.header
        return Info(
            name=PurePath(service.store.uri).name,
            entries=len(service.store),
            max_side=header.settings.max_side,
            dim=header.dim,
            model=header.model,
            whitened=header.whitened,
            calibrated=service.index.calibration is not None,
            expands=header.expansion is not None,
            engine=engine,
            can_write=settings.can_write,
            can_mark=settings.token is not None,
            token_needed=not settings.local,
            instance=settings.instance,
            limits=LimitsView(**limits.model_dump(include=set(LimitsView.model_fields))),
        )

    @app.get("/health")
    def health() -> Health:
        """Report whether the server works and reaches its index."""
        return Health(status="ok", entries=len(service.store))

    @app.get("/metrics", name="metrics", response_class=Response, responses=METRICS)
    def numbers() -> Response:
        """Return the metrics of the server for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/docs", include_in_schema=False)
    def docs() -> FileResponse:
        return FileResponse(STATIC / "docs.html")

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    app.mount("/static", StaticFiles(directory=STATIC, check_dir=False))


def _answer_errors(app: FastAPI) -> None:
    """Answer every error with one line in JSON."""

    async def answer(request: Request, error: Any) -> JSONResponse:
        if isinstance(error, AnyHTTPException):
            return failure(error.status_code, str(error.detail), error.headers)
        status = next(ERRORS[kind] for kind in ERRORS if isinstance(error, kind))
        wrong = isinstance(error, RequestValidationError)
        return failure(status, _first(error) if wrong else str(error))

    for kind in (AnyHTTPException, *ERRORS):
        app.add_exception_handler(kind, answer)


def _first(error: RequestValidationError) -> str:
    first = error.errors()[0]
    inside = first.get("ctx", {}).get("error")
    return str(inside) if isinstance(inside, InputError) else f"{first['loc'][-1]}: {first['msg']}"
