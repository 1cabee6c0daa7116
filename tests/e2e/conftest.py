"""Real runs of a tiny model through the command line: real processes, real files, no server configured."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hlatctl.cli.main import main
from hlatctl.run import processes
from hlatctl.run.journal import Event, read_events
from hlatctl.run.paths import RunPaths
from tests.foreign import install
from tests.waiting import WAIT_S

SENTENCE = "the model reads a page and then another page until it says the next word"
WORDS = SENTENCE.split()
#: Inductor doesn't try the machine's vector instructions, whose headers take longest to compile.
SCALAR_KERNELS = {"TORCHINDUCTOR_VEC_ISA_OK": "0"}


#: A run on a scheduler whose nodes have no known speed needs no confirmation with a budget below the limit.
LIMIT = "budget.node_hours=50"

Call = Callable[..., subprocess.CompletedProcess[str]]


class Cli:
    """The command `hlatctl`, with its own runs folder and corpus.

    Args:
        prefect_api_url: the Prefect API that its runs report to; empty: runs with ``tracking=none`` use none.
    """

    def __init__(self, folder: Path, prefect_api_url: str = "") -> None:
        self.folder, self.prefect_api_url = folder, prefect_api_url
        self.runs_dir = folder / "runs"
        corpus = folder / "corpus"
        corpus.mkdir()
        rows = [{"text": " ".join(WORDS[(i * j) % len(WORDS)] for j in range(40 + i % 60))} for i in range(400)]
        (corpus / "part.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        self.overrides = [
            f"data.path={corpus}",
            "tokenizer.train_vocab_size=384",
            "model.vocab_size=384",
            "model.hidden_size=32",
            "model.intermediate_size=64",
            "model.num_layers=2",
            "model.num_heads=2",
            "model.num_kv_heads=1",
            "train.seq_len=128",
            "train.global_batch_size=4",
            "train.max_steps=40",
            "train.tokens=1M",
            "checkpoint.every_steps=10",
            "backend.compile=false",
            "cluster.processes_per_node=2",
            "eval.enabled=false",
            f"cluster.worker_cache_dir={folder / 'worker'}",
            "recovery.backoff_s=0.1",
            f"preflight.timeout_s={WAIT_S:g}",
            "tracking=none",
        ]

    def argv(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "hlatctl", *arguments]

    @property
    def env(self) -> dict[str, str]:
        prefect = {"PREFECT_API_URL": self.prefect_api_url} if self.prefect_api_url else {}
        own = {"HLATCTL_RUNS_DIR": os.fspath(self.runs_dir), "NO_COLOR": "1", **SCALAR_KERNELS}
        return {**os.environ, **prefect, **own}

    def run(self, *arguments: str, timeout_s: float = WAIT_S) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*arguments), env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def train(self, run_id: str, *overrides: str) -> subprocess.CompletedProcess[str]:
        return self.run("train", "--run-id", run_id, *self.overrides, *overrides)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.argv(*arguments), env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def start_train(self, run_id: str, *overrides: str) -> subprocess.Popen[str]:
        return self.start("train", "--run-id", run_id, *self.overrides, *overrides)

    def paths(self, run_id: str) -> RunPaths:
        return RunPaths(self.runs_dir / run_id)

    def events(self, run_id: str, kind: str) -> list[Event]:
        return [event for event in read_events(self.paths(run_id)) if event["kind"] == kind]

    def losses(self, run_id: str) -> dict[int, Any]:
        """Return the loss by step. A repeated step must have the same loss each time."""
        losses: dict[int, Any] = {}
        for event in self.events(run_id, "step"):
            assert losses.setdefault(event["step"], event["loss"]) == event["loss"]
        return losses

    def trainer_pids(self, run_id: str) -> list[int]:
        """Return the training processes of a run, without their launcher and the script, in order of ranks.

        The process that forked them may have been started for the preflight.
        """
        found: dict[int, processes.Identity] = {}
        for process in processes.with_words("--run-dir", os.fspath(self.paths(run_id).root)):
            found |= processes.ranks(process.pid)
        return [found[rank].pid for rank in sorted(found)]


class WithPackage(Cli):
    """The command in an environment with a package that a test has installed into the folder."""

    @property
    def env(self) -> dict[str, str]:
        return {**super().env, "PYTHONPATH": os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])}


_PACED_ROW = """
from conf.registries import OptimizerKind

PACED = OptimizerKind(code="paced.optimizer:Paced.of")
"""
_PACED = """
import sys, time
from trainer.optim.adamw import AdamW

PAUSES = int(sys.argv[sys.argv.index("--attempt") + 1]) >= {first_attempt}

class Paced(AdamW):
    def step(self, **options):
        if PAUSES:
            time.sleep({pause_s})
        super().step(**options)
"""


class Paced(WithPackage):
    """The command for a training that something happens to: each step sleeps.

    Such a training goes on until commands, servers and new processes have started. At full speed it would take the
    processors from these, and a run of so many steps would have to be repeated for comparison.

    Args:
        first_attempt: the first attempt whose steps sleep.
    """

    def __init__(self, folder: Path, *, pause_s: float = 0.05, first_attempt: int = 1) -> None:
        super().__init__(folder)
        optimizer = _PACED.format(pause_s=pause_s, first_attempt=first_attempt)
        modules = {"paced/__init__.py": "", "paced/rows.py": _PACED_ROW, "paced/optimizer.py": optimizer}
        install(folder, "paced", modules, {"hlatctl.optimizers": {"paced": "paced.rows:PACED"}})
        self.overrides.append("optimizer.name=paced")


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    return Cli(tmp_path_factory.mktemp("e2e"))


@pytest.fixture
def call(cli: Cli, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Return a function that runs a command in this process, for those that take less time than a process to start."""
    for name, value in cli.env.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        code = main(list(arguments))
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def tracked(cli: Cli, prefect_api_url: str) -> Cli:
    """The same runs folder; runs report to Prefect."""
    reporting = copy.copy(cli)
    reporting.prefect_api_url = prefect_api_url
    return reporting


@pytest.fixture(scope="session")
def undisturbed(cli: Cli) -> str:
    """A run without faults, for comparison, whose driver is detached and followed."""
    result = cli.run("train", "--detach", "--run-id", "undisturbed", *cli.overrides)
    assert result.returncode == 0, result.stderr
    assert cli.run("logs", "undisturbed", "-f").returncode == 0
    return "undisturbed"
