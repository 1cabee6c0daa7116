"""The remote folder in object storage: what is copied, what is fetched, and that its failures never stop training."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("fsspec", reason="no extra for object storage is installed")

from conf.load import load
from hlatctl.cache import remote as layout
from hlatctl.cache.store import Objects
from hlatctl.run import files
from hlatctl.run.checkpoint import MANIFEST, checkpoint_steps, read_manifest, why_invalid, write_manifest
from hlatctl.run.errors import CheckpointError, StorageError
from hlatctl.run.paths import RunPaths
from tests.trainer.conftest import EventsOf, MakeRun, TrainHere
from tests.waiting import WAIT_S, wait_for
from trainer.__main__ import main
from trainer.backends.base import Backend
from trainer.checkpoint import remote


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIRST_PAUSE_S", "_LAST_PAUSE_S", "_FIRST_LOOK_S", "_LAST_LOOK_S"):
        monkeypatch.setattr(remote, name, 0.01)
    monkeypatch.setattr(remote, "_PATIENCE_S", 30.0)
    monkeypatch.setattr(remote, "_PAUSES_S", (0.0,))


@pytest.fixture
def uploading(tmp_path: Path, make_run: MakeRun) -> RunPaths:
    """A run that has not begun, with an empty remote folder."""
    return make_run(tmp_path / "run", checkpoint={"remote_url": f"file://{tmp_path}/bucket"})


def _copies(run: RunPaths) -> list[layout.Copy]:
    return layout.complete_copies(layout.remote_folder(f"file://{run.root.parent}/bucket", run.run_id))


def _steps(run: RunPaths) -> list[int]:
    return sorted(copy.step for copy in _copies(run))


def _folder(run: RunPaths, step: int) -> Path:
    (name,) = [copy.name for copy in _copies(run) if copy.step == step]
    return run.root.parent / "bucket" / run.run_id / name


def _losses(run: RunPaths, attempt: int, events_of: EventsOf) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events_of(run, "step", attempt)}


def _alarms(run: RunPaths, events_of: EventsOf, attempt: int | None = None) -> list[str]:
    return [event["message"] for event in events_of(run, "alarm", attempt) if event["what"] == "remote_copy"]


def _broken(monkeypatch: pytest.MonkeyPatch, breaks: Callable[[int], bool]) -> list[str]:
    """Let puts fail whose number, from 0, breaks; return the paths of the others, as they come."""
    put, arrived, count = Objects.put, list[str](), [0]

    def failing(self: Objects, source: Path, path: str, *more: Any) -> None:
        number, count[0] = count[0], count[0] + 1
        if breaks(number):
            raise ConnectionError("the storage is away")
        put(self, source, path, *more)
        arrived.append(path)

    monkeypatch.setattr(Objects, "put", failing)
    return arrived


def test_every_verified_checkpoint_is_copied_and_the_run_waits_for_the_last_one(
    uploading: RunPaths, train_here: TrainHere, events_of: EventsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived = _broken(monkeypatch, lambda number: False)
    assert train_here(uploading, 1) == 0
    copied = events_of(uploading, "checkpoint_uploaded")
    assert copied[-1]["step"] == 24
    assert copied[-1]["bytes"] == read_manifest(uploading.checkpoint(24)).size_bytes
    assert arrived.count("config.yaml") == 1
    last = [path for path in arrived if path.startswith("step-00000024")]
    assert last[-1].endswith(MANIFEST)
    assert why_invalid(_folder(uploading, 24), of_run=False) is None
    assert not _alarms(uploading, events_of)


def test_the_copy_of_the_configuration_is_the_newest_one(
    uploading: RunPaths, train_here: TrainHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    amended = files.seal_lines(files.unseal_lines(uploading.config.read_text(encoding="utf-8"))[0])
    files.write_text(uploading.amended_config(1), "not this one")
    files.write_text(uploading.amended_config(2), amended)
    arrived = _broken(monkeypatch, lambda number: False)
    assert train_here(uploading, 1) == 0
    assert arrived.count("config.yaml") == 1
    assert (_folder(uploading, 24).parent / "config.yaml").read_text(encoding="utf-8") == amended


def test_a_lost_run_directory_continues_from_the_remote_folder_with_the_same_bits(
    uploading: RunPaths, train_here: TrainHere, events_of: EventsOf, make_run: MakeRun
) -> None:
    assert train_here(uploading, 1) == 0
    losses = _losses(uploading, 1, events_of)
    layout.delete(layout.remote_folder(f"file://{uploading.root.parent}/bucket", "run"), _copies(uploading)[0])
    shutil.rmtree(uploading.root)
    again = make_run(uploading.root, checkpoint={"remote_url": f"file://{uploading.root.parent}/bucket"})
    assert train_here(again, 1) == 0
    (fetched,) = events_of(again, "checkpoint_fetched")
    assert fetched["step"] == events_of(again, "train_started")[0]["resumed_from_step"] == 16
    assert _losses(again, 1, events_of) == {step: losses[step] for step in range(17, 25)}
    assert _steps(again)[-1] == 24


def test_a_checkpoint_that_is_damaged_in_the_run_directory_is_fetched(
    uploading: RunPaths, train_here: TrainHere, events_of: EventsOf
) -> None:
    assert train_here(uploading, 1) == 0
    for step in checkpoint_steps(uploading):
        (uploading.checkpoint(step) / "state.json").write_text("{}")
    assert train_here(uploading, 2) == 0
    assert events_of(uploading, "train_started", 2)[0]["resumed_from_step"] == 24
    assert events_of(uploading, "checkpoint_fetched", 2)[0]["step"] == 24


def test_a_damaged_copy_is_not_used_and_the_one_before_it_is(
    uploading: RunPaths, train_here: TrainHere, events_of: EventsOf
) -> None:
    assert train_here(uploading, 1) == 0
    shard = next(_folder(uploading, 24).glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert _steps(uploading)[-2:] == [16, 24]
    shutil.rmtree(uploading.checkpoints)
    assert train_here(uploading, 2) == 0
    (alarm,) = _alarms(uploading, events_of, 2)
    assert f"{shard.name}: checksum differs" in alarm
    assert events_of(uploading, "train_started", 2)[0]["resumed_from_step"] == 16
    assert not list(uploading.checkpoints.glob(".tmp*"))


def test_nothing_is_lost_silently_if_the_copies_are_damaged_too(uploading: RunPaths, train_here: TrainHere) -> None:
    assert train_here(uploading, 1) == 0
    for copy in _copies(uploading):
        (_folder(uploading, copy.step) / "state.json").unlink()
    shutil.rmtree(uploading.checkpoints)
    with pytest.raises(CheckpointError, match="the run does not start over by itself"):
        train_here(uploading, 2)


def test_an_outage_is_one_alarm_and_the_copy_is_made_when_it_is_over(
    uploading: RunPaths, train_here: TrainHere, events_of: EventsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    _broken(monkeypatch, lambda number: number < 20)
    assert train_here(uploading, 1) == 0
    (alarm,) = _alarms(uploading, events_of)
    assert alarm.endswith("ConnectionError: the storage is away")
    assert _steps(uploading)[-1] == 24
    assert len(_losses(uploading, 1, events_of)) == 24


def test_a_storage_that_hangs_holds_up_no_step_and_no_save(
    uploading: RunPaths, train_here: TrainHere, events_of: EventsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, finish, answers = Objects.put, remote.Uploader.finish, threading.Event()

    def hanging(self: Objects, source: Path, path: str, *more: Any) -> None:
        assert answers.wait(WAIT_S)
        put(self, source, path, *more)

    def after_training(self: remote.Uploader, is_asked_to_stop: Callable[[], bool]) -> None:
        assert [event["step"] for event in events_of(uploading, "checkpoint_verified")] == [8, 16, 24]
        answers.set()
        finish(self, is_asked_to_stop)

    monkeypatch.setattr(Objects, "put", hanging)
    monkeypatch.setattr(remote.Uploader, "finish", after_training)
    assert train_here(uploading, 1) == 0
    assert _steps(uploading) == [8, 24]


def test_a_run_ends_without_a_storage_that_stays_away_and_the_next_attempt_copies(
    uploading: RunPaths, train_here: TrainHere, events_of: EventsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as away:
        away.setattr(remote, "_PATIENCE_S", 0.5)
        _broken(away, lambda number: True)
        assert train_here(uploading, 1) == 0
    assert _steps(uploading) == []
    assert "the run ends without its last copy, because nothing was copied" in _alarms(uploading, events_of)[-1]
    assert events_of(uploading, "train_stopped")[0]["reason"] == "finished"
    assert train_here(uploading, 2) == 0
    assert _steps(uploading) == [24]


def test_whether_there_is_a_copy_must_be_known_only_without_a_checkpoint_here(
    uploading: RunPaths, train_here: TrainHere, events_of: EventsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(self: Objects) -> list[str]:
        raise ConnectionError("the storage is away")

    assert train_here(uploading, 1) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Objects, "folders", away)
        assert train_here(uploading, 2) == 0
        assert "can't be read (ConnectionError: the storage is away)" in _alarms(uploading, events_of, 2)[0]
        shutil.rmtree(uploading.checkpoints)
        with pytest.raises(StorageError, match="whether it has a checkpoint to continue from is not known"):
            train_here(uploading, 3)
    assert train_here(uploading, 4) == 0


def test_a_start_does_not_hang_on_a_storage_that_does_not_answer(
    uploading: RunPaths, train_here: TrainHere, events_of: EventsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train_here(uploading, 1) == 0
    answers = threading.Event()
    monkeypatch.setattr(remote, "_LIST_S", 0.05)
    monkeypatch.setattr(Objects, "folders", lambda self: [answers.wait(WAIT_S)] * 0)
    monkeypatch.setattr(remote.Uploader, "finish", lambda *_: None)
    assert train_here(uploading, 2) == 0
    assert "can't be read (TimeoutError: no answer within 0.05 s)" in _alarms(uploading, events_of, 2)[0]
    answers.set()


def test_copies_after_a_walk_back_stop_counting(
    uploading: RunPaths, train_here: TrainHere, events_of: EventsOf
) -> None:
    assert train_here(uploading, 1) == 0
    shutil.rmtree(uploading.checkpoint(8), ignore_errors=True)
    before = {copy.step: copy for copy in _copies(uploading)}
    walked_back = ["--run-dir", os.fspath(uploading.root), "--attempt", "2", "--max-checkpoint-step", "8"]
    assert main(walked_back) == 0
    assert events_of(uploading, "train_started", 2)[0]["resumed_from_step"] == 8
    assert events_of(uploading, "checkpoint_fetched", 2)[0]["step"] == 8
    assert set(before) == {8, 16, 24}
    assert 24 in {event["step"] for event in events_of(uploading, "checkpoint_uploaded", 2)}


def test_the_newest_copies_and_the_lasting_ones_stay(tmp_path: Path, make_run: MakeRun, train_here: TrainHere) -> None:
    tokens_per_step = 4 * 32
    run = make_run(
        tmp_path / "run",
        checkpoint={
            "remote_url": f"file://{tmp_path}/bucket",
            "remote_keep": 1,
            "mode": "sync",
            "keep_every_tokens": 8 * tokens_per_step,
            "every_steps": 4,
            "keep": 6,
        },
    )
    assert train_here(run, 1) == 0
    left_over = tmp_path / "bucket" / "run" / f"step-00000003-{'0' * 12}"
    left_over.mkdir()
    (left_over / "state.json").touch()
    layout.delete(layout.remote_folder(f"file://{tmp_path}/bucket", "run"), _copies(run)[0])
    assert train_here(run, 2) == 0
    assert _steps(run) == [8, 16, 24]
    assert not left_over.exists()


def test_a_copy_of_another_run_with_the_same_id_is_not_used(
    uploading: RunPaths, train_here: TrainHere, events_of: EventsOf
) -> None:
    assert train_here(uploading, 1) == 0
    folder = _folder(uploading, 24)
    folder.rename(folder.with_name(f"step-00000032-{'f' * 12}"))
    assert train_here(uploading, 2) == 0
    assert not events_of(uploading, "checkpoint_fetched", 2)


@pytest.mark.parametrize("path", ["../outside", "/outside", "a/../../outside", ""])
def test_a_manifest_that_names_files_outside_is_refused(path: str) -> None:
    assert not remote._is_inside(path)
    assert remote._is_inside("shard-00001.safetensors")


def test_ranks_share_the_files_without_overlap_by_size() -> None:
    files: list[dict[str, Any]] = [{"path": f"f{number}", "bytes": number % 7} for number in range(50)]
    shares = [remote.share(files, rank, 8) for rank in range(8)]
    assert sorted(entry["path"] for share in shares for entry in share) == sorted(entry["path"] for entry in files)
    sums = [sum(entry["bytes"] for entry in share) for share in shares]
    assert max(sums) - min(sums) <= 6


class _TwoRanks:
    """Two ranks of one process: what uploading uses of a backend."""

    world_size = 2

    def __init__(self, rank: int, values: dict[int, Any], barrier: threading.Barrier) -> None:
        self.rank, self._values, self._barrier = rank, values, barrier

    def gather_beside(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        gathered = [self._values[0], self._values[1]]
        self._barrier.wait()
        return gathered


class _Notes:
    def __init__(self) -> None:
        self.notes: list[tuple[str, dict[str, Any]]] = []

    def note(self, kind: str, *, durable: bool = False, **fields: Any) -> None:
        self.notes.append((kind, fields))


@pytest.fixture
def two_ranks(tmp_path: Path, make_run: MakeRun) -> Iterator[tuple[RunPaths, list[remote.Uploader], _Notes]]:
    """A run with checkpoints of 4 and 8, each of 6 files, and the uploaders of its ranks."""
    run = make_run(tmp_path / "run", checkpoint={"remote_url": f"file://{tmp_path}/bucket"})
    for step in (4, 8):
        run.checkpoint(step).mkdir(parents=True)
        for number in range(6):
            (run.checkpoint(step) / f"shard-{number}").write_bytes(bytes([step]) * (number + 1))
        write_manifest(run.checkpoint(step), step=step, tokens=step, world={"world_size": 2})
    values, barrier, notes = dict[int, Any](), threading.Barrier(2), _Notes()
    ranks = [
        remote.Uploader(load(run.config), run, cast(Backend, _TwoRanks(rank, values, barrier)), cast(Any, notes))
        for rank in range(2)
    ]
    yield run, ranks, notes
    for each in ranks:
        each.close()


def _offer(ranks: list[remote.Uploader], steps: list[int]) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda each: each.offer(steps), ranks))


def test_the_manifest_comes_after_the_files_of_every_rank(
    two_ranks: tuple[RunPaths, list[remote.Uploader], _Notes], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ranks, notes = two_ranks
    put, by, open_now = Objects.put, dict[str, str](), threading.Event()

    def recorded(self: Objects, source: Path, path: str, *more: Any) -> None:
        if path.endswith("shard-4"):  # rank 1's first
            assert open_now.wait(WAIT_S)
        put(self, source, path, *more)
        by[path.rpartition("/")[2]] = str(threading.get_ident())

    monkeypatch.setattr(Objects, "put", recorded)
    _offer(ranks, [4])
    wait_for(lambda: {"shard-5", "shard-3", "shard-1"} <= set(by))
    assert MANIFEST not in by
    assert _steps(run) == []
    open_now.set()
    wait_for(lambda: _steps(run) == [4])
    assert by["shard-5"] == by["shard-3"] == by["shard-1"] == by[MANIFEST]
    assert by["shard-4"] == by["shard-2"] == by["shard-0"] != by[MANIFEST]
    wait_for(lambda: [kind for kind, _ in notes.notes] == ["checkpoint_uploaded"])


def test_a_failure_of_another_rank_is_an_alarm_and_the_begun_copy_is_finished_first(
    two_ranks: tuple[RunPaths, list[remote.Uploader], _Notes], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ranks, notes = two_ranks
    put, away = Objects.put, threading.Event()
    failed = threading.Event()

    def failing(self: Objects, source: Path, path: str, *more: Any) -> None:
        if path.endswith("shard-4") and not away.is_set():
            failed.set()
            raise ConnectionError("no route")
        put(self, source, path, *more)

    monkeypatch.setattr(Objects, "put", failing)
    _offer(ranks, [4])
    assert failed.wait(WAIT_S)
    wait_for(lambda: ranks[1]._failure)
    _offer(ranks, [8])
    kind, fields = notes.notes[0]
    assert kind == "alarm"
    assert "rank 1: step 4: ConnectionError: no route" in fields["message"]
    away.set()
    wait_for(lambda: _steps(run) == [4, 8])
    wait_for(lambda: len(notes.notes) == 3)
    assert [fields["step"] for kind, fields in notes.notes if kind == "checkpoint_uploaded"] == [4, 8]


def test_a_checkpoint_that_is_deleted_before_it_is_copied_is_an_alarm_and_blocks_nothing(
    two_ranks: tuple[RunPaths, list[remote.Uploader], _Notes],
) -> None:
    run, ranks, notes = two_ranks
    shutil.rmtree(run.checkpoint(4))
    _offer(ranks, [4])
    wait_for(lambda: notes.notes)
    assert "the checkpoint of step 4 was deleted before it was copied" in notes.notes[0][1]["message"]
    _offer(ranks, [8])
    wait_for(lambda: _steps(run) == [8])


def test_the_end_of_a_run_does_not_wait_when_it_is_asked_to_stop(
    two_ranks: tuple[RunPaths, list[remote.Uploader], _Notes], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ranks, _ = two_ranks
    monkeypatch.setattr(Objects, "put", lambda *_: (_ for _ in ()).throw(ConnectionError()))
    monkeypatch.setattr(remote, "_PATIENCE_S", 1e9)
    _offer(ranks, [4])
    ranks[0].finish(lambda: True)
