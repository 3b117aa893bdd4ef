"""The HTTP interface: search, entries, health and metrics, and the web page."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path, PurePath
from typing import Annotated, Any

from anyio import to_thread
from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import ClientDisconnect

from listwise import __version__
from listwise.data.images import ImageError, TooManyPixelsError
from listwise.search.duplicates import THRESHOLD
from listwise.search.entries import NoEntryError
from listwise.search.filters import FilterError
from listwise.search.hits import ThresholdError
from listwise.search.index import Index
from listwise.search.refinement import RefineMethod
from listwise.search.views import DuplicateView, EntryView
from listwise.serving.batching import ClientGoneError, QueueFullError, TooLateError
from listwise.serving.engine import SearchRequest
from listwise.serving.feedback_routes import add_feedback
from listwise.serving.fields import (
    DIFFERENT,
    SAME,
    BadRequestError,
    K,
    check_fields,
    filter_in,
    form_fields,
    marked_keys,
    search_request,
)
from listwise.serving.guard import CONTENT_POLICY, Guard
from listwise.serving.metrics import Metrics
from listwise.serving.reference import STYLE_POLICY, reference_page
from listwise.serving.routing import JPEG, client_of, form_body, jpeg, key_of
from listwise.serving.service import Service
from listwise.serving.settings import ServeSettings
from listwise.serving.uploads import read_form
from listwise.serving.views import (
    AddedView,
    Answer,
    Duplicates,
    Facets,
    Failure,
    Health,
    Info,
    LimitsView,
    Page,
    Removed,
)

STATIC = Path(__file__).parent / "static"
CLIENT_GONE = 499
METRICS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {}}, "description": "Metrics in the format of Prometheus."}
}
Headers = dict[str, str] | None
Where = Annotated[
    str, Query(description="Filter on attributes, such as `price < 100 and color = 'red'`.")
]


def create_app(index: Index, settings: ServeSettings, trial_seconds: float = 0.0) -> FastAPI:
    """The ASGI app of a server; `server_config` has the uvicorn settings that belong to it.

    Args:
        index: the index to serve.
        settings: settings of the server.
        trial_seconds: time of the network, from `prepare`; with it, the server knows from its
            first request on how many it can answer in time.

    Examples:
        >>> app = create_app(open_index("shop"), ServeSettings())     # doctest: +SKIP
        >>> uvicorn.Server(server_config(app, Limits())).run()         # doctest: +SKIP
    """
    metrics = Metrics()
    service = Service(index, settings, metrics, trial_seconds)

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
    room = service.check_search_room
    app.add_middleware(Guard, settings=settings, metrics=metrics, check_room=room)
    _answer_errors(app, settings)
    _add_search(app, service)
    _add_entries(app, service)
    _add_overviews(app, service)
    add_feedback(app, service)
    _add_pages(app, service, metrics)
    return app


async def _check_parameters(request: Request) -> None:
    """Refuse a query parameter that a route of the interface does not have.

    Links to the page may have parameters of other programs, such as `utm_source`.
    """
    route = request.scope["route"]
    if not route.path.startswith("/api/"):
        return
    known = [field.alias for field in route.dependant.query_params]
    unknown = sorted(set(request.query_params) - set(known))
    if unknown:
        use = f"use {', '.join(known)}" if known else "this address has none"
        raise BadRequestError(f"unknown parameter {unknown[0][:60]!r}: {use}")


def _add_search(app: FastAPI, service: Service) -> None:
    form = form_body(form_fields(service.limits))

    @app.post("/api/search", openapi_extra=form, responses=_links("results/0/key"))
    async def search(request: Request) -> Answer:
        """Search by photos, by parts of photos, by entries, or by several of these together."""
        client = client_of(request)
        # A search that cannot be answered in time is refused before its photos are read.
        room = partial(service.check_search_room, client.address)
        async with read_form(request, service.limits, service.held, room) as form:
            query = search_request(form, service.limits)
            if "no-cache" in request.headers.get("cache-control", ""):
                await to_thread.run_sync(service.refresh)
            return await service.search(query, client)

    most = service.limits.results
    many = Query(ge=1, le=most, description="Maximum number of results.")

    @app.get("/api/entries/{key}/similar")
    async def similar(
        request: Request,
        key: str,
        k: Annotated[int, many] = min(K, most),
        expand: bool | None = None,
        rerank: bool = False,
        where: Where = "",
        min_score: float | None = None,
        min_probability: Annotated[float | None, Query(ge=0, le=1)] = None,
        start: Annotated[int, Query(ge=0, le=most)] = 0,
        refine: RefineMethod | None = None,
        same: Annotated[str, Query(description=SAME["description"])] = "",
        different: Annotated[str, Query(description=DIFFERENT["description"])] = "",
    ) -> Answer:
        """Search by an entry; the entry itself is not among the results."""
        chosen, marked = filter_in(where), marked_keys(same, different)
        rest = chosen, min_score, min_probability, start, refine, *marked
        query = SearchRequest((), (), [key_of(key)], k, expand, rerank, *rest)
        return await service.search(query, client_of(request))


def _add_entries(app: FastAPI, service: Service) -> None:
    limits = service.limits

    @app.get("/api/entries", responses=_links("entries/0/key"))
    def entries(
        start: Annotated[int, Query(ge=0, le=2**31)] = 0,
        count: Annotated[int, Query(ge=1, le=limits.results)] = min(K, limits.results),
        where: Where = "",
    ) -> Page:
        """List entries; their order is the same until the index changes."""
        chosen = filter_in(where)
        found = service.store.page(start, count, chosen)
        return Page(entries=list(map(EntryView.of, found)), total=service.store.count(chosen))

    @app.get("/api/entries/{key}")
    def entry(key: str) -> EntryView:
        """Return an entry."""
        return EntryView.of(service.entry(key_of(key)))

    @app.get("/api/entries/{key}/thumbnail", response_class=Response, responses=JPEG)
    async def thumbnail(request: Request, key: str) -> Response:
        """Return a small JPEG file of an entry's photo."""
        return jpeg(request, await service.thumbnail(key_of(key), client_of(request)))

    @app.get("/api/entries/{key}/photo", response_class=Response, responses=JPEG)
    async def photo(request: Request, key: str) -> Response:
        """Return a JPEG file of an entry's photo, its long side reduced to 1600 pixels."""
        found = await to_thread.run_sync(service.entry, key_of(key))
        return jpeg(request, await service.photo(found, client_of(request)))

    photos = form_fields(limits)["photos"] | {"minItems": 1}
    form = form_body({"photos": photos}, required=["photos"])

    @app.post("/api/entries", openapi_extra=form, responses=_links("added/0"))
    async def add(request: Request) -> AddedView:
        """Add photos to the index. Requires the token."""
        client = client_of(request)
        room = partial(service.check_write_room, client)
        async with read_form(request, limits, service.held, room) as form:
            check_fields(form, ["photos"])
            return await service.add(form.photos, client)

    @app.delete("/api/entries/{key}")
    async def remove(request: Request, key: str) -> Removed:
        """Remove an entry from the index. Requires the token."""
        return Removed(removed=await service.remove(key_of(key), client_of(request)))


