"""Behaves like `epd-engine serve` as far as `epd up` can see; its environment says what goes wrong."""

import argparse
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["serve"])
parser.add_argument("model")
for flag in ("--host", "--served-model-name", "--ec-transfer-config", "--drain-timeout"):
    parser.add_argument(flag, required=True)
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--greeting", default="hello")
options = parser.parse_args()
transfer = json.loads(options.ec_transfer_config)

if reason := os.environ.get("STANDIN_FAIL"):
    sys.exit(f"cannot start: {reason}")
if os.environ.get("STANDIN_GRANDCHILD"):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
if os.environ.get("STANDIN_STUBBORN"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
# A file whose presence holds readiness back: the test decides when the engine is ready.
gate = Path(os.environ.get("STANDIN_GATE", "/nonexistent"))


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(503 if self.path == "/ready" and gate.exists() else 200)

    def answer(self, status: int) -> None:
        body = json.dumps({"argv": sys.argv, "threads": os.environ.get("OMP_NUM_THREADS")}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


store = Path(transfer["ec_connector_extra_config"]["shared_storage_path"])
(store / f"{transfer['ec_role']}-was-here").touch()
print(f"{options.greeting} from {transfer['ec_role']}")
server = http.server.ThreadingHTTPServer((options.host, options.port), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    signal.pause()
