"""Behaves like `epd-proxy` as far as `epd up` can see: ready when its language engines are, and late in
knowing of an encoder."""

import argparse
import http.server
import itertools
import json
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


ROLES = {name: getattr(options, name) for name in ("encoder", "pd", "prefill", "decode")}
asked = itertools.count()  # since all are ready


def state() -> dict[str, list[dict[str, bool]]]:
    roles = {role: [{"ready": is_ready(url)} for url in urls] for role, urls in ROLES.items()}
    if all(one["ready"] for ones in roles.values() for one in ones) and next(asked) < 3:
        roles["encoder"] = [{"ready": False} for _ in options.encoder]
    return roles


def is_ready(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/ready", timeout=5).close()
    except OSError:
        return False
    return True


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.path in ("/health", "/ready")
        roles = state()
        ready = all(one["ready"] for role, ones in roles.items() for one in ones if role != "encoder")
        body = json.dumps({"roles": roles}).encode()
        self.send_response(404 if not known else 200 if ready else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


server = http.server.ThreadingHTTPServer((options.host, options.port), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    signal.pause()
