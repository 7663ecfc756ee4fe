"""The `epd-engine` command."""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version

from epd_engine.config import EngineConfig, MediaLimits
from epd_engine.ec_store.cli.parser import add_store_parser
from epd_engine.ec_store.cli.parser import run as run_store
from epd_engine.ec_transfer.config import ECConfigError, ECTransferConfig
from epd_engine.kv_transfer.config import KVConfigError, KVTransferConfig

EPILOG = """\
roles, by --ec-transfer-config:
  none            aggregated: tower and language model in one process
  ec_producer     encoder only: fills the EC store, holds no language model and no KV cache
  ec_consumer     language model only: takes encoder outputs from the store
  ec_both         both, sharing the store with others

and by --kv-transfer-config, where prefill and decode are apart:
  kv_producer     prefill: computes prompts, and hands their KV on
  kv_consumer     decode: goes on from there; needs no EC store and no tower
  kv_both         both

example, an encoder and a PD instance on one store:
  epd-engine serve MODEL --port 8001 --ec-transfer-config '{"ec_connector": "ECSharedStorageConnector",
    "ec_role": "ec_producer", "ec_connector_extra_config": {"shared_storage_path": "/mnt/ec"}}'
  epd-engine serve MODEL --port 8002 --ec-transfer-config '{"ec_connector": "ECSharedStorageConnector",
    "ec_role": "ec_consumer", "ec_connector_extra_config": {"shared_storage_path": "/mnt/ec"}}'
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="epd-engine", description="Serves a multimodal model in one EPD role."
    )
    parser.add_argument("--version", action="version", version=version("epd"))
    commands = parser.add_subparsers(dest="command", required=True)
    serve_parser = commands.add_parser(
        "serve",
        help="serve a model over the OpenAI API",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_serve_arguments(serve_parser)
    add_store_parser(commands)
    arguments = parser.parse_args(argv)
    if "check" in arguments:
        arguments.check(arguments)
    if arguments.command == "store":
        sys.exit(run_store(arguments))
    try:
        config = _config(arguments)
    except (ECConfigError, KVConfigError) as error:
        serve_parser.error(str(error))
    from epd_engine.server.serve import serve  # torch is imported only once the flags are right

    sys.exit(serve(config, arguments.host, arguments.port, arguments.drain_timeout, arguments.log_level))


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    default = EngineConfig("")
    add = parser.add_argument
    add("model", metavar="MODEL", help="a checkpoint folder or a hub id")
    add("--revision", help="branch, tag or commit of a hub id")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    add(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names clients use (default: MODEL)",
    )
    add("--dtype", default=default.dtype, choices=["auto", "float32", "bfloat16", "float16"])
    add("--device", default=default.device, help="cpu, cuda, cuda:1 ... (default: %(default)s)")
    add(
        "--drain-timeout",
        type=_not_negative,
        default=30,
        metavar="SECONDS",
        help="what has begun may finish, once told to end (default: %(default)s)",
    )
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    _add_limits(parser, default)
    _add_transfers(parser)
    _add_media(parser, default)


def _add_limits(parser: argparse.ArgumentParser, default: EngineConfig) -> None:
    add = parser.add_argument
    add("--max-model-len", type=_positive, metavar="TOKENS", help="context limit (default: the model's)")
    add(
        "--max-num-seqs",
        type=_positive,
        default=default.max_num_seqs,
        metavar="N",
        help="requests in a batch",
    )
    add("--max-num-batched-tokens", type=_positive, default=default.max_num_batched_tokens, metavar="N")
    add(
        "--max-waiting",
        type=_positive,
        default=default.max_waiting,
        metavar="N",
        help="queue limit, then 429",
    )
    add(
        "--kv-cache-tokens",
        type=_positive,
        metavar="N",
        help="KV room (default: 4 x the context limit, or what memory allows)",
    )
    add("--encoder-cache-size", type=_positive, default=default.encoder_cache_size, metavar="EMBEDDINGS")
    add(
        "--max-encoder-embeds",
        type=_positive,
        default=default.max_encoder_embeds,
        metavar="N",
        help="per step",
    )


def _add_transfers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--ec-transfer-config",
        type=_ec_transfer,
        metavar="JSON",
        help="role and EC store; see below",
    )
    add(
        "--kv-transfer-config",
        type=_kv_transfer,
        metavar="JSON",
        help="role and way of KV from prefill to decode; see below",
    )
    add(
        "--ec-miss",
        choices=["error", "compute"],
        default="error",
        help="may a consumer compute raw media itself",
    )


def _add_media(parser: argparse.ArgumentParser, default: EngineConfig) -> None:
    add = parser.add_argument
    add(
        "--limit-mm-per-prompt",
        type=_limits,
        default={},
        metavar="JSON",
        help="items per request: '{\"image\": 8}'",
    )
    add(
        "--allowed-media-domains",
        nargs="+",
        default=[],
        metavar="HOST",
        help="hosts to fetch media from (none)",
    )
    add(
        "--max-media-bytes", type=_positive, default=default.media.max_bytes, metavar="BYTES", help="per item"
    )
    add(
        "--max-image-pixels",
        type=_positive,
        default=default.media.max_pixels,
        metavar="N",
        help="per picture",
    )
    add(
        "--max-audio-seconds",
        type=_positive,
        default=default.media.max_audio_seconds,
        metavar="SECONDS",
        help="per sound, besides the model's own limit (default: %(default)g)",
    )


def _config(arguments: argparse.Namespace) -> EngineConfig:
    """Raises `ECConfigError` or `KVConfigError` for flags that contradict each other."""
    ec, kv = arguments.ec_transfer_config, arguments.kv_transfer_config
    if kv is not None and ec is not None and ec.is_encode_only:
        raise KVConfigError("--kv-transfer-config is not for an encoder, which has no KV")
    if arguments.ec_miss == "compute" and (ec is None or not ec.is_consumer):
        raise ECConfigError("--ec-miss compute is for an instance whose ec_role consumes")
    return EngineConfig(
        model=arguments.model,
        revision=arguments.revision,
        served_model_names=tuple(arguments.served_model_name),
        dtype=arguments.dtype,
        device=arguments.device,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_waiting=arguments.max_waiting,
        kv_cache_tokens=arguments.kv_cache_tokens,
        encoder_cache_size=arguments.encoder_cache_size,
        max_encoder_embeds=arguments.max_encoder_embeds,
        ec_transfer=ec,
        kv_transfer=kv,
        ec_miss=arguments.ec_miss,
        media=MediaLimits(
            per_request=arguments.limit_mm_per_prompt,
            allowed_domains=tuple(arguments.allowed_media_domains),
            max_bytes=arguments.max_media_bytes,
            max_pixels=arguments.max_image_pixels,
            max_audio_seconds=arguments.max_audio_seconds,
        ),
    )


def _not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {value}")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be positive, got {value}")
    return value


def _ec_transfer(text: str) -> ECTransferConfig:
    try:
        return ECTransferConfig.from_json(text)
    except ECConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _limits(text: str) -> dict[str, int]:
    try:
        limits = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(limits, dict) or not all(type(n) is int and n >= 0 for n in limits.values()):
        raise argparse.ArgumentTypeError('must look like {"image": 8, "audio": 1}')
    if unknown := sorted(set(limits) - {"image", "audio", "video"}):
        raise argparse.ArgumentTypeError(f"unknown modality {unknown[0]!r}; known are image, audio, video")
    return limits


def _kv_transfer(text: str) -> KVTransferConfig:
    try:
        return KVTransferConfig.from_json(text)
    except KVConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
