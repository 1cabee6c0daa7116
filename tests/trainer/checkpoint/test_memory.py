"""Copies of the newest steps in the memory of the nodes: what is restored from them, and what never is."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.load import load
from conf.schema import Config
from hlatctl.run import memory
from hlatctl.run.journal import FLOW_WRITER, JournalWriter, train_writer
from hlatctl.run.paths import RunPaths
from tests.trainer.conftest import EventsOf, MakeRun, Ranks, TrainHere
from trainer.backends.torch_native import TorchNative
from trainer.checkpoint.manager import CheckpointManager
from trainer.step import loop


class _KilledError(Exception):
    """Ends an attempt as a kill would."""


COPIES = {"checkpoint": {"every_steps": 8, "memory_every_steps": 3}}
#: Trains an attempt that is killed after a step (None: to the end), and that ended so for the driver.
Train = Callable[..., None]


@pytest.fixture(autouse=True)
def _own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "ROOT", tmp_path / "shm")
    (tmp_path / "shm").mkdir()


@pytest.fixture
def run(tmp_path: Path, make_run: MakeRun) -> RunPaths:
    """24 steps, with checkpoints of 8, 16 and 24, and copies of every third."""
    return make_run(tmp_path / "run", **COPIES)


@pytest.fixture
def train(run: RunPaths, train_here: TrainHere, monkeypatch: pytest.MonkeyPatch) -> Train:
    start, ends = loop.Training._start_step, dict[str, int | None]()

    def start_or_end(training: loop.Training) -> None:
        if training.checkpoints._memory:
            training.checkpoints._memory.wait()  # otherwise one that isn't complete yet would skip the next one
        if training.step - 1 == ends["after"]:
            training.checkpoints.wait()
            raise _KilledError
        start(training)

    monkeypatch.setattr(loop.Training, "_start_step", start_or_end)

    def train(attempt: int, dies_after: int | None = None, **end: Any) -> None:
        ends["after"] = dies_after
        with JournalWriter(run, FLOW_WRITER) as journal:
            journal.append("attempt_started", attempt=attempt, handle={})
            if dies_after is None:
                assert train_here(run, attempt) == 0
            else:
                with pytest.raises(_KilledError):
                    train_here(run, attempt)
            ended = {"cause": "killed", "decision": "restart", **end}
            journal.append("attempt_ended", attempt=attempt, step=dies_after or 24, **ended)

    return train


@pytest.fixture
def started(run: RunPaths, events_of: EventsOf) -> Callable[[int], tuple[int, str]]:
    """The step that an attempt has started from, and from where."""

    def of(attempt: int) -> tuple[int, str]:
        (event,) = events_of(run, "train_started", attempt)
        return event["resumed_from_step"], event["restored_from"]

    return of


Started = Callable[[int], tuple[int, str]]


#: Returns what an attempt would start from, after an end of the first one.
Choose = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def once_trained(tmp_path_factory: pytest.TempPathFactory, make_run: MakeRun, train_here: TrainHere) -> Path:
    """A run that was killed after step 14, and its node's memory with steps 9 and 12."""
    folder = tmp_path_factory.mktemp("once")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "ROOT", folder / "shm")
        (folder / "shm").mkdir()
        run = make_run(folder / "run", **COPIES)
        with JournalWriter(run, FLOW_WRITER) as journal:
            journal.append("attempt_started", attempt=1, handle={})
        start = loop.Training._start_step

        def start_or_end(training: loop.Training) -> None:
            assert training.checkpoints._memory
            training.checkpoints._memory.wait()
            if training.step == 15:
                training.checkpoints.wait()
                raise _KilledError
            start(training)

        patch.setattr(loop.Training, "_start_step", start_or_end)
        with pytest.raises(_KilledError):
            train_here(run, 1)
        memory.of_run(run).rename(folder / "copies")
    return folder


@pytest.fixture
def trained(once_trained: Path, tmp_path: Path) -> RunPaths:
    run = RunPaths(Path(shutil.copytree(once_trained / "run", tmp_path / "run")))
    memory.of_run(run).parent.mkdir(mode=0o700)
    shutil.copytree(once_trained / "copies", memory.of_run(run))
    return run


