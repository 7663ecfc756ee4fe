"""Prefill and decode instances, and what the proxy does with them in a few plain lines."""

import json
from pathlib import Path
from typing import Any

import httpx

from tests.support.epd_client import ask, media_parts, prime, rewritten
from tests.support.processes import Server

Messages = list[dict[str, Any]]


def kv_flags(role: str, path: Path, **extra: Any) -> list[str]:
    """The flags of an instance that exchanges KV as files in `path`."""
    config = {
        "kv_connector": "SharedStorageKVConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(path), **extra},
    }
    return ["--kv-transfer-config", json.dumps(config)]


def nixl_flags(role: str, **extra: Any) -> list[str]:
    """The flags of an instance that exchanges KV by memory."""
    config = {"kv_connector": "NixlKVConnector", "kv_role": role, "kv_connector_extra_config": extra}
    return ["--kv-transfer-config", json.dumps(config)]


def for_language(encoder: Server, messages: Messages) -> Messages:
    """The messages with what the encoder says of their media."""
    return rewritten(messages, prime(encoder, messages)) if media_parts(messages) else messages


def ask_prefill(prefill: Server, messages: Messages, **fields: Any) -> httpx.Response:
    fields = {name: value for name, value in fields.items() if name not in ("stream", "stream_options")}
    asked = {**fields, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    return ask(prefill, messages, **asked)


def handed_on(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    params: dict[str, Any] = answer.json()["kv_transfer_params"]
    return params


def ask_split(
    encoder: Server, prefill: Server, decode: Server, messages: Messages, **fields: Any
) -> httpx.Response:
    """E, then P, then D."""
    messages = for_language(encoder, messages)
    params = handed_on(ask_prefill(prefill, messages, **fields))
    return ask(decode, messages, **fields, kv_transfer_params=params)


def transfers_in(path: Path) -> list[Path]:
    return [p for p in path.glob("*/*") if p.is_dir()]
