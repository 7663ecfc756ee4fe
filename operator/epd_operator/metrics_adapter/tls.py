"""The TLS side of the adapter: certificates change while it serves."""

import ssl
import tempfile
from pathlib import Path
from typing import Any

from .certificates import Pair


class Tls:
    """What new connections are met with. `context` is for the listener, and stays the same."""

    def __init__(self) -> None:
        self.context = _server_context()
        self.context.sni_callback = self._choose
        self._current: ssl.SSLContext | None = None

    @property
    def is_ready(self) -> bool:
        """Whether there is a certificate to serve with."""
        return self._current is not None

    def use(self, serving: Pair, authority: str) -> None:
        """From now on serves with a certificate, and accepts client certificates of an authority (PEM) only;
        of nobody where it is empty. Raises ssl.SSLError and ValueError for what is none."""
        context = _server_context()
        with tempfile.TemporaryDirectory() as directory:
            # The ssl module reads files alone.
            file = Path(directory) / "serving.pem"
            file.touch(0o600)
            file.write_bytes(serving.key + serving.certificate)
            context.load_cert_chain(file)
        if authority:
            context.load_verify_locations(cadata=authority)
        self._current = context

    def _choose(self, connection: Any, _name: str | None, _context: ssl.SSLContext) -> int | None:
        if self._current is None:
            return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
        connection.context = self._current
        return None


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Whoever has no certificate may still bring a token.
    context.verify_mode = ssl.CERT_OPTIONAL
    # A resumed session would not be checked again.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    return context