@pytest.fixture
def choose(trained: RunPaths) -> Choose:
    def choose(
        attempt: int = 2, max_step: int | None = None, config: Config | None = None, **end: Any
    ) -> tuple[int, str]:
        config = config or load(trained.config)
        if attempt == 2:
            ended = {"cause": "killed", "decision": "restart", **end}
            with JournalWriter(trained, FLOW_WRITER) as journal:
                journal.append("attempt_ended", attempt=1, step=14, **ended)
        manager = CheckpointManager(config, trained, TorchNative(config), None, attempt=attempt)
        chosen = manager.choose(max_step)
        assert chosen
        return chosen[0], "storage" if manager.restored_from == "nothing" else manager.restored_from

    return choose


def _losses(run: RunPaths, events_of: EventsOf, attempt: int) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events_of(run, "step", attempt)}


def _shards(run: RunPaths) -> list[str]:
    return sorted(path.name for path in memory.of_node(run).glob("*.shard"))


def test_an_attempt_continues_from_the_newest_step_in_memory(
    run: RunPaths,
    train: Train,
    started: Started,
    events_of: EventsOf,
    tmp_path: Path,
    make_run: MakeRun,
    train_here: TrainHere,
) -> None:
    train(1, dies_after=14)
    assert memory.of_node(run).stat().st_mode & 0o777 == 0o700
    train(2, dies_after=17)
    assert started(2) == (12, "memory"), "the checkpoint is of step 8"
    train(3)
    assert started(3) == (16, "storage"), "its checkpoint is newer than the copy of step 15"
    assert not memory.of_run(run).exists(), "nothing stays behind a finished run"
    twin = make_run(tmp_path / "twin")
    assert train_here(twin, 1) == 0
    losses = _losses(twin, events_of, 1)
    for attempt, first in ((2, 13), (3, 17)):
        again = _losses(run, events_of, attempt)
        assert min(again) == first
        assert again == {step: losses[step] for step in again}
    assert _losses(run, events_of, 3)[24] == losses[24]


def test_an_attempt_that_made_no_copy_leaves_those_before_it(run: RunPaths, train: Train, started: Started) -> None:
    train(1, dies_after=14)
    train(2, dies_after=13)
    train(3)
    assert started(3) == (12, "memory")


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ({"cause": "rollback"}, "its loss was not finite"),
        ({"cause": "corruption"}, "its numbers may be wrong"),
        ({"cause": "amended"}, "its configuration has changed"),
        ({"decision": "walk_back", "max_checkpoint_step": 8}, "the step itself may be the cause"),
        ({"decision": "skip_data"}, "its data have changed"),
        ({"decision": "stop"}, "a person has seen it"),
    ],
)
def test_after_an_end_that_may_be_the_numbers_fault_nothing_in_memory_is_used(
    trained: RunPaths, choose: Choose, end: dict[str, Any], why: str
) -> None:
    assert choose(**end) == (8, "storage"), why


def test_no_copy_above_a_limit_of_checkpoints_is_used(trained: RunPaths, choose: Choose) -> None:
    assert choose(max_step=11) == (9, "memory")
    assert choose(max_step=8) == (8, "storage")


def test_a_damaged_copy_and_an_incomplete_one_are_replaced_by_the_one_before(trained: RunPaths, choose: Choose) -> None:
    shard = memory.of_node(trained) / "000001-000000-1.shard"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert choose() == (9, "memory")
    shard.with_suffix(".json").unlink()
    assert choose() == (9, "memory")
    (memory.of_node(trained) / "000001-000000-0.json").write_text("{}")
    assert choose() == (8, "storage")


def test_a_copy_of_another_layout_is_not_used(trained: RunPaths, choose: Choose) -> None:
    config = load(trained.config)
    changed = replace(config, optimizer=replace(config.optimizer, ema_decay=0.9))
    assert choose(config=changed) == (8, "storage")


