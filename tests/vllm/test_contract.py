"""Our connector under vLLM's own scheduler and its V2 runner's EC code, by `contract_program.py`."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.vllm import ENGINE, process_environment

PROGRAM = Path(__file__).with_name("contract_program.py")
CASES = re.findall(r"^def (case_\w+)", PROGRAM.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def results(python: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("contract")
    environment = {**process_environment(), "PYTHONPATH": str(ENGINE)}
    ran = subprocess.run(
        [python, PROGRAM, model, folder],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    said: dict[str, str] = json.loads(ran.stdout.splitlines()[-1])
    return said


@pytest.mark.parametrize("case", CASES)
def test_under_vllms_scheduler(results: dict[str, str], case: str) -> None:
    assert results[case] == ""
