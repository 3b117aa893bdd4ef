"""The HTTP interface and the web page: a thin layer over `listwise.search`."""

from listwise.optional import requires

with requires("serve", "the server"):
    import anyio  # noqa: F401
    import fastapi  # noqa: F401
    import h11  # noqa: F401
    import prometheus_client  # noqa: F401
    import python_multipart  # noqa: F401
    import uvicorn  # noqa: F401
