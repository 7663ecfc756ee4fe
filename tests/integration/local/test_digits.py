"""The shipped example with the real engine and proxy, asked with the plain OpenAI client."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.integration.local.epd_runner import REPOSITORY, Epd, until

EXAMPLES = REPOSITORY / "examples"
QUICKSTART = EXAMPLES / "quickstart.py"


def answer(epd: Epd, url: str, *pictures: str) -> str:
    """What the model says about some of the shipped pictures."""
    paths = [EXAMPLES / "images" / f"{picture}.png" for picture in pictures]
    command: list[str | Path] = [epd.python, EXAMPLES / "ask.py", "--url", url, *paths]
    asked = subprocess.run(command, env=epd.environment, capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr
    return asked.stdout.splitlines()[-1].removeprefix("answer").strip()


def test_a_picture_is_read_before_and_after_the_encoder_is_killed(real_epd: Epd) -> None:
    up = real_epd.run("up", "-d", "-f", EXAMPLES / "digits.yaml", "--port", "0")
    assert up.returncode == 0, up.stdout + up.stderr
    state = real_epd.until_ready()
    url = f"{state['address']}/v1"
    assert answer(real_epd, url, "seven") == "seven"

    (encoder,) = (one for one in state["processes"] if one["role"] == "encoder")
    os.kill(encoder["pid"], signal.SIGKILL)
    until(lambda: real_epd.state()["processes"][0]["restarts"] == 1, "a restart")
    real_epd.until_ready()
    assert answer(real_epd, url, "three") == "three", "a picture that only the new encoder has seen"

    assert real_epd.run("down").returncode == 0
    real_epd.assert_nothing_left()


@pytest.mark.parametrize("tiers", ["both", "memory"])
def test_a_picture_goes_through_memory_before_and_after_every_process_is_killed(
    real_epd: Epd, tmp_path: Path, tiers: str
) -> None:
    document = yaml.safe_load((EXAMPLES / "memory.yaml").read_text())
    document["spec"]["model"]["source"] = str(EXAMPLES / "models" / "digits-vl")
    if tiers == "memory":
        del document["spec"]["ecStore"]["sharedStorage"], document["spec"]["ecStore"]["write"]
    path = tmp_path / "memory.yaml"
    path.write_text(yaml.safe_dump(document))
    up = real_epd.run("up", "-d", "-f", path, "--port", "0")
    assert up.returncode == 0, up.stdout + up.stderr
    state = real_epd.until_ready()
    url = f"{state['address']}/v1"
    assert answer(real_epd, url, "seven") == "seven"
    assert list(Path(state["memory"]).rglob("*.arena"))
    for process in state["processes"]:
        os.kill(process["pid"], signal.SIGKILL)
    until(lambda: all(one["restarts"] == 1 for one in real_epd.state()["processes"]), "restarts")
    real_epd.until_ready()
    assert answer(real_epd, url, "seven", "three") == "seven three"
    assert real_epd.run("down").returncode == 0
    assert not Path(state["memory"]).exists()
    real_epd.assert_nothing_left()


def test_the_quickstart_answers_right_and_ends_by_itself(real_epd: Epd) -> None:
    quickstart = real_epd.start_command(real_epd.python, QUICKSTART, "--oneshot")
    output, _ = quickstart.communicate()
    assert quickstart.returncode == 0, output
    assert "question  What digit is this?" in output
    assert "answer    seven" in output
    real_epd.assert_nothing_left()


def test_the_quickstart_serves_until_ctrl_c(epd: Epd) -> None:
    quickstart = epd.start_command(epd.python, QUICKSTART)
    assert quickstart.stdout is not None
    output = ""
    while "Serving until Ctrl-C" not in output:
        line = quickstart.stdout.readline()
        assert line, output
        output += line
    assert f"ask.py --url {epd.state()['address']}/v1 PICTURE" in output
    os.killpg(quickstart.pid, signal.SIGINT)
    rest, _ = quickstart.communicate()
    assert quickstart.returncode == 0, output + rest
    assert "Traceback" not in output + rest
    epd.assert_nothing_left()


def test_the_quickstart_fails_if_the_answer_is_not_right(epd: Epd) -> None:
    quickstart = epd.start_command(epd.python, QUICKSTART, "--oneshot")  # the stand-ins answer nothing
    output, _ = quickstart.communicate()
    assert quickstart.returncode == 1
    assert "That is not right: 'seven' was expected." in output
    epd.assert_nothing_left()


def test_ctrl_c_while_the_quickstart_is_starting_leaves_nothing(epd: Epd) -> None:
    quickstart = epd.start_command(epd.python, QUICKSTART)
    until(epd.state, "the supervisor has begun")
    os.killpg(quickstart.pid, signal.SIGINT)
    output, _ = quickstart.communicate()
    assert "Traceback" not in output
    epd.assert_nothing_left()
