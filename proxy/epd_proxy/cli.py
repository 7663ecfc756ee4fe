"""The `epd-proxy` command."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from epd_proxy import logs
from epd_proxy.apiserver import own_namespace
from epd_proxy.app import Proxy
from epd_proxy.config import DECODE, PREFILL, ROLES, Config, Limits, Origin, Services, topology_problem
from epd_proxy.serve import Server

_DESCRIPTION = """\
One OpenAI-compatible address in front of encoders and PDs (prefill + decode), or encoders, prefill and decode
instances.

Media items of a chat completion go to the encoders, which put their embeddings into the EC store; the PD
gets keys and sizes in their place and answers. Requests without media go straight to a PD. Where prefill and
decode are apart, a prefill instance gets each request first, and a decode instance takes over its KV and
answers.
"""
_EXAMPLE = """\
example:
  epd-engine serve MODEL --port 8001 --ec-transfer-config '{"ec_role": "ec_producer", ...}'
  epd-engine serve MODEL --port 8002 --ec-transfer-config '{"ec_role": "ec_consumer", ...}'
  epd-proxy --encoder http://127.0.0.1:8001 --pd http://127.0.0.1:8002
  curl http://127.0.0.1:8000/ready     # lists the instances and their state

  epd-proxy --encoder http://127.0.0.1:8001 --prefill http://127.0.0.1:8002 --decode http://127.0.0.1:8003

  epd-proxy --encoder-service digits-encoder --pd-service digits-pd   # in a pod

