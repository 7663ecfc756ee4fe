"""The model in an engine's pod: where it is, how it is fetched, where downloads are kept."""

import posixpath
from typing import Any

from ..api.deployment import MODELS_PATH, Model
from .pods import HOME
from .store import Mount

HF_HOME = "/var/cache/huggingface"


def source_of(model: Model) -> str:
    """The model as the engine's argument. What is not in a claim is left to the image or the hub."""
    if model.claim is None:
        return model.source
    return posixpath.normpath(posixpath.join(MODELS_PATH, model.source))


def model_mounts(model: Model) -> list[Mount]:
    """The cache of downloads, then the claim that holds the model, where there is one."""
    mounts = [_cache(model)]
    if model.claim is not None:
        mounts.append(_claim(model.claim))
    return mounts


def model_env(model: Model) -> list[dict[str, Any]]:
    """What the hub's client and other caches are told."""
    env: list[dict[str, Any]] = [
        {"name": "HF_HOME", "value": HF_HOME},
        {"name": "XDG_CACHE_HOME", "value": f"{HOME}/.cache"},
    ]
    if model.token_secret is not None:
        key = {"name": model.token_secret.name, "key": model.token_secret.key}
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}})
    return env


def _cache(model: Model) -> Mount:
    """Where downloads go: a claim that keeps them, or a folder that ends with the pod."""
    volume: dict[str, Any] = {"name": "cache", "emptyDir": {}}
    if model.cache_claim is not None:
        volume = {"name": "cache", "persistentVolumeClaim": {"claimName": model.cache_claim}}
    return Mount(volume, {"name": "cache", "mountPath": HF_HOME})


def _claim(claim: str) -> Mount:
    return Mount(
        {"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}},
        {"name": "model", "mountPath": MODELS_PATH, "readOnly": True},
    )
