"""Arguments and output functions that several commands share."""

from __future__ import annotations

import getpass
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conf import folders
from hlatctl.cli.completion import override_words, run_names, run_or_sweep_names
from hlatctl.report.run_view import is_simulated
from hlatctl.run import runs
from hlatctl.run.errors import ConfigError, RunNotFoundError
from hlatctl.run.paths import RunPaths, SweepPaths
from hlatctl.run.simulated import WARNING
from hlatctl.units import one_line, printable

if TYPE_CHECKING:
    from conf.schema import Config


def _overrides(about: str) -> Any:
    return typer.Argument(metavar="OVERRIDES", help=about, show_default=False, autocompletion=override_words)


#: Of a new run, of a run that exists, and of its evaluation.
Overrides = Annotated[
    list[str] | None, _overrides("Configuration keys to set, such as experiment=quickstart train.tokens=10M.")
]
Changes = Annotated[
    list[str] | None, _overrides("Keys of the run's configuration to change, such as optimizer.lr=1e-4.")
]
EvalOverrides = Annotated[
    list[str] | None, _overrides("Keys of the evaluation to set, such as eval=hlat_core eval.limit=100.")
]

#: Bold and its end: they can neither hide text nor move the cursor.
_EMPHASIS = re.compile("(\x1b\\[[01]m)")


def place(text: str) -> Path:
    """Return the path that a person has named, with ``~`` expanded; the parser of all arguments that are paths.

    Raises:
        ConfigError: the text is empty, as an unset variable in a script gives, or names no user's folder. ``Path("")``
            would be the current folder.
    """
    if not text:
        raise ConfigError("a path is empty", hint="name a file or folder; . is the current folder")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"{text}: there is no such user", hint="write the whole path") from None


def _use_config_dirs(ctx: typer.Context, value: list[Path] | None) -> list[Path] | None:
    """Use the folders of ``--config-dir`` until the command has ended."""
    ctx.with_resource(folders.using(value or []))
    return value


#: The callback does all that the option is for; commands take the argument and ignore it.
ConfigDirs = Annotated[
    list[Path] | None,
    typer.Option(
        "--config-dir",
        metavar="DIR",
        parser=place,
        help="Folder with options, experiments and sweeps of your own; can be repeated.  [also: $HLATCTL_CONFIG_DIR, "
        "and ./conf if it contains hlatctl.yaml]",
        show_default=False,
        callback=_use_config_dirs,
    ),
]
RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="Run id, a unique beginning of one, or `latest`.", autocompletion=run_names)
]
RunOrSweepName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run or sweep id, a unique beginning of one, or `latest`.",
        autocompletion=run_or_sweep_names,
    ),
]


RunsDir = Annotated[
    Path | None,
    typer.Option(
        "--runs-dir",
        metavar="PATH",
        parser=place,
        help="Folder that contains the runs.  [default: $HLATCTL_RUNS_DIR or ./runs]",
        show_default=False,
    ),
]
Detach = Annotated[bool, typer.Option("--detach", help="Run in the background and return immediately.")]
Name = Annotated[str | None, typer.Option("--name", metavar="TEXT", help="Display name.", show_default=False)]
Tags = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="K=V", help="Tag to find it by; can be repeated.", show_default=False),
]
Note = Annotated[str, typer.Option("--note", metavar="TEXT", help="Note to attach to it.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def runs_folder(runs_dir: Path | None) -> Path:
    """Return the absolute path of the runs folder, or of the default one."""
    from conf.compose import default_runs_dir

    return runs_dir.absolute() if runs_dir else default_runs_dir()


def with_runs_dir(overrides: list[str] | None, runs_dir: Path | None) -> list[str]:
    """Return overrides, and the folder of ``--runs-dir`` as the last of them."""
    from conf.compose import quoted

    named = [f"runs_dir={quoted(str(runs_folder(runs_dir)))}"] if runs_dir else []
    return [*(overrides or []), *named]


def warn_of_no_effect(config: Config, overrides: list[str] | None) -> None:
    """Print a warning for each key of the command line that has no effect in a configuration."""
    for text in no_effects(config, overrides):
        say(f"warning: {text}")


def no_effects(config: Config, overrides: list[str] | None) -> list[str]:
    """Return a warning for each key of the command line that has no effect in a configuration."""
    from conf.effects import without_effect
    from conf.origins import overridden_keys

    return without_effect(config, (key for text in overrides or [] for key in overridden_keys(text)))


def find_run(name: str, runs_dir: Path | None) -> RunPaths:
    """Return the run of an id, a unique beginning of one, or ``latest``; or else of a name that no other run has."""
    folder = runs_folder(runs_dir)
    try:
        return runs.find_run(folder, name)
    except RunNotFoundError:
        from hlatctl.report.run_index import called

        if run := called(folder, name):
            return run
        raise


def find_sweep(name: str, runs_dir: Path | None) -> SweepPaths | None:
    """Return the sweep of an id or a unique beginning of one. None if there is none."""
    return runs.find_sweep(runs_folder(runs_dir), name)


def find_sweep_only(name: str, runs_dir: Path | None, argument: str) -> SweepPaths:
    """Return the sweep of a name.

    Args:
        argument: what the name was given as, such as ``--extend``.

    Raises:
        RunNotFoundError: there is no such run or sweep.
        ConfigError: it is a run.
    """
    sweep = find_sweep(name, runs_dir)
    if sweep is None:
        run = find_run(name, runs_dir)
        raise ConfigError(
            f"{argument}={name}: {run.run_id} is a run, not a sweep",
            hint=f"`hlatctl status {run.run_id}` shows the run",
        )
    return sweep


def announce(run: RunPaths) -> None:
    """Print a line if a run or a sweep is simulated."""
    if is_simulated(run):
        say(WARNING)


def print_json(value: Any) -> None:
    """Print JSON on stdout; characters that a terminal obeys are escaped, also those of the direction of writing."""
    lines = json.dumps(value, indent=2, ensure_ascii=False).split("\n")
    write("\n".join(line if line.isprintable() else _escaped(line) for line in lines))


def _escaped(line: str) -> str:
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in line)


def write(text: object = "", *, nl: bool = True) -> None:
    """Print on stdout. Characters that a terminal obeys are shown by their codes; every command prints with this.

    Args:
        text: can come from a file, a job or a model that somebody else wrote.
        nl: end the line.
    """
    parts = _EMPHASIS.split(str(text))  # each second part is the emphasis of a table of ours
    shown = [part if index % 2 else printable(part) for index, part in enumerate(parts)]
    typer.echo("".join(shown), nl=nl)  # noqa: TID251


def say(text: str = "") -> None:
    """Print a line on stderr, as :func:`write`."""
    typer.echo(printable(text), err=True)  # noqa: TID251


def user_name() -> str:
    """Return the name of this process's user."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        return "unknown"


def columns(rows: list[list[str]]) -> str:
    """Return rows of cells as aligned plain text."""
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