SIGTERM and Ctrl-C stop accepting, finish what is in flight within --drain-timeout, and end. A second one
does not wait.
"""
_LIMIT_HELP = {
    "max_body": "largest request body, in bytes; a larger one gets 413",
    "max_items": "most media items in one request; more get 400",
    "max_buffered": "most bytes of request bodies held at once, of all requests; beyond them 429",
    "max_in_flight": "most chat completions at once; further ones get 429 with Retry-After",
    "connect": "seconds to connect to an instance before another one is tried",
    "primer": "seconds for encoding one batch of items, retries included; then 504",
    "prefill": "seconds for one prefill; then 504",
    "decode": "seconds until the first event of a decode instance's stream; then 504",
    "first_token": "seconds until the first event of a PD's stream; then 504",
    "answer": "seconds until an answer that is not streamed; then 504",
    "idle": "seconds between two pieces of a request body (408) or of a stream (an error event)",
    "drain": "seconds for requests in flight when the proxy is told to stop",
}
_LIMIT_FLAGS = {
    "max_body": "max-body-bytes",
    "max_buffered": "max-buffered-bytes",
    "max_items": "max-media-items",
}
_ROLE_HELP = {
    "encoder": ("an encoder", "the encoders"),
    "pd": ("a PD", "the PDs"),
    "prefill": ("a prefill instance, with --decode in place of --pd", "the prefill instances"),
    "decode": ("a decode instance", "the decode instances"),
}
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def parse(arguments: Sequence[str] | None = None) -> Config:
    """The configuration from a command line; ends the process with a usage message when it is wrong."""
    parser = argparse.ArgumentParser(
        "epd-proxy", description=_DESCRIPTION, epilog=_EXAMPLE, formatter_class=_HelpFormatter
    )
    _add_instances(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (%(default)s)")
    parser.add_argument(
        "--api-keys-file",
        type=Path,
        metavar="FILE",
        help="JSON with the digests of API keys, read again when it changes; without it nobody needs a key",
    )
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(%(default)s)"
    )
    limits = parser.add_argument_group("limits")
    for field in fields(Limits):
        counts = isinstance(field.default, int)
        seconds = _not_negative if field.name == "drain" else _positive
        limits.add_argument(
            _limit_flag(field.name),
            dest=_limit(field.name),
            type=_positive_int if counts else seconds,
            default=field.default,
            metavar="N" if counts else "S",
            help=f"{_LIMIT_HELP[field.name]} (%(default)s)",
        )
    given = parser.parse_args(arguments)
    if given.limit_max_buffered < given.limit_max_body:
        parser.error("--max-buffered-bytes is less than --max-body-bytes: the largest body would never fit")
    return Config(
        instances=_instances(parser, given),
        host=given.host,
        port=given.port,
        log_level=given.log_level,
        services=_services(parser, given),
        api_keys=given.api_keys_file,
        limits=Limits(**{field.name: getattr(given, _limit(field.name)) for field in fields(Limits)}),
    )


def main() -> None:
    config = parse()
    logs.configure(config.log_level)
    try:
        proxy = Proxy(config)
    except (OSError, ValueError) as error:
        sys.exit(f"epd-proxy: --api-keys-file {config.api_keys}: {error}")
    Server(proxy, config).run()


def _add_instances(parser: argparse.ArgumentParser) -> None:
    given = parser.add_argument_group("instances by address")
    for role, words in _ROLE_HELP.items():
        given.add_argument(
            f"--{role}",
            action="append",
            default=[],
            type=_origin,
            metavar="URL",
            help=f"{words[0]}; may be repeated",
        )
    found = parser.add_argument_group(
        "instances by Kubernetes Services", "Their EndpointSlices are watched, with the port named http."
    )
    for role, words in _ROLE_HELP.items():
        found.add_argument(
            f"--{role}-service", type=_service, metavar="NAME", help=f"the Service of {words[1]}"
        )
    found.add_argument(
        "--kubernetes-namespace",
        type=_service,
        metavar="NS",
        help="namespace of the Services (the one of this pod)",
    )


def _instances(parser: argparse.ArgumentParser, given: argparse.Namespace) -> dict[str, tuple[Origin, ...]]:
    named = {role: tuple(origins) for role in ROLES if (origins := getattr(given, role))}
    for origins in named.values():
        if len({origin.url for origin in origins}) < len(origins):
            parser.error("the same URL is given twice for one role")
    if shared := {one.url for one in named.get(PREFILL, ())} & {one.url for one in named.get(DECODE, ())}:
        parser.error(f"{min(shared)} is given as --prefill and as --decode: it would hand over to itself")
    return named


def _services(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Services | None:
    names = {role: name for role in ROLES if (name := getattr(given, f"{role}_service"))}
    addressed = [role for role in ROLES if getattr(given, role)]
    if names and addressed:
        parser.error("instances are given by address or by Service, not both")
    if not names and not given.kubernetes_namespace:
        if problem := topology_problem(addressed, ""):
            parser.error(f"{problem}; or the same with -service")
        return None
    if addressed:
        parser.error("--kubernetes-namespace has no meaning where instances are given by address")
    if problem := topology_problem(names, "-service"):
        parser.error(problem)
    twice = [name for name in names.values() if list(names.values()).count(name) > 1]
    if twice:
        flags = " and ".join(f"--{role}-service" for role, name in names.items() if name == twice[0])
        parser.error(f"{flags} are the same")
    namespace = given.kubernetes_namespace or own_namespace()
    if namespace is None:
        parser.error("this is no pod, so --kubernetes-namespace is needed")
    return Services(namespace, names)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=100)


def _limit(name: str) -> str:
    """Where a limit stands among the parsed arguments, which have roles of the same names."""
    return f"limit_{name}"


def _limit_flag(name: str) -> str:
    flag = _LIMIT_FLAGS.get(name, name)
    return "--" + (flag if name.startswith("max_") else f"{flag}-timeout").replace("_", "-")


def _origin(text: str) -> Origin:
    try:
        return Origin.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _service(text: str) -> str:
    if not _LABEL.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a Service or namespace")
    return text


def _not_negative(text: str) -> float:
    return 0.0 if float(text) == 0 else _positive(text)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _positive_int(text: str) -> int:
    return int(_positive(str(int(text))))
