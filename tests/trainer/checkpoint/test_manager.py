"""Checkpoints: which one is restored, which are kept, and that nothing in them is ever executed."""

from __future__ import annotations

import pickle
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conf.load import load
from conf.sizes import CHECKPOINT_BYTES_PER_PROCESS, checkpoint_bytes
from hlatctl.run.checkpoint import checkpoint_steps, read_manifest, steps_in, why_invalid
from hlatctl.run.errors import DISK_FULL, CheckpointError, StorageError
from hlatctl.run.fold import fold
from hlatctl.run.journal import JournalWriter, eval_writer, read_events, train_writer
from hlatctl.run.paths import RunPaths, step_name
from tests.trainer.conftest import EventsOf, MakeRun, TrainHere, TrainRun
from tests.trainer.damage import WAYS, damage
from tests.waiting import WAIT_S
from trainer.backends.torch_native import TorchNative
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.shards import ShardFile, describe_tensors, read_tensors
from trainer.checkpoint.trust import CheckpointRecords, ReadBack, Tiers, why_incomplete


@pytest.fixture(scope="module")
def once_trained(tmp_path_factory: pytest.TempPathFactory, make_run: MakeRun, train_here: TrainHere) -> RunPaths:
    run = make_run(tmp_path_factory.mktemp("once") / "trained")
    assert train_here(run, 1) == 0
    return run


@pytest.fixture
def trained(tmp_path: Path, once_trained: RunPaths) -> RunPaths:
    """24 steps, checkpoints of 8, 16 and 24."""
    return RunPaths(Path(shutil.copytree(once_trained.root, tmp_path / "trained")))


@pytest.mark.parametrize("precision", ["fp32", "mixed", "bf16_sr"])
def test_a_checkpoint_has_the_size_that_plan_and_preflight_compute(train_run: TrainRun, precision: str) -> None:
    """The tensors to the byte; the other files are estimated, so their 64 KiB may be more than they take."""
    run = train_run(precision={"name": precision}, train={"max_steps": 1})
    config, folder = load(run.config), run.checkpoint(1)
    tensors = describe_tensors(folder).values()
    written = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert written == checkpoint_bytes(config) - CHECKPOINT_BYTES_PER_PROCESS
    assert written < read_manifest(folder).size_bytes <= checkpoint_bytes(config)


def test_ranks_describe_their_shards_only_at_the_first_save(
    train_run: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    gather = TorchNative.to_rank0_beside

    def noted(backend: TorchNative, value: Any) -> list[Any]:
        sent.append(value)
        return gather(backend, value)

    monkeypatch.setattr(TorchNative, "to_rank0_beside", noted)
    run = train_run()
    assert checkpoint_steps(run) == [8, 16, 24]
    assert ["loader" in value for value in sent] == [False, True, True, True], "the blocks, then only the ranks' states"
    first, last = ((run.checkpoint(step) / "tensors.jsonl").read_bytes() for step in (8, 24))
    assert first == last


def test_the_time_allowed_follows_the_newest_checkpoint_that_was_written(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path / "limit", model={"hidden_size": 4096, "num_layers": 32, "intermediate_size": 16384})
    config = load(run.config)
    size = checkpoint_bytes(config)

    def limit_s() -> float:
        records = CheckpointRecords(config, run, Tiers(config, run), None)
        records.start()
        return records.limit_s()

    assert limit_s() == pytest.approx(4 * size / 100e6), "nothing was measured yet"
    with JournalWriter(run, train_writer(0)) as journal:
        journal.append("checkpoint_written", step=1, tokens=1, bytes=size, wall_s=1000.0, stall_s=1.0, reason="final")
        assert limit_s() == pytest.approx(4000.0)
        journal.append("checkpoint_written", step=2, tokens=1, bytes=size, wall_s=10.0, stall_s=1.0, reason="final")
    assert limit_s() == 900.0


def _losses(run: RunPaths, attempt: int, events_of: EventsOf) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events_of(run, "step", attempt)}


def _damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _shard(run: RunPaths, step: int) -> Path:
    return next(run.checkpoint(step).glob("*.safetensors"))


