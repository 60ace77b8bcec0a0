"""A Hub that has nothing, for several files of tests."""

import http.server
import threading
from types import SimpleNamespace

import pytest


@pytest.fixture
def server():
    """An HTTP server on loopback that has no such repository; `asked` are the paths that were asked of it."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True).start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{listening.server_port}", asked=asked)
    listening.shutdown()
    listening.server_close()
