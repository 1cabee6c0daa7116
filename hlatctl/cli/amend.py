"""`hlatctl amend`: changes the configuration of a run that exists."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Annotated

import typer

from hlatctl.cli.common import (
    Changes,
    ConfigDirs,
    RunName,
    RunsDir,
    columns,
    find_run,
    say,
    user_name,
    warn_of_no_effect,
    write,
)
from hlatctl.run.paths import RunPaths

if TYPE_CHECKING:
    from flows.amendments import Amended

Why = Annotated[str, typer.Option("--why", help="Reason, for the journal.", show_default=False)]
_value = reprlib.Repr()
_value.maxstring = _value.maxother = _value.maxdict = 60
#: Keys that change the learning rate.
_OF_THE_RATE = ("optimizer.", "train.tokens", "train.max_steps")
#: Keys that only steps of training read.
_OF_TRAINING = ("optimizer.", "precision.", "parallel.", "train.", "data.", "checkpoint.", "backend.")


def _show_table(wanted: bool) -> None:
    if wanted:
        from conf.amendments import IN_WORDS, RULES

        rows = [[row.keys.rstrip(".") + ".*" * row.keys.endswith("."), IN_WORDS[row.when], row.redoes] for row in RULES]
        write(columns([["key", "changes", "redoes, or why not"], *rows]))
        raise typer.Exit


def amend(
    run: RunName,
    overrides: Changes = None,
    config_dir: ConfigDirs = None,
    why: Why = "",
    at: Annotated[
        str | None,
        typer.Option(metavar="STEP|now", help="Write a checkpoint after this step, and restart with the change."),
    ] = None,
    runs_dir: RunsDir = None,
    table: Annotated[
        bool,
        typer.Option("--table", callback=_show_table, is_eager=True, help="Print which keys may change, and when."),
    ] = False,
) -> None:
    """Change the configuration of a run.

    The run may be running. Some keys change at once, others with the run's next attempt, and some never:
    `hlatctl amend --table` lists them. The new configuration is checked first. config.yaml stays as it was.
    """
    make(find_run(run, runs_dir), overrides or [], why=why, at=at)


def make(run: RunPaths, overrides: list[str], *, why: str, at: str | None = None, resumes: bool = False) -> None:
    """Amend a run and print what changes, and when.

    Args:
        overrides: overrides as for `hlatctl train`.
        at: step after which the change begins, or ``now``.
        resumes: the caller continues the run next.

    Raises:
        HlatctlError: the amendment is refused; nothing was written.
    """
    from flows import amendments

    amended = amendments.amend(run, overrides, by=user_name(), why=why, at=at)
    if not amended.number:
        say(f"run {run.run_id}: nothing changes" + (", the run has these values" if overrides else ""))
        return
    for key, (old, new) in amended.changes.items():
        say(f"{key}: {_value.repr(old)} -> {_value.repr(new)}")
    warn_of_no_effect(amended.after, overrides)
    for line in _consequences(amended):
        say(line)
    begins = "begins now, or with the next attempt" if resumes else _when(run, amended)
    say(f"amendment {amended.number} {begins}")


def _consequences(amended: Amended) -> list[str]:
    from conf.amendments import rule_of
    from conf.training_rules import learning_rate

    lines = []
    step = max(amended.at_step or 0, amended.step) + 1
    trains = any(key.startswith(_OF_TRAINING) for key in amended.changes)
    if trains and step > max(amended.before.total_steps, amended.after.total_steps):
        lines.append(
            f"training ended with step {amended.step}: this has an effect only if a larger train.tokens or "
            "train.max_steps continues it"
        )
    elif any(key.startswith(_OF_THE_RATE) for key in amended.changes):
        before, after = (
            f"{learning_rate(step, config):.4g}" if step <= config.total_steps else "none"
            for config in (amended.before, amended.after)
        )
        lines.append(f"learning rate of step {step}: {before} -> {after}")
    if amended.before.total_steps != amended.after.total_steps:
        lines.append(f"last step: {amended.before.total_steps} -> {amended.after.total_steps}")
    redone = dict.fromkeys(rule_of(key).redoes for key in amended.changes)
    redone.pop("nothing", None)
    return [*lines, f"redoes: {'; '.join(redone)}"] if redone else lines


def _when(run: RunPaths, amended: Amended) -> str:
    from conf.amendments import IN_WORDS, rule_of

    ahead = amended.at_step is not None and amended.at_step > amended.step
    if ahead or (amended.at_step is not None and amended.is_driven):
        after = f"step {amended.at_step}" if ahead else "the current step"
        return f"begins after {after}: a checkpoint is written there, and training restarts from it"
    if not amended.is_driven:
        return f"begins when the run continues: `hlatctl resume {run.run_id}`"
    if amended.begins != "next_attempt":
        return f"begins {IN_WORDS[amended.begins]}"
    late = next(key for key in amended.changes if rule_of(key).when == "next_attempt")
    return f"begins with the next attempt, because of {late}; `hlatctl amend {run.run_id} --at now` begins it now"
