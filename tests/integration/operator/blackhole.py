"""A way to the API server that can stop passing anything on, without closing a connection."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import yaml

CHUNK = 65536


class Blackhole:
    """A forwarder on this host; `kubeconfig` leads through it."""

    def __init__(self, kubeconfig: Path, directory: Path) -> None:
        document = yaml.safe_load(kubeconfig.read_text())
        cluster = document["clusters"][0]["cluster"]
        address = urlsplit(cluster["server"])
        self._target = address.hostname, address.port
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        port = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        cluster["server"] = f"https://127.0.0.1:{port}"
        self.kubeconfig = directory / "through-the-blackhole"
        self.kubeconfig.write_text(yaml.safe_dump(document))

    @contextmanager
    def swallowing(self) -> Iterator[None]:
        """Connections stay open, new ones are accepted, and nothing comes through."""
        self._loop.call_soon_threadsafe(self._open.clear)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._open.set)

    def close(self) -> None:
        """Ends it; connections die with it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _listen(self) -> int:
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._target)
        await asyncio.gather(self._pass(reader, back), self._pass(there, writer), return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(CHUNK):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()
