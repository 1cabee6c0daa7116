"""The services that have mirrors, as the tests see them: TensorBoard's files, W&B's client and a server, MLflow."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flows.tracking import mlflow_client
from hlatctl.run.paths import RunPaths
from tests.flows.tracking.mirrors.fake_wandb import FakeWandb, serving
from tests.flows.tracking.mirrors.make import make_run

#: wandb requires 40 characters.
KEY = "5ec4e7" * 7
Curve = list[tuple[int, float]]


@dataclass(frozen=True)
class Seen:
    """What a service shows of a run.

    Args:
        name: name of the mirror.
        curve: a metric of steps by step, such as ``loss``.
        scores: the scores of a task by the milestone's step.
        says: name, tags, notes and further labels as one text.
        outcome: the run's outcome.
        config: a value of the run's configuration.
        lose: removes the run there.
        away: a block in which the service accepts nothing.
    """

    name: str
    curve: Callable[[RunPaths, str], Curve]
    scores: Callable[[RunPaths, str], Curve]
    says: Callable[[RunPaths], str]
    outcome: Callable[[RunPaths], str]
    config: Callable[[RunPaths, str], str]
    lose: Callable[[RunPaths], None]
    away: Callable[[RunPaths], AbstractContextManager[None]]

    def steps(self, run: RunPaths) -> list[int]:
        return [step for step, _ in self.curve(run, "loss")]


@pytest.fixture(scope="session")
def mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's tables, created by two processes simultaneously, as a new run and `hlatctl ui` may do."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    code = "import sys; from flows.tracking.mlflow_client import connect; connect(sys.argv[1]).search_experiments()"
    both = [subprocess.Popen([sys.executable, "-c", code, f"sqlite:///{path}"]) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    return path


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    """An empty runs folder."""
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def run(runs_dir: Path) -> RunPaths:
    """A run that has begun."""
    return make_run(runs_dir)


@pytest.fixture
def with_mlflow(runs_dir: Path, mlflow_database: Path) -> Path:
    """A runs folder with an empty MLflow."""
    shutil.copy(mlflow_database, runs_dir / "mlflow.db")
    return runs_dir


@pytest.fixture(scope="session")
def wandb_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeWandb]:
    """A server, and an environment in which wandb finds only it. wandb reads the environment once."""
    import wandb

    with serving() as server, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("WANDB_API_KEY", KEY)
        patch.setenv("WANDB_BASE_URL", server.url)
        yield server
        wandb.teardown()


@pytest.fixture
def fake(wandb_server: FakeWandb) -> FakeWandb:
    """The server, empty."""
    wandb_server.runs.clear()
    wandb_server.away, wandb_server.rewinds, wandb_server.received = False, True, b""
    return wandb_server


def events(run: RunPaths, part: str = "") -> EventAccumulator:
    """Read TensorBoard's event files."""
    reader = EventAccumulator(str(run.tensorboard / part), size_guidance={"scalars": 0, "tensors": 0})
    logging.getLogger("tensorboard").disabled = True  # it warns of each restart
    return reader.Reload()


def scalars(run: RunPaths, tag: str, part: str = "") -> Curve:
    reader = events(run, part)
    return [(e.step, e.value) for e in reader.Scalars(tag)] if tag in reader.Tags()["scalars"] else []


def texts(run: RunPaths, tag: str, part: str = "") -> list[str]:
    return [event.tensor_proto.string_val[0].decode() for event in events(run, part).Tensors(tag)]


def _tensorboard() -> Seen:
    @contextmanager
    def away(run: RunPaths) -> Iterator[None]:
        aside = run.root / "aside"
        if run.tensorboard.exists():
            run.tensorboard.rename(aside)
        run.tensorboard.touch()
        yield
        run.tensorboard.unlink()
        if aside.exists():
            aside.rename(run.tensorboard)

    return Seen(
        name="tensorboard",
        curve=lambda run, metric: scalars(run, f"train/{metric}", "by_step"),
        scores=lambda run, task: scalars(run, f"eval/{task}"),
        says=lambda run: texts(run, "labels")[-1],
        outcome=lambda run: texts(run, "outcome")[-1].partition(" ")[0],
        config=lambda run, key: next(line for line in texts(run, "config")[0].splitlines() if f"| {key} " in line),
        lose=lambda run: shutil.rmtree(run.tensorboard),
        away=away,
    )


def _wandb(fake: FakeWandb) -> Seen:
    @contextmanager
    def away(_run: RunPaths) -> Iterator[None]:
        fake.away = True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("flows.tracking.mirrors.wandb_run._INIT_TIMEOUT_S", 1.0)
            yield
        fake.away = False

    return Seen(
        name="wandb",
        curve=lambda run, metric: fake.runs[run.run_id].curve(f"train/{metric}"),
        scores=lambda run, task: fake.runs[run.run_id].curve(f"eval/{task}", axis="eval/step"),
        says=lambda run: "\n".join(
            [(kept := fake.runs[run.run_id]).name, *kept.tags, kept.notes, str(kept.config.get("hlatctl.amended"))]
        ),
        outcome=lambda run: fake.runs[run.run_id].summary["outcome"],
        config=lambda run, key: str(fake.runs[run.run_id].config[key]["value"]),
        lose=lambda run: fake.runs.clear(),
        away=away,
    )


def mlflow_rows(runs_dir: Path, key: str = "train/loss") -> list[tuple[str, int, float]]:
    """Return a metric's rows in MLflow's database, in order of steps: run, step, value."""
    with closing(sqlite3.connect(runs_dir / "mlflow.db")) as database:
        query = "SELECT run_uuid, step, value FROM metrics WHERE key = ? ORDER BY step"
        return database.execute(query, (key,)).fetchall()


def mlflow_copy(run: RunPaths) -> Any:
    """Return a run in MLflow."""
    client = mlflow_client.connect(mlflow_client.default_tracking_uri(run.root.parent))
    return client.get_run(mlflow_client.copied_to(run)["run_id"])


def _mlflow() -> Seen:
    def curve(run: RunPaths, key: str) -> Curve:
        known = mlflow_client.copied_to(run)["run_id"]
        return [(step, value) for run_id, step, value in mlflow_rows(run.root.parent, key) if run_id == known]

    def says(run: RunPaths) -> str:
        return "\n".join(f"{key}={value}" for key, value in mlflow_copy(run).data.tags.items())

    def lose(run: RunPaths) -> None:
        client = mlflow_client.connect(mlflow_client.default_tracking_uri(run.root.parent))
        client.delete_run(mlflow_client.copied_to(run)["run_id"])

    @contextmanager
    def away(run: RunPaths) -> Iterator[None]:
        database = run.root.parent / "mlflow.db"
        aside = database.rename(database.with_name("aside"))
        database.mkdir()
        yield
        database.rmdir()
        aside.rename(database)

    return Seen(
        name="mlflow",
        curve=lambda run, metric: curve(run, f"train/{metric}"),
        scores=lambda run, task: curve(run, f"eval/{task}"),
        says=says,
        outcome=lambda run: str(mlflow_copy(run).data.tags["hlatctl.outcome"]),
        config=lambda run, key: str(mlflow_copy(run).data.params[key]),
        lose=lose,
        away=away,
    )


@pytest.fixture(params=["tensorboard", "wandb", "mlflow"])
def seen(request: pytest.FixtureRequest) -> Seen:
    """Each service in turn, empty."""
    if request.param == "wandb":
        return _wandb(request.getfixturevalue("fake"))
    if request.param == "mlflow":
        request.getfixturevalue("with_mlflow")
        return _mlflow()
    return _tensorboard()
