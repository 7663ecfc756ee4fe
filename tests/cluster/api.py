"""The least client of an API server: what readiness needs, without the cost of loading a whole library."""

import base64
import json
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

TIMEOUT_S = 5.0


class Api:
    """Reads through one of the harness' own kubeconfigs (a token, and one authority)."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        self._server: str = cluster["server"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._tls = ssl.create_default_context(cadata=authority)
        self._headers = {"Authorization": f"Bearer {config['users'][0]['user']['token']}"}
        # The environment's HTTP proxy has no way to our address.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self._tls)
        )

    def _open(self, path: str, timeout: float) -> Any:
        return self._opener.open(
            urllib.request.Request(self._server + path, headers=self._headers), timeout=timeout
        )

    def text(self, path: str) -> str:
        """The body of an answer; OSError when there is none or it is an error."""
        with self._open(path, TIMEOUT_S) as answer:
            return str(answer.read().decode())

    def json(self, path: str) -> dict[str, Any]:
        """The body of an answer, parsed."""
        parsed: dict[str, Any] = json.loads(self.text(path))
        return parsed

    def watch(self, path: str, version: str, seconds: int) -> Iterator[dict[str, Any]]:
        """The events after a version, for so long."""
        with self._open(
            f"{path}?watch=1&resourceVersion={version}&timeoutSeconds={seconds}", seconds + TIMEOUT_S
        ) as a:
            for line in a:
                yield json.loads(line)


def healthy(url: str) -> bool:
    """Whether a component's health address on this machine answers 200."""
    # The components' own certificates are self-signed and thrown away with the process.
    tls = ssl._create_unverified_context()
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls)
    )
    try:
        with opener.open(url, timeout=TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
