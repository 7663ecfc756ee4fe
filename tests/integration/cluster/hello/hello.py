"""Says where it runs; with a port as its argument it says so over HTTP."""

import http.server
import socket
import sys


class Hello(http.server.BaseHTTPRequestHandler):
    """The name of the pod to everyone who asks."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"hello from {socket.gethostname()}\n".encode())


print(f"hello from {socket.gethostname()}")
if len(sys.argv) > 1:
    http.server.ThreadingHTTPServer(("", int(sys.argv[1])), Hello).serve_forever()
