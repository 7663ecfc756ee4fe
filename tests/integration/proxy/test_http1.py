"""The HTTP client against a server of raw bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from epd_proxy import http1
from epd_proxy.config import Origin
from epd_proxy.http1 import Client, Disconnected, Garbled, Unreachable

Session = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Every connection is served by `session`; `connections` counts them."""

    def __init__(self) -> None:
        self.connections = 0
        self.session: Session
        self.requests: list[bytes] = []

    async def read(self, reader: asyncio.StreamReader) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        self.requests.append(head + await reader.readexactly(length))

    def says(self, *pieces: bytes, close: bool = False) -> None:
        """Each request of a connection gets `pieces`, one write each."""

        async def session(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                await self.read(reader)
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if close:
                    writer.close()
                    return

        self.session = session

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self.session(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.listener = listener
    server.origin = Origin.parse(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    yield server
    listener.close()


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    client = Client(1.0)
    yield client
    client.close()


async def ask(client: Client, server: Server, body=(b"{}",)) -> tuple[int, bytes]:
    with await client.request(server.origin, "POST", "/x", [(b"a", b"b")], list(body)) as reply:
        return reply.status, await reply.read(1 << 20)


async def test_a_request_is_one_head_and_its_pieces(server, client):
    server.says(OK)
    assert await ask(client, server, (b"one", memoryview(b"two" * 10000))) == (200, b"ok")
    host = server.origin.url.removeprefix("http://").encode()
    head = b"POST /x HTTP/1.1\r\nhost: " + host + b"\r\na: b\r\ncontent-length: 30003\r\n\r\n"
    assert server.requests == [head + b"one" + b"two" * 10000]


async def test_a_finished_connection_is_used_again(server, client):
    server.says(OK)
    for _ in range(3):
        await ask(client, server)
    assert server.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok" + b"HTTP/1.1 200 OK\r\n",
    ],
)
async def test_a_connection_that_will_close_or_says_too_much_is_not_used_again(server, client, answer):
    server.says(answer)
    for _ in range(2):
        assert await ask(client, server) == (200, b"ok")
    assert server.connections == 2


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_chunked_answers_in_any_pieces(server, client, size):
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    server.says(*(answer[at : at + size] for at in range(0, len(answer), size)))
    for _ in range(2):
        assert await ask(client, server) == (200, b"abcde")
    assert server.connections == 1


async def test_an_answer_without_a_length_ends_with_its_connection(server, client):
    server.says(b"HTTP/1.1 200 OK\r\n\r\nabc", b"de", close=True)
    assert await ask(client, server) == (200, b"abcde")


async def test_an_interim_answer_is_passed_over(server, client):
    server.says(b"HTTP/1.1 100 Continue\r\n\r\n" + OK)
    assert await ask(client, server) == (200, b"ok")


async def test_an_answer_before_the_whole_request_was_read(server, client):
    async def refuses(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        await writer.drain()
        await reader.read()

    server.session = refuses
    assert await ask(client, server, (b"x" * 5_000_000,)) == (413, b"no")


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: " + b"b" * 70_000 + b"\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_garbled(server, client, answer):
    server.says(answer)
    with pytest.raises(Garbled):
        await ask(client, server)


async def test_a_body_over_the_bound_is_garbled(server, client):
    server.says(b"HTTP/1.1 200 OK\r\ncontent-length: 2000000\r\n\r\n" + b"x" * 2_000_000)
    with pytest.raises(Garbled, match="more than 1048576 bytes"):
        await ask(client, server)


async def test_a_connection_lost_before_the_answer_and_in_its_middle_are_told_apart(server, client):
    server.says(close=True)
    with pytest.raises(Disconnected) as lost:
        await ask(client, server)
    assert not lost.value.started
    server.says(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", close=True)
    with pytest.raises(Disconnected) as lost:
        await ask(client, server)
    assert lost.value.started


async def test_what_arrived_before_the_loss_is_handed_out_first(server, client):
    server.says(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", close=True)
    with await client.request(server.origin, "GET", "/", []) as reply:
        assert await reply.chunk() == b"ok"
        with pytest.raises(Disconnected):
            await reply.chunk()


async def test_a_kept_connection_that_went_stale_is_replaced_once(server, client):
    async def once(reader, writer):
        await server.read(reader)
        writer.write(OK)
        await server.read(reader)  # the second request meets a closing server
        writer.transport.abort()

    server.session = once
    for _ in range(3):
        assert await ask(client, server) == (200, b"ok")
    assert server.connections == 3

    async def never(reader, writer):
        await server.read(reader)
        writer.transport.abort()

    server.session = never
    with pytest.raises(Disconnected):
        await ask(client, server)
    assert server.connections == 4


async def test_a_server_that_dies_on_a_kept_connection_was_not_merely_unreachable(server, client):
    async def dies(reader, writer):
        await server.read(reader)
        writer.write(OK)
        await server.read(reader)
        server.listener.close()
        await asyncio.sleep(0)
        writer.transport.abort()

    server.session = dies
    await ask(client, server)
    with pytest.raises(Disconnected):
        await ask(client, server)


async def test_an_idle_connection_is_dropped_before_the_server_does(server, client, monkeypatch):
    monkeypatch.setattr(http1, "IDLE_SECONDS", 0.0)
    server.says(OK)
    await ask(client, server)
    await asyncio.sleep(0.01)
    await ask(client, server)
    assert server.connections == 2
    assert http1.IDLE_SECONDS < 5


async def test_nobody_listening_is_unreachable(client):
    with pytest.raises(Unreachable):
        await client.request(Origin.parse("http://127.0.0.1:1"), "GET", "/", [])


async def test_a_slow_reader_holds_the_server_back(server, client):
    written = 0

    async def flood(reader, writer):
        nonlocal written
        await server.read(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()
            written += 65536

    server.session = flood
    with await client.request(server.origin, "GET", "/", []) as reply:
        before = -1
        while before != written:  # until the server has come to a stop
            before = written
            for _ in range(200):
                await asyncio.sleep(0)
            await asyncio.sleep(0.02)
        assert written < 64 << 20
        stopped = written
        for _ in range(64):
            await reply.chunk()
            await asyncio.sleep(0)
        while written == stopped:
            await reply.chunk()
