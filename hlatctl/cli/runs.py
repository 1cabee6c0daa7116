"""`hlatctl runs`, `rm`, `archive`, `note`, `show` and `diff`: list, remove, label and compare runs."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from hlatctl.cli.common import (
    Json,
    Name,
    RunName,
    RunOrSweepName,
    RunsDir,
    Tags,
    announce,
    columns,
    find_run,
    find_sweep,
    print_json,
    run_names,
    run_or_sweep_names,
    runs_folder,
    say,
    write,
)
from hlatctl.report import run_list
from hlatctl.report.run_list import RunRow, rows
from hlatctl.report.run_view import view_run, view_sweep
from hlatctl.run import files, labels
from hlatctl.run.errors import ConfigError, RunNotFoundError
from hlatctl.run.fold import read_state
from hlatctl.run.labels import marked
from hlatctl.run.paths import RunPaths
from hlatctl.run.processes import user_name
from hlatctl.run.runs import LATEST, list_sweeps
from hlatctl.run.state import AmendmentState
from hlatctl.units import count, counted, number, one_line, size, tags_text, utc

#: Columns in order, and how soon a narrow terminal loses each: the highest number first, 0 never.
_COLUMNS = {
    "RUN": 0,
    "STATUS": 0,
    "STEP": 0,
    "TOKENS": 4,
    "LOSS": 0,
    "VALIDATION": 3,
    "SCORES": 6,
    "AGE": 1,
    "COST": 5,
    "NAME": 2,
    "TAGS": 7,
    "DIFFERS IN": 2,
}
_WIDEST_CELL = 40


def runs(
    sweep: Annotated[str | None, typer.Argument(metavar="SWEEP", help="List the trials of this sweep.")] = None,
    tag: Annotated[list[str] | None, typer.Option(metavar="K[=V]", help="Only runs with this tag.")] = None,
    status: Annotated[list[str] | None, typer.Option(help="Only runs with this status, such as running.")] = None,
    experiment: Annotated[str | None, typer.Option(help="Only runs of this experiment.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="AGE|DATE", help="Only runs with an event since 7d, 12h or 2026-11-01.")
    ] = None,
    sort: Annotated[
        str, typer.Option(metavar="COLUMN", help=f"Order of the runs: {', '.join(run_list.SORT_KEYS)}.")
    ] = "created",
    reverse: Annotated[bool, typer.Option("--reverse", help="Largest or newest first.")] = False,
    trials: Annotated[bool, typer.Option("--trials", help="Also list the trials of sweeps.")] = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """List runs, oldest first, and sweeps.

    Shows what the command lines of the shown runs differ in. A terminal shows the columns that fit; piped output has
    all of them.
    """
    folder, now_unix_s = runs_folder(runs_dir), time.time()
    chosen = run_list.Filter(
        tags=run_list.tag_filter(tag or []),
        statuses=tuple(status or ()),
        experiment=experiment,
        since_unix_s=None if since is None else run_list.since(since, now_unix_s),
    )
    only = None if sweep is None else _sweep_of(sweep, runs_dir)
    everything = rows(folder)
    found = [row for row in everything if chosen.takes(row) and (only is None or row.sweep == only)]
    found = run_list.ordered(found, sort, reverse=reverse)
    if as_json:
        print_json([dataclasses.asdict(row) for row in found])
        return
    listed = [row for row in found if trials or only is not None or not row.sweep]
    if listed:
        write(_table(listed, now_unix_s))
    elif not everything:
        say(f"there are no runs in {folder}; `hlatctl train` starts one")
    elif not any(row.sweep for row in found):
        say(f"none of the {len(everything)} runs in {folder} is chosen")
    if only is None and not trials:
        _print_sweeps(folder, found)


def _sweep_of(name: str, runs_dir: Path | None) -> str:
    found = find_sweep(name, runs_dir)
    if found is None:
        raise RunNotFoundError(f"{name}: no sweep of that name", hint="`hlatctl runs` lists runs and sweeps")
    return found.run_id


def _print_sweeps(folder: Path, found: list[RunRow]) -> None:
    shown = {row.sweep for row in found if row.sweep}
    lines = []
    for paths in list_sweeps(folder):
        if paths.run_id in shown:
            state, _ = view_sweep(paths)
            done = f"{state.count('finished')} of {state.trials_planned} trials finished"
            status = marked(state.status, simulated=state.simulated)
            lines.append([paths.run_id, status, done, state.labels.name, tags_text(state.labels.tags)])
    if lines:
        write("\n" + columns([["SWEEP", "STATUS", "TRIALS", "NAME", "TAGS"], *lines]))
        say(f"`hlatctl runs {lines[-1][0]}` lists the trials of a sweep")


def _table(found: list[RunRow], now_unix_s: float) -> str:
    """Return the columns that have a value in some row and, on a terminal, fit."""
    cells = [_cells(row, differs, now_unix_s) for row, differs in zip(found, run_list.differing(found), strict=True)]
    shown = [name for name in _COLUMNS if not _COLUMNS[name] or any(row[name] not in ("", "-") for row in cells)]
    if sys.stdout.isatty():
        shown = _fitting(shown, cells, shutil.get_terminal_size().columns)
    return columns([shown, *([row[name] for name in shown] for row in cells)])


def _fitting(shown: list[str], cells: list[dict[str, str]], width: int) -> list[str]:
    shown = list(shown)
    for row in cells:
        for name in shown:
            if len(row[name]) > _WIDEST_CELL and name != "RUN":
                row[name] = one_line(row[name])[: _WIDEST_CELL - 1] + "…"
    while sum(max(len(name), *(len(row[name]) for row in cells)) + 2 for name in shown) - 2 > width:
        worst = max(shown, key=lambda name: _COLUMNS[name])
        if not _COLUMNS[worst]:
            break
        shown.remove(worst)
    return shown


def _cells(row: RunRow, differs: str, now_unix_s: float) -> dict[str, str]:
    scores = {task: value for task, value in row.scores.items() if not task.startswith("validation")}
    return {
        "RUN": row.run_id,
        "STATUS": marked(row.status, simulated=row.simulated),
        "STEP": f"{row.step}/{row.total_steps or '?'}",
        "TOKENS": count(row.tokens),
        "LOSS": f"{number({'loss': row.loss}, 'loss'):.4f}" if row.step else "-",
        "VALIDATION": "-" if row.validation_loss is None else f"{row.validation_loss:.4f}",
        "SCORES": " ".join(f"{task}={value:.3f}" for task, value in scores.items()) or "-",
        "AGE": run_list.age(row, now_unix_s),
        "COST": "-" if row.cost_usd is None else f"{row.cost_usd:,.2f} USD",
        "NAME": row.name,
        "TAGS": tags_text(row.tags),
        "DIFFERS IN": differs,
    }


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
        if found.remote_url:
            say(f"  copies in {found.remote_url} stay")
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
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{question[:-1]}: input is not a terminal", hint="pass --yes to confirm")
    if not typer.confirm(question, err=True):
        raise ConfigError("not confirmed; nothing was changed")


def note(
    run: RunOrSweepName,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The note.")] = "",
    name: Name = None,
    tag: Tags = None,
    untag: Annotated[list[str] | None, typer.Option(metavar="K", help="Remove a tag.")] = None,
    runs_dir: RunsDir = None,
) -> None:
    """Add a note to a run, or change its name and tags.

    A sweep has them too. Without anything to change, prints name, tags and notes. `--name ""` removes the name.
    """
    sweep = find_sweep(run, runs_dir)
    paths = sweep or find_run(run, runs_dir)
    change = labels.change(name=name, tags=tag or (), untag=untag or (), note=text)
    labels.write_label(paths, change, by=user_name())
    state = view_sweep(sweep)[0].labels if sweep else view_run(paths).state.labels
    if change:
        say(f"{paths.run_id}: noted")
        return
    for what, value in (("name", state.name), ("tags", tags_text(state.tags))):
        if value:
            write(f"{what}  {one_line(value)}")
    for each in state.notes:
        write(f"{utc(each.time_unix_s)}  {one_line(each.by)}: {one_line(each.text)}")


def show(
    run: RunName = LATEST,
    created: Annotated[
        bool, typer.Option("--created", help="Show the configuration as it was, without amendments.")
    ] = False,
    origins: Annotated[bool, typer.Option("--origins", help="Print where each value came from.")] = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Print a run's configuration and provenance.

    Prints the amendments, and two YAML documents: the configuration with all amendments, and the provenance. Prints
    JSON with --json. --origins prints the file, or the command line, or the amendment that set each value; the other
    values are defaults.
    """
    import dataclasses

    import yaml

    from conf.load import dump
    from conf.of_run import of_run

    paths = find_run(run, runs_dir)
    announce(paths)
    provenance, amendments = _provenance(paths), read_state(paths).amendments
    config = of_run(paths, number=0 if created else None)
    if origins:
        _show_origins(paths, provenance or {}, as_json=as_json)
        return
    if as_json:
        print_json(
            {
                "run_id": paths.run_id,
                "path": str(paths.root),
                "config": dataclasses.asdict(config),
                "amendments": [dataclasses.asdict(amendment) for amendment in amendments],
                "provenance": provenance,
            }
        )
        return
    if amendments and not created:
        table = columns(_rows(amendments))
        write("\n".join(f"# {line}" for line in ["amendments", *table.splitlines()]))
    source = paths.config if created or not amendments else paths.amended_config(amendments[-1].number)
    write(f"# {source}\n{dump(config)}---\n# {paths.provenance}")
    write(yaml.safe_dump(provenance, sort_keys=False, allow_unicode=True), nl=False)


