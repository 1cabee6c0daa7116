"""Errors as messages and exit codes; help that imports nothing slow."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer

from hlatctl import __version__
from hlatctl.cli import main as cli
from hlatctl.cli.main import main
from tests.hlatctl.conftest import MakeRun

COMMANDS = (
    "train",
    "plan",
    "forecast",
    "speedtest",
    "sweep",
    "sweep-report",
    "ladder",
    "runs",
    "status",
    "watch",
    "logs",
    "profile",
    "note",
    "stop",
    "resume",
    "amend",
    "fork",
    "verify-resume",
    "show",
    "diff",
    "compare",
    "goodput",
    "report",
    "share",
    "generate",
    "drill",
    "doctor",
    "ui",
    "sync",
    "rm",
    "archive",
    "notify",
    "checkpoint",
    "cache",
    "data",
    "eval",
    "config",
)
ROOT = Path(__file__).parents[3]


def in_a_process(*argv: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.fspath(ROOT)}
    return subprocess.run(
        [sys.executable, "-P", *argv], capture_output=True, text=True, env=environment, check=False, timeout=60
    )


def test_help_lists_every_command_in_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    listed = text[text.index("Commands:") :].splitlines()[1:]
    assert [line.split()[0] for line in listed if line.strip()] == list(COMMANDS)
    assert all(line.endswith(".") and not line.endswith("...") for line in listed if line.strip())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"Usage: hlatctl {command}" in capsys.readouterr().out


def _words_of_all_commands() -> list[list[str]]:
    def below(command: Any, words: list[str]) -> Iterator[list[str]]:
        yield words
        for name, sub in getattr(command, "commands", {}).items():
            yield from below(sub, [*words, name])

    hidden = ["eval", "target"]  # nobody types it
    return [words for words in below(typer.main.get_command(cli.app), []) if words != hidden]


@pytest.mark.parametrize("words", _words_of_all_commands(), ids=" ".join)
def test_help_is_in_words_everywhere_and_h_is_enough(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "-h"]) == 0
    text = capsys.readouterr().out
    usage = text.splitlines()[0]
    assert not re.search(r"[{}<>]|\[\[|\.{4}", usage)
    assert not re.search(r"<(str|int|float|path|file|directory|list|bool)", text)


@pytest.mark.parametrize("words", [["amend"], ["resume"], ["fork"], ["eval"], ["eval", "data", "status"]], ids=" ".join)
def test_help_recommends_no_override_that_a_command_refuses(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--help"]) == 0
    assert "experiment=" not in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["forecast", "latest"], ["plan", "train.tokens"], ["train", "=3"]], ids=" ".join)
def test_a_word_that_is_no_override_is_named_without_hydras_text(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 10
    assert capsys.readouterr().err == (
        f"error: OVERRIDES={argv[1]}: must be KEY=VALUE\n"
        "hint: such as train.tokens=100M; `hlatctl config keys` lists the keys\n"
    )


def test_several_values_belong_to_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "train.tokens=10M,20M"]) == 10
    assert "error: train.tokens=10M,20M: has several values, which only a sweep tries\n" in capsys.readouterr().err


def test_every_command_of_runs_takes_their_folder() -> None:
    without = []
    for words in _words_of_all_commands():
        command: Any = typer.main.get_command(cli.app)
        for word in words:
            command = command.commands[word]
        if not hasattr(command, "commands") and "runs_dir" not in {each.name for each in command.params}:
            without.append(" ".join(words))
    assert without == ["checkpoint import", "data unpack", "config list", "config keys", "config show", "config import"]


@pytest.mark.processes
def test_the_folder_of_runs_goes_into_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "it's, a=folder"
    assert main(["plan", "experiment=quickstart", "--json", "--runs-dir", os.fspath(folder)]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["runs_dir"] == os.fspath(folder)


@pytest.mark.processes
def test_help_imports_nothing_slow() -> None:
    code = (
        "import sys\nfrom hlatctl.cli.main import main\nmain(['--help'])\n"
        "slow = {'torch', 'prefect', 'mlflow', 'hydra', 'omegaconf', 'matplotlib', 'numpy', 'rich', 'yaml', 'flows'}\n"
        "print('SLOW', sorted(slow & set(sys.modules)))"
    )
    assert "SLOW []" in in_a_process("-c", code).stdout


def packages_of(name: str, known: set[str]) -> set[str]:
    """Return a package and what it needs, without extras."""
    if name in known:
        return known
    known.add(name)
    with suppress(metadata.PackageNotFoundError):  # of another system or Python
        for text in metadata.requires(name) or ():
            if "extra ==" not in text and (found := re.match(r"[\w.-]+", text)):
                packages_of(re.sub(r"[-_.]+", "-", found[0]).lower(), known)
    return known


@pytest.mark.processes
def test_the_command_line_alone_is_enough_to_plan() -> None:
    base = packages_of("hlatctl", set())
    others = [
        module
        for module, packages in metadata.packages_distributions().items()
        if not base & {re.sub(r"[-_.]+", "-", package).lower() for package in packages}
    ]
    assert {"torch", "numpy", "prefect"} < set(others)
    code = f"import sys; sys.modules.update(dict.fromkeys({others!r})); from hlatctl.cli.main import main; "
    assert "training time" in in_a_process("-c", f"{code}sys.exit(main(['plan']))").stdout


@pytest.mark.processes
def test_the_module_is_the_command() -> None:
    result = in_a_process("-m", "hlatctl", "--version")
    assert (result.returncode, result.stdout) == (0, f"hlatctl {__version__}\n")


def test_an_unknown_command_names_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "error: no such command 'trian'\nhint: did you mean train?\n"


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["train", "--bogus"], "error: no such option: --bogus\nhint: `hlatctl train --help` shows how to use it\n"),
        (["stop"], "error: missing argument 'RUN'\nhint: `hlatctl stop --help` shows how to use it\n"),
        (["logs", "x", "--rank", "-1"], "error: invalid value for '--rank': "),
        (["ui", "--mlflow-port", "0"], "error: invalid value for '--mlflow-port': "),
        (["cache", "lst"], "error: no such command 'lst'\nhint: did you mean ls?\n"),
        (["eval", "data", "x"], "error: no such command 'x'\nhint: `hlatctl eval data --help` shows how to use it\n"),
    ],
)
def test_usage_errors_look_like_all_others(argv: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(error)
    assert len(captured.err.splitlines()) == 2
    assert captured.out == ""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("argv", "code", "error"),
    [
        (
            ["train", "model.vocabsize=3"],
            10,
            "error: model.vocabsize: unknown key\nhint: did you mean model.vocab_size?\n",
        ),
        (["plan", "train.tokens=0"], 10, "error: train.tokens=0: must be greater than 0\n"),
        (["train", "--dry-run", "--run-id", "../x"], 10, "error: --run-id=../x: must be 1 to 100 letters"),
        (["train", "data.path=/does/not/exist", "tokenizer.path=/neither"], 11, "error: "),
    ],
)
def test_bad_input_gives_an_error_and_creates_nothing(
    argv: list[str], code: int, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == code
    captured = capsys.readouterr()
    assert captured.err.startswith(error)
    assert captured.out == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["status", "logs", "show", "goodput"])
def test_what_only_reads_a_run_takes_the_newest_one_by_default(
    command: str, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run("newest-1")
    where = ["--runs-dir", os.fspath(run.root.parent)]
    assert main([command, "newest-1", *where]) == 0
    named = capsys.readouterr().out
    assert main([command, *where]) == 0
    assert capsys.readouterr().out == named
    assert "newest-1" in named


@pytest.mark.parametrize("command", ["status", "logs", "stop", "resume", "show", "compare", "goodput", "sync"])
def test_an_unknown_run_is_an_error(command: str, make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run("quickstart-1")
    assert main([command, "quikstart-1", "--runs-dir", os.fspath(run.root.parent)]) == 13
    assert capsys.readouterr().err == (
        f"error: quikstart-1: no run of that name in {run.root.parent}\nhint: did you mean quickstart-1?\n"
    )


@pytest.mark.parametrize("words", [["runs", "--host", "lab"], ["--debug", "--host=lab", "runs"]])
def test_the_host_comes_first(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 10
    assert "--host: must be the first word\nhint: hlatctl --host HOST COMMAND" in capsys.readouterr().err


def test_a_command_without_its_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(folder: object) -> None:
        raise ModuleNotFoundError("No module named 'prefect.client'", name="prefect.client")

    monkeypatch.setattr("hlatctl.cli.runs.runs_folder", fail)
    assert main(["runs"]) == 17
    assert "needs the package prefect, which is not installed\nhint: " in capsys.readouterr().err


def test_a_bug_is_one_line_and_a_file_with_the_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(folder: object) -> None:
        raise RuntimeError("broken\nin two lines")

    monkeypatch.setattr("hlatctl.cli.runs.runs_folder", fail)
    monkeypatch.setattr("tempfile.tempdir", os.fspath(tmp_path))
    assert main(["runs"]) == 1
    error = capsys.readouterr().err
    (saved,) = tmp_path.iterdir()
    assert error == (
        "error: this is a bug in hlatctl: RuntimeError: broken\n"
        f"hint: the traceback is in {saved}; HLATCTL_TRACEBACK=1 prints it\n"
    )
    assert "in fail" in saved.read_text(encoding="utf-8")
    monkeypatch.setenv(cli.TRACEBACK_ENV, "1")
    assert main(["runs"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_an_interrupt_exits_130_without_a_word_too_many(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(folder: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hlatctl.cli.runs.runs_folder", interrupt)
    assert main(["runs"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.processes
def test_a_reader_that_goes_away_is_no_error(make_run: MakeRun) -> None:
    run = make_run()
    log = run.logs(1) / "train.log"
    log.parent.mkdir(parents=True)
    log.write_text("line\n" * 100_000, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.fspath(ROOT), "HLATCTL_RUNS_DIR": os.fspath(run.root.parent)}
    with subprocess.Popen(
        [sys.executable, "-m", "hlatctl", "logs", "example"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "run example: created" in process.stdout.readline()
        process.stdout.close()
        assert "Traceback" not in (error := process.stderr.read())
        assert "Broken pipe" not in error
    assert process.returncode == 141, "what a shell says of a program that SIGPIPE ended"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("--version >&-", 14, "error: stdout: can't be written (Bad file descriptor)\nhint: redirect stdout"),
        ("--version >/dev/full", 14, "error: stdout: can't be written (No space left on device)\nhint: free space"),
        ("config list | true", 0, ""),
        ("--version >&- 2>&-", 14, ""),
        ("trian 2>&-", 2, ""),
        ("trian 2>/dev/full", 2, ""),
        ("rm example <&-", 10, "input is not a terminal"),
    ],
)
def test_a_stream_that_is_closed_or_full_gives_an_error_or_drops_messages(
    words: str, code: int, says: str, make_run: MakeRun
) -> None:
    run = make_run()
    environment = {**os.environ, "PYTHONPATH": os.fspath(ROOT), "HLATCTL_RUNS_DIR": os.fspath(run.root.parent)}
    command = f"{sys.executable} -P -m hlatctl {words}"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment, timeout=60)
    assert ended.returncode == code
    assert ended.stdout == ""
    assert says in ended.stderr
    assert bool(says) == bool(ended.stderr)
    assert "Exception ignored" not in ended.stderr


@pytest.mark.parametrize("argv", [["runs"], ["config", "show"], ["plan", "experiment=quickstart"]])
def test_a_working_directory_that_was_removed_is_named(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HLATCTL_RUNS_DIR", raising=False)
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(argv) == 14
    assert capsys.readouterr().err == (
        "error: working directory: can't be used (No such file or directory)\nhint: `cd` to a folder that exists\n"
    )
