"""Pure: from a deployment and what this machine offers to the processes to start."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..api import EPDDeployment, Instance, Role, duration_seconds
from ..roles import TRAITS, roles_of
from ..wire import StorePlaces, janitor_command
from .engines import native_engine, vllm_engine
from .machine import LOOPBACK, Machine


@dataclass(frozen=True)
class ProcessSpec:
    """One process. Time limits are in seconds."""

    name: str
    role: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    port: int
    url: str
    startup_timeout: float
    drain_timeout: float
    ready_path: str = "/ready"


@dataclass(frozen=True)
class Plan:
    """All processes of one deployment; the proxy is the last."""

    name: str
    model: str
    address: str
    places: StorePlaces
    processes: tuple[ProcessSpec, ...]


def make_plan(deployment: EPDDeployment, name: str, machine: Machine) -> Plan:
    """The processes of a deployment for which `refusals` is empty."""
    spec = deployment.spec
    instances = [(name, role, i) for name, role in roles_of(deployment) for i in range(_replicas(role))]
    threads = max(1, machine.cores // len(instances))
    janitor_port, *ports = machine.ports
    # Side channels come after all engines' ports: by role they are there or not.
    side_channels = iter(ports[len(instances) :])
    engines = tuple(
        _engine(deployment, name, role, index, port, threads, machine, side_channels)
        for (name, role, index), port in zip(instances, ports, strict=False)
    )
    janitor = _janitor(deployment, janitor_port, machine)
    proxy = _proxy(deployment, engines, machine)
    return Plan(name, spec.model.name, proxy.url, machine.places, (*engines, janitor, proxy))


def port_count(deployment: EPDDeployment) -> int:
    """How many ports engines and janitor need."""
    return 1 + sum(
        _replicas(role) * (2 if _has_side_channel(deployment, name) else 1)
        for name, role in roles_of(deployment)
    )


def _has_side_channel(deployment: EPDDeployment, name: str) -> bool:
    return deployment.spec.engine.type == "vllm" and TRAITS[name].kv_role is not None


def _replicas(role: Role) -> int:
    return 1 if role.replicas is None else role.replicas


def _engine(
    deployment: EPDDeployment,
    name: str,
    role: Role,
    index: int,
    port: int,
    threads: int,
    machine: Machine,
    side_channels: Iterator[int],
) -> ProcessSpec:
    if machine.vllm is None:
        command = native_engine(deployment, name, role, machine, port)
    else:
        side_channel = next(side_channels) if _has_side_channel(deployment, name) else None
        command = vllm_engine(deployment, name, role, machine, machine.vllm, port, side_channel)
    # Each engine would take all cores for itself, and then they wait for one another.
    env = {} if "OMP_NUM_THREADS" in machine.environment else {"OMP_NUM_THREADS": str(threads)}
    process = _process(f"{name}-{index}", name, command.argv, {**env, **command.env}, LOOPBACK, port, role)
    return replace(process, ready_path=command.ready_path)


def _janitor(deployment: EPDDeployment, port: int, machine: Machine) -> ProcessSpec:
    store = deployment.spec.ec_store
    argv = janitor_command(machine.engine, store, machine.places, LOOPBACK, port)
    return _process("janitor", "janitor", argv, {}, LOOPBACK, port, store.janitor)


def _proxy(deployment: EPDDeployment, engines: Sequence[ProcessSpec], machine: Machine) -> ProcessSpec:
    argv = [machine.proxy, "--host", machine.host, "--port", str(machine.proxy_port)]
    argv += ["--drain-timeout", str(deployment.spec.proxy.drain_seconds)]
    for engine in engines:
        argv += [f"--{engine.role}", engine.url]
    # A wildcard is no address to talk to.
    reached_at = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(machine.host, machine.host)
    return _process("proxy", "proxy", argv, {}, reached_at, machine.proxy_port, deployment.spec.proxy)


def _process(
    name: str,
    role: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    host: str,
    port: int,
    settings: Instance,
) -> ProcessSpec:
    own_env = {variable.name: variable.value or "" for variable in settings.env}
    return ProcessSpec(
        name=name,
        role=role,
        argv=(*argv, *settings.extra_args),
        # Logs are read while the process runs, so it must not hold lines back.
        env={"PYTHONUNBUFFERED": "1", **env, **own_env},
        port=port,
        url=f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}",
        startup_timeout=duration_seconds(settings.startup_timeout),
        drain_timeout=duration_seconds(settings.drain_timeout),
    )
