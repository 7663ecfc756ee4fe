"""`engine.type: vllm` on a real node: vLLM with our connector in its image, as the operator runs it."""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.base import Cluster
from tests.cluster.images import BASE_PYTHON, build_image
from tests.e2e.installation import Installation, installed_on, local_volume
from tests.integration.chart.programs import Kubectl
from tests.support.engines import MODEL_NAME
from tests.support.vllm import FLAGS, LARGEST, NO_VIDEO, environment_directory, vllm_python
from tests.vllm.client import picture, question

VLLM_START_SECONDS = 900.0  # two minutes, where no other suite runs beside
NAMESPACE, NAME = "e2e-vllm", "tiny"
IMAGE = "localhost/epd-engine-vllm:e2e"
LABELS = f'{{engine="0",model_name="{MODEL_NAME}"}}'
PYTHON = "python{}.{}".format(*BASE_PYTHON)

# In the place of vLLM's own image, which is for GPUs: its build for CPUs, where Debian's Python looks. An
# image's files have no times, by which compiled ones would be believed, and to compile takes minutes.
BASE = f"""\
ARG BASE
FROM ${{BASE}}
COPY site-packages /usr/local/lib/{PYTHON}/dist-packages
RUN python3 -m compileall -q -f -j 0 --invalidation-mode unchecked-hash /usr/local/lib/{PYTHON} || true
RUN printf '%s\\n' '#!/bin/sh' 'exec python3 -m vllm.entrypoints.cli.main "$@"' > /usr/local/bin/vllm \\
 && chmod 755 /usr/local/bin/vllm
"""

pytestmark = [pytest.mark.node, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def image(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    vllm_python()
    dockerfile = tmp_path_factory.mktemp("vllm") / "Dockerfile"
    dockerfile.write_text(BASE)
    base = "localhost/vllm-cpu:e2e"
    build_image(dockerfile, base, context=environment_directory() / "lib" / PYTHON)
    cluster.load_image(build_image("images/engine-vllm/Dockerfile", IMAGE, build_args={"BASE": base}))
    return IMAGE


@pytest.fixture(scope="module")
def installed(
    operator: None, image: str, kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    from benchmarks.make_model import make

    store, models = tmp_path_factory.mktemp("store"), tmp_path_factory.mktemp("models")
    make(models / "tiny", "qwen2_5_vl", "tiny")
    for path in [models, *models.rglob("*")]:
        path.chmod(0o755)
    volumes = [
        local_volume(kubectl, "e2e-vllm-store", store, size="10Gi"),
        local_volume(kubectl, "e2e-vllm-models", models, size="1Gi", storage_class="models"),
    ]
    wanted = (claim("models"), deployment(image))
    with installed_on(volumes, kubectl, NAMESPACE, *wanted, seconds=VLLM_START_SECONDS) as made:
        yield made


def claim(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": name,
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }


def deployment(image: str) -> dict[str, Any]:
    limits = json.dumps({"image": LARGEST, **NO_VIDEO})
    small = [*FLAGS, "--dtype", "float32", "--limit-mm-per-prompt", limits]
    return {
        "apiVersion": "epd.dev/v1alpha1",
        "kind": "EPDDeployment",
        "metadata": {"name": NAME},
        "spec": {
            "model": {"source": "./tiny", "claim": "models", "servedName": MODEL_NAME},
            "engine": {"type": "vllm", "image": image},
            "roles": {role: {"replicas": 1, "extraArgs": small} for role in ("encoder", "pd")},
            "ecStore": {"sharedStorage": {}},
        },
    }


def test_a_picture_is_encoded_in_one_pod_and_answered_by_the_other(installed: Installation) -> None:
    about_it = question(picture())
    answer = installed.answer(about_it)
    assert answer
    assert installed.answer(about_it) == answer
    assert installed.metric("encoder", f"epd_engine_ec_saves_total{LABELS}") == 1
    assert installed.metric("pd", f"epd_engine_ec_loads_total{LABELS}") == 1


def test_pods_run_as_users_without_rights(installed: Installation) -> None:
    for role in ("encoder", "pd"):
        (pod,) = installed.pods(role)
        said = installed.kubectl("exec", pod, "-n", NAMESPACE, "--", "id", "-u")
        assert int(said) not in (0, os.getuid())
