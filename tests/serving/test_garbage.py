"""Memory of requests is freed when they end, without a search for garbage."""

import asyncio
import gc
import signal
import socket
import sys
import weakref

import uvicorn
from fastapi import FastAPI, Request

from listwise.serving.server import run_server
from listwise.serving.settings import Limits
from listwise.serving.uploads import HeldBytes, read_form

BODY = (
    b'--b\r\nContent-Disposition: form-data; name="photos"; filename="a.jpg"\r\n\r\n'
    b"content\r\n--b--\r\n"
)


async def read_photo():
    """Read a form, and return a weak reference to its photo."""

    async def receive():
        return {"type": "http.request", "body": BODY, "more_body": False}

    headers = [(b"content-type", b"multipart/form-data; boundary=b")]
    request = Request({"type": "http", "headers": headers, "client": None}, receive)
    async with read_form(request, Limits(), HeldBytes(1000, 1000), lambda: None) as form:
        assert form.photos[0].read() == b"content"
        return weakref.ref(form.photos[0])


def test_photos_of_a_request_are_freed_with_it():
    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(read_photo())() is None
    finally:
        gc.enable()


def test_a_server_searches_for_garbage_as_often_as_python_does(monkeypatch):
    found = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: found.append(gc.get_threshold()))
    usual, interval = gc.get_threshold(), sys.getswitchinterval()
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    gc.set_threshold(10_000)  # as in a command
    try:
        with socket.socket() as listening:
            run_server(FastAPI(), listening, Limits())
    finally:
        gc.set_threshold(*usual)
        sys.setswitchinterval(interval)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert found[0][0] < 1000
