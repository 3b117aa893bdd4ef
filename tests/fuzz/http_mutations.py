"""Requests to a server as bytes, and random damage to them."""

import json

import numpy as np

BOUNDARY = b"----fuzz"
METHODS = [
    b"GET",
    b"HEAD",
    b"POST",
    b"PUT",
    b"DELETE",
    b"OPTIONS",
    b"TRACE",
    b"CONNECT",
    b"get",
    b"",
]
LENGTHS = [
    b"0",
    b"1",
    b"-1",
    b"+5",
    b"1e3",
    b"0x10",
    b"99999999999999999999",
    b"5, 6",
    b"",
    b"\xb2",
]
PATHS = [
    b"/api/../../etc/passwd",
    b"/%00",
    b"/%ff%fe",
    b"//",
    b"*",
    b"http://other/health",
    b"/?" * 99,
]
PATHS += [
    b"/" + b"a" * 70_000,
    b"/static/%2e%2e/app.py",
    b"/api/entries?start=-1",
    b"/api/entries/%2f",
]
LINES = [b"X: a\r\n folded", b"X : a", b": a", b"X", b"X: \x00", b"X: a\rX-Injected: 1", b"X: \xff"]
LINES += [b"Expect: 100-continue", b"Upgrade: websocket\r\nConnection: Upgrade", b"Upgrade: h2c"]
LINES += [b"Host: other", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: identity"]
LINES += [b"X: " + b"a" * 100_000, b"\r\n".join(b"X%d: a" % i for i in range(2000))]
INJECTIONS = [b"\r\nX-Injected: 1\r\n", b"%0d%0aX-Injected:%201", b"\nX-Injected: 1", b"\r\n\r\n"]
VALUES = [
    b"",
    b"-1",
    b"NaN",
    b"[",
    b"[" * 20_000,
    b'["1"]',
    b"[[0,0,1e400,1]]",
    b"\xff\x00",
    b"null",
]


def request(method: str, path: str, token: str, body: bytes = b"", kind: bytes = b"") -> bytes:
    """A valid request, after which the server closes the connection."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
    lines += [f"Authorization: Bearer {token}"]
    head = "\r\n".join(lines).encode()
    if body:
        head += b"\r\nContent-Type: " + kind + b"\r\nContent-Length: %d" % len(body)
    return head + b"\r\n\r\n" + body


def form(path: str, token: str, photos: list[bytes], fields: dict[str, bytes]) -> bytes:
    """A valid request with a form."""
    body = b""
    for photo in photos:
        disposition = b'Content-Disposition: form-data; name="photos"; filename="a.jpg"'
        body += b"--" + BOUNDARY + b"\r\n" + disposition + b"\r\n\r\n" + photo + b"\r\n"
    for name, value in fields.items():
        disposition = b'Content-Disposition: form-data; name="%s"' % name.encode()
        body += b"--" + BOUNDARY + b"\r\n" + disposition + b"\r\n\r\n" + value + b"\r\n"
    body += b"--" + BOUNDARY + b"--\r\n"
    return request("POST", path, token, body, b"multipart/form-data; boundary=" + BOUNDARY)


def valid_requests(photos: list[bytes], key: str, token: str) -> list[bytes]:
    """Searches by photo and by key, lists, pages, pictures, an addition and a removal."""
    keys = json.dumps([key]).encode()
    paths = ["/", "/health", "/metrics", "/docs", "/openapi.json", "/static/main.js", "/api/info"]
    paths += ["/api/entries", "/api/entries?start=3&count=7", f"/api/entries/{key}"]
    paths += [f"/api/entries/{key}/{what}" for what in ("similar?k=3", "thumbnail", "photo")]
    return [
        *(request("GET", path, token) for path in paths),
        request("DELETE", "/api/entries/123", token),
        form("/api/search", token, photos[:1], {}),
        form("/api/search", token, photos[:1], {"k": b"3", "boxes": b"[[1, 2, 30, 40]]"}),
        form("/api/search", token, photos[:2], {"expand": b"true", "rerank": b"true"}),
        form("/api/search", token, [], {"keys": keys, "k": b"2"}),
        form("/api/entries", token, photos[:1], {}),
    ]


def pick(choices: list[bytes], generator: np.random.Generator) -> bytes:
    return choices[int(generator.integers(len(choices)))]


def damage(valid: list[bytes], generator: np.random.Generator) -> bytes:
    """One of the requests, or several in a row, with one to three random damages."""
    content = pick(valid, generator)
    for _ in range(int(generator.integers(1, 4))):
        if generator.random() < 0.3:
            content = damage_bytes(content, valid, generator)
        else:
            content = damage_parts(content, generator)
    return content


def damage_bytes(content: bytes, valid: list[bytes], generator: np.random.Generator) -> bytes:
    """Flip bits anywhere or in the header, cut the request off, or send others after it."""
    match int(generator.integers(0, 4)):
        case 0:
            return flip_bits(content, generator)
        case 1:
            head, end, body = content.partition(b"\r\n\r\n")
            return flip_bits(head, generator) + end + body
        case 2:
            return content[: int(generator.integers(1, len(content) + 1))]
        case _:
            kept = content.replace(b"Connection: close\r\n", b"")
            return kept * int(generator.integers(1, 6)) + pick(valid, generator)


def damage_parts(content: bytes, generator: np.random.Generator) -> bytes:
    """Change the lines of the header, or how the body is sent."""
    head, end, body = content.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    place = int(generator.integers(1, len(lines) + 1))
    match int(generator.integers(0, 8)):
        case 0:
            lines.insert(place, pick(lines, generator))
        case 1:
            lines.insert(place, pick(LINES, generator))
        case 2:
            lines.insert(place, b"Content-Length: " + pick(LENGTHS, generator))
        case 3:
            lengths = [*LENGTHS, b"%d" % (len(body) + 9), b"%d" % max(0, len(body) - 9)]
            lines = [*without_length(lines), b"Content-Length: " + pick(lengths, generator)]
        case 4:
            lines = [*without_length(lines), b"Transfer-Encoding: chunked"]
            body = chunked(body, generator)
        case 5:
            method, _, rest = lines[0].partition(b" ")
            version = pick([b"", b" HTTP/1.1", b" HTTP/0.9", b" HTTP/2.0"], generator)
            other = method + b" " + pick(PATHS, generator) + version
            lines[0] = pick([pick(METHODS, generator) + b" " + rest, other], generator)
        case 6:
            line = int(generator.integers(0, len(lines)))
            at = int(generator.integers(0, len(lines[line]) + 1))
            injected = pick(INJECTIONS, generator)
            lines[line] = lines[line][:at] + injected + lines[line][at:]
        case _:
            name = pick([b"k", b"boxes", b"keys", b"expand", b"other", b"photos"], generator)
            part = b'Content-Disposition: form-data; name="' + name + b'"\r\n\r\n'
            body = b"\r\n".join([b"--" + BOUNDARY, part + pick(VALUES, generator), body])
            lines = [*without_length(lines), b"Content-Length: %d" % len(body)]
    return b"\r\n".join(lines) + end + body


def without_length(lines: list[bytes]) -> list[bytes]:
    return [line for line in lines if not line.startswith(b"Content-Length")]


def flip_bits(content: bytes, generator: np.random.Generator) -> bytes:
    """Flip one to eight bits."""
    damaged = bytearray(content or b"\0")
    for place in generator.integers(0, len(damaged), int(generator.integers(1, 9))):
        damaged[int(place)] ^= 1 << int(generator.integers(0, 8))
    return bytes(damaged)


def chunked(body: bytes, generator: np.random.Generator) -> bytes:
    """A body in chunks, of which some have a wrong length, and which may be cut off."""
    sent = b""
    while body:
        size = int(generator.integers(1, 4000))
        chunk, body = body[:size], body[size:]
        wrong = [b"0", b"-1", b"ffffffffffffffff", b"zz", b"%x;a=b" % len(chunk), b""]
        length = b"%x" % len(chunk)
        if generator.random() < 0.1:
            length = wrong[int(generator.integers(len(wrong)))]
        sent += length + b"\r\n" + chunk + b"\r\n"
    sent += b"0\r\n\r\n"
    return sent if generator.random() < 0.5 else sent[: int(generator.integers(0, len(sent)))]
