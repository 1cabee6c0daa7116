"""Every command of the README runs, in its order, as written; only sizes are made small."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hlatctl.cli.main import main
from tests.e2e.conftest import Cli
from tests.ports import free_ports
from tests.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.processes

REPOSITORY = Path(__file__).parents[1]
#: Commands that drive a run have a process of their own. Others take less time than a process to start.
DRIVES = ("train", "resume", "eval")
BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)


def readme_commands() -> list[list[str]]:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    lines = [line for block in BLOCK.findall(text) for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines]
    return [command for command in commands if command and command[0] != "."]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which the README's relative paths exist."""
    import sentencepiece

    cli = Cli(tmp_path)
    sentencepiece.SentencePieceTrainer.train(
        input=os.fspath(cli.folder / "corpus" / "part.jsonl"),
        model_prefix=os.fspath(tmp_path / "llama"),
        vocab_size=150,
        model_type="bpe",
        byte_fallback=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return tmp_path


def small(cli_overrides: list[str], command: list[str]) -> list[str]:
    """The command with everything small that it does not say itself."""
    said = {word.split("=")[0] for word in command}
    said |= {"tokenizer.train_vocab_size"} if "tokenizer.path" in said else set()
    said |= {"eval.enabled"} if "--dry-run" in said else set()  # a simulated cluster evaluates at once
    return [*command, *(o for o in cli_overrides if o.split("=")[0] not in said)]


def test_every_command_of_the_readme_works(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HLATCTL_RUNS_DIR", os.fspath(folder / "runs"))
    overrides = small_overrides(folder)
    ids: list[str] = []
    for command in readme_commands():
        if command[0] == "make":
            subprocess.run(["make", "-C", os.fspath(REPOSITORY), "-n", *command[1:]], check=True, capture_output=True)
            continue
        assert command[0] == "hlatctl"
        words = small(overrides, command[1:]) if command[1] in ("train", "plan") else command[1:]
        given = iter(ids)
        words = [next(given) if word == "RUN" else word for word in words]
        arguments = [sys.executable, "-m", "hlatctl", *words]
        if command[1] == "ui":
            interrupt_when_ready(arguments)
            continue
        if command[1] not in DRIVES:
            assert main(words) == 0, (command, capsys.readouterr().err)
            continue
        result = subprocess.run(arguments, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert result.returncode == 0, (command, result.stderr)
        if command[1] == "train":
            ids.append(result.stdout.strip().splitlines()[-1])
    assert len(ids) == 3


def small_overrides(folder: Path) -> list[str]:
    """Those of the tiny model in one process, without what belongs to another folder."""
    template = Cli.__new__(Cli)
    (folder / "template").mkdir()
    Cli.__init__(template, folder / "template")
    return [*template.overrides, "cluster.processes_per_node=1"]


def interrupt_when_ready(arguments: list[str]) -> None:
    prefect, mlflow = map(str, free_ports(2))
    ports = ["--prefect-port", prefect, "--mlflow-port", mlflow, "--port", "0"]
    log = Path("ui.log")
    with log.open("w") as output:
        process = subprocess.Popen([*arguments, *ports], stdout=output, stderr=subprocess.STDOUT)
        wait_for(lambda: "page\thttp://127.0.0.1" in log.read_text() or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) in (0, 130), log.read_text()
    assert "page\thttp://127.0.0.1" in log.read_text()
