"""`hlatctl rm` and `hlatctl archive`: remove runs, or only their checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hlatctl.cli.common import RunsDir, find_run, find_sweep, runs_folder, say, user_name
from hlatctl.cli.completion import run_or_sweep_names
from hlatctl.run.errors import ConfigError
from hlatctl.run.paths import RunPaths
from hlatctl.run.runs import LATEST
from hlatctl.units import counted, size

RunNames = Annotated[
    list[str], typer.Argument(metavar="RUN", help="Run or sweep ids.", autocompletion=run_or_sweep_names)
]
Yes = Annotated[bool, typer.Option("--yes", help="Don't ask.")]


def rm(run: RunNames, yes: Yes = False, runs_dir: RunsDir = None) -> None:
    """Remove runs and sweeps with everything in their folders.

    Asks first; with --yes, name runs by their ids instead of `latest`. A sweep is removed with its trials. Copies in
    MLflow and in object storage stay.
    """
    from flows import tidy

    chosen = _find(run, runs_dir, yes=yes)
    everything = [member for paths in chosen for member in tidy.members(paths)]
    for member in everything:
        tidy.check_idle(member)
        found = tidy.content(member)
        held = size(found.checkpoints_bytes + found.other_bytes)
        say(f"{member.run_id}: {held} with {counted(found.checkpoints, 'checkpoint')}")
        for fork in found.forks:
            say(f"  {fork} was forked from it; that run keeps its own checkpoint")
        if found.mirror_url:
            say(f"  copies in {found.mirror_url} stay")
    _confirm(f"Remove {counted(len(everything), 'folder')}?", yes=yes)
    for member in everything:
        tidy.remove(member)
        say(f"{member.run_id}: removed")
    tidy.remove_left_overs(runs_folder(runs_dir))


def archive(
    run: RunNames,
    all_checkpoints: Annotated[
        bool, typer.Option("--all-checkpoints", help="Remove the newest verified checkpoint too.")
    ] = False,
    yes: Yes = False,
    runs_dir: RunsDir = None,
) -> None:
    """Remove the checkpoints of runs, but keep their reports.

    Asks first. The newest verified checkpoint stays, unless --all-checkpoints is given. An archived run can't be
    resumed; `status`, `show`, `compare` and its report work as before.
    """
    from flows import tidy

    every = [member for paths in _find(run, runs_dir, yes=yes) for member in tidy.members(paths)]
    members = [member for member in every if member.config.is_file()]
    for member in members:
        tidy.check_idle(member)
    kept = {member.run_id: None if all_checkpoints else tidy.newest_valid(member, say) for member in members}
    for member in members:
        found, stays = tidy.content(member), kept[member.run_id]
        which = "none stays" if stays is None else f"that of step {stays} stays"
        say(f"{member.run_id}: {size(found.checkpoints_bytes)} in {counted(found.checkpoints, 'checkpoint')}; {which}")
    _confirm(f"Archive {counted(len(members), 'run')}?", yes=yes)
    for member in members:
        freed = tidy.archive(member, keeps=kept[member.run_id], by=user_name())
        say(f"{member.run_id}: archived, {size(freed)} removed")


def _find(names: list[str], runs_dir: Path | None, *, yes: bool) -> list[RunPaths]:
    if yes and LATEST in names:
        newest = find_run(LATEST, runs_dir).run_id
        raise ConfigError(
            f"RUN={LATEST}: can't be confirmed in advance with --yes, because another run may be the newest by then",
            hint=f"name the run; the newest one is {newest}",
        )
    found = [find_sweep(name, runs_dir) or find_run(name, runs_dir) for name in dict.fromkeys(names)]
    return list({paths.run_id: paths for paths in found}.values())


def _confirm(question: str, *, yes: bool) -> None:
    """Ask.

    Raises:
        ConfigError: the answer is no, or input is not a terminal.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{question[:-1]}: input is not a terminal", hint="pass --yes to confirm")
    if not typer.confirm(question, err=True):
        raise ConfigError("not confirmed; nothing was changed")
