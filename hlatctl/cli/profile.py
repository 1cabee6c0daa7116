"""`hlatctl profile`: records a few steps of running training with PyTorch's profiler."""

from __future__ import annotations

from typing import Annotated

import typer

from hlatctl.cli.common import RunName, RunsDir, find_run, say, user_name, write
from hlatctl.run.errors import ConfigError
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import ProfileState
from hlatctl.units import size

#: Reads of the journal between two progress lines: 10 s.
_LINE_EVERY_LOOKS = 20


def profile(
    run: RunName,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps to record, at most 20.")] = 5,
    ranks: Annotated[str, typer.Option(metavar="R,R|all", help="Ranks that record, at most 16.")] = "0",
    memory: Annotated[bool, typer.Option(help="Also record each allocation.")] = True,
    runs_dir: RunsDir = None,
) -> None:
    """Record a few steps of a running job, without a restart.

    Writes a trace of each rank and a table of its operators into the run's folder profiles/, and prints the table of
    the first rank. The traces open in https://ui.perfetto.dev. All ranks wait while the files are written.
    """
    from flows import control

    paths = find_run(run, runs_dir)
    asked = control.request_profile(paths, steps=steps, ranks=_ranks(ranks), memory=memory, by=user_name())
    say(f"profile {asked.number}: asked training for {steps} steps of {_which(asked)}; Ctrl-C stops only the waiting")
    made = _wait(paths, asked)
    write(control.profile_table(paths, made))
    folder = paths.profile(made.number)
    say(f"profile {made.number}: steps {made.first_step} to {made.last_step}, {size(made.bytes)} in {folder}")


def _wait(run: RunPaths, asked: ProfileState) -> ProfileState:
    from flows import control

    made = asked
    try:
        for look, (step, profile) in enumerate(control.wait_for_profile(run, asked.number), start=1):
            made = profile
            if look % _LINE_EVERY_LOOKS == 0:
                say(f"profile {asked.number}: waiting, training is at step {step}")
    except KeyboardInterrupt:
        say(f"profile {asked.number}: goes on; it will be in {run.profile(asked.number)}")
        raise
    return made


def _ranks(text: str) -> list[int] | None:
    if text == "all":
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"--ranks={text}: must be numbers of ranks, or `all`", hint="--ranks 0,3")
    return [int(word) for word in words]


def _which(profile: ProfileState) -> str:
    ranks = profile.ranks
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
