"""The HTTP server of a node's metrics and health."""
from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

log = logging.getLogger("bpsfast.node")

#: Timeout of a client that sends nothing.
_CLIENT_TIMEOUT_S = 10.0


class MetricsServer(ThreadingMixIn, TCPServer):
    """An HTTP server until `end`. It answers each GET with what *answer* (path, Accept) returns in a thread of its own.

    *answer* returns status, content type and body, and raises nothing.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, answer: Callable[[str, str], tuple[int, str, bytes]]) -> None:
        self.answer = answer
        self.address_family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM,
                                                 flags=socket.AI_PASSIVE)[0][0]
        super().__init__((host, port), _Handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="bpsfast-metrics", daemon=True)
        self._thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log only for debugging: a client may close its connection before it has its answer."""
        log.debug("a question for numbers failed", exc_info=True)

    def end(self) -> None:
        """Stop serving, and free the port."""
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    timeout = _CLIENT_TIMEOUT_S
    server: MetricsServer

    def do_GET(self) -> None:
        """Answer a question."""
        code, kind, body = self.server.answer(self.path.partition("?")[0], self.headers.get("Accept", ""))
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *values: Any) -> None:
        """Log no line for each question."""
