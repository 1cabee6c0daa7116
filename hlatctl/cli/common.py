"""What several commands share: arguments, output, shell completion, and names of evaluated milestones.

Completion only lists folders and doesn't import Hydra, so it stays fast with thousands of runs. Commands name an
evaluated milestone as RUN, RUN:TOKENS, or RUN with ``--at TOKENS``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conf import folders
from hlatctl.report.run_view import is_simulated
from hlatctl.run import runs
from hlatctl.run.errors import ConfigError, HlatctlError, RunNotFoundError
from hlatctl.run.fold import read_state
from hlatctl.run.labels import WARNING, noted
from hlatctl.run.paths import RunPaths, SweepPaths
from hlatctl.run.runs import LATEST, list_runs, list_sweeps
from hlatctl.units import count, one_line, printable

if TYPE_CHECKING:
    from conf.schema import ClusterConfig, Config
    from flows.runtime.spending import Expense
    from hlatctl.run.state import MilestoneState


def run_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return ``latest`` and the ids of runs that begin with the typed text, newest first."""
    return _beginning(incomplete, [LATEST, *(run.run_id for run in reversed(_listed(list_runs, ctx)))])


def run_or_sweep_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the completions of :func:`run_names`, and ids of sweeps."""
    sweeps = _beginning(incomplete, [sweep.run_id for sweep in _listed(list_sweeps, ctx)])
    return [*run_names(ctx, incomplete), *sweeps]


def override_words(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return overrides that begin with the typed text: ``experiment=``, ``experiment=quickstart``, ``optimizer.lr=``.

    Bash treats ``=`` as a separate word and completes only what follows; zsh and fish complete the whole word.
    """
    chosen = [Path(folder) for folder in ctx.params.get("config_dir") or []]
    with suppress(HlatctlError, OSError), folders.using(chosen):
        typed = ctx.params.get("overrides") or []
        if not incomplete and typed and "=" not in typed[-1]:  # in bash, the cursor is behind the "="
            return _values(typed[-1])
        if typed and typed[-1] == "=":
            return _beginning(incomplete, _values(typed[-2])) if len(typed) > 1 else []
        key, equals, value = incomplete.partition("=")
        if equals:
            return [f"{key}={word}" for word in _beginning(value, _values(key))]
        return _keys(incomplete, _APART.get(ctx.info_name or "", []))
    return []


#: The groups apart from a run's configuration that a command takes.
_APART = {
    "sweep": [folders.SIMULATION, folders.SWEEP],
    "ladder": [folders.SIMULATION, folders.LADDER],
    "train": [folders.SIMULATION],
    "forecast": [folders.SIMULATION],
}


def _keys(incomplete: str, more: list[str]) -> list[str]:
    from conf.compose import groups
    from conf.reference import keys

    names = [key.name for key in keys() if "[" not in key.name and "NAME" not in key.name]
    words = _beginning(incomplete, [f"{name}=" for name in [*groups(), *more, *names]])
    tops = {_top(word) for word in words}
    if "." not in incomplete and len({top.rstrip(".=") for top in tops}) > 1:
        return sorted(tops)
    if len(words) == 1:  # with a second word the shell adds no space
        key = words[0].removesuffix("=")
        return [words[0], *(f"{key}={value}" for value in _values(key))]
    return words


def _top(word: str) -> str:
    name, dot, _ = word.partition(".")
    return f"{name}{dot}"


def _values(key: str) -> list[str]:
    from conf.compose import groups
    from conf.reference import keys

    if key in (known := groups()):
        return known[key]
    if key in folders.APART:
        return folders.names(key)
    found = [entry for entry in keys() if entry.name == key.lstrip("+")]
    if not found:
        return []
    default = found[0].default
    first = [str(default)] if isinstance(default, int | float | str) and not isinstance(default, bool) else []
    return list(dict.fromkeys([*first, *found[0].choices]))


def _listed(list_folder: Any, ctx: typer.Context) -> list[Any]:
    """Return the content of a folder; empty if it can't be read, because completion must not print errors."""
    from conf.compose import default_runs_dir

    chosen = ctx.params.get("runs_dir")
    with suppress(OSError, HlatctlError):
        return list(list_folder(Path(chosen).expanduser() if chosen else default_runs_dir()))
    return []