def _rows(amendments: list[AmendmentState]) -> list[list[str]]:
    from hlatctl.report.numbers import amended
    from hlatctl.report.summary import AMENDMENTS, amendment_rows

    rows = [row for amendment in amendments for row in amendment_rows(amended(amendment))]
    return [[cell.upper() for cell in AMENDMENTS], *rows]


def _show_origins(run: RunPaths, provenance: dict[str, Any], *, as_json: bool) -> None:
    from conf.load import flatten
    from conf.of_run import of_run
    from conf.origins import SCHEMA

    values = flatten(of_run(run))
    record = provenance.get("origins")
    known = isinstance(record, dict) and isinstance(record.get("keys"), dict)
    keys = dict.fromkeys(values, SCHEMA if known else "unknown")
    keys |= record["keys"] if isinstance(record, dict) and known else {}
    for amendment in read_state(run).amendments:
        keys |= dict.fromkeys(amendment.changes, f"amendment {amendment.number}")
    if as_json:
        rows = {key: {"value": value, "origin": keys[key]} for key, value in values.items()}
        print_json({"run_id": run.run_id, "origins": rows, "files": (record or {}).get("files", {})})
        return
    write(columns([["key", "value", "origin"], *([k, str(v), keys[k]] for k, v in values.items())]))


