"""The command line where no process is needed: what it says, and its exit status."""

import sys
from pathlib import Path

import pytest

from epd_operator.cli import main

EXAMPLE = Path(__file__).parents[3] / "examples" / "digits.yaml"


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def epd(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> "Epd":
    return Epd(monkeypatch, capsys)


class Epd:
    """Runs the command line: exit status, standard output, standard error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> tuple[object, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["epd", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        output = self._capsys.readouterr()
        return ended.value.code or 0, output.out, output.err


def test_validate_accepts_the_example(epd: Epd) -> None:
    status, output, _ = epd("validate", "-f", EXAMPLE)
    assert status == 0
    assert output == f"{EXAMPLE}: digits is valid (encoder + pd, model digits-vl)\n"


def test_validate_says_each_problem_with_file_line_and_column(epd: Epd, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(EXAMPLE.read_text().replace("replicas: 1", "replicas: -1"))
    line = bad.read_text().splitlines().index("      replicas: -1") + 1
    status, _, errors = epd("validate", "-f", bad)
    assert status == 1
    assert errors.splitlines()[1] == (
        f"{bad}:{line}:7: spec.roles.encoder.replicas: must be 0 or more, got -1"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory"),
        (b"\xff\xfe", "it is no UTF-8 text"),
        (b"", "the document is empty"),
    ],
)
def test_a_file_that_cannot_be_read_is_said_to(
    epd: Epd, tmp_path: Path, content: bytes | None, said: str
) -> None:
    file = tmp_path / "file.yaml"
    if content is not None:
        file.write_bytes(content)
    status, _, errors = epd("validate", "-f", file)
    assert status == 1
    assert said in errors


@pytest.mark.parametrize("name", ["../elsewhere", "", "A", "a" * 64])
def test_a_name_is_no_path(epd: Epd, name: str) -> None:
    status, _, errors = epd("up", "-f", EXAMPLE, "--name", name)
    assert status == 1
    assert "--name: must be" in errors


def test_with_nothing_running_the_next_step_is_said(epd: Epd) -> None:
    assert epd("ps") == (0, "nothing is running; start a deployment with `epd up -d -f FILE`\n", "")
    assert epd("ps", "--json") == (0, "[]\n", "")
    assert epd("down") == (0, "nothing is running\n", "")
    assert epd("down", "--name", "x") == (0, "x is not running\n", "")
    status, _, errors = epd("logs")
    assert status == 1
    assert "epd up -d -f FILE" in errors


def test_help_teaches(epd: Epd) -> None:
    _, top, _ = epd("--help")
    for command in ("validate", "up", "ps", "logs", "down"):
        assert f" {command} " in top
    assert "epd up -f examples/digits.yaml" in top
    _, up, _ = epd("up", "--help")
    assert "0 finds a free one" in up
    assert "epd up -d -f examples/digits.yaml" in up
    assert epd("--version")[1].startswith("epd ")
