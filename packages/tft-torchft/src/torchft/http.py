"""An HTTP server for IPv6. Law of this file: one class, for servers of the user's own."""

from __future__ import annotations

import socket
from http.server import ThreadingHTTPServer

__all__ = ["_IPv6HTTPServer"]


class _IPv6HTTPServer(ThreadingHTTPServer):
    address_family = socket.AF_INET6
    request_queue_size = 1024