def _provenance(run: RunPaths) -> dict[str, Any] | None:
    try:
        record = files.read_json(run.provenance)
    except (OSError, ValueError) as error:
        say(f"{run.provenance}: can't be read ({error})")
        return None
    return record if isinstance(record, dict) else {"content": record}


#: Value of a key that a configuration doesn't have.
_MISSING = object()


def diff(
    first: RunName,
    second: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Run to compare it with; none: the same run as it was created.",
            autocompletion=run_names,
        ),
    ] = None,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Show the configuration keys in which two runs differ.

    Their configurations have all amendments. With one run, shows what its amendments have changed.
    If a run doesn't have a key, its value is shown as `-`, and as null in JSON.
    """
    from conf.load import flatten
    from conf.of_run import of_run

    run = find_run(first, runs_dir)
    if second is None:
        names, configs = ["CREATED", "NOW"], [of_run(run, number=0), of_run(run)]
    else:
        names = [run.run_id, find_run(second, runs_dir).run_id]
        configs = [of_run(run), of_run(find_run(second, runs_dir))]
    one, other = map(flatten, configs)
    keys = [key for key in {**one, **other} if one.get(key, _MISSING) != other.get(key, _MISSING)]
    if as_json:
        print_json({key: [one.get(key), other.get(key)] for key in keys})
    elif keys:
        rows = [[key, _text(one.get(key, _MISSING)), _text(other.get(key, _MISSING))] for key in keys]
        write(columns([["KEY", *names], *rows]))
    else:
        say("the configurations are equal")


def _text(value: object) -> str:
    if value is _MISSING:
        return "-"
    return "null" if value is None else str(value)
