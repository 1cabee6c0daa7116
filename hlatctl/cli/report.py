"""`hlatctl report`, `share` and `goodput`: write a run's report or a copy of its page, show how it spent its time."""

from __future__ import annotations

import dataclasses
import webbrowser
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hlatctl.cli.common import (
    Json,
    RunName,
    RunsDir,
    columns,
    find_run,
    find_runs,
    find_sweep,
    place,
    print_json,
    run_or_sweep_names,
    say,
    write,
)
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, cannot_write
from hlatctl.run.paths import RunPaths
from hlatctl.run.runs import LATEST
from hlatctl.units import size


class Format(StrEnum):
    """What to write."""

    HTML = "html"
    MARKDOWN = "markdown"
    SVG = "svg"
    PNG = "png"
    PDF = "pdf"
    CSV = "csv"
    TEX = "tex"


def report(
    run: RunName,
    formats: Annotated[
        list[Format] | None, typer.Option("--format", help="What to write; can be repeated.  [default: html, svg, csv]")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where to write.  [default: the run's report folder]", parser=place),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Write a run's report and print its path.

    A run writes its report when it ends. This command writes it at any time, also for old and archived runs. html is
    one page with all figures inside, and summary.md and numbers.json. markdown is summary.md with its figures as PNG
    files, for a chat or a repository. svg, png, pdf and csv are the figures and their data, in figures/. tex is the
    tables for LaTeX with booktabs, in tables/.
    """
    from hlatctl.report.build import DEFAULT, HTML, build

    if find_sweep(run, runs_dir):
        raise ConfigError(f"RUN={run}: is a sweep, not a run", hint=f"`hlatctl sweep-report {run}` writes its report")
    wanted = {each.value for each in formats or []} or set(DEFAULT)
    if open_page:
        wanted.add(HTML)
    paths = find_run(run, runs_dir)
    folder = _checked(output, paths, wanted) if output is not None else None
    with nullcontext() if folder else files.created_like(paths.root):
        page = build(paths, wanted, folder)
    write(page)
    if open_page and not webbrowser.open(page.as_uri()):
        say(f"no browser was found; open {page}")


def _checked(output: Path, run: RunPaths, formats: set[str]) -> Path:
    from hlatctl.report.build import HTML

    folder = output.absolute()
    place, own = folder.resolve(), run.report.resolve()
    if place.is_relative_to(run.root.resolve()) and not place.is_relative_to(own):
        raise ConfigError(
            f"--output={output}: is inside the run", hint="leave out --output, or name a folder elsewhere"
        )
    if HTML in formats and (folder / "index.html").exists() and not (folder / "numbers.json").exists():
        raise ConfigError(
            f"--output={output}: contains an index.html that is not a report",
            hint=f"name a new folder: {output}/report",
        )
    return folder


def share(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN", help="A run, up to 20 runs to compare, or a sweep.", autocompletion=run_or_sweep_names
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What to write.  [default: RUN.html or compare.html here]", parser=place),
    ] = None,
    runs_dir: RunsDir = None,
) -> None:
    """Write a run, a comparison or a sweep to one HTML file.

    The file is the live page without a server: it opens in any browser, from a disk, without a network. Its charts
    zoom, and its curves have at most 3,000 points. A sweep's file has the pages of its 20 best trials. Logs, documents
    and items of evaluations are not in it. Prints the file's path.
    """
    from flows.live import share as shared
    from hlatctl.report.live.index import OpenRun

    sweep = find_sweep(names[0], runs_dir) if len(names) == 1 else None
    runs = shared.best_trials(sweep) if sweep else find_runs(names, runs_dir)
    page = shared.page([OpenRun(run).refresh() for run in runs], sweep, "")
    name = "compare" if len(names) > 1 else (sweep or runs[0]).run_id
    path = (output or Path(f"{name}.html")).absolute()
    if path.is_dir() or path.suffix != ".html":
        raise ConfigError(f"--output={output}: must be the name of an HTML file", hint=f"--output {path.name}.html")
    try:
        if path.exists() and not shared.is_ours(path):
            raise ConfigError(f"--output={path}: was not written by `hlatctl share`", hint="name another file")
        files.write_text(path, page)
    except OSError as error:
        raise cannot_write(path, error) from None
    write(path)
    say(f"{size(len(page.encode()))}; open it in a browser")


def goodput(
    run: RunName = LATEST,
    simulation: Annotated[
        bool, typer.Option("--simulation", help="Print what was measured as a profile for simulation=NAME.")
    ] = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Show how a run spent its time.

    Goodput, or effective training time ratio (ETTR), is the share of time spent on steps that count, without their
    waits for data. It is a share of the time from the first attempt's start to the newest attempt's last event.
    Uptime is the share of the same time in which steps followed one another. It includes lost steps, data waits and
    checkpoint stalls; restarts and pauses reduce it. Young's and Daly's checkpoint intervals are computed from the
    measured stall of a save and the measured time between failures. All figures come from the journal.

    With --simulation it prints the times of steps, checkpoints and the parts of recoveries, and the rates of failures.
    Saved as simulation/NAME.yaml in a folder of configuration, they make `forecast` and dry runs simulate this cluster.
    """
    from conf.of_run import of_run
    from hlatctl.report import goodput
    from hlatctl.report.run_view import read_without_steps
    from hlatctl.run.labels import noted

    paths = find_run(run, runs_dir)
    state, events = read_without_steps(paths)
    simulated = state.simulated
    if simulation:
        from hlatctl.report import simulation_profile

        found = simulation_profile.profile(events, of_run(paths), state)
        if as_json:
            print_json(found)
        else:
            write(simulation_profile.text(found, state, paths.run_id).rstrip())
        return
    account = goodput.measure_goodput(events, of_run(paths), state)
    if as_json:
        print_json({"run_id": paths.run_id, "simulated": simulated, **dataclasses.asdict(account)})
        return
    header, rows = goodput.time_table(account)
    write(
        columns(
            [
                ["run", noted(paths.run_id, simulated=simulated)],
                *([name, text] for name, text in goodput.facts(account)),
            ]
        )
        + "\n"
    )
    write(columns([[cell.upper() for cell in header], *rows]))
