"""Behaves like `epd-proxy` as far as `epd up` can see: ready when all its engines are."""

import argparse
import http.server
import signal
import sys
import threading
import urllib.request

parser = argparse.ArgumentParser()
parser.add_argument("--host", required=True)
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--drain-timeout", type=float, required=True)
parser.add_argument("--encoder", action="append", required=True)
for role in ("--pd", "--prefill", "--decode"):
    parser.add_argument(role, action="append", default=[])
options = parser.parse_args()
if not (options.pd or (options.prefill and options.decode)):
    parser.error("--pd, or --prefill and --decode")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def engines_are_ready() -> bool:
    for url in (*options.encoder, *options.pd, *options.prefill, *options.decode):
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5).close()
        except OSError:
            return False
    return True


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.path in ("/health", "/ready")
        self.send_response(404 if not known else 200 if engines_are_ready() else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


server = http.server.ThreadingHTTPServer((options.host, options.port), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    signal.pause()