def _add_overviews(app: FastAPI, service: Service) -> None:
    limits = service.limits

    @app.get("/api/duplicates", response_model=Duplicates)
    async def duplicates(
        threshold: Annotated[float, Query(ge=0.5, le=1)] = THRESHOLD,
        start: Annotated[int, Query(ge=0, le=2**31)] = 0,
        count: Annotated[int, Query(ge=1, le=limits.results)] = min(K, limits.results),
    ) -> Response:
        """List groups of photos that are in the index more than once, by their descriptors.

        The first request compares all photos. If that takes longer than the time limit, the answer
        is 503, and a later request returns the groups.
        """
        found = await service.duplicates(threshold)

        def answer() -> str:
            page = found[start : start + count]
            groups = [DuplicateView.of(group, limits.results) for group in page]
            return Duplicates(groups=groups, total=len(found)).model_dump_json()

        # In a thread: large groups would stop the event loop.
        return Response(await to_thread.run_sync(answer), media_type="application/json")

    @app.get("/api/facets")
    def facets() -> Facets:
        """List the attributes with at most 20 distinct values, with the count of each value."""
        return Facets.of(service.facets())


def _add_pages(app: FastAPI, service: Service, metrics: Metrics) -> None:
    settings, limits = service.settings, service.limits
    engine = str(service.store.info()["engine"])

    @app.get("/api/info")
    def info() -> Info:
        """Describe the index, and what a client may do."""
        header = service.store.header
        return Info(
            name=PurePath(service.store.uri).name,
            entries=len(service.store),
            dim=header.dim,
            model=header.model,
            whitened=header.whitened,
            calibrated=service.calibrated,
            expands=service.expands,
            engine=engine,
            can_write=settings.can_write,
            can_mark=settings.token is not None,
            token_needed=not settings.local,
            instance=settings.instance,
            limits=LimitsView(
                **limits.model_dump(include=set(LimitsView.model_fields) - {"max_side"}),
                max_side=service.max_side,
            ),
        )

    @app.get("/health")
    def health() -> Health:
        """Report whether the server works and reaches its index."""
        return Health(status="ok", entries=len(service.store))

    @app.get("/metrics", name="metrics", response_class=Response, responses=METRICS)
    def numbers() -> Response:
        """Return the metrics of the server for Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        policy = f"{CONTENT_POLICY}; style-src 'self' {STYLE_POLICY}"
        return HTMLResponse(
            reference_page(app.openapi()), headers={"Content-Security-Policy": policy}
        )

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    app.mount("/static", StaticFiles(directory=STATIC, check_dir=False))


def _answer_errors(app: FastAPI, settings: ServeSettings) -> None:
    """Answer every error with one line in JSON."""
    limits = settings.limits

    def answer(kind: type[Exception], describe: Callable[[Any], tuple[int, str, Headers]]) -> None:
        async def handle(request: Request, error: Exception) -> JSONResponse:
            status, reason, headers = describe(error)
            return JSONResponse({"error": " ".join(reason.split())}, status, headers)

        app.add_exception_handler(kind, handle)

    answer(AnyHTTPException, lambda e: (e.status_code, str(e.detail), e.headers))
    answer(RequestValidationError, lambda e: (400, _first(e), None))
    answer(BadRequestError, lambda e: (400, str(e), None))
    answer(FilterError, lambda e: (400, str(e), None))
    answer(ThresholdError, lambda e: (400, str(e), None))
    answer(ImageError, lambda e: (400, str(e), None))
    answer(NoEntryError, lambda e: (404, str(e), None))
    answer(TooManyPixelsError, lambda e: (413, str(e), None))
    answer(QueueFullError, lambda e: (503, str(e), {"Retry-After": str(e.seconds)}))
    answer(
        TooLateError, lambda e: (504, f"the request took longer than {limits.seconds:g} s", None)
    )
    answer(ClientGoneError, lambda e: (CLIENT_GONE, "the client has disconnected", None))
    answer(ClientDisconnect, lambda e: (CLIENT_GONE, "the client has disconnected", None))


def _first(error: RequestValidationError) -> str:
    first = error.errors()[0]
    return f"{first['loc'][-1]}: {first['msg']}"


def _links(key: str) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI description of what a client may do with a key at a place in an answer."""
    parameters = {"key": f"$response.body#/{key}"}
    operations = ("entry", "similar", "thumbnail", "photo", "remove")
    links = {name: {"operationId": name, "parameters": parameters} for name in operations}
    return {200: {"links": links}}
