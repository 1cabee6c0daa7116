"""The commands of `hlatctl`, and the messages and exit codes of its errors."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from hlatctl import __version__
from hlatctl.cli import (
    cache,
    checkpoint,
    compare,
    config,
    data,
    drill,
    evaluate,
    generate,
    ladder,
    logs,
    notify,
    plan,
    remote,
    report,
    runs,
    status,
    sweep,
    train,
    ui,
)
from hlatctl.cli.app import App, UsageError, usage_text
from hlatctl.cli.common import write
from hlatctl.run.errors import ERROR_FILE_ENV, DependencyError, HlatctlError, install, leave, of_system
from hlatctl.units import one_line, printable

TRACEBACK_ENV = "HLATCTL_TRACEBACK"
_USAGE, _INTERRUPTED = 2, 130

app = App("Pre-train, evaluate and document language models, with one command per run.")

for _command in (
    train.train,
    plan.plan,
    plan.forecast,
    plan.speedtest,
    sweep.sweep,
    sweep.sweep_report,
    ladder.ladder,
    runs.runs,
    status.status,
    ui.watch,
    logs.logs,
    train.profile,
    runs.note,
    train.stop,
    train.resume,
    train.amend,
    train.fork,
    drill.verify_resume,
    runs.show,
    runs.diff,
    compare.compare,
    report.goodput,
    report.report,
    report.share,
    generate.generate,
    drill.drill,
    drill.doctor,
    ui.ui,
    notify.sync,
    runs.rm,
    runs.archive,
    notify.notify,
):
    app.command()(_command)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(cache.app, name="cache")
app.add_typer(data.app, name="data")
app.add_typer(evaluate.app, name="eval")
app.add_typer(config.app, name="config")


def _print_version(wanted: bool) -> None:
    if wanted:
        write(f"hlatctl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    host: Annotated[
        str | None,
        typer.Option(
            remote.OPTION,
            metavar="[USER@]NAME[:VENV]",
            help="Run the command on this machine, over your own ssh; VENV is hlatctl's environment there.",
        ),
    ] = None,
) -> None:
    pass  # `main` has taken --host from the beginning of the command line; it is here for the help


@functools.cache
def _commands() -> Any:
    """Return the tree of commands. Building it takes 0.2 s, which a process with several command lines spends once."""
    return typer.main.get_command(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Returns:
        0, 2 for a usage error, an error's own code (``hlatctl.run.errors``), 1 for a bug in hlatctl.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    error_file = os.environ.pop(ERROR_FILE_ENV, None)  # of this process, not of those that it starts
    code = _exit_code(lambda: _run(words), error_file)
    flushed = _exit_code(sys.stdout.flush, error_file)
    return code or flushed


def _run(words: list[str]) -> object:
    if remote.begin():
        return None
    if asked := remote.asked(words):
        return remote.run(*asked)
    return _commands()(args=words, prog_name="hlatctl", standalone_mode=False)


def _exit_code(work: Callable[[], object], error_file: str | None) -> int:
    try:
        ended = work()
        return ended if isinstance(ended, int) else 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except UsageError as error:
        print(f"error: {printable(usage_text(error))}", file=sys.stderr)
        return _USAGE
    except HlatctlError as error:
        print(f"{error.word}: {printable(str(error))}", file=sys.stderr)
        leave(error, error_file)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except Exception as error:
        if refused := _without_package(error) or of_system(error):
            print(f"error: {printable(str(refused))}", file=sys.stderr)
            return refused.exit_code
        _report_bug(error)
        return 1


def _without_package(error: Exception) -> DependencyError | None:
    """Return the error of a command that needs another package than the command line itself, if this is one."""
    package = str(error.name).partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not package or package in ("conf", "eval", "flows", "hlatctl", "trainer") or package in sys.stdlib_module_names:
        return None
    return DependencyError(f"this command needs the package {package}, which is not installed", hint=install("head"))


def _report_bug(error: Exception) -> None:
    """Print one line. Write the traceback to a file, or to stderr if the environment asks for it."""
    what = one_line(f"{type(error).__name__}: {error}".splitlines()[0])
    print(f"error: this is a bug in hlatctl: {what}", file=sys.stderr)
    text = "".join(traceback.format_exception(error))
    if os.environ.get(TRACEBACK_ENV):
        print(text, file=sys.stderr, end="")
        return
    try:
        with tempfile.NamedTemporaryFile("w", prefix="hlatctl-traceback-", suffix=".txt", delete=False) as file:
            file.write(text)
        print(f"hint: the traceback is in {file.name}; {TRACEBACK_ENV}=1 prints it", file=sys.stderr)
    except OSError:
        print(f"hint: {TRACEBACK_ENV}=1 prints the traceback", file=sys.stderr)
