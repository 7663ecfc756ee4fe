"""The `epd` command line."""

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .crd.levels import CelLevel
from .local import commands
from .local.commands import SUPERVISOR
from .local.detach import run_detached
from .local.errors import LocalError
from .local.rundir import known_runs
from .local.state import DeploymentState, Phase

if TYPE_CHECKING:
    from .api import EPDDeployment

# `epd.api` and what runs processes are imported by the commands that need them: `ps`, `logs` and `down`
# answer in half the time without.


def _examples(*lines: str) -> str:
    """A help text's last part: a line for each example."""
    return "\n\n".join(["[dim]Examples[/dim]", *lines])


app = typer.Typer(
    name="epd",
    help="Serve a multimodal model with encoders and language-model instances of their own (EPD).\n\n"
    "On this machine: write an EPDDeployment document, check it with [bold]epd validate[/bold], run it with "
    "[bold]epd up[/bold].",
    epilog=_examples(
        "epd validate -f examples/digits.yaml",
        "epd up -f examples/digits.yaml",
        "python examples/ask.py examples/images/seven.png",
    ),
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

File = Annotated[
    Path,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="The EPDDeployment document (YAML or JSON); - reads standard input.",
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        "--name", "-n", metavar="NAME", help="Which deployment, where several run.", show_default=False
    ),
]
Detach = Annotated[
    bool, typer.Option("--detach", "-d", help="Return when all is ready; stop it with `epd down`.")
]
Port = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        metavar="PORT",
        help="The proxy's port; 0 finds a free one. Not given: spec.proxy.port (8000).",
        show_default=False,
    ),
]
Host = Annotated[
    str,
    typer.Option(metavar="HOST", help="The address that the proxy binds; 0.0.0.0 lets other machines in."),
]
Store = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Directory of the EC store, which is kept; one that is removed at the end where not given.",
        show_default=False,
    ),
]
VllmPython = Annotated[
    Path | None,
    typer.Option(
        "--vllm-python",
        envvar="EPD_VLLM_PYTHON",
        metavar="PYTHON",
        help="For engine.type vllm: the Python of the environment that has it; this one where not given.",
        show_default=False,
    ),
]
OtherName = Annotated[
    str | None,
    typer.Option(
        "--name",
        "-n",
        metavar="NAME",
        help="Another name than the document's metadata.name.",
        show_default=False,
    ),
]


def main() -> None:
    """Runs the command line; what a person can mend ends with exit status 1 and a message."""
    try:
        app()
    except LocalError as error:
        print(f"epd: {error}", file=sys.stderr)
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"epd {version('epd')}")
        raise typer.Exit


@app.callback()
def _global_options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog=_examples("epd validate -f examples/digits.yaml"))
def validate(file: File) -> None:
    """Check a document: every problem with its line, its field, and what to do."""
    deployment = _load(file)
    spec = deployment.spec
    topology = "encoder + pd" if spec.roles.pd is not None else "encoder + prefill + decode"
    print(f"{file}: {deployment.metadata.name} is valid ({topology}, model {spec.model.name})")


@app.command(
    epilog=_examples("epd up -f examples/digits.yaml", "epd up -d -f examples/digits.yaml --port 8080")
)
def up(
    file: File,
    detach: Detach = False,
    port: Port = None,
    host: Host = "127.0.0.1",
    store: Store = None,
    name: OtherName = None,
    vllm_python: VllmPython = None,
) -> None:
    """Run a deployment as processes on this machine, until Ctrl-C.

    Starts the replicas of each role and a proxy, restarts what dies, and says the one address to talk to.
    """
    from .local.up import UpOptions, run

    if sys.platform != "linux":
        raise LocalError("`epd up` needs Linux: it finds what a killed run left behind by way of /proc")
    deployment = _load(file)
    name = deployment.metadata.name if name is None else _check_name(name)
    base = Path.cwd() if str(file) == "-" else file.resolve().parent
    options = UpOptions(host=host, port=port, store=store, vllm_python=vllm_python)
    if not detach:
        raise typer.Exit(run(deployment, name, base, options, lambda state: _print_ready(state, "Ctrl-C")))

    def serve(go_on_in_background: Callable[[Path], None]) -> int:
        def ready(state: DeploymentState) -> None:
            _print_ready(state)
            go_on_in_background(Path(state.directory) / "logs" / f"{SUPERVISOR}.log")

        try:
            return run(deployment, name, base, options, ready)
        except LocalError as error:
            print(f"epd: {error}", file=sys.stderr)
            return 1

    raise typer.Exit(run_detached(serve))


