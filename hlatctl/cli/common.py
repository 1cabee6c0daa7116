"""What the commands share: their common arguments, finding a run, and how a run stands right now."""

from __future__ import annotations

import getpass
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hlatctl.run import runs
from hlatctl.run.errors import HlatctlError, StorageError
from hlatctl.run.paths import RunPaths, SweepPaths

if TYPE_CHECKING:
    from conf.schema import Config
    from hlatctl.run.state import RunState

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OVERRIDES",
        help="Configuration keys to set, such as experiment=quickstart train.tokens=10M.",
        show_default=False,
    ),
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Run id, a unique beginning of one, or `latest`.")]
RunOrSweepName = Annotated[
    str, typer.Argument(metavar="RUN", help="Run or sweep id, a unique beginning of one, or `latest`.")
]
RunsDir = Annotated[
    Path | None,
    typer.Option(
        "--runs-dir", help="Folder that contains the runs.  [default: $HLATCTL_RUNS_DIR or ./runs]", show_default=False
    ),
]
Detach = Annotated[bool, typer.Option("--detach", help="Run in the background and return at once.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

#: What a run is called whose journal says that it goes on, but which nobody drives.
INTERRUPTED = "interrupted"
_ENDED = ("finished", "failed", "stopped")


@dataclass(frozen=True)
class RunView:
    """How a run stands, as far as its folder can be read.

    Args:
        status: as in ``RunState``, or ``interrupted`` (nobody drives it), ``stopping``, ``damaged``.
        driver_pid: the process that drives it.
        config: None if it can't be read; ``problem`` then says why.
    """

    run: RunPaths
    state: RunState
    status: str
    driver_pid: int | None
    config: Config | None
    problem: str = ""

    @property
    def ended(self) -> bool:
        """Nothing more will happen unless somebody resumes it."""
        return self.driver_pid is None

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run, if its configuration can be read."""
        return self.config.total_steps if self.config else None


def runs_folder(runs_dir: Path | None) -> Path:
    """The runs folder that was named, or the default one."""
    from conf.compose import default_runs_dir

    return runs_dir.expanduser().absolute() if runs_dir else default_runs_dir()


def prepared_folder(config: Config) -> Path:
    """Where the corpus itself is prepared, whatever launcher the configuration names; a simulation prepares none."""
    from conf.fingerprint import data_fingerprint
    from hlatctl.run.paths import cache_dir

    return cache_dir(Path(config.runs_dir)) / "data" / data_fingerprint(config)


def find_run(name: str, runs_dir: Path | None) -> RunPaths:
    """The run that a person means."""
    return runs.find_run(runs_folder(runs_dir), name)


def find_sweep(name: str, runs_dir: Path | None) -> SweepPaths | None:
    """The sweep that a person means, or None if it is no sweep."""
    return runs.find_sweep(runs_folder(runs_dir), name)


def announce(run: RunPaths) -> None:
    """Say that a run or a sweep is simulated, if it is: the first line of every command that goes on with it."""
    from hlatctl.run.simulated import WARNING

    if is_simulated(run):
        say(WARNING)


def is_simulated(run: RunPaths) -> bool:
    """Whether a run, or a sweep, was made by a dry run; False if its folder can't be read."""
    from hlatctl.run import sweep
    from hlatctl.run.journal import read_events

    if isinstance(run, SweepPaths):
        return sweep.fold(read_events(run)).simulated
    config, _ = _read_config(run)  # far less to read than a long journal
    return config is not None and config.cluster.launcher == "mock"


def look(run: RunPaths) -> RunView:
    """How a run stands; a damaged folder is told of and never fails."""
    from hlatctl.run.lease import driver_pid
    from hlatctl.run.state import RunState

    pid = driver_pid(run)
    config, problem = _read_config(run)
    try:
        state = read_state(run)
    except StorageError as error:
        return RunView(run, RunState(), "damaged", pid, config, error.message)
    return RunView(run, state, "damaged" if problem else _status(state, pid), pid, config, problem)


def read_state(run: RunPaths) -> RunState:
    """The folded journal."""
    from hlatctl.run.fold import fold
    from hlatctl.run.journal import read_events

    return fold(read_events(run))


def _status(state: RunState, pid: int | None) -> str:
    if pid is None:
        return INTERRUPTED if state.status == "running" else state.status
    if state.status in _ENDED:
        return state.status
    return "stopping" if state.stop_requested else "running"


def _read_config(run: RunPaths) -> tuple[Config | None, str]:
    import conf.load

    try:
        return conf.load.load(run.config), ""
    except HlatctlError as error:
        return None, error.message


def print_json(value: Any) -> None:
    """JSON on stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def say(text: str = "") -> None:
    """Talk, on stderr."""
    typer.echo(text, err=True)


def user_name() -> str:
    """Who is at the keyboard."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        return "unknown"


def columns(rows: list[list[str]]) -> str:
    """Rows of cells as aligned plain text."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
