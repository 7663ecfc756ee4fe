"""The command line of the operator."""

import argparse
import asyncio
import hashlib
import os
import signal
import socket
import sys
from collections.abc import Sequence

import kopf

from .apply.kinds import UnservedError
from .handlers import logs
from .handlers.operator import Operator, Options
from .metrics_adapter.options import adapter_options, add_adapter_arguments
from .render import Images

_LEASE = "epd-operator"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `epd-operator`. Exits with 1 and one line where it cannot begin."""
    given = _parser().parse_args(arguments)
    logs.configure(given.log_level)
    if given.kubeconfig:
        os.environ["KUBECONFIG"] = given.kubeconfig
    try:
        asyncio.run(given.begin(given))
    except (kopf.LoginError, UnservedError, OSError) as error:
        sys.exit(f"epd-operator: {error}")


async def _run(given: argparse.Namespace) -> None:
    await Operator(_options(given)).run()


async def _run_adapter(given: argparse.Namespace) -> None:
    # What makes certificates is loaded by those alone who need some.
    from .metrics_adapter.adapter import MetricsAdapter

    work = asyncio.ensure_future(MetricsAdapter(adapter_options(given)).run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        pass  # told to end: what was asked is answered


def _options(given: argparse.Namespace) -> Options:
    namespaces = tuple(sorted(set(given.namespaces)))
    return Options(
        images=Images(
            engine=given.engine_image,
            proxy=given.proxy_image,
            vllm=given.vllm_image,
            pull_policy=given.image_pull_policy,
            pull_secrets=tuple(given.image_pull_secrets),
        ),
        namespaces=namespaces,
        lease_name=_lease_name(namespaces) if given.leader_election else None,
        lease_namespace=os.environ.get("POD_NAMESPACE"),
        identity=f"{os.environ.get('POD_NAME') or socket.gethostname()}_{os.getpid()}",
        metrics_port=given.metrics_port,
        health_port=given.health_port,
        tick_s=given.tick,
        stall_s=given.stall,
        usage_interval_s=given.usage_interval,
        prometheus_address=given.prometheus_address,
        load_interval_s=given.load_interval,
        bottleneck_s=given.bottleneck_after,
    )


def _lease_name(namespaces: tuple[str, ...]) -> str:
    """Operators of different namespaces do not keep each other from acting."""
    if not namespaces:
        return _LEASE
    return f"{_LEASE}-{hashlib.sha256(','.join(namespaces).encode()).hexdigest()[:8]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="epd-operator", description="Runs EPDDeployments on Kubernetes.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run until told to end")
    run.set_defaults(begin=_run)
    _add_common(run)
    add_adapter_arguments(adapter := commands.add_parser("metrics-adapter", help="serve the metrics APIs"))
    adapter.set_defaults(begin=_run_adapter)
    _add_common(adapter)
    add = run.add_argument
    add("--leader-election", action="store_true", help="act only while holding the Lease")
    add("--engine-image", metavar="IMAGE", required=True, help="of engines, where a resource names none")
    add("--proxy-image", metavar="IMAGE", required=True, help="of proxies")
    add("--vllm-image", metavar="IMAGE", help="of engines of type vllm, where a resource names none")
    policies = ("Always", "IfNotPresent", "Never")
    add("--image-pull-policy", choices=policies, default="IfNotPresent", help="of all pods")
    add(
        "--image-pull-secret",
        dest="image_pull_secrets",
        metavar="NAME",
        action="append",
        default=[],
        help="a Secret in the resource's namespace; may be given more than once",
    )
    add(
        "--load-interval",
        type=float,
        default=15.0,
        metavar="SECONDS",
        help="ask engines how full they are this often",
    )
    add(
        "--bottleneck-after",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="tell of a role that is full, and fuller than all others, for so long",
    )
    add("--prometheus-address", metavar="URL", help="where KEDA finds Prometheus")
    add("--tick", type=float, default=60.0, metavar="SECONDS", help="look at every resource this often")
    add("--stall", type=float, default=150.0, metavar="SECONDS", help="unhealthy when stuck for this long")
    add(
        "--usage-interval",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="ask each store's janitor how full it is this often",
    )
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kubeconfig", metavar="FILE", help="how to reach the cluster, when not in it (or KUBECONFIG)")
    add(
        "--namespace",
        dest="namespaces",
        metavar="NAME",
        action="append",
        default=[],
        help="serve this namespace only; may be given more than once",
    )
    add("--metrics-port", type=int, default=8080, help="port of /metrics")
    add("--health-port", type=int, default=8081, help="port of /healthz and /readyz")
    add("--log-level", choices=logs.LEVELS, default="info", help="least level that is logged")