@app.command(epilog=_examples("epd crd | kubectl apply -f -", "epd crd --cel basic > crd.yaml"))
def crd(
    cel: Annotated[
        CelLevel,
        typer.Option(help="Rules the API server checks: basic needs Kubernetes 1.25, quantity needs 1.29."),
    ] = CelLevel.QUANTITY,
    helm: Annotated[bool, typer.Option("--helm", help="Print the chart's template instead.")] = False,
) -> None:
    """Print the custom resource definition, for a cluster that is set up without the Helm chart."""
    from .crd.text import crd_template, crd_yaml

    print(crd_template() if helm else crd_yaml(cel), end="")


@app.command(epilog=_examples("epd ps", "epd ps --json | jq -r '.\\[0].address'"))
def ps(
    name: Name = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of deployments as JSON.")] = False,
) -> None:
    """Show what runs: each deployment's address, and its processes."""
    states = commands.ps(name)
    if as_json:
        print(json.dumps([state.as_json() for state in states], indent=2))
    elif not states:
        print("nothing is running; start a deployment with `epd up -d -f FILE`")
    for state in [] if as_json else states:
        _print_state(state)


@app.command(epilog=_examples("epd logs", "epd logs encoder -f", "epd logs pd-0 --tail 50"))
def logs(
    role: Annotated[
        str | None,
        typer.Argument(
            help="encoder, pd, janitor, proxy, a process such as encoder-0, or supervisor; all if not given.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new lines, until Ctrl-C.")
    ] = False,
    tail: Annotated[
        int | None,
        typer.Option(min=0, metavar="LINES", help="Only the last lines of each log.", show_default=False),
    ] = None,
    name: Name = None,
) -> None:
    """Print the logs of a role."""
    try:
        for line in commands.logs(commands.only_name(name), role, tail, follow):
            print(line, flush=follow)
    except KeyboardInterrupt:
        pass


@app.command(epilog=_examples("epd down", "epd down --name digits"))
def down(name: Name = None) -> None:
    """Stop a deployment that runs in the background (or elsewhere), and remove its files.

    Also cleans up after an `epd up` that was killed.
    """
    runs = known_runs()
    if not runs or (name is not None and name not in runs):
        print(f"{name or 'nothing'} is {'not running' if name else 'running'}")
        return
    print(commands.down(commands.only_name(name)))


def _check_name(name: str) -> str:
    from pydantic import TypeAdapter, ValidationError

    from .api.base import Name as Label

    try:
        return TypeAdapter(Label).validate_python(name)
    except ValidationError:
        raise LocalError(
            f"--name: must be at most 63 lower-case letters, digits and hyphens, got {name!r}"
        ) from None


def _load(file: Path) -> "EPDDeployment":
    """The document in a file. Raises LocalError with every problem in it."""
    from .api import DocumentError, parse_document

    try:
        return parse_document(sys.stdin.read() if str(file) == "-" else file.read_text())
    except OSError as error:
        raise LocalError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise LocalError(f"cannot read {file}: it is no UTF-8 text") from None
    except DocumentError as error:
        places = [f"{file}:{one.line}:{one.column}: {one}" for one in error.problems]
        raise LocalError("the document is not valid\n" + "\n".join(places)) from None


def _print_ready(state: DeploymentState, how_to_stop: str = "") -> None:
    which = f" --name {state.name}" if len(known_runs()) > 1 else ""
    console = Console()
    console.print(f"{state.name} is ready", style="bold green", highlight=False)
    for title, text in (
        ("address", f"{state.address}/v1  (OpenAI API)"),
        ("model", state.model),
        ("logs", f"epd logs encoder -f{which}"),
        ("stop", how_to_stop or f"epd down{which}"),
    ):
        console.print(f"  {title:<8} {text}", highlight=False, markup=False, soft_wrap=True)


def _print_state(state: DeploymentState) -> None:
    console = Console()
    advice = ": `epd up` was killed, `epd down` cleans up" if state.phase is Phase.DEAD else ""
    console.print(
        f"{state.name}  {state.phase}{advice}  {state.address}/v1  model {state.model}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("  PROCESS", "STATE", "PID", "PORT", "RESTARTS", ""):
        table.add_column(column)
    for one in state.processes:
        cells = (
            f"  {one.name}",
            str(one.phase),
            str(one.pid or "-"),
            str(one.port),
            str(one.restarts),
            one.note,
        )
        table.add_row(*map(escape, cells))
    console.print(table, highlight=False, soft_wrap=True)
