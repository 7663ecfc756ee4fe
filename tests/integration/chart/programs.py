"""helm and kubectl, run as a person runs them."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.cluster.patience import until

REPOSITORY = Path(__file__).resolve().parents[3]
CHART = REPOSITORY / "charts" / "epd-operator"
CRD = "crd/epddeployments.epd.dev"


class ProgramError(Exception):
    """A program ended with an error; the text is what it said."""


def _run(command: list[str], environment: dict[str, str], given: str | None) -> str:
    # Helm and kubectl must not learn of another cluster from whoever runs the tests.
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, env=inherited | environment, timeout=120
    )
    if done.returncode != 0:
        raise ProgramError(done.stderr + done.stdout)
    return done.stdout


@dataclass(frozen=True)
class Helm:
    """Helm of one version; `home` keeps its caches out of the user's."""

    program: Path
    home: Path
    kubeconfig: Path | None = None

    def __call__(self, *arguments: str) -> str:
        """What it prints. Raises ProgramError."""
        environment = {
            f"HELM_{kind}_HOME": str(self.home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")
        }
        # Without a cluster, an address where none answers.
        environment["KUBECONFIG"] = str(self.kubeconfig or self.home / "none")
        return _run([str(self.program), *arguments], environment, None)


@dataclass(frozen=True)
class Kubectl:
    """kubectl with all rights in a cluster."""

    program: Path
    kubeconfig: Path

    def __call__(self, *arguments: str, given: str | None = None) -> str:
        """What it prints; `given` is its standard input. Raises ProgramError."""
        return _run([str(self.program), *arguments], {"KUBECONFIG": str(self.kubeconfig)}, given)

    def json(self, *arguments: str) -> Any:
        """What it prints with `-o json`."""
        return json.loads(self(*arguments, "-o", "json"))

    def apply(self, document: dict[str, Any], *arguments: str) -> str:
        """Applies a document."""
        return self("apply", *arguments, "-f", "-", given=json.dumps(document))


def wait_until_established(kubectl: Kubectl) -> None:
    """Until the API server serves the resource.

    `kubectl wait` gives up on a definition that is too new to have a status.
    """

    def is_established() -> bool:
        status = kubectl.json("get", CRD).get("status", {})
        return any(
            one["type"] == "Established" and one["status"] == "True" for one in status.get("conditions") or []
        )

    until(is_established, "an established definition")
