"""Following EndpointSlices when the API server does what a real one cannot be asked to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from epd_proxy import apiserver, discovery
from epd_proxy.discovery import Discovery
from epd_proxy.metrics import Metrics
from epd_proxy.pool import Pool
from tests.integration.proxy.harness import until
from tests.integration.proxy.scripted_api import ApiServer


class Followed:
    """A scripted API server, and the pools that follow it."""

    def __init__(self, api: ApiServer) -> None:
        self.api = api
        self.metrics = Metrics()
        self.pools = {"d-pd": Pool("pd"), "d-encoder": Pool("encoder")}
        connect = apiserver.connector("models", tuple(self.pools))
        self.discovery = Discovery(self.pools, connect, self.metrics.discovery(), seconds=1)

    def hosts(self, service: str = "d-pd") -> list[str]:
        return [instance.origin.host for instance in self.pools[service]]

    async def until(self, *hosts: str, service: str = "d-pd") -> None:
        async def seen() -> bool:
            return self.hosts(service) == list(hosts)

        await until(seen)

    async def until_asked(self, what: str, times: int = 1) -> None:
        async def seen() -> bool:
            return sum(one.startswith(what) for one in self.api.requests) >= times

        await until(seen)

    def restarts(self, reason: str) -> float:
        labels = {"reason": reason}
        return self.metrics.registry.get_sample_value("epd_proxy_watch_restarts_total", labels) or 0

    @property
    def up(self) -> float | None:
        return self.metrics.registry.get_sample_value("epd_proxy_watch_up")


@pytest.fixture
async def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Followed]:
    """Followed from the start on, with one PD known."""
    monkeypatch.setattr(discovery, "_FIRST_BACKOFF", 0.05)
    monkeypatch.setattr(discovery, "_LAST_BACKOFF", 0.2)
    monkeypatch.setattr(discovery, "_LATE_SECONDS", 0.5)
    api = ApiServer()
    await api.start()
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "kubeconfig")))
    await api.put("pd-1", "d-pd", "10.0.0.1")
    f = Followed(api)
    f.discovery.start()
    await f.until("10.0.0.1")
    await f.until_asked("watch")
    yield f
    await f.discovery.stop()
    await api.stop()


async def test_events_are_followed_by_service(followed: Followed):
    f = followed
    await f.api.put("e-1", "d-encoder", "10.0.1.1")
    await f.until("10.0.1.1", service="d-encoder")
    await f.api.put("pd-2", "d-pd", "10.0.0.2")
    await f.until("10.0.0.1", "10.0.0.2")
    await f.api.put("pd-1", "d-pd", "10.0.0.3")
    await f.until("10.0.0.2", "10.0.0.3")
    await f.api.delete("pd-2")
    await f.until("10.0.0.3")
    assert f.up == 1


async def test_a_watch_that_ends_in_time_goes_on_without_a_list(followed: Followed):
    f = followed
    await f.api.put("pd-2", "d-pd", "10.0.0.2")
    await f.until_asked("watch", 3)
    await f.api.put("pd-3", "d-pd", "10.0.0.3")
    await f.until("10.0.0.1", "10.0.0.2", "10.0.0.3")
    assert f.api.requests.count("list") == 1
    assert f.api.requests[2] == "watch 102"


@pytest.mark.parametrize("way", ["event", "status"])
async def test_a_version_that_is_too_old_means_a_new_list(followed: Followed, way: str):
    f = followed
    await f.api.put("pd-2", "d-pd", "10.0.0.2", quietly=True)
    if way == "event":
        await f.api.fail_watches(410)
    else:
        f.api.watches_refused = [410]
    await f.until("10.0.0.1", "10.0.0.2")
    assert f.restarts("expired") == 1


async def test_a_watch_that_is_cut_means_a_new_list(followed: Followed):
    f = followed
    await f.api.put("pd-1", "d-pd", "10.0.0.2", quietly=True)
    f.api.cut()
    await f.until("10.0.0.2")
    assert f.restarts("lost") == 1


async def test_a_watch_that_goes_silent_is_given_up(followed: Followed):
    f = followed
    f.api.silent = True
    await f.api.put("pd-1", "d-pd", "10.0.0.2")
    await f.until("10.0.0.2")
    assert f.restarts("silent") >= 1


async def test_while_the_api_server_is_away_what_is_known_stays(followed: Followed):
    f = followed
    kept = list(f.pools["d-pd"])
    await f.api.stop()

    async def tried() -> bool:
        return f.restarts("lost") >= 3

    await until(tried)
    assert (f.hosts(), f.up) == (["10.0.0.1"], 0)
    await f.api.put("pd-2", "d-pd", "10.0.0.2")
    await f.api.start()
    await f.until("10.0.0.1", "10.0.0.2")
    assert list(f.pools["d-pd"])[:1] == kept
    assert f.up == 1


async def test_what_is_refused_is_asked_again(followed: Followed):
    f = followed
    f.api.watches_refused = [403, 500, 401]
    f.api.cut()
    await f.until_asked("list", 5)
    await f.api.put("pd-2", "d-pd", "10.0.0.2")
    await f.until("10.0.0.1", "10.0.0.2")
    assert f.restarts("refused") == 3


async def test_an_old_cluster_is_asked_in_its_own_version(followed: Followed):
    f = followed
    f.api.versions = ["v1beta1"]  # the cluster was rolled back
    f.api.cut()
    await f.api.put("pd-2", "d-pd", "10.0.0.2")
    await f.until("10.0.0.1", "10.0.0.2")


async def test_many_slices_in_one_event_loop_turn_are_all_seen(followed: Followed):
    f = followed
    await asyncio.gather(*(f.api.put(f"s-{n}", "d-pd", f"10.0.1.{n}") for n in range(30)))

    async def seen() -> bool:
        return len(f.hosts()) == 31

    await until(seen)
    assert f.api.requests.count("list") == 1
