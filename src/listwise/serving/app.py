"""The HTTP interface: search, entries, health and metrics, and the page that uses them."""

import asyncio
import io
import json
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path, PurePath
from typing import Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from PIL import Image
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from listwise import __version__
from listwise.data.images import Box, TooManyPixelsError, load_image
from listwise.errors import InputError
from listwise.search.index import Entry
from listwise.serving.batching import Batcher, ClientGoneError, QueueFullError, TooLateError
from listwise.serving.engine import Asked, Engine, ToRerank
from listwise.serving.guard import CONTENT_POLICY, Guard
from listwise.serving.metrics import Metrics
from listwise.serving.reference import STYLE_POLICY, reference_page
from listwise.serving.searcher import Hit, NoEntryError, Searcher
from listwise.serving.settings import Limits, ServeSettings
from listwise.serving.shared import SharedIndex
from listwise.serving.store import Store, Stored
from listwise.serving.uploads import Form, Held, Upload, form_of
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
CACHED = "private, max-age=3600"
CLIENT_GONE = 499
K = 60