def _beginning(incomplete: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _overrides(about: str) -> Any:
    return typer.Argument(metavar="OVERRIDES", help=about, autocompletion=override_words)


#: Overrides of a new run, of an existing run, and of its evaluation.
Overrides = Annotated[
    list[str] | None, _overrides("Configuration keys to set, such as experiment=quickstart train.tokens=10M.")
]
Changes = Annotated[
    list[str] | None, _overrides("Keys of the run's configuration to change, such as optimizer.lr=1e-4.")
]
EvalOverrides = Annotated[
    list[str] | None, _overrides("Keys of the evaluation to set, such as eval=hlat_core eval.limit=100.")
]

#: Bold on and off. They can neither hide text nor move the cursor.
_EMPHASIS = re.compile("(\x1b\\[[01]m)")


def place(text: str) -> Path:
    """Return the path that a person typed, with ``~`` expanded. All path arguments are parsed with this.

    Raises:
        ConfigError: the text is empty, as an unset variable in a script gives, or names an unknown user's folder.
            ``Path("")`` would be the current folder.
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


#: The callback does all the work of the option; commands ignore the argument.
ConfigDirs = Annotated[
    list[Path] | None,
    typer.Option(
        "--config-dir",
        metavar="DIR",
        parser=place,
        help="Folder with options, experiments and sweeps of your own; can be repeated.  [also: $HLATCTL_CONFIG_DIR, "
        "and ./conf if it contains hlatctl.yaml]",
        callback=_use_config_dirs,
    ),
]


def _run(about: str, complete: Any = run_names) -> Any:
    return typer.Argument(metavar="RUN", help=about, autocompletion=complete)


RunName = Annotated[str, _run("Run id, a unique beginning of one, or `latest`.")]
RunOrSweepName = Annotated[str, _run("Run or sweep id, a unique beginning of one, or `latest`.", run_or_sweep_names)]
EvaluatedRun = Annotated[str, _run("Run id, a unique beginning of one, or `latest`; RUN:TOKENS names a milestone.")]
RunsDir = Annotated[
    Path | None,
    typer.Option(
        "--runs-dir",
        metavar="PATH",
        parser=place,
        help="Folder that contains the runs.  [default: $HLATCTL_RUNS_DIR or ./runs]",
    ),
]
Name = Annotated[str | None, typer.Option("--name", metavar="TEXT", help="Display name.")]
Tags = Annotated[list[str] | None, typer.Option("--tag", metavar="K=V", help="Tag to find it by; can be repeated.")]
Note = Annotated[str, typer.Option("--note", metavar="TEXT", help="Note to attach to it.")]
Yes = Annotated[bool, typer.Option("--yes", help="Start without asking, whatever the cost.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def confirm(expense: Expense, cluster: ClusterConfig, what: str, *, yes: bool, dry_run: bool = False) -> None:
    """Say what a submission to a cluster costs, and ask for confirmation above the cluster's limits.

    A dry run only says that it would ask.

    Raises:
        ConfigError: it is not confirmed.
    """
    if cluster.jobs_run == "cluster":
        say(f"cost of {what}: {expense.text()}")
    why = expense.why_ask(cluster, what)
    if dry_run and why:
        say(f"{why}; without --dry-run that must be confirmed")
    if yes or dry_run or not why:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{why}; that must be confirmed, and input is not a terminal", hint=expense.hint)
    if not typer.confirm(f"{why}. Start?", err=True):
        raise ConfigError(f"{why}; that was not confirmed, and nothing was started", hint="answer y, or pass --yes")


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
    from conf.origins import overridden_keys
    from conf.validate import without_effect

    return without_effect(config, (key for text in overrides or [] for key in overridden_keys(text)))


def find_run(name: str, runs_dir: Path | None) -> RunPaths:
    """Return the run with an id, a unique prefix of one, or ``latest``; or else with a unique name."""
    folder = runs_folder(runs_dir)
    try:
        return runs.find_run(folder, name)
    except RunNotFoundError:
        from hlatctl.report.run_list import called

        if run := called(folder, name):
            return run
        raise


def find_runs(names: Iterable[str], runs_dir: Path | None) -> list[RunPaths]:
    """Return the runs in the given order. Each can be named only once."""
    paths: dict[str, RunPaths] = {}
    for name in names:
        run = find_run(name, runs_dir)
        if run.run_id in paths:
            raise ConfigError(f"RUN={name}: {run.run_id} is named twice", hint="name every run once")
        paths[run.run_id] = run
    return list(paths.values())


def find_sweep(name: str, runs_dir: Path | None) -> SweepPaths | None:
    """Return the sweep with an id or a unique prefix of one. None if there is none."""
    return runs.find_sweep(runs_folder(runs_dir), name)


def find_sweep_only(name: str, runs_dir: Path | None, argument: str) -> SweepPaths:
    """Return the sweep of a name that an option or argument had; ConfigError if it is a run."""
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
    """Print JSON on stdout; control characters are escaped, including those for text direction."""
    lines = json.dumps(value, indent=2, ensure_ascii=False).split("\n")
    write("\n".join(line if line.isprintable() else _escaped(line) for line in lines))


def _escaped(line: str) -> str:
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in line)


def write(text: object = "", *, nl: bool = True) -> None:
    """Print untrusted text on stdout, with control characters shown by their codes. Every command prints with this."""
    parts = _EMPHASIS.split(str(text))  # each second part is the emphasis of this project's table
    shown = [part if index % 2 else printable(part) for index, part in enumerate(parts)]
    typer.echo("".join(shown), nl=nl)  # noqa: TID251


def say(text: str = "") -> None:
    """Print a line on stderr, as :func:`write`."""
    typer.echo(printable(text), err=True)  # noqa: TID251


def columns(rows: list[list[str]]) -> str:
    """Return rows of cells as aligned plain text."""
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


At = Annotated[
    str | None, typer.Option(metavar="TOKENS", help="Milestone, such as 200B.  [default: the newest evaluated one]")
]


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """An evaluated milestone of a run.

    Args:
        title: display name of run and milestone; says if the run is simulated.
        is_imported: the scores are imported.
    """

    run: RunPaths
    milestone: MilestoneState
    title: str
    is_imported: bool


def find_evaluated(word: str, at: str | None, runs_dir: Path | None) -> Evaluated:
    """Return the evaluated milestone of RUN or RUN:TOKENS: that of ``--at``, or the newest one.

    ConfigError: there is no such milestone, or it is named twice. EvaluationError: the run has none.
    """
    from conf.load import token_count
    from hlatctl.report.compare import evaluated_milestone

    name, colon, own = word.partition(":")
    if colon and at is not None:
        raise ConfigError(f"--at={at}: {word} names a milestone too", hint="name it once")
    tokens = token_count(own, "RUN:TOKENS") if colon else token_count(at, "--at") if at is not None else None
    run = find_run(name, runs_dir)
    state = read_state(run)
    milestone = evaluated_milestone(run, state.milestones, tokens)
    where = "imported" if state.imported else f"at {count(milestone.milestone_tokens)} tokens"
    return Evaluated(
        run=run,
        milestone=milestone,
        title=noted(f"{run.run_id} {where}", simulated=state.simulated),
        is_imported=bool(state.imported),
    )
