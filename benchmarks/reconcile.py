"""How fast, and at what cost, the operator brings resources to what they say.

On a real API server with its controllers, and without nodes: pods are made and stay pending. The peers are
the limits that we set ourselves.

    .venv/bin/python benchmarks/reconcile.py [--quick] [--json FILE]
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil
from report import Row, print_table, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kubernetes import client, config

from tests.cluster.fixtures import Namespace
from tests.cluster.local import LocalCluster
from tests.integration.operator.definitions import define
from tests.integration.operator.operators import OperatorProcess, running
from tests.integration.operator.world import CHILDREN as CHILDREN_KINDS
from tests.integration.operator.world import PLURAL, World

PATIENCE_S = 900.0
TICKS = 3
NAMESPACE = "benchmark"
SERVICE_RANGE = "--service-cluster-ip-range=198.19.0.0/16"  # an address for each resource's proxy
DEPLOYMENTS = 4  # of one resource: encoder, PD, proxy, janitor; they are made after all else
CHILDREN = 18
WRITES = ("create", "update", "patch", "delete")
REQUESTS = "epd_operator_requests_total"
RECONCILES = "epd_operator_reconcile_seconds_count"
LIMIT = "limit"


class Size(NamedTuple):
    """How much is measured."""

    singles: int
    many: int
    tick_s: float
    """Long enough to look at all resources, with room."""


def until(condition: Callable[[], bool], pause_s: float) -> None:
    """Waits for a condition."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not true after {PATIENCE_S:.0f} s")
        time.sleep(pause_s)


def deployments(world: World, label: str) -> int:
    """How many Deployments there are with a label."""
    return len(world.listed("deployments", labelSelector=label))


def one(world: World, name: str) -> float:
    """Seconds from the creation of a resource to its last child."""
    label = f"app.kubernetes.io/instance={name}"
    begun = time.monotonic()
    world.create(name)
    until(lambda: deployments(world, label) == DEPLOYMENTS, 0.01)
    seconds = time.monotonic() - begun
    made = sum(len(world.listed(plural, labelSelector=label)) for plural in CHILDREN_KINDS)
    assert made == CHILDREN, f"{made} children"
    return seconds


def many(world: World, operator: OperatorProcess, count: int) -> tuple[float, float]:
    """Seconds until so many resources, created at once, have children and a status; reconciles by then."""
    before = operator.metric(RECONCILES)
    made_before = operator.metric(REQUESTS, verb="patch", code="201")
    wanted = CHILDREN * (count + len(world.listed(PLURAL)))
    begun = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: world.create(f"many-{index}"), range(count)))

    def settled() -> bool:
        # Long lists, asked for again and again, would be most of the API server's work.
        made = operator.metric(REQUESTS, verb="patch", code="201")
        if made - made_before < CHILDREN * count:
            return False
        found = [found for found in world.listed(PLURAL) if found["metadata"]["name"].startswith("many-")]
        if not all(found.get("status", {}).get("conditions") for found in found):
            return False
        label = "app.kubernetes.io/managed-by=epd-operator"
        return sum(len(world.listed(plural, labelSelector=label)) for plural in CHILDREN_KINDS) == wanted

    until(settled, 0.5)
    return time.monotonic() - begun, operator.metric(RECONCILES) - before


def steady(operator: OperatorProcess, tick_s: float) -> dict[str, float]:
    """Requests for each tick, once the cluster has come to rest."""

    def counts() -> dict[str, float]:
        kinds = {"lists": ("list",), "writes": WRITES, "reads": ("get",), "watches": ("watch",)}
        return {
            name: sum(operator.metric(REQUESTS, verb=verb) for verb in verbs) for name, verbs in kinds.items()
        }

    def quiet() -> bool:
        before = counts()
        time.sleep(2 * tick_s)
        return counts()["writes"] == before["writes"]

    until(quiet, 0)
    before, ticks = counts(), operator.ticks()
    until(lambda: operator.ticks() >= ticks + TICKS, 0.1)
    passed = operator.ticks() - ticks
    return {name: (value - before[name]) / passed for name, value in counts().items()}


def measure(world: World, operator: OperatorProcess, size: Size) -> list[Row]:
    """All numbers."""
    times = [one(world, f"single-{index}") for index in range(size.singles)]
    seconds, reconciles = many(world, operator, size.many)
    requests = steady(operator, size.tick_s)
    memory = psutil.Process(operator.pid).memory_info().rss / 1e6
    median = f"from create to all children, median of {size.singles}"
    return [
        Row(median, statistics.median(times), "s", LIMIT, 1.0, 1.0),
        Row(f"{size.many} resources created at once, settled", seconds, "s", LIMIT, 0.3 * size.many, 1.0),
        Row("reconciles while they settle", reconciles / seconds, "reconciles/s"),
        Row("lists a tick at rest", requests["lists"], "requests", LIMIT, 0.0, 1.0),
        Row("writes a tick at rest", requests["writes"], "requests", LIMIT, 0.0, 1.0),
        Row("reads of one object a tick at rest", requests["reads"], "requests"),
        Row(f"watches begun a tick of {size.tick_s:.0f} s at rest", requests["watches"], "requests"),
        Row(f"memory with {size.many} resources more", memory, "MB", LIMIT, 200.0, 1.0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 single resources and 20 at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    options = parser.parse_args()
    size = Size(5, 20, 2.0) if options.quick else Size(20, 300, 10.0)
    with (
        LocalCluster.start(with_node=False, apiserver_args=[SERVICE_RANGE]) as cluster,
        config.new_client_from_config(str(cluster.kubeconfig)) as connection,
        tempfile.TemporaryDirectory() as directory,
    ):
        define(connection)
        client.CoreV1Api(connection).create_namespace({"metadata": {"name": NAMESPACE}})
        world = World(Namespace(NAMESPACE, cluster, connection))
        with running(cluster.kubeconfig, Path(directory, "log"), f"--tick={size.tick_s}") as operator:
            rows = measure(world, operator, size)
    print_table(rows)
    if options.json:
        write_json(rows, options.json)


if __name__ == "__main__":
    main()
