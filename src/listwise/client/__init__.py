"""A client for servers that `listwise serve` starts. It needs only the standard library."""

from listwise.client.client import Client, ServerError

__all__ = ["Client", "ServerError"]
