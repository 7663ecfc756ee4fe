"""`epd up` and its companions on real processes: stand-ins that fail in the ways wanted."""

import json
import os
import signal
import socket
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.integration.local.epd_runner import Epd, until


@pytest.fixture
def document(tmp_path: Path) -> "Document":
    (tmp_path / "model").mkdir()
    return Document(tmp_path / "digits.yaml")


class Document:
    """An EPDDeployment file; a role's fields are given where a test needs them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write()

    def write(self, store: dict[str, Any] | None = None, **roles: dict[str, Any]) -> Path:
        spec = {"model": {"source": "./model"}, "roles": {"encoder": {}, "pd": {}} | roles}
        if store is not None:
            spec["ecStore"] = store
        self.path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "epd.dev/v1alpha1",
                    "kind": "EPDDeployment",
                    "metadata": {"name": "digits"},
                    "spec": spec,
                }
            )
        )
        return self.path


def up(epd: Epd, document: Document) -> dict[str, Any]:
    """Runs a deployment in the foreground, and its state when all is ready."""
    epd.start("up", "-f", document.path, "--port", "0")
    return epd.until_ready()


def end(epd: Epd) -> None:
    """Ends it as a service manager would."""
    epd.started[0].terminate()
    assert epd.started[0].wait() == 0
    epd.assert_nothing_left()


def env(**variables: str | Path) -> list[dict[str, str]]:
    return [{"name": name, "value": str(value)} for name, value in variables.items()]


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.loads(answer.read() or "null")


def named(state: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in state["processes"] if one["name"] == name)
    return found


def test_in_the_background_from_up_to_down(epd: Epd, document: Document) -> None:
    document.write(encoder={"replicas": 2, "extraArgs": ["--greeting", "good day"]})
    up = epd.run("up", "-d", "-f", document.path, "--port", "0")
    assert up.returncode == 0, up.stdout + up.stderr
    (state,) = epd.ps()
    assert f"{state['address']}/v1" in up.stdout
    assert [one["name"] for one in state["processes"]] == [
        *("encoder-0", "encoder-1", "pd-0"),
        *("janitor", "proxy"),
    ]
    assert {one["phase"] for one in state["processes"]} == {"ready"}
    roles = get(f"{state['address']}/ready")["roles"]
    assert all(one["ready"] for ones in roles.values() for one in ones), "the proxy knows it too"
    engine = get(f"http://127.0.0.1:{named(state, 'encoder-1')['port']}/health")
    assert engine["argv"][2] == str(document.path.parent / "model"), "relative to the document"

    listing = epd.run("ps").stdout
    assert state["address"] in listing
    assert "encoder-1  ready" in listing
    assert epd.run("logs", "encoder").stdout.splitlines() == [
        "encoder-0 | good day from ec_producer",
        "encoder-1 | good day from ec_producer",
    ]
    assert epd.run("logs", "pd-0", "--tail", "1").stdout == "pd-0 | hello from ec_consumer\n"
    unknown = epd.run("logs", "decoder")
    assert unknown.returncode == 1
    assert "it has encoder, encoder-0, encoder-1, janitor, pd, pd-0, proxy, supervisor" in unknown.stderr

    second = epd.run("up", "-f", document.path, "--port", "0")
    assert second.returncode == 1
    assert "digits is running already" in second.stderr
    assert Path(state["store"], "ec_producer-was-here").exists()

    down = epd.run("down")
    assert (down.returncode, down.stdout) == (0, "digits is stopped\n")
    epd.assert_nothing_left()
    assert epd.run("down").stdout == "nothing is running\n"
    assert "nothing is running" in epd.run("ps").stdout
    assert epd.ps() == []


def test_prefill_and_decode_run_apart_and_what_dies_comes_back(epd: Epd, document: Document) -> None:
    document.write(pd=None, prefill={}, decode={"replicas": 2})
    state = up(epd, document)
    assert [one["name"] for one in state["processes"]] == [
        *("encoder-0", "prefill-0", "decode-0", "decode-1"),
        *("janitor", "proxy"),
    ]
    kv = Path(state["store"], "kv")
    assert {one.name for one in kv.iterdir()} == {"kv_producer-was-here", "kv_consumer-was-here"}
    for role in ("prefill", "decode"):
        process = named(epd.state(), f"{role}-0")
        os.kill(process["pid"], signal.SIGKILL)
        until(lambda name=f"{role}-0": named(epd.state(), name)["restarts"] == 1, "a restart")
        state = epd.until_ready()
        assert named(state, f"{role}-0")["port"] == process["port"], "the proxy knows it by its address"
    assert epd.run("logs", "decode").stdout.count("hello from kv_consumer") == 3
    end(epd)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_in_the_foreground_a_signal_leaves_nothing(
    epd: Epd, document: Document, number: signal.Signals
) -> None:
    up = epd.start("up", "-f", document.path, "--port", "0")
    epd.until_ready()
    up.send_signal(number)
    output, _ = up.communicate()
    assert up.returncode == 0, output
    assert "digits is ready" in output
    assert output.endswith("digits is stopped\n")
    assert output.index("proxy      stopped") < output.index("encoder-0  stopping"), (
        "requests can be finished"
    )
    epd.assert_nothing_left()


@pytest.mark.parametrize("detached", [False, True])
def test_a_signal_before_all_is_ready_leaves_nothing(epd: Epd, document: Document, detached: bool) -> None:
    gate = document.path.with_name("gate")
    gate.touch()
    document.write(pd={"env": env(STANDIN_GATE=gate)})
    up = epd.start("up", *(["-d"] if detached else []), "-f", document.path, "--port", "0")
    until(lambda: epd.state() and named(epd.state(), "encoder-0")["phase"] == "ready", "encoder ready")
    up.send_signal(signal.SIGINT)
    output, _ = up.communicate()
    assert up.returncode == 1
    assert "stopped before it was ready" in output
    epd.assert_nothing_left()


def test_up_in_the_background_that_is_killed_while_it_waits_leaves_nothing(
    epd: Epd, document: Document
) -> None:
    gate = document.path.with_name("gate")
    gate.touch()
    document.write(pd={"env": env(STANDIN_GATE=gate)})
    up = epd.start("up", "-d", "-f", document.path, "--port", "0")
    until(epd.state, "the supervisor has begun")
    up.send_signal(signal.SIGKILL)
    up.wait()
    until(lambda: not epd.processes() and not epd.files(), "all gone")


def test_a_process_that_is_killed_is_started_again_at_its_address(epd: Epd, document: Document) -> None:
    assert epd.run("up", "-d", "-f", document.path, "--port", "0").returncode == 0
    before = epd.until_ready()
    os.kill(named(before, "encoder-0")["pid"], signal.SIGKILL)
    until(lambda: named(epd.state(), "encoder-0")["restarts"] == 1, "a restart")
    after = epd.until_ready()
    old, new = named(before, "encoder-0"), named(after, "encoder-0")
    assert new["pid"] != old["pid"]
    assert new["port"] == old["port"]
    get(f"http://127.0.0.1:{new['port']}/ready")
    supervisor_log = epd.run("logs", "supervisor").stdout
    assert "encoder-0  restarting: killed by SIGKILL; next start in" in supervisor_log
    assert epd.run("down").returncode == 0
    epd.assert_nothing_left()


def test_the_janitor_is_one_of_the_processes(epd: Epd, document: Document) -> None:
    document.write(store={"sharedStorage": {"capacity": "1Gi", "ttl": "90s"}})
    before = up(epd, document)
    janitor = named(before, "janitor")
    argv = get(f"http://127.0.0.1:{janitor['port']}/health")["argv"]
    assert argv[1:8] == ["store", "janitor", "--path", before["store"], "--capacity", str(2**30), "--ttl"]
    assert "janitor    ready" in epd.run("ps").stdout
    assert epd.run("logs", "janitor").stdout == "janitor | hello from janitor\n"
    os.kill(janitor["pid"], signal.SIGKILL)
    until(lambda: named(epd.state(), "janitor")["restarts"] == 1, "a restart")
    after = named(epd.until_ready(), "janitor")
    assert (after["port"], after["pid"] == janitor["pid"]) == (janitor["port"], False)
    end(epd)


@pytest.mark.parametrize("tiers", ["memory", "both"])
def test_memory_is_made_bounded_and_removed(epd: Epd, document: Document, tiers: str) -> None:
    store: dict[str, Any] = {"sharedMemory": {}} | ({"sharedStorage": {}} if tiers == "both" else {})
    document.write(store=store)
    started = epd.run("up", "-d", "-f", document.path, "--port", "0")
    assert started.returncode == 0, started.stdout + started.stderr
    state = epd.until_ready()
    memory = Path(state["memory"])
    names = {"ec_producer-was-here", "ec_consumer-was-here", "janitor-was-here"}
    assert {one.name for one in memory.iterdir()} == names
    assert (state["store"] is None) == (tiers == "memory")
    engine = get(f"http://127.0.0.1:{named(state, 'encoder-0')['port']}/health")
    config = json.loads(engine["argv"][engine["argv"].index("--ec-transfer-config") + 1])
    extra = config["ec_connector_extra_config"]
    capacity = extra.get("memory", extra)["capacity"]
    size = os.statvfs(memory)
    assert 0 < capacity <= size.f_blocks * size.f_frsize // 4
    assert epd.run("down").returncode == 0
    assert not memory.exists()
    epd.assert_nothing_left()


@pytest.mark.parametrize("next_command", ["down", "up"])
def test_memory_of_a_killed_run_is_removed(epd: Epd, document: Document, next_command: str) -> None:
    document.write(store={"sharedMemory": {"capacity": "1Mi"}})
    assert epd.run("up", "-d", "-f", document.path, "--port", "0").returncode == 0
    state = epd.until_ready()
    memory = Path(state["memory"])
    (memory / "left").touch()
    os.kill(state["supervisor"], signal.SIGKILL)
    until(lambda: not epd.processes(), "its children follow it")
    assert (memory / "left").exists()
    if next_command == "up":
        assert epd.run("up", "-d", "-f", document.path, "--port", "0").returncode == 0
        assert not (memory / "left").exists()
    assert epd.run("down").returncode == 0
    assert not memory.exists()
    epd.assert_nothing_left()


def test_a_process_that_dies_again_and_again_is_said_to_and_the_others_go_on(
    epd: Epd, document: Document
) -> None:
    before = up(epd, document)
    for restarts in range(1, 4):
        pid = until(lambda: named(epd.state(), "pd-0")["pid"], "pd-0 runs")
        os.kill(pid, signal.SIGKILL)
        until(lambda wanted=restarts: named(epd.state(), "pd-0")["restarts"] == wanted, "a restart")
    assert "again and again; see `epd logs pd-0`" in named(epd.state(), "pd-0")["note"]
    after = epd.until_ready()
    assert named(after, "encoder-0") == named(before, "encoder-0")


def test_a_disk_that_takes_no_more_state_does_not_stop_the_serving(epd: Epd, document: Document) -> None:
    state = up(epd, document)
    encoder = named(state, "encoder-0")
    Path(state["directory"], "state.tmp").mkdir()  # nothing can be written there now
    os.kill(encoder["pid"], signal.SIGKILL)
    until(lambda: not _alive({encoder["pid"]}), "the encoder is gone")
    until(lambda: _answers(f"http://127.0.0.1:{encoder['port']}/ready"), "it is started again")
    end(epd)


def _answers(url: str) -> bool:
    try:
        get(url)
    except OSError:
        return False
    return True


def test_logs_can_be_followed_until_the_end(epd: Epd, document: Document) -> None:
    assert epd.run("up", "-d", "-f", document.path, "--port", "0").returncode == 0
    following = epd.start("logs", "encoder", "-f")
    assert following.stdout is not None
    assert following.stdout.readline() == "encoder-0 | hello from ec_producer\n"
    os.kill(named(epd.until_ready(), "encoder-0")["pid"], signal.SIGKILL)
    assert following.stdout.readline() == "encoder-0 | hello from ec_producer\n"
    assert epd.run("down").returncode == 0
    assert following.wait() == 0


def test_a_process_that_does_not_start_ends_all_with_the_end_of_its_log(epd: Epd, document: Document) -> None:
    document.write(encoder={"env": env(STANDIN_FAIL="no such weights")})
    for arguments in (["up"], ["up", "-d"]):
        up = epd.run(*arguments, "-f", document.path, "--port", "0")
        assert up.returncode == 1
        assert "epd: encoder-0 did not start: exit status 1" in up.stderr
        assert "encoder-0 | cannot start: no such weights" in up.stderr
        epd.assert_nothing_left()


def test_a_process_that_is_not_ready_in_time_ends_all(epd: Epd, document: Document) -> None:
    gate = document.path.with_name("gate")
    gate.touch()
    document.write(pd={"env": env(STANDIN_GATE=gate), "startupTimeout": "500ms"})
    up = epd.run("up", "-f", document.path, "--port", "0")
    assert up.returncode == 1
    assert "pd-0 did not start: not ready within 0.5 s" in up.stderr
    epd.assert_nothing_left()


def test_a_process_that_ignores_sigterm_is_killed_after_its_drain_timeout(
    epd: Epd, document: Document
) -> None:
    document.write(pd={"env": env(STANDIN_STUBBORN="1"), "drainTimeout": "200ms"})
    up(epd, document)
    end(epd)


def test_a_second_ctrl_c_does_not_wait_for_the_drain_timeout(epd: Epd, document: Document) -> None:
    document.write(pd={"env": env(STANDIN_STUBBORN="1"), "drainTimeout": "1h"})
    up = epd.start("up", "-f", document.path, "--port", "0")
    epd.until_ready()
    up.send_signal(signal.SIGINT)
    until(lambda: named(epd.state(), "pd-0")["phase"] == "stopping", "pd-0 is asked to stop")
    up.send_signal(signal.SIGINT)
    up.communicate()
    epd.assert_nothing_left()


@pytest.mark.parametrize("next_command", ["down", "up"])
def test_after_a_killed_supervisor_the_next_command_cleans_up(
    epd: Epd, document: Document, next_command: str
) -> None:
    document.write(encoder={"env": env(STANDIN_GRANDCHILD="1")})
    assert epd.run("up", "-d", "-f", document.path, "--port", "0").returncode == 0
    state = epd.until_ready()
    os.kill(state["supervisor"], signal.SIGKILL)
    engines = {one["pid"] for one in state["processes"]}
    until(lambda: not _alive(engines), "its children follow it")
    assert epd.processes() != [], "the grandchild, in a session of its own, lives on"
    (dead,) = epd.ps()
    assert dead["phase"] == "dead"
    assert {(one["phase"], one["pid"]) for one in dead["processes"]} == {("dead", None)}
    assert "epd down" in epd.run("ps").stdout
    if next_command == "up":
        document.write()
        up = epd.run("up", "-d", "-f", document.path, "--port", "0")
        assert up.returncode == 0
        assert "ended 1 processes" in up.stdout
    down = epd.run("down")
    assert down.returncode == 0
    assert ("had been killed" in down.stdout) == (next_command == "down")
    epd.assert_nothing_left()


def _alive(pids: set[int]) -> set[int]:
    alive = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.add(pid)
    return alive


def test_a_taken_port_and_a_document_that_cannot_run_are_said_before_anything_starts(
    epd: Epd, document: Document
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        up = epd.run("up", "-f", document.path, "--port", port)
    assert up.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in up.stderr
    assert "--port" in up.stderr
    document.write(encoder={"replicas": 0})
    (document.path.parent / "model").rmdir()
    up = epd.run("up", "-d", "-f", document.path)
    assert up.returncode == 1
    assert "spec.roles.encoder.replicas: is 0" in up.stderr
    assert "spec.model.source: there is no directory" in up.stderr
    epd.assert_nothing_left()


def test_two_deployments_side_by_side_and_a_store_that_is_kept(
    epd: Epd, document: Document, tmp_path: Path
) -> None:
    store = tmp_path / "kept"
    first = epd.run("up", "-d", "-f", document.path, "--port", "0", "--name", "one", "--store", store)
    second = epd.run("up", "-d", "-f", document.path, "--port", "0", "--name", "two")
    assert (first.returncode, second.returncode) == (0, 0)
    assert "epd down --name two" in second.stdout
    assert [state["name"] for state in epd.ps()] == ["one", "two"]
    ambiguous = epd.run("down")
    assert ambiguous.returncode == 1
    assert "name one of one, two with --name" in ambiguous.stderr
    for name in ("one", "two"):
        assert epd.run("down", "--name", name).returncode == 0
    assert epd.run("down", "--name", "two").stdout == "two is not running\n"
    epd.assert_nothing_left()
    assert (store / "ec_producer-was-here").exists()
