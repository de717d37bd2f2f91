"""A small HTTP server of this process that answers as a test says."""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # five, the default, are fewer than a fleet connects at once

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # the other side has given up: nothing to print
            super().handle_error(request, client_address)


Answer = Callable[[str, Any, bytes], tuple[int, bytes] | tuple[int, bytes, Mapping[str, str]]]
"""Path, headers and body of a request → status, body and headers."""


@contextmanager
def http_server(answer: Answer, headers: Mapping[str, str] | None = None) -> Iterator[str]:
    """Its address; ``headers`` go with every answer."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            status, body, *own = answer(self.path, self.headers, self.rfile.read(int(self.headers.get("Content-Length") or 0)))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {}), **(own[0] if own else {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_HEAD = _answer

        def log_message(self, *_: object) -> None: ...

    with QuietServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
