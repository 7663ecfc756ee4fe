"""What a person sees while a deployment starts, runs and stops."""

import time
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from .state import DeploymentState, Phase, ProcessState

_MARKS = {
    Phase.READY: "[green]✓[/]",
    Phase.NOT_READY: "[yellow]•[/]",
    Phase.RESTARTING: "[red]✗[/]",
    Phase.STOPPED: "[dim]-[/]",
}


class Progress(Protocol):
    """Shows a deployment's state."""

    def update(self, state: DeploymentState) -> None:
        """The state may have changed, or time has passed."""

    def close(self) -> None:
        """Leaves the screen as it is; what follows are lines."""


def progress_on(console: Console) -> "Progress":
    """A table that is redrawn on a terminal, plain lines anywhere else."""
    return LiveProgress(console) if console.is_terminal else LineProgress(console)


class LineProgress:
    """One line for each change."""

    def __init__(self, console: Console, said: DeploymentState | None = None) -> None:
        """`said`: a state that the person knows already."""
        self._console = console
        self._said = (
            {process.name: (process.phase, process.note) for process in said.processes} if said else {}
        )
        self._since: dict[str, float] = {}

    def update(self, state: DeploymentState) -> None:
        """Prints what has changed since the last call."""
        for process in state.processes:
            now = (process.phase, process.note)
            if self._said.get(process.name) != now:
                self._said[process.name] = now
                self._print(process)

    def close(self) -> None:
        """Nothing to leave."""

    def _print(self, process: ProcessState) -> None:
        took = ""
        if process.phase is Phase.STARTING:
            self._since[process.name] = time.monotonic()
        elif process.phase is Phase.READY and process.name in self._since:
            took = f" after {time.monotonic() - self._since.pop(process.name):.1f} s"
        note = f": {process.note}" if process.note else ""
        self._console.print(
            f"{process.name:<10} {process.phase}{took}{note}", markup=False, highlight=False, soft_wrap=True
        )


class LiveProgress:
    """A table of the processes; after `close`, lines for what happens later."""

    def __init__(self, console: Console) -> None:
        self._lines: LineProgress | None = None
        self._console = console
        self._started = time.monotonic()
        self._ready_at: dict[str, float] = {}
        self._state: DeploymentState | None = None
        # Redrawn by `update` alone: a thread of rich's would live on in every child between fork and exec.
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def update(self, state: DeploymentState) -> None:
        """Redraws the table, or prints what has changed."""
        if self._lines is not None:
            self._lines.update(state)
        else:
            self._state = state
            self._live.update(Group(*(self._row(process) for process in state.processes)), refresh=True)

    def close(self) -> None:
        """Leaves the table on the screen."""
        if self._lines is None:
            self._live.stop()
            self._lines = LineProgress(self._console, self._state)

    def _row(self, process: ProcessState) -> Table:
        row = Table.grid(padding=(0, 1))
        for width in (2, 12, 10, 8):
            row.add_column(min_width=width)
        if process.phase is Phase.READY:
            self._ready_at.setdefault(process.name, time.monotonic())
        end = self._ready_at.get(process.name, time.monotonic())
        mark = _MARKS.get(process.phase) or Spinner("dots")
        row.add_row(mark, process.name, str(process.phase), f"{end - self._started:.1f} s", process.note)
        return row
