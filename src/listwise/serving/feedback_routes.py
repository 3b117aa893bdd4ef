"""The addresses of marks, labels, classes and suggestions."""

from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response

from listwise.serving.feedback import Feedback, MarkRequest
from listwise.serving.feedback_views import (
    Classes,
    Labelled,
    MarksAdded,
    MarksPage,
    Suggestions,
    Unmarked,
)
from listwise.serving.fields import (
    DIFFERENT,
    LONGEST_NAME,
    MARKS,
    SAME,
    BadRequestError,
    K,
    box_in,
    check_fields,
    class_in,
    form_fields,
    listed_keys,
    marked_keys,
    name_in,
    ranks_in,
)
from listwise.serving.routing import JPEG, client_of, form_body, jpeg, key_of
from listwise.serving.service import Service
from listwise.serving.uploads import Form, read_form

SUGGESTIONS = 20
"""Default number of suggested pairs."""
MOST_SUGGESTIONS = 200
CSV: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/csv": {}}, "description": "A table with the columns path and label."}
}
MARK_FORM: dict[str, Any] = {
    "box": {
        "type": "string",
        "description": "JSON list: the part of the photo that was searched for, [x0, y0, x1, y1] "
        "in pixels of the upright photo.",
        "examples": ["[10, 20, 300, 400]"],
    },
    "entry": {
        "type": "string",
        "description": "The key of the entry that was searched for, instead of a photo.",
    },
    "same": SAME,
    "different": DIFFERENT,
    "by": {
        "type": "string",
        "maxLength": LONGEST_NAME,
        "description": "The name of the person who marks.",
    },
    "ranks": {
        "type": "string",
        "description": "JSON object: the places of marked entries in the results, from 1.",
        "examples": ['{"123": 1, "456": 7}'],
    },
}
LABEL_FORM: dict[str, Any] = {
    "name": {
        "type": "string",
        "maxLength": LONGEST_NAME,
        "description": "The name of the class; without it, the label is removed. It must not begin "
        "with =, +, - or @.",
    },
    "keys": SAME | {"description": f"Keys of entries, separated by commas; at most {MARKS}."},
}


def add_feedback(app: FastAPI, service: Service) -> None:
    """Add the addresses to an app."""
    feedback = Feedback(service)
    _add_marks(app, service, feedback)
    _add_mark(app, service, feedback)
    _add_classes(app, service, feedback)


def _add_marks(app: FastAPI, service: Service, feedback: Feedback) -> None:
    limits = service.limits
    photos = form_fields(limits)["photos"] | {"maxItems": 1, "description": "The query photo."}
    body = form_body({"photos": photos} | MARK_FORM)

    @app.post("/api/marks", openapi_extra=body)
    async def mark(request: Request) -> MarksAdded:
        """Store which results of a query show the same thing, and which do not.

        Requires the token. The query is a photo, which is kept, or an entry.
        """
        client = client_of(request)
        room = partial(service.check_write_room, client)
        async with read_form(request, limits, service.held, room) as form:
            return await feedback.mark(mark_request(form), client)

    @app.get("/api/marks")
    async def marks(
        request: Request,
        start: Annotated[int, Query(ge=0, le=2**31)] = 0,
        count: Annotated[int, Query(ge=1, le=limits.results)] = min(K, limits.results),
        entry: Annotated[str | None, Query(description="Only marks of this query.")] = None,
    ) -> MarksPage:
        """List the marks, the latest first, and the conflicts."""
        key = None if entry is None else key_of(entry)
        return await feedback.marks(start, count, key, client_of(request))

    @app.get("/api/marks/labels", response_class=Response, responses=CSV)
    async def labels(request: Request) -> Response:
        """Return the classes of marks and labels as a table for training. Requires the token.

        The paths are those on the machine of the server.
        """
        text = await feedback.table(client_of(request))
        name = {"Content-Disposition": 'attachment; filename="labels.csv"'}
        return Response(text, media_type="text/csv", headers=name)


def _add_mark(app: FastAPI, service: Service, feedback: Feedback) -> None:
    @app.delete("/api/marks/{id}")
    async def unmark(request: Request, id: str) -> Unmarked:
        """Undo a mark; the history keeps it. Requires the token."""
        return Unmarked(undone=await feedback.unmark(id, client_of(request)))

    @app.get("/api/marks/{id}/photo", response_class=Response, responses=JPEG)
    async def query_photo(request: Request, id: str) -> Response:
        """Return a small JPEG file of the query photo of a mark."""
        return jpeg(request, await feedback.photo(id, client_of(request)))


def _add_classes(app: FastAPI, service: Service, feedback: Feedback) -> None:
    limits = service.limits
    body = form_body(LABEL_FORM, required=["keys"])

    @app.post("/api/labels", openapi_extra=body)
    async def label(request: Request) -> Labelled:
        """Name the class of entries in their attribute `label`. Requires the token."""
        client = client_of(request)
        room = partial(service.check_write_room, client)
        async with read_form(request, limits, service.held, room) as form:
            check_fields(form, list(LABEL_FORM))
            keys = listed_keys("keys", form.fields.get("keys", ""))
            if form.photos or not keys:
                raise BadRequestError("nothing to label: send keys of entries, and no photos")
            name = class_in("name", form.fields.get("name", ""))
            return Labelled(labelled=await feedback.label(name, keys, client))

    @app.get("/api/classes")
    async def classes(
        request: Request,
        start: Annotated[int, Query(ge=0, le=2**31)] = 0,
        count: Annotated[int, Query(ge=1, le=limits.results)] = min(K, limits.results),
    ) -> Classes:
        """List the classes of labels and marks, with their progress."""
        return await feedback.classes(start, count, client_of(request))

    @app.get("/api/suggestions")
    async def suggestions(
        request: Request,
        count: Annotated[int, Query(ge=1, le=MOST_SUGGESTIONS)] = SUGGESTIONS,
    ) -> Suggestions:
        """List pairs of entries for which it is most unclear whether they show the same thing."""
        return await feedback.suggestions(count, client_of(request))


def mark_request(form: Form) -> MarkRequest:
    """The marks that a form describes.

    Raises:
        BadRequestError: a field is wrong; the message names it.
    """
    fields = form.fields
    check_fields(form, ["photos", *MARK_FORM])
    entry = fields.get("entry", "")
    if "photos" in fields:
        raise BadRequestError("photos are files: send them with a file name (curl -F photos=@FILE)")
    if len(form.photos) + bool(entry) != 1:
        raise BadRequestError("send the query: one photo, or the key of an entry")
    box = box_in(fields.get("box", ""))
    if box is not None and entry:
        raise BadRequestError("box is a part of a photo: send the photo instead of entry")
    same, different = marked_keys(fields.get("same", ""), fields.get("different", ""))
    if not same and not different:
        raise BadRequestError("nothing to mark: send same or different")
    return MarkRequest(
        form.photos[0] if form.photos else None,
        box,
        key_of(entry) if entry else None,
        same,
        different,
        name_in("by", fields.get("by", "")),
        ranks_in(fields.get("ranks", "")),
    )
