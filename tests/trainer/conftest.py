"""Fixtures of the trainer's tests: a small real corpus, small configurations, real processes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import DATA_FOLDER
from conf.load import dump
from conf.schema import Config, SourceConfig
from hlatctl import node
from hlatctl.run import files, processes
from hlatctl.run.errors import ERROR_FILE_ENV
from hlatctl.run.files import JOB_FOLDER_ENV
from hlatctl.run.journal import read_events
from hlatctl.run.paths import RunPaths
from tests.trainer.s3_server import Server, make_bucket
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
_DOCUMENTS = ("textwrap.py", "bisect.py", "heapq.py", "shlex.py", "queue.py", "sched.py", "stat.py", "cmd.py")

#: Long, because the machine may be busy.
_FINISH_S = 900.0

MakeConfig = Callable[..., Config]
MakeRun = Callable[..., RunPaths]
Start = Callable[..., "subprocess.Popen[str]"]
Finish = Callable[..., str]
EventsOf = Callable[..., list[dict[str, Any]]]
TrainHere = Callable[[RunPaths, int], int]
TrainRun = Callable[..., RunPaths]
#: Does jobs (``tests.trainer.ranks``) in as many processes, and returns their results on rank 0.
Ranks = Callable[[int, list[dict[str, Any]]], list[Any]]


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Public texts, tokenizers and weights: the folder that the benchmarks use too."""
    if "HLATCTL_BENCH_DATA" not in os.environ:
        pytest.skip("HLATCTL_BENCH_DATA is not set; see benchmarks/README.md")
    return DATA_FOLDER


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources of some standard modules, split into 240 documents, as JSON Lines."""
    library = Path(sysconfig.get_path("stdlib"))
    text = "".join((library / name).read_text(encoding="utf-8") for name in _DOCUMENTS)
    size = len(text) // 240
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text[i * size : (i + 1) * size]}) + "\n" for i in range(240)))
    return path


@pytest.fixture(scope="session")
def make_config(corpus: Path) -> MakeConfig:
    """Small configurations; ``group={"key": value}`` changes keys of a group."""

    def make(**changes: Any) -> Config:
        groups: dict[str, dict[str, Any]] = {
            "model": {
                "vocab_size": 512,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_layers": 2,
                "num_heads": 4,
                "num_kv_heads": 2,
            },
            "data": {"path": os.fspath(corpus), "prefetch_batches": 2},
            "tokenizer": {"train_vocab_size": 400},
            "optimizer": {"lr": 3e-3, "warmup_steps": 5},
            "train": {"tokens": 24 * 4 * 32, "global_batch_size": 4, "seq_len": 32},
            "checkpoint": {"every_steps": 8},
            "eval": {"enabled": False},
            "backend": {"compile": False},
        }
        config = Config()
        for name, change in changes.items():
            if isinstance(change, dict):
                groups[name] = {**groups.get(name, {}), **change}
            else:
                config = replace(config, **{name: change})
        return replace(config, **{name: replace(getattr(config, name), **keys) for name, keys in groups.items()})

    return make


@pytest.fixture(scope="session")
def any_s3_server() -> Iterator[Server]:
    pytest.importorskip("s3fs", reason="the extra s3 is not installed")
    pytest.importorskip("moto", reason="moto is not installed")
    server = Server()
    yield server
    server.kill()


@pytest.fixture
def s3_server(any_s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A real S3 server with an empty bucket, which the environment names."""
    for name, value in any_s3_server.environment().items():
        monkeypatch.setenv(name, value)
    make_bucket()
    return any_s3_server