def test_a_step_whose_checkpoint_an_evaluation_needs_is_not_jumped_over(trained: RunPaths, choose: Choose) -> None:
    """The milestone of step 10 was being written when the attempt ended."""
    config = load(trained.config)
    evaluated = replace(config, eval=replace(config.eval, enabled=True, every_tokens=10 * config.tokens_per_step))
    assert choose(config=evaluated) == (9, "memory")


def test_a_superseded_copy_is_not_used(trained: RunPaths, choose: Choose) -> None:
    """The node with the copies of the first attempt was away in the second one, which began before them."""
    with JournalWriter(trained, FLOW_WRITER) as journal, JournalWriter(trained, train_writer(0), 2) as rank0:
        journal.append("attempt_ended", attempt=1, step=14, cause="killed", decision="restart")
        journal.append("attempt_started", attempt=2, handle={})
        rank0.append("train_started", resumed_from_step=10)
        journal.append("attempt_ended", attempt=2, step=10, cause="killed", decision="restart")
    assert choose(attempt=3) == (9, "memory")


def test_a_full_memory_is_a_warning_and_training_goes_on(
    run: RunPaths, train: Train, events_of: EventsOf, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    train(1)
    (warning,) = events_of(run, "warning")
    assert re.fullmatch(
        r"checkpoint\.memory_every_steps=3: no step is copied to memory: .*/run-\w+/[^/]+: No space left on device; "
        r"[\d.]+ .iB are free",
        warning["message"],
    )
    assert warning["message"] in capfd.readouterr().err


def test_a_folder_that_others_may_write_to_is_not_used(run: RunPaths, train: Train, events_of: EventsOf) -> None:
    memory.of_node(run).mkdir(parents=True)
    memory.of_node(run).chmod(0o777)
    train(1)
    (warning,) = events_of(run, "warning")
    assert "other users may write there (mode 0777)" in warning["message"]


def test_forgotten_copies_of_other_runs_are_removed(run: RunPaths) -> None:
    forgotten, used = (memory.of_run(RunPaths(run.root / name)) / "node" for name in ("forgotten", "used"))
    for folder in (forgotten, used):
        folder.mkdir(parents=True)
    os.utime(forgotten, (0, 0))
    memory.remove_forgotten()
    assert used.exists()
    assert not forgotten.parent.exists()


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {"parallel": {"data_parallel": "fsdp"}}),
    "tp and zero1": (4, {"parallel": {"data_parallel": "zero1", "tensor_parallel_size": 2}}),
}


@pytest.mark.processes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_node_that_is_lost_with_its_memory_costs_no_step_that_its_partner_has(
    layout: str, tmp_path: Path, make_run: MakeRun, ranks: Ranks, started: Started, events_of: EventsOf, run: RunPaths
) -> None:
    """Its place is taken by a new node, and the nodes have another order."""
    processes, changes = LAYOUTS[layout]
    cluster = {"processes_per_node": processes}
    run = make_run(run.root, cluster=cluster, **COPIES, **changes)
    twin = make_run(tmp_path / "twin", cluster=cluster, **changes)
    shm = tmp_path / "shm"

    def job(run: RunPaths, attempt: int, **more: Any) -> dict[str, Any]:
        return {"work": "train", "run": os.fspath(run.root), "attempt": attempt, "memory": os.fspath(shm), **more}

    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append("attempt_started", attempt=1, handle={})
        ranks(processes, [job(run, 1, nodes=["a", "b"], dies_after=14), job(twin, 1)])
        journal.append("attempt_ended", attempt=1, step=14, cause="node_failed", decision="restart_without")
        shutil.rmtree(memory.of_run(run) / "b")
        journal.append("attempt_started", attempt=2, handle={})
        ranks(processes, [job(run, 2, nodes=["c", "a"])])
    assert started(2) == (12, "partner")
    losses, again = _losses(twin, events_of, 1), _losses(run, events_of, 2)
    assert again == {step: losses[step] for step in range(13, 25)}
    assert not memory.of_run(run).exists(), "nothing stays behind a finished run"
