"""The fixture that starts proxies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from epd_proxy.app import Proxy
from epd_proxy.config import Config, Limits, Origin
from tests.integration.proxy.harness import MakeSetup, Setup, serving
from tests.integration.proxy.scripted import Engine, decode, encode


@pytest.fixture
async def setup() -> AsyncIterator[MakeSetup]:
    """Starts a proxy: `await setup(encoders=2, pds=1, api_keys=path, primer=1.0)`; the rest are limits."""
    async with AsyncExitStack() as stack:

        async def make(encoders: int = 1, pds: int = 1, api_keys: Path | None = None, **limits: Any) -> Setup:
            engines = [Engine(encode) for _ in range(encoders)], [Engine(decode) for _ in range(pds)]
            for engine in (*engines[0], *engines[1]):
                await engine.start()
                stack.push_async_callback(engine.stop)
            origins = [tuple(Origin.parse(engine.url) for engine in role) for role in engines]
            proxy = Proxy(Config(*origins, api_keys=api_keys, limits=Limits(**limits)))
            url = await stack.enter_async_context(serving(proxy))
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20))
            return Setup(proxy, client, *engines)

        yield make