def test_damaged_checkpoint_is_rejected_and_the_previous_one_is_used(
    trained: RunPaths, train_here: TrainHere, events_of: EventsOf
) -> None:
    _damage(_shard(trained, 24))
    assert train_here(trained, 2) == 0
    (rejected,) = events_of(trained, "checkpoint_rejected", 2)
    assert rejected["step"] == 24
    assert rejected["reason"] == f"{_shard(trained, 24).name}: checksum differs"
    assert events_of(trained, "train_started", 2)[0]["resumed_from_step"] == 16
    first, again = _losses(trained, 1, events_of), _losses(trained, 2, events_of)
    assert again == {step: first[step] for step in range(17, 25)}
    assert train_here(trained, 3) == 0
    assert not events_of(trained, "checkpoint_rejected", 3)


def test_max_checkpoint_step_ignores_newer_checkpoints(
    trained: RunPaths, train_here: TrainHere, events_of: EventsOf
) -> None:
    from trainer.__main__ import main

    assert main(["--run-dir", str(trained.root), "--attempt", "2", "--max-checkpoint-step", "16"]) == 0
    assert events_of(trained, "train_started", 2)[0]["resumed_from_step"] == 16
    assert not events_of(trained, "checkpoint_rejected", 2)
    first, again = _losses(trained, 1, events_of), _losses(trained, 2, events_of)
    assert again == {step: first[step] for step in range(17, 25)}


def test_checkpoints_without_manifest_and_temporary_folders_do_not_count(
    trained: RunPaths, train_here: TrainHere, events_of: EventsOf
) -> None:
    (trained.checkpoint(24) / "manifest.json").unlink()
    left_over = trained.checkpoints / ".tmp-step-00000032"
    left_over.mkdir()
    assert train_here(trained, 2) == 0
    (rejected,) = events_of(trained, "checkpoint_rejected", 2)
    assert rejected["reason"].endswith("no manifest.json, so the checkpoint was never completed")
    assert not left_over.exists()


def test_no_valid_checkpoint_is_an_error_and_not_a_new_start(
    trained: RunPaths, train_here: TrainHere, events_of: EventsOf
) -> None:
    for step in checkpoint_steps(trained):
        _damage(_shard(trained, step))
    with pytest.raises(CheckpointError, match=r"no valid checkpoint, although steps \[8, 16, 24\] were written"):
        train_here(trained, 2)
    shutil.rmtree(trained.checkpoints)
    with pytest.raises(CheckpointError, match="the run does not start over by itself"):
        train_here(trained, 3)
    assert not events_of(trained, "step", 2)


def test_attempt_before_any_checkpoint_starts_from_the_initial_model(
    tmp_path: Path, make_run: MakeRun, train_here: TrainHere, events_of: EventsOf
) -> None:
    run = make_run(tmp_path / "fresh")
    assert train_here(run, 2) == 0
    assert events_of(run, "train_started", 2)[0]["resumed_from_step"] == 0


def test_full_disk_stops_the_run_and_leaves_earlier_checkpoints_alone(
    trained: RunPaths, train_here: TrainHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    _damage(_shard(trained, 24))
    usage = shutil.disk_usage(trained.root)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageError, match=r"a checkpoint needs \d+ bytes, 1000 are free") as caught:
        train_here(trained, 2)
    assert caught.value.code == DISK_FULL
    needed = int(re.findall(r"needs (\d+)", caught.value.message)[0])
    assert needed > sum(path.stat().st_size for path in trained.checkpoint(16).glob("*.safetensors"))
    assert checkpoint_steps(trained) == [8, 16, 24]


