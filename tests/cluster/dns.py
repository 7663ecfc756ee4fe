"""Keeps a file of DNS records in step with the cluster's services, for dnsmasq to answer from."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from .api import Api

WATCH_S = 300
RETRY_S = 0.5
Key = tuple[str, str]
Objects = dict[Key, dict[str, Any]]


class Records:
    """Services and endpoints as last seen, and the file made of them."""

    def __init__(self, file: Path, server_pid: Path, domain: str) -> None:
        self._file = file
        self._server_pid = server_pid
        self._domain = domain
        self._lock = threading.Lock()
        self._objects: dict[str, Objects] = {"services": {}, "endpoints": {}}

    def replace(self, kind: str, objects: Objects) -> None:
        """All objects of a kind."""
        with self._lock:
            self._objects[kind] = objects
            self._write()

    def change(self, kind: str, key: Key, value: dict[str, Any] | None) -> None:
        """One object of a kind, or its end."""
        with self._lock:
            if value is None:
                self._objects[kind].pop(key, None)
            else:
                self._objects[kind][key] = value
            self._write()

    def lines(self) -> list[str]:
        """A service's own address; of one without, those of its ready endpoints."""
        lines = []
        for (namespace, name), service in sorted(self._objects["services"].items()):
            address = service["spec"].get("clusterIP")
            addresses = [address] if address not in (None, "", "None") else self._endpoints((namespace, name))
            lines += [f"{one} {name}.{namespace}.svc.{self._domain}" for one in addresses]
        return lines

    def _endpoints(self, key: Key) -> list[str]:
        subsets = self._objects["endpoints"].get(key, {}).get("subsets") or []
        return [address["ip"] for subset in subsets for address in subset.get("addresses") or []]

    def _write(self) -> None:
        text = "".join(f"{line}\n" for line in self.lines())
        if self._file.read_text() == text:
            return
        partial = self._file.with_suffix(".partial")
        partial.write_text(text)
        partial.rename(self._file)
        try:
            os.kill(int(self._server_pid.read_text()), signal.SIGHUP)
        except (OSError, ValueError) as error:
            # It reads the file when it starts, too.
            print(f"the server was not told: {error}", flush=True)


def follow(api: Api, kind: str, records: Records) -> None:
    """Lists and watches one kind for ever."""
    path = f"/api/v1/{kind}"
    while True:
        try:
            listed = api.json(path)
            records.replace(kind, {_key(one): one for one in listed["items"]})
            for event in api.watch(path, listed["metadata"]["resourceVersion"], WATCH_S):
                if event["type"] == "ERROR":
                    break
                gone = event["type"] == "DELETED"
                records.change(kind, _key(event["object"]), None if gone else event["object"])
        except (OSError, ValueError) as error:
            print(f"{kind}: {error}; listing again", flush=True)
            time.sleep(RETRY_S)


def _key(resource: dict[str, Any]) -> Key:
    return resource["metadata"]["namespace"], resource["metadata"]["name"]


def main(kubeconfig: str, file: str, server_pid: str, domain: str) -> None:
    """`python -m tests.cluster.dns KUBECONFIG FILE PIDFILE DOMAIN`."""
    records = Records(Path(file), Path(server_pid), domain)
    for kind in ("services", "endpoints"):
        threading.Thread(target=follow, args=(Api(Path(kubeconfig)), kind, records)).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
