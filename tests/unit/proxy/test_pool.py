"""Which instance takes the next piece of work."""

from __future__ import annotations

from epd_proxy.config import Origin
from epd_proxy.pool import Lease, Pool, spread

URLS = [Origin.parse(f"http://10.0.0.{n}:8000") for n in range(3)]


def ready_pool() -> Pool:
    pool = Pool("pd", URLS)
    for instance in pool:
        pool.probed(instance, instance.failures, True, "ready")
    return pool


def urls(instances) -> list[str]:
    return [instance.origin.url for instance in instances]


def test_nothing_is_picked_before_a_probe_succeeded():
    assert Pool("pd", URLS).pick() is None


def test_the_least_outstanding_instance_is_picked_and_ties_go_to_the_first_given():
    pool = ready_pool()
    leases = [Lease(pool.pick()) for _ in range(4)]
    assert urls(lease.instance for lease in leases) == [URLS[0].url, URLS[1].url, URLS[2].url, URLS[0].url]
    leases[1].release()
    assert pool.pick().origin == URLS[1]
    for lease in (leases[0], *leases[2:]):
        lease.release()
    assert [instance.outstanding for instance in pool] == [0, 0, 0]
    assert pool.pick().origin == URLS[0]


def test_an_instance_to_avoid_is_picked_only_where_there_is_no_other():
    pool = ready_pool()
    first, second, third = pool
    assert pool.pick(avoid={first}) is second
    assert pool.pick(exclude=[second, third], avoid={first}) is first
    assert pool.pick(avoid=set(pool)) is first


def test_a_moved_lease_leaves_its_first_instance():
    pool = ready_pool()
    first, second, _ = pool
    lease = Lease(first, 3)
    lease.move(second)
    assert (first.outstanding, second.outstanding) == (0, 3)
    lease.release()
    assert second.outstanding == 0


def test_a_lost_instance_gets_no_traffic_until_a_later_probe():
    pool = ready_pool()
    first = next(iter(pool))
    begun_before = first.failures
    pool.lost(first, "reset")
    pool.probed(first, begun_before, True, "ready")
    assert urls(pool.ready()) == [URLS[1].url, URLS[2].url]
    pool.probed(first, first.failures, True, "ready")
    assert urls(pool.ready()) == [origin.url for origin in URLS]


def test_a_probe_in_flight_does_not_revive_a_removed_instance():
    pool = ready_pool()
    first = next(iter(pool))
    pool.remove(URLS[0])
    pool.probed(first, first.failures, True, "ready")
    assert not first.ready
    again = pool.add(URLS[0])
    pool.probed(first, first.failures, True, "ready")
    assert again is not first
    assert not again.ready
    assert urls(pool.ready()) == [URLS[1].url, URLS[2].url]


def test_adding_a_known_address_keeps_its_instance():
    pool = ready_pool()
    assert pool.add(URLS[1]).ready
    assert len(list(pool)) == 3


def test_items_spread_evenly_over_idle_encoders_with_positions_kept():
    assert spread([0, 0], 5) == [[0, 2, 4], [1, 3]]


def test_items_go_where_the_fewest_are_outstanding():
    assert spread([4, 0, 1], 4) == [[], [0, 1, 3], [2]]
    assert spread([7], 2) == [[0, 1]]
    assert spread([1, 1], 0) == [[], []]


def test_an_item_avoids_an_instance_where_there_is_another():
    assert spread([0, 5], 3, {0: 0, 2: 1}) == [[1, 2], [0]]
    assert spread([0], 1, {0: 0}) == [[0]]


def test_who_probes_hears_of_new_instances_and_of_removed_ones():
    pool = Pool("pd", URLS[:1])
    told: list = []
    pool.added = told.append
    new = pool.add(URLS[1])
    pool.add(URLS[1])
    assert told == [new]
    pool.remove(URLS[1])
    assert new.trouble.is_set()
    assert len(pool) == 1
