"""The HTTP interface: search, entries, health and metrics, and the page that uses them."""

import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path, PurePath
from typing import Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from PIL import Image
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import ClientDisconnect

from listwise import __version__
from listwise.data.images import ImageError, TooManyPixelsError, load_image
from listwise.search.entries import Entry, NoEntryError
from listwise.search.filling import thumbnail_from_photo
from listwise.search.index import Index
from listwise.serving.batching import ClientGoneError, QueueFullError, TooLateError
from listwise.serving.engine import SearchRequest
from listwise.serving.fields import FORM, BadRequestError, K, key_in, search_request
from listwise.serving.guard import CONTENT_POLICY, Guard
from listwise.serving.metrics import Metrics
from listwise.serving.reference import STYLE_POLICY, reference_page
from listwise.serving.service import Gone, Service
from listwise.serving.settings import ServeSettings
from listwise.serving.uploads import form_of
from listwise.serving.views import (
    AddedView,
    Answer,
    EntryView,
    Failure,
    Health,
    Info,
    LimitsView,
    Page,
    Removed,
)

STATIC = Path(__file__).parent / "static"
PHOTO_SIDE = 1600
CACHED = "private, no-cache"  # cached, but revalidated: an entry may be replaced
CLIENT_GONE = 499
JPEG: dict[int | str, dict[str, Any]] = {
    200: {"content": {"image/jpeg": {}}, "description": "A JPEG file."}
}
Headers = dict[str, str] | None


