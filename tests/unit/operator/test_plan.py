"""From a document to processes, and what is refused on the way."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from epd_operator.api import EPDDeployment, parse_document
from epd_operator.local.machine import Machine
from epd_operator.local.plan import Plan, make_plan, port_count
from epd_operator.local.review import refusals
from epd_operator.local.vllm import VllmInstallation
from epd_operator.wire import StorePlaces


def deployment(**spec: Any) -> EPDDeployment:
    """A document with these fields of the spec."""
    document = {
        "apiVersion": "epd.dev/v1alpha1",
        "kind": "EPDDeployment",
        "metadata": {"name": "digits"},
        "spec": {"model": {"source": "./m/digits-vl"}, "roles": {"encoder": {}, "pd": {}}} | spec,
    }
    return parse_document(yaml.safe_dump(document))


def planned(wanted: EPDDeployment, **changes: Any) -> Plan:
    machine = {
        "engine": "/bin/epd-engine",
        "proxy": "/bin/epd-proxy",
        "cores": 8,
        "environment": {},
        "model": "/m/digits-vl",
        "places": StorePlaces("/run/store", None, None),
        "host": "127.0.0.1",
        "proxy_port": 8000,
        "ports": [1000, 1001, 1002, 1003, 1004],
    }
    return make_plan(wanted, "digits", Machine(**{**machine, **changes}))


def test_each_role_gets_its_own_command_line_and_the_proxy_knows_them_all() -> None:
    plan = planned(deployment(roles={"encoder": {"replicas": 2}, "pd": {}}))
    assert [process.name for process in plan.processes] == [
        *("encoder-0", "encoder-1", "pd-0"),
        *("janitor", "proxy"),
    ]
    encoder, _, pd, janitor, proxy = plan.processes
    assert encoder.argv[:-1] == (
        *("/bin/epd-engine", "serve", "/m/digits-vl", "--host", "127.0.0.1", "--port", "1001"),
        *("--served-model-name", "digits-vl", "--drain-timeout", "30", "--ec-transfer-config"),
    )
    assert json.loads(encoder.argv[-1]) == {
        "ec_connector": "ECSharedStorageConnector",
        "ec_role": "ec_producer",
        "ec_connector_extra_config": {"shared_storage_path": "/run/store"},
    }
    assert json.loads(pd.argv[-1])["ec_role"] == "ec_consumer"
    assert janitor.argv == (
        *("/bin/epd-engine", "store", "janitor", "--path", "/run/store", "--capacity", "9663676416"),
        *("--host", "127.0.0.1", "--port", "1000"),
    )
    assert proxy.argv == (
        *("/bin/epd-proxy", "--host", "127.0.0.1", "--port", "8000", "--drain-timeout", "30"),
        *("--encoder", "http://127.0.0.1:1001", "--encoder", "http://127.0.0.1:1002"),
        *("--pd", "http://127.0.0.1:1003"),
    )
    assert plan.address == "http://127.0.0.1:8000"
    assert port_count(deployment(roles={"encoder": {"replicas": 2}, "pd": {}})) == 4


def test_time_limits_arguments_and_environment_of_a_role_reach_its_processes_alone() -> None:
    role = {
        "startupTimeout": "90s",
        "drainTimeout": "5s",
        "extraArgs": ["--port", "9"],
        "env": [{"name": "A", "value": "1"}, {"name": "OMP_NUM_THREADS", "value": "3"}],
    }
    encoder, pd, _, _ = planned(deployment(roles={"encoder": role, "pd": {}})).processes
    assert (encoder.startup_timeout, encoder.drain_timeout) == (90, 5)
    assert (pd.startup_timeout, pd.drain_timeout) == (600, 30)
    assert encoder.argv[-2:] == ("--port", "9"), "what the user appends comes last, so that it wins"
    assert encoder.env["A"] == "1"
    assert encoder.env["OMP_NUM_THREADS"] == "3"
    assert "A" not in pd.env


@pytest.mark.parametrize(("cores", "encoders", "threads"), [(8, 1, "4"), (8, 3, "2"), (1, 2, "1")])
def test_engines_share_the_cores(cores: int, encoders: int, threads: str) -> None:
    plan = planned(deployment(roles={"encoder": {"replicas": encoders}, "pd": {}}), cores=cores)
    assert {process.env["OMP_NUM_THREADS"] for process in plan.processes[:-2]} == {threads}


def test_threads_that_the_user_chose_are_kept() -> None:
    plan = planned(deployment(), environment={"OMP_NUM_THREADS": "7"})
    assert all("OMP_NUM_THREADS" not in process.env for process in plan.processes)


@pytest.mark.parametrize(
    ("host", "address"),
    [("0.0.0.0", "http://127.0.0.1:8000"), ("::", "http://[::1]:8000"), ("10.1.2.3", "http://10.1.2.3:8000")],
)
def test_the_address_can_be_talked_to_whatever_is_bound(host: str, address: str) -> None:
    plan = planned(deployment(), host=host)
    assert plan.address == address
    assert plan.processes[-1].argv[2] == host


def test_a_revision_is_passed_on() -> None:
    plan = planned(deployment(model={"source": "org/m", "revision": "abc"}), model="org/m")
    argv = plan.processes[0].argv
    assert argv[argv.index("--revision") + 1] == "abc"
    assert argv[argv.index("--served-model-name") + 1] == "org/m"


EXAMPLES = Path(__file__).parents[3] / "examples"
ROLES: dict[str, Any] = {"encoder": {}, "pd": {}}
SPLIT: dict[str, Any] = {"encoder": {}, "prefill": {}, "decode": {}}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_run_on_this_machine(path: Path) -> None:
    assert refusals(parse_document(path.read_text()), own_store=False) == []


def test_prefill_and_decode_share_a_directory_beside_the_store() -> None:
    wanted = deployment(
        roles={**SPLIT, "decode": {"replicas": 2}}, kvTransfer={"extraConfig": {"lease_seconds": 5}}
    )
    plan = planned(wanted)
    assert [process.name for process in plan.processes[:-2]] == [
        *("encoder-0", "prefill-0", "decode-0", "decode-1")
    ]
    told = [
        {word: json.loads(value) for word, value in pairwise(process.argv) if word.endswith("-config")}
        for process in plan.processes[:-2]
    ]
    kv = {
        "kv_connector": "SharedStorageKVConnector",
        "kv_connector_extra_config": {"shared_storage_path": "/run/store/kv", "lease_seconds": 5},
    }
    encoder, prefill, decode, _ = told
    assert encoder.keys() == {"--ec-transfer-config"}
    assert prefill["--ec-transfer-config"]["ec_role"] == "ec_consumer"
    assert prefill["--kv-transfer-config"] == {**kv, "kv_role": "kv_producer"}
    assert decode == {"--kv-transfer-config": {**kv, "kv_role": "kv_consumer"}}
    assert plan.processes[-1].argv[7:] == (
        *("--encoder", "http://127.0.0.1:1001", "--prefill", "http://127.0.0.1:1002"),
        *("--decode", "http://127.0.0.1:1003", "--decode", "http://127.0.0.1:1004"),
    )
    assert port_count(wanted) == 5


def test_kv_crosses_by_memory_where_nixl_is_asked_for() -> None:
    plan = planned(deployment(roles=SPLIT, kvTransfer={"type": "nixl", "extraConfig": {"lease_seconds": 5}}))
    told = [
        json.loads(one.argv[one.argv.index("--kv-transfer-config") + 1])
        for one in plan.processes
        if "--kv-transfer-config" in one.argv
    ]
    kv = {"kv_connector": "NixlKVConnector", "kv_connector_extra_config": {"lease_seconds": 5}}
    assert told == [{**kv, "kv_role": "kv_producer"}, {**kv, "kv_role": "kv_consumer"}]


@pytest.mark.parametrize(
    ("kind", "environment", "device"),
    [("nixl", {}, "lo"), ("nixl", {"UCX_NET_DEVICES": "eth0"}, None), ("sharedStorage", {}, None)],
)
def test_nixl_listens_on_this_machine_alone_unless_the_user_says_where(
    kind: str, environment: dict[str, str], device: str | None
) -> None:
    plan = planned(deployment(roles=SPLIT, kvTransfer={"type": kind}), environment=environment)
    encoder, *others = [one.env.get("UCX_NET_DEVICES") for one in plan.processes[:-2]]
    assert encoder is None
    assert others == [device, device]


def test_vllm_runs_in_its_own_environment_with_our_connector_before_it() -> None:
    wanted = deployment(engine={"type": "vllm"}, roles={**SPLIT, "decode": {"replicas": 2}})
    plan = planned(
        wanted,
        vllm=VllmInstallation("/vllm/bin/python", "/run/connector"),
        environment={"PYTHONPATH": "/mine"},
        ports=[1000, 1001, 1002, 1003, 1004, 2001, 2002, 2003],
    )
    assert port_count(wanted) == 8
    encoder, *others = plan.processes[:-2]
    assert encoder.argv[:5] == (
        *("/vllm/bin/python", "-m", "vllm.entrypoints.cli.main", "serve"),
        "/m/digits-vl",
    )
    assert encoder.env["PYTHONPATH"] == "/run/connector:/mine"
    assert encoder.env["HF_HUB_OFFLINE"] == "1"
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in encoder.env
    assert [one.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for one in others] == ["2001", "2002", "2003"]
    assert [one.port for one in plan.processes[:-2]] == [1001, 1002, 1003, 1004]
    assert {one.ready_path for one in plan.processes[:-2]} == {"/health"}
    janitor, proxy = plan.processes[-2:]
    assert (janitor.argv[0], janitor.ready_path) == ("/bin/epd-engine", "/ready")
    assert "PYTHONPATH" not in proxy.env


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            {
                "roles": SPLIT,
                "ecStore": {"sharedMemory": {}},
                "kvTransfer": {"type": "sharedStorage"},
            },
            "spec.kvTransfer.type: sharedStorage needs files",
        ),
        ({"roles": {**SPLIT, "decode": {"replicas": 0}}}, "spec.roles.decode.replicas: is 0"),
        (
            {"ecStore": {"sharedStorage": {"existingClaim": "a"}}},
            "spec.ecStore.sharedStorage.existingClaim: there are no claims on this machine",
        ),
        (
            {"roles": {"encoder": {"autoscaling": {"maxReplicas": 2}}, "pd": {}}},
            "spec.roles.encoder.autoscaling: `epd up` does not scale by load",
        ),
        ({"roles": {"encoder": {}, "pd": {"replicas": 0}}}, "spec.roles.pd.replicas: is 0"),
        ({"proxy": {"replicas": 2}}, "spec.proxy.replicas: `epd up` runs one proxy"),
        ({"paused": True}, "spec.paused: is true"),
        (
            {
                "ecStore": {
                    "sharedStorage": {},
                    "janitor": {"env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {}}}]},
                }
            },
            "spec.ecStore.janitor.env[0].valueFrom: there is no cluster to take KEY from",
        ),
        (
            {"proxy": {"env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {}}}]}},
            "spec.proxy.env[0].valueFrom: there is no cluster to take KEY from",
        ),
    ],
)
def test_a_valid_document_that_cannot_run_here_is_refused_with_a_way_out(
    spec: dict[str, Any], said: str
) -> None:
    (reason,) = refusals(deployment(**spec), own_store=False)
    assert reason.startswith(said)


def test_a_claim_can_be_replaced_by_a_directory() -> None:
    wanted = deployment(ecStore={"sharedStorage": {"existingClaim": "a"}})
    assert refusals(wanted, own_store=True) == []


def test_a_store_in_memory_alone_has_no_files_to_keep() -> None:
    wanted = deployment(ecStore={"sharedMemory": {"existingClaim": "a"}})
    assert refusals(wanted, own_store=False) == []
    (reason,) = refusals(wanted, own_store=True)
    assert reason.endswith("remove --store")


def test_capacity_and_ttl_are_the_janitors() -> None:
    store = {"sharedStorage": {"capacity": "1Gi", "ttl": "1h"}, "janitor": {"extraArgs": ["--interval", "1"]}}
    janitor = planned(deployment(ecStore=store)).processes[-2]
    assert janitor.argv[5:9] == ("--capacity", str(2**30), "--ttl", "3600")
    assert janitor.argv[-2:] == ("--interval", "1")


@pytest.mark.parametrize("tiers", [1, 2])
def test_memory_has_the_size_that_this_machine_gives(tiers: int) -> None:
    store: dict[str, Any] = {"sharedMemory": {"leaseTimeout": "5s"}}
    if tiers == 2:
        store |= {"sharedStorage": {}, "write": "back"}
    places = StorePlaces("/run/store" if tiers == 2 else None, "/dev/shm/x", 1000)
    plan = planned(deployment(ecStore=store), places=places)
    config = json.loads(plan.processes[0].argv[-1])
    memory = {"path": "/dev/shm/x", "capacity": 1000, "lease_seconds": 5.0}
    if tiers == 2:
        assert config["ec_connector_extra_config"] == {
            "memory": memory,
            "storage": {"shared_storage_path": "/run/store"},
            "write": "back",
        }
    else:
        assert config["ec_connector_extra_config"] == memory
    argv = plan.processes[-2].argv
    assert argv[argv.index("--memory-path") + 1] == "/dev/shm/x"
    assert ("--path" in argv) == (tiers == 2)
