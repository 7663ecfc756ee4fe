"""A janitor's /usage, as far as the operator can see one: what it answers is the test's to say."""

import http.server
import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PORT = 8000


class Janitor:
    """Answers at an address of this host that is nobody else's."""

    def __init__(self) -> None:
        self.answer: object = {"bytes": 0, "entries": 0, "capacity": 9 << 30}
        self.asked = 0
        janitor = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                janitor.asked += 1
                body = json.dumps(janitor.answer).encode()
                self.send_response(200 if self.path == "/usage" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = _server(Handler)
        self.address = str(self.server.server_address[0])


def _server(handler: type[http.server.BaseHTTPRequestHandler]) -> http.server.ThreadingHTTPServer:
    """All of 127.0.0.0/8 is this host."""
    while True:
        address = f"127.{random.randint(1, 250)}.{random.randint(1, 250)}.{random.randint(2, 250)}"
        try:
            return http.server.ThreadingHTTPServer((address, PORT), handler)
        except OSError:  # somebody listens at all addresses, or at just this one
            continue


@contextmanager
def answering() -> Iterator[Janitor]:
    """A janitor that answers while inside."""
    janitor = Janitor()
    thread = threading.Thread(target=janitor.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield janitor
    finally:
        janitor.server.shutdown()
        janitor.server.server_close()
        thread.join()