def create_app(index: Index, settings: ServeSettings) -> FastAPI:
    """The server's ASGI app: uvicorn or any other server can run it."""
    metrics = Metrics()
    service = Service(index, settings, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await to_thread.run_sync(service.close)

    app = FastAPI(
        title="Listwise",
        version=__version__,
        description="Find photos by example.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses={"4XX": {"model": Failure}, "5XX": {"model": Failure}},
    )
    app.add_middleware(Guard, settings=settings, metrics=metrics)
    _answer_errors(app, settings)
    _add_search(app, service)
    _add_entries(app, service)
    _add_pages(app, service, metrics)
    return app


def _add_search(app: FastAPI, service: Service) -> None:
    @app.post("/api/search", openapi_extra=_form(FORM))
    async def search(request: Request) -> Answer:
        """Search by photos, by parts of photos, by entries, or by several of them at once."""
        async with form_of(request, service.limits, service.held) as form:
            query = search_request(form, service.limits)
            return await service.search(query, _gone(request))

    most = service.limits.results
    many = Query(ge=1, le=most, description="Results at most.")

    @app.get("/api/entries/{key}/similar")
    async def similar(
        request: Request,
        key: str,
        k: Annotated[int, many] = min(K, most),
        expand: bool = False,
        rerank: bool = False,
    ) -> Answer:
        """Search by an entry, which is itself left out."""
        query = SearchRequest((), (), [_key(key)], k, expand, rerank)
        return await service.search(query, _gone(request))


def _add_entries(app: FastAPI, service: Service) -> None:
    limits = service.limits
    decoding = CapacityLimiter(2)  # a large photo takes much memory

    @app.get("/api/entries")
    def entries(
        start: Annotated[int, Query(ge=0, le=2**31)] = 0,
        count: Annotated[int, Query(ge=1, le=limits.results)] = min(K, limits.results),
    ) -> Page:
        """Some entries, in an order that stays while nothing is written."""
        found = service.store.page(start, count)
        return Page(entries=list(map(EntryView.of, found)), total=len(service.store))

    @app.get("/api/entries/{key}")
    def entry(key: str) -> EntryView:
        """One entry."""
        return EntryView.of(service.entry(_key(key)))

    @app.get("/api/entries/{key}/thumbnail", response_class=Response, responses=JPEG)
    async def thumbnail(request: Request, key: str) -> Response:
        """An entry's small picture."""
        found = await to_thread.run_sync(service.entry, _key(key))
        small = await to_thread.run_sync(service.store.thumbnail, found.key)
        if not small:
            make = partial(thumbnail_from_photo, found)
            small = await to_thread.run_sync(make, limiter=decoding)
        return _picture(request, found, small)

    @app.get("/api/entries/{key}/photo", response_class=Response, responses=JPEG)
    async def photo(request: Request, key: str) -> Response:
        """An entry's photo, its long side reduced to 1600 pixels."""
        found = await to_thread.run_sync(service.entry, _key(key))
        content = await to_thread.run_sync(_screen_photo, found, limiter=decoding)
        return _picture(request, found, content)

    @app.post("/api/entries", openapi_extra=_form({"photos": FORM["photos"]}))
    async def add(request: Request) -> AddedView:
        """Put photos into the index. Needs the token."""
        async with form_of(request, limits, service.held) as form:
            return await service.add(form.photos, _gone(request))

    @app.delete("/api/entries/{key}")
    async def remove(request: Request, key: str) -> Removed:
        """Remove an entry from the index. Needs the token."""
        return Removed(removed=await service.remove(_key(key), _gone(request)))


def _add_pages(app: FastAPI, service: Service, metrics: Metrics) -> None:
    settings, limits, header = service.settings, service.limits, service.store.header
    engine = str(service.store.info()["engine"])

    @app.get("/api/info")
    def info() -> Info:
        """What is served, and what a client may do."""
        return Info(
            name=PurePath(service.store.uri).name,
            entries=len(service.store),
            dim=header.dim,
            model=header.model,
            whitened=header.whitened,
            engine=engine,
            can_write=settings.can_write,
            token_needed=not settings.local,
            limits=LimitsView(**limits.model_dump(include=set(LimitsView.model_fields))),
        )

    @app.get("/health")
    def health() -> Health:
        """That the server works and reaches its index."""
        return Health(status="ok", entries=len(service.store))

    @app.get("/metrics", response_class=Response)
    def numbers() -> Response:
        """What the server counts, for Prometheus."""
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
    """Make every failure a line of JSON."""
    limits = settings.limits

    def answer(kind: type[Exception], tell: Callable[[Any], tuple[int, str, Headers]]) -> None:
        def handle(request: Request, error: Exception) -> JSONResponse:
            status, reason, headers = tell(error)
            return JSONResponse({"error": " ".join(reason.split())}, status, headers)

        app.add_exception_handler(kind, handle)

    answer(AnyHTTPException, lambda e: (e.status_code, str(e.detail), e.headers))
    answer(RequestValidationError, lambda e: (400, _first(e), None))
    answer(BadRequestError, lambda e: (400, str(e), None))
    answer(ImageError, lambda e: (400, str(e), None))
    answer(NoEntryError, lambda e: (404, str(e), None))
    answer(TooManyPixelsError, lambda e: (413, str(e), None))
    answer(
        QueueFullError,
        lambda e: (503, "the server is busy: try again in a second", {"Retry-After": "1"}),
    )
    answer(TooLateError, lambda e: (504, f"this took longer than {limits.seconds:g} s", None))
    answer(ClientGoneError, lambda e: (CLIENT_GONE, "the client has gone", None))
    answer(ClientDisconnect, lambda e: (CLIENT_GONE, "the client has gone", None))


def _first(error: RequestValidationError) -> str:
    first = error.errors()[0]
    return f"{first['loc'][-1]}: {first['msg']}"


def _form(fields: dict[str, Any]) -> dict[str, Any]:
    """A multipart body in the words of OpenAPI."""
    schema = {"type": "object", "properties": fields}
    return {"requestBody": {"content": {"multipart/form-data": {"schema": schema}}}}


def _gone(request: Request) -> Gone:
    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    return gone


def _key(text: str) -> int:
    key = key_in(text)
    if key is None:
        raise NoEntryError(f"{text[:40]!r} is no entry's key")
    return key


def _picture(request: Request, entry: Entry, content: bytes) -> Response:
    """A JPEG file that browsers keep; not sent again to one that has it."""
    if not content:
        raise HTTPException(404, f"there is no picture of {entry.id}")
    tag = f'"{blake2b(content, digest_size=12).hexdigest()}"'
    headers = {"Cache-Control": CACHED, "ETag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type="image/jpeg", headers=headers)


def _screen_photo(entry: Entry) -> bytes:
    try:
        photo = load_image(entry.path, min_side=PHOTO_SIDE)
    except ImageError as error:
        # The reason, without the place on this machine.
        raise HTTPException(404, f"the photo {entry.id} cannot be shown: {error.reason}") from None
    photo.thumbnail((PHOTO_SIDE, PHOTO_SIDE), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    photo.save(file, "JPEG", quality=88)
    return file.getvalue()
