"""Every benchmark that the documentation names starts from where its command says."""

import re
import subprocess
import sys

import pytest

from tests.support.digits import ROOT

NAMED = sorted(set(re.findall(r"benchmarks/\w+\.py", (ROOT / "docs" / "benchmarks.md").read_text())))


@pytest.mark.parametrize("program", NAMED)
def test_a_benchmark_explains_itself(program: str) -> None:
    command = [sys.executable, str(ROOT / program), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")
