"""The fixture that starts proxies."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from epd_proxy.app import Proxy
from epd_proxy.config import Config, Limits, Origin
from tests.integration.proxy.harness import MakeSetup, Setup, serving
from tests.integration.proxy.scripted import Engine, decode, encode, prefill

HANDLERS = {"encoder": encode, "pd": decode, "prefill": prefill, "decode": decode}


@pytest.fixture
async def setup() -> AsyncIterator[MakeSetup]:
    """Starts a proxy: `await setup(encoders=2, pds=1, api_keys=path, primer=1.0)`; the rest are limits.

    With `prefills=1, decodes=1` these stand in the place of PDs.
    """
    async with AsyncExitStack() as stack:

        async def make(
            encoders: int = 1,
            pds: int | None = None,
            prefills: int = 0,
            decodes: int = 0,
            api_keys: Path | None = None,
            **limits: Any,
        ) -> Setup:
            counts = {"encoder": encoders, "prefill": prefills, "decode": decodes}
            counts["pd"] = pds if pds is not None else int(not prefills)
            engines = {role: [Engine(HANDLERS[role]) for _ in range(n)] for role, n in counts.items()}
            for engine in itertools.chain(*engines.values()):
                await engine.start()
                stack.push_async_callback(engine.stop)
            origins = {
                role: tuple(Origin.parse(one.url) for one in ones) for role, ones in engines.items() if ones
            }
            proxy = Proxy(Config(origins, api_keys=api_keys, limits=Limits(**limits)))
            url = await stack.enter_async_context(serving(proxy))
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20))
            return Setup(
                proxy, client, engines["encoder"], engines["pd"], engines["prefill"], engines["decode"]
            )

        yield make
