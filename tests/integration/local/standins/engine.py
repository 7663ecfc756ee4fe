"""Behaves like `epd-engine serve` and `epd-engine store janitor` as far as `epd up` can see; its environment
says what goes wrong."""

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
commands = parser.add_subparsers(dest="command", required=True)
serve = commands.add_parser("serve")
serve.add_argument("model")
for flag in ("--served-model-name", "--drain-timeout"):
    serve.add_argument(flag, required=True)
for flag in ("--ec-transfer-config", "--kv-transfer-config"):
    serve.add_argument(flag, type=json.loads, default={})
serve.add_argument("--greeting", default="hello")
janitor = commands.add_parser("store").add_subparsers(required=True).add_parser("janitor")
for flag in ("--path", "--memory-path", "--capacity", "--ttl"):
    janitor.add_argument(flag)
for command in (serve, janitor):
    command.add_argument("--host", required=True)
    command.add_argument("--port", type=int, required=True)
options = parser.parse_args()

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


if options.command == "serve":
    transfer, kv = options.ec_transfer_config, options.kv_transfer_config
    name, greeting = kv.get("kv_role") or transfer["ec_role"], options.greeting
    extra = transfer.get("ec_connector_extra_config", {})
    tiers = [extra.get("storage", extra), extra.get("memory", extra)]
    stores = [
        tier[key] for tier, key in zip(tiers, ("shared_storage_path", "path"), strict=True) if key in tier
    ]
    if kv:
        stores.append(kv["kv_connector_extra_config"]["shared_storage_path"])
else:
    name, greeting = "janitor", "hello"
    stores = [path for path in (options.path, options.memory_path) if path]
for store in stores:
    Path(store).mkdir(exist_ok=True)
    (Path(store) / f"{name}-was-here").touch()
print(f"{greeting} from {name}")
server = http.server.ThreadingHTTPServer((options.host, options.port), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    signal.pause()