@pytest.fixture(scope="session")
def dataset(make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``dataset.json`` of the small corpus."""
    from trainer.data.prepare import prepare

    target = tmp_path_factory.mktemp("prepared") / "data"
    prepare(make_config(), target)
    return target / "dataset.json"


@pytest.fixture(scope="session")
def mixed(make_config: MakeConfig, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """``dataset.json`` of a mixture: the small corpus, and twenty of its documents as a second source."""
    from trainer.data.prepare import prepare

    folder = tmp_path_factory.mktemp("mixed")
    lines = corpus.read_text().splitlines(keepends=True)
    (folder / "few.jsonl").write_text("".join(lines[:20]))
    sources = [SourceConfig(path=os.fspath(corpus)), SourceConfig(path=os.fspath(folder / "few.jsonl"))]
    prepare(make_config(data={"path": None, "sources": sources}), folder / "data")
    dataset: dict[str, Any] = json.loads((folder / "data" / "dataset.json").read_text())
    return dataset


@pytest.fixture(scope="session")
def make_run(make_config: MakeConfig, dataset: Path) -> MakeRun:
    def make(root: Path, **changes: Any) -> RunPaths:
        run = RunPaths(root)
        text = dump(make_config(runs_dir=os.fspath(root.parent), **changes))
        files.write_text(run.config, files.seal_lines(text))
        files.write_text(run.dataset, dataset.read_text(encoding="utf-8"))
        return run

    return make


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Start a module or a file alone, or (with ``processes``) a module by ``trainer.launch``, in a process group.

    The environment is that of ``hlatctl.node``, which isn't used so that signals reach the processes directly.
    """

    def run(
        *argv: str,
        processes: int = 0,
        shares: str = "trainer.backends.torch_native",
        log: Path | None = None,
        **env: str,
    ) -> subprocess.Popen[str]:
        launcher = ("-m", "trainer.launch", str(processes), f"--import={shares}")
        own = tmp_path_factory.mktemp("job")
        if processes:
            env = {**node.one_machine(own), JOB_FOLDER_ENV: os.fspath(own), "TMPDIR": os.fspath(own), **env}
        module = () if argv[0].endswith(".py") else ("-m",)
        with log.open("w") if log else nullcontext(subprocess.PIPE) as output:
            return subprocess.Popen(
                [sys.executable, *(launcher if processes else ()), *module, *argv],
                cwd=ROOT,
                text=True,
                start_new_session=True,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.fspath(ROOT), "PYTHONSAFEPATH": "1", **env},
            )

    return run


@pytest.fixture(scope="session")
def finish() -> Finish:
    """Wait for a process, check its exit code and return its output; kill it if it hangs."""

    def wait(process: subprocess.Popen[str], code: int = 0) -> str:
        try:
            output, _ = process.communicate(timeout=_FINISH_S)
        except subprocess.TimeoutExpired:
            descendants = processes.descendants(process.pid)  # ranks are in sessions of their own
            for pid in (process.pid, *descendants):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"not finished after {_FINISH_S:g} s: {output}") from None
        assert process.returncode == code, output
        return output

    return wait


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, start: Start) -> Iterator[Ranks]:
    """Groups of processes that stay for the tests of a file: the threads of idle groups take processor time."""
    groups: dict[int, tuple[subprocess.Popen[str], Path, Iterator[int]]] = {}

    def end(size: int) -> None:
        process = groups.pop(size)[0]
        for pid in (*processes.descendants(process.pid), process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def do(size: int, jobs: list[dict[str, Any]]) -> list[Any]:
        if size not in groups:
            folder = tmp_path_factory.mktemp("ranks")
            argv = ("tests.trainer.ranks", os.fspath(folder), str(os.getpid()))
            groups[size] = start(*argv, processes=size, log=folder / "log"), folder, itertools.count(1)
        process, folder, numbers = groups[size]
        number = next(numbers)
        files.write_json(folder / f"{number}.json", jobs)
        done = folder / f"{number}.done"
        wait_for(lambda: done.exists() or process.poll() is not None, timeout_s=_FINISH_S)
        if not done.exists():
            end(size)
            raise AssertionError((folder / "log").read_text(encoding="utf-8"))
        results: list[Any] = files.read_json(done)
        return results

    yield do
    for size in list(groups):
        end(size)


@pytest.fixture
def train_run(tmp_path: Path, make_run: MakeRun, train_here: TrainHere) -> TrainRun:
    """Make a run with changes of the configuration, and train its first attempt in this process to the end."""
    numbers = itertools.count(1)

    def train(**changes: Any) -> RunPaths:
        run = make_run(tmp_path / f"run-{next(numbers)}", **changes)
        assert train_here(run, 1) == 0
        return run

    return train


@pytest.fixture(scope="session")
def events_of() -> EventsOf:
    def select(run: RunPaths, kind: str, attempt: int | None = None) -> list[dict[str, Any]]:
        return [e for e in read_events(run) if e["kind"] == kind and attempt in (None, e["attempt"])]

    return select


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE_ENV, os.fspath(path))
    return path