def test_on_a_full_disk_the_last_checkpoint_takes_the_room_of_old_ones(
    train_run: TrainRun, events_of: EventsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.disk_usage

    def usage(path: Path) -> Any:
        """Return what is left of a disk with room for three and a half checkpoints, and the megabyte to spare."""
        sizes = [read_manifest(path / step_name(step)).size_bytes for step in steps_in(path)]
        return real(path)._replace(free=int(3.5 * sizes[0]) + (1 << 20) - sum(sizes) if sizes else 1 << 30)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    run = train_run(checkpoint={"every_steps": 6, "keep": 4})
    assert checkpoint_steps(run) == [12, 18, 24]
    assert [alarm["what"] for alarm in events_of(run, "alarm")] == ["disk_full"]
    assert events_of(run, "checkpoint_skipped") == []


def test_another_global_batch_size_can_not_resume(trained: RunPaths, make_run: MakeRun, train_here: TrainHere) -> None:
    make_run(trained.root, train={"global_batch_size": 8, "tokens": 24 * 8 * 32})
    with pytest.raises(CheckpointError, match=r"global batch has 4 sequences, train\.global_batch_size=8"):
        train_here(trained, 2)


class _Bomb(NamedTuple):
    target: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def test_planted_pickles_are_never_loaded(trained: RunPaths, train_here: TrainHere, tmp_path: Path) -> None:
    from hlatctl.run.checkpoint import read_manifest, write_manifest
    from trainer.convert.export import read_weights

    exploded = tmp_path / "exploded"
    folder, bomb = trained.checkpoint(24), pickle.dumps(_Bomb(exploded))
    for name in (".metadata", "__0_0.distcp", "state.pt", "optimizer.bin"):
        (folder / name).write_bytes(bomb)
    manifest = read_manifest(folder)
    (folder / "manifest.json").unlink()
    write_manifest(folder, step=24, tokens=manifest.tokens, world=manifest.world)
    assert train_here(trained, 2) == 0
    assert read_weights(trained, 24)
    assert not exploded.exists()
    pickle.loads(bomb)
    assert exploded.exists(), "the planted file works when it is loaded"


def test_every_degree_of_trust_is_journalled_in_its_order(train_run: TrainRun) -> None:
    run = train_run(checkpoint={"every_steps": 8, "survived_after_steps": 8})
    events = [e for e in read_events(run) if e["kind"].startswith("checkpoint_") and e["step"] == 8]
    degrees = [event["kind"].removeprefix("checkpoint_") for event in events]
    assert degrees[:3] == ["written", "committed", "verified"]
    assert degrees[3:] == ["survived"]
    written, committed, verified = events[:3]
    manifest = read_manifest(run.checkpoint(8))
    assert (written["bytes"], written["reason"]) == (manifest.size_bytes, "interval")
    assert 0 < written["stall_s"] <= written["wall_s"]
    assert committed["manifest_sha256"] == manifest.sha256
    assert verified["path"] == str(run.checkpoint(8))
    assert fold(read_events(run)).trust == {8: "survived", 16: "survived", 24: "verified"}


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_async_and_sync_checkpoints_have_the_same_bits(
    mode: str, trained: RunPaths, train_run: TrainRun, train_here: TrainHere, events_of: EventsOf
) -> None:
    run = train_run(checkpoint={"every_steps": 8, "mode": mode})
    for step in (8, 16, 24):
        ours, theirs = read_tensors(run.checkpoint(step), bool), read_tensors(trained.checkpoint(step), bool)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    shutil.rmtree(run.checkpoint(24))
    assert train_here(run, 2) == 0
    assert _losses(run, 2, events_of) == {s: v for s, v in _losses(trained, 1, events_of).items() if s > 16}


def test_save_during_another_is_skipped_with_when_busy_skip(
    train_run: TrainRun, events_of: EventsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def write_slowly(backend: TorchNative, tensors: dict[str, Any], folder: Path) -> ShardFile | None:
        assert released.wait(timeout=WAIT_S)
        return save(backend, tensors, folder)

    def note_and_release(records: CheckpointRecords, kind: str, **fields: Any) -> None:
        note(records, kind, **fields)
        if kind == "checkpoint_skipped" and fields["step"] == 20:
            released.set()

    save, note = TorchNative.save, CheckpointRecords.note
    monkeypatch.setattr(TorchNative, "save", write_slowly)
    monkeypatch.setattr(CheckpointRecords, "note", note_and_release)
    run = train_run(checkpoint={"every_steps": 10, "when_busy": "skip"})
    (skipped,) = events_of(run, "checkpoint_skipped")
    assert (skipped["step"], skipped["reason"]) == (20, "the previous checkpoint is still being written")
    assert checkpoint_steps(run) == [10, 24], "the final save waits"


def test_full_disk_skips_interval_saves_and_training_continues(
    train_run: TrainRun, events_of: EventsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    real = shutil.disk_usage

    def usage(path: Path) -> Any:
        asked.append(path)
        return real(path)._replace(free=1000) if len(asked) in (2, 3) else real(path)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    run = train_run(checkpoint={"every_steps": 6})
    assert [event["step"] for event in events_of(run, "checkpoint_skipped")] == [12, 18]
    (alarm,) = events_of(run, "alarm")
    assert (alarm["step"], alarm["what"]) == (12, "disk_full")
    assert "1000 are free; checkpoints are skipped until there is enough space" in alarm["message"]
    assert checkpoint_steps(run) == [6, 24]


@pytest.mark.processes
def test_disk_that_fills_during_a_write_loses_no_earlier_checkpoint(
    tmp_path: Path, make_run: MakeRun, train_here: TrainHere, events_of: EventsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "small")
    run.checkpoints.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", str(run.checkpoints)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        # Other processes fill the disk after the check for free space.
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(StorageError, match=r"step 24 can't be written .*No space left on device") as caught:
            train_here(run, 1)
        assert caught.value.code == DISK_FULL
        alarms = [(alarm["what"], alarm.get("code")) for alarm in events_of(run, "alarm")]
        assert alarms == [("disk_full", None), ("checkpoint_failed", DISK_FULL)]
        assert events_of(run, "checkpoint_skipped")[0]["step"] == 16
        assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000008"]
        assert why_invalid(run.checkpoint(8)) is None
    finally:
        subprocess.run(["umount", str(run.checkpoints)], check=True)


@pytest.mark.parametrize(
    ("text", "what"), [("No space left on device", "disk_full"), ("Input/output error", "checkpoint_failed")]
)
def test_write_error_is_an_alarm_and_stops_training_unless_the_disk_is_full(
    text: str,
    what: str,
    tmp_path: Path,
    make_run: MakeRun,
    train_here: TrainHere,
    events_of: EventsOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail_once(backend: TorchNative, tensors: dict[str, Any], folder: Path) -> ShardFile | None:
        if folder.name.startswith(".tmp-step-00000008"):
            (folder / "half.safetensors").write_bytes(b"x")
            raise OSError(text)
        return save(backend, tensors, folder)

    save = TorchNative.save
    monkeypatch.setattr(TorchNative, "save", fail_once)
    run = make_run(tmp_path / "fails")
    if what == "disk_full":
        assert train_here(run, 1) == 0
        assert checkpoint_steps(run) == [16, 24]
    else:
        with pytest.raises(
            StorageError, match=r"checkpoint of step 8 can't be written to .*Input/output error"
        ) as caught:
            train_here(run, 1)
        assert caught.value.hint == "repair the storage, then try again"
        assert max(event["step"] for event in events_of(run, "step")) == 16, "the next save raises it"
    assert [alarm["what"] for alarm in events_of(run, "alarm")] == [what]
    assert not list(run.checkpoints.glob(".tmp-*")), "incomplete checkpoints are deleted"


def test_permanent_checkpoints_and_unevaluated_milestones_stay(
    tmp_path: Path, make_run: MakeRun, train_here: TrainHere, events_of: EventsOf
) -> None:
    step_tokens = 4 * 32
    kept = {"every_steps": 4, "keep": 1, "keep_every_tokens": 7 * step_tokens}
    run = make_run(tmp_path / "kept", checkpoint=kept, eval={"enabled": True, "every_tokens": 6 * step_tokens})
    with JournalWriter(run, eval_writer(6 * step_tokens)) as journal:
        journal.append("eval_finished", milestone_tokens=6 * step_tokens, step=6, scores={}, skipped={}, wall_s=1.0)
        journal.append("eval_finished", milestone_tokens=12 * step_tokens, step=12, scores={}, chosen=True)
    assert train_here(run, 1) == 0
    # 7, 14 and 21 are permanent; the suite isn't evaluated at 12, 18 and 24; of the others the newest stays.
    assert checkpoint_steps(run) == [7, 12, 14, 18, 20, 21, 24]
    reasons = {event["step"]: event["reason"] for event in events_of(run, "checkpoint_written")}
    assert (reasons[6], reasons[7], reasons[8]) == ("milestone", "permanent", "interval")
    assert [event["step"] for event in events_of(run, "checkpoint_deleted")] == [4, 6, 8, 16]


def test_newest_verified_checkpoint_stays_when_newer_ones_are_rejected(
    train_run: TrainRun, events_of: EventsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = ReadBack.written

    def damaged(read_back: ReadBack) -> None:
        """Damage a shard after it was written and before it comes back."""
        if not read_back._path.parent.name.startswith(".tmp-step-00000004"):
            _damage(read_back._path)
        written(read_back)

    monkeypatch.setattr(ReadBack, "written", damaged)
    run = train_run(checkpoint={"every_steps": 4, "keep": 1})
    rejected = events_of(run, "checkpoint_rejected")
    assert [event["step"] for event in rejected] == [8, 12, 16, 20, 24]
    assert rejected[0]["reason"].endswith(".safetensors: checksum differs")
    assert checkpoint_steps(run) == [4]
    assert fold(read_events(run)).trust == {4: "survived"}


def test_fast_folder_is_read_first_and_then_the_run_directory(
    tmp_path: Path, train_run: TrainRun, train_here: TrainHere, events_of: EventsOf
) -> None:
    run = train_run(checkpoint={"every_steps": 8, "fast_dir": str(tmp_path / "nvme")})
    (near,) = (tmp_path / "nvme").iterdir()
    assert checkpoint_steps(run) == [8, 16, 24]
    assert [path.name for path in near.iterdir()] == ["step-00000024"], "the fast folder holds only the newest"
    assert why_invalid(run.checkpoint(24)) is None

    assert train_here(run, 2) == 0
    assert events_of(run, "checkpoint_verified", 2)[0]["path"] == str(near / "step-00000024")

    _damage(next((near / "step-00000024").glob("*.safetensors")))
    assert train_here(run, 3) == 0
    assert events_of(run, "checkpoint_rejected", 3)[0]["path"] == str(near / "step-00000024")
    assert events_of(run, "checkpoint_verified", 3)[0]["path"] == str(run.checkpoint(24))
    assert events_of(run, "train_started", 3)[0]["resumed_from_step"] == 24
    assert 24 in fold(read_events(run)).checkpoints

    shutil.rmtree(near)  # another node
    shutil.rmtree(run.checkpoint(24))
    assert train_here(run, 4) == 0
    assert events_of(run, "train_started", 4)[0]["resumed_from_step"] == 16


def test_copy_of_an_earlier_run_with_the_same_name_is_not_used(
    tmp_path: Path, train_run: TrainRun, events_of: EventsOf
) -> None:
    fast = {"every_steps": 8, "fast_dir": str(tmp_path / "nvme")}
    run = train_run(checkpoint=fast)
    shutil.rmtree(run.root)
    run = train_run(checkpoint=fast, seed=7)
    assert events_of(run, "train_started", 1)[0]["resumed_from_step"] == 0


def test_shard_missing_from_the_manifest_is_rejected(trained: RunPaths) -> None:
    assert why_incomplete(trained.checkpoint(24)) is None
    shutil.copy(_shard(trained, 16), trained.checkpoint(24) / "more.safetensors")
    assert why_incomplete(trained.checkpoint(24)) == "more.safetensors: not in the manifest"


def test_weights_that_a_checkpoint_replaces_are_not_drawn(
    trained: RunPaths, train_here: TrainHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That would take minutes of a large model's every attempt, and no checkpoint leaves one undefined."""
    whole = read_tensors(trained.checkpoint(24), bool)
    shutil.rmtree(trained.checkpoint(24))
    monkeypatch.delattr("trainer.model.initial.normal_block")
    assert train_here(trained, 2) == 0
    again = read_tensors(trained.checkpoint(24), bool)
    assert all(torch.equal(again[name], whole[name]) for name in whole)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(which=st.integers(0), where=st.integers(0), how=WAYS)
def test_damage_to_any_file_never_gives_other_numbers(trained: RunPaths, which: int, where: int, how: str) -> None:
    config = load(trained.config)
    backend = TorchNative(config)
    tensors = backend.optimizer(backend.build_model(document_end_id=None)).tensors()
    for step in (8, 16):
        shutil.rmtree(trained.checkpoint(step), ignore_errors=True)
    good = read_tensors(trained.checkpoint(24), bool)
    present = sorted(trained.checkpoint(24).iterdir())
    path = present[which % len(present)]
    content = path.read_bytes()
    try:
        damage(path, how, where)
        try:
            manager = CheckpointManager(config, trained, backend, None)
            restored = manager.restore(tensors, manager.choose())
        except CheckpointError:
            return
        # A flipped bit in the manifest's white space doesn't change its content.
        assert (path.name, how) == ("manifest.json", "flip")
        assert restored is not None
        assert restored.step == 24
        assert all(torch.equal(tensors[name], good[name]) for name in good)
    finally:
        path.write_bytes(content)
