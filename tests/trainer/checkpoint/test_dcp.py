"""Checkpoints in DCP's format: damage and malicious pickles are refused, and no code of theirs runs."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hlatctl.run.checkpoint import MANIFEST, read_manifest
from hlatctl.run.errors import CheckpointError, StorageError
from tests.dcp_checkpoint import renew_manifest, rewrite_metadata, write_dcp
from tests.trainer.rank_threads import on_ranks
from trainer.checkpoint.dcp import METADATA, _Inert, attributes, load, read_metadata, read_objects, save
from trainer.checkpoint.together import Together
from trainer.checkpoint.trust import Verifier, share

_RANKS = 3
_STATE: dict[str, Any] = {
    "weight": torch.arange(21.0).view(7, 3),
    "half": torch.arange(8.0).view(2, 4).bfloat16(),  # the last rank has no rows
    "bias": torch.arange(5.0),
    "optimizer": {"state": {"weight": {"step": torch.tensor(3.0)}}},
    "lr_scheduler": {"last_epoch": 3, "_last_lr": [0.1], "lr_lambdas": [None]},
    "dataloader": {"dp_rank_0": b"\x01", "readers": [{"row": 1}, {"row": torch.ones(2)}]},
    "train_state": {"step": 3},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of step 7 by three ranks."""
    folder = tmp_path / "step-00000007"
    write_dcp(folder, _STATE, ranks=_RANKS, step=7, others={"state.json": {}})
    return folder


def _why_invalid(folder: Path) -> str | None:
    def work(backend: Any) -> str | None:
        return Verifier(backend, Together(backend, folder, lambda: 600.0)).why_invalid(folder)

    (reason,) = set(on_ranks(_RANKS, work))
    assert reason is None or isinstance(reason, str)
    return reason


def _load(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = {
        "weight": torch.zeros(7, 3),
        "half": torch.zeros(2, 4, dtype=torch.bfloat16),
        "lr_scheduler": {"last_epoch": 0, "_last_lr": [0.0], "lr_lambdas": [None]},
        "train_state": {"step": 0},
    }
    load(state, folder)
    return state


def test_metadata_equals_what_torch_reads(folder: Path) -> None:
    ours, theirs = read_metadata(folder), pickle.loads((folder / METADATA).read_bytes())
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert (ours.planner_data, ours.storage_data) == (theirs.planner_data, theirs.storage_data)


def test_torch_loads_a_valid_checkpoint_through_the_safe_reader(folder: Path) -> None:
    assert _why_invalid(folder) is None
    state = _load(folder)
    assert torch.equal(state["weight"], _STATE["weight"])
    assert torch.equal(state["half"], _STATE["half"])
    assert (state["lr_scheduler"], state["train_state"]) == (_STATE["lr_scheduler"], _STATE["train_state"])


def test_a_name_that_the_checkpoint_lacks_is_an_error_unless_it_is_optional(folder: Path) -> None:
    state: dict[str, Any] = {"bias": torch.zeros(5), "optimizer": {"param_groups.weight.lr": 0.5}}
    with pytest.raises(CheckpointError, match=r"optimizer\.param_groups\.weight\.lr is not in the checkpoint"):
        load(state, folder, optional=())
    load(state, folder)  # as a converted checkpoint
    assert torch.equal(state["bias"], _STATE["bias"])
    assert state["optimizer"] == {"param_groups.weight.lr": 0.5}


def test_a_tensor_of_another_shape_is_an_error(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="bias"):
        load({"bias": torch.zeros(6)}, folder)


def test_a_saved_state_is_loaded_again_and_never_overwritten(tmp_path: Path) -> None:
    save(_STATE, tmp_path / "saved")
    assert torch.equal(_load(tmp_path / "saved")["weight"], _STATE["weight"])
    with pytest.raises(StorageError, match=r"saved: RuntimeError: Checkpoint already exists"):
        save(_STATE, tmp_path / "saved")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        save(_STATE, tmp_path / "file")


def test_a_rank_verifies_the_file_that_it_wrote(folder: Path) -> None:
    entries = read_manifest(folder).files
    shares = [[entry["path"] for entry in share(entries, rank, _RANKS)] for rank in range(_RANKS)]
    assert shares[1:] == [["__1_0.distcp"], ["__2_0.distcp"]]
    assert sorted(shares[0]) == [METADATA, "__0_0.distcp", "state.json"]


class _Attack:
    """Its pickle creates a file when it is loaded with a full unpickler."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (os.fspath(self._mark),)


def _shard(folder: Path, rank: int = 1) -> Path:
    return folder / f"__{rank}_0.distcp"


def _tensor(metadata: Metadata, name: str = "weight") -> TensorStorageMetadata:
    stored = metadata.state_dict_metadata[name]
    assert isinstance(stored, TensorStorageMetadata)
    return stored


def _entry(metadata: Metadata, **fields: Any) -> None:
    index = MetadataIndex("weight", torch.Size([3, 0]))
    metadata.storage_data[index] = replace(metadata.storage_data[index], **fields)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def _replace(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


def _chunks(folder: Path, *rows: tuple[int, int]) -> None:
    """Give the tensor other chunks, as first row and number of rows."""

    def change(metadata: Metadata) -> None:
        stored = _tensor(metadata)
        places = [(torch.Size([first, 0]), torch.Size([number, 3])) for first, number in rows]
        stored.chunks[:] = [ChunkStorageMetadata(offsets=at, sizes=sizes) for at, sizes in places]
        info = metadata.storage_data[MetadataIndex("weight", torch.Size([0, 0]))]
        for at, _ in places:
            metadata.storage_data.setdefault(MetadataIndex("weight", at), info)

    rewrite_metadata(folder, change)


def _put(folder: Path, **fields: Any) -> None:
    rewrite_metadata(folder, lambda metadata: pickle.dumps(replace(metadata, **fields)))


def _lose(folder: Path) -> None:
    _shard(folder).unlink()
    renew_manifest(folder)


def _truncate(folder: Path) -> None:
    os.truncate(_shard(folder), 100)
    renew_manifest(folder)


def _repeat(metadata: Metadata) -> None:
    stored = TensorStorageMetadata(TensorProperties(), torch.Size([1]), [_tensor(metadata, "bias").chunks[0]] * 5000)
    metadata.state_dict_metadata = {f"a{number}": stored for number in range(5000)}


#: Files that differ from the manifest's sizes and hashes.
_CHANGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated shard": (lambda f: os.truncate(_shard(f), 100), "__1_0.distcp: 100 bytes, expected"),
    "extended shard": (lambda f: os.truncate(_shard(f), 10**6), "__1_0.distcp: 1000000 bytes, expected"),
    "flipped bit in a shard": (lambda f: _flip(_shard(f)), "__1_0.distcp: checksum differs"),
    "missing shard": (lambda f: _shard(f).unlink(), "__1_0.distcp: missing"),
    "shards exchanged": (lambda f: _shard(f, 1).replace(_shard(f, 2)), "__1_0.distcp: missing"),
    "flipped bit in the metadata": (lambda f: _flip(f / METADATA), ".metadata: checksum differs"),
    "empty metadata": (lambda f: os.truncate(f / METADATA, 0), ".metadata: 0 bytes, expected"),
    "missing metadata": (lambda f: (f / METADATA).unlink(), ".metadata: missing"),
    "missing manifest": (lambda f: (f / MANIFEST).unlink(), "no manifest.json, so the checkpoint was never completed"),
    "flipped bit in the manifest": (lambda f: _flip(f / MANIFEST), "unreadable manifest"),
    "manifest of another step": (lambda f: renew_manifest(f, step=8), "step 8 in a folder named step-00000007"),
    "truncated JSON": (lambda f: os.truncate(f / "state.json", 1), "state.json: 1 bytes, expected"),
    "link to another file": (
        lambda f: _replace(_shard(f), lambda path: path.symlink_to(_shard(f, 2))),
        "__1_0.distcp: ",
    ),
    "link to nothing": (lambda f: _replace(_shard(f), lambda path: path.symlink_to("gone")), "__1_0.distcp: missing"),
    "folder in the place of a shard": (lambda f: _replace(_shard(f), Path.mkdir), "__1_0.distcp: missing"),
    "pipe in the place of the metadata": (lambda f: _replace(f / METADATA, os.mkfifo), ".metadata: missing"),
}
#: Contents that are useless although the manifest has their hashes.
_USELESS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "shard that is not in the manifest": (
        lambda f: shutil.copy(_shard(f), _shard(f, 9)),
        "__9_0.distcp: not in the manifest",
    ),
    "missing shard": (_lose, "weight: ends at byte"),
    "truncated shard": (_truncate, "of __1_0.distcp, which is shorter"),
    "gap": (lambda f: _chunks(f, (0, 3), (4, 3)), "weight: 3 elements are in no chunk"),
    "overlap": (lambda f: _chunks(f, (0, 3), (2, 4)), "weight: elements are in two chunks"),
    "chunk twice": (lambda f: _chunks(f, (0, 3), (3, 3), (3, 3)), "weight: elements are in two chunks"),
    "chunk outside": (lambda f: _chunks(f, (0, 3), (4, 4)), "weight: a chunk lies outside of the tensor"),
    "chunk in no file": (
        lambda f: rewrite_metadata(
            f, lambda m: m.storage_data.pop(MetadataIndex("weight", torch.Size([3, 0]))) and None
        ),
        "weight: a chunk is in no file",
    ),
    "entry without a chunk": (
        lambda f: rewrite_metadata(f, lambda m: m.state_dict_metadata.pop("bias") and None),
        "expected",
    ),
    "entry within another": (lambda f: rewrite_metadata(f, lambda m: _entry(m, offset=1)), "within another entry"),
    "short entry": (lambda f: rewrite_metadata(f, lambda m: _entry(m, length=9)), "9 bytes in __1_0.distcp, expected"),
    "negative offset": (lambda f: rewrite_metadata(f, lambda m: _entry(m, offset=-1)), "at byte -1 of __1_0.distcp"),
    "entry outside": (lambda f: rewrite_metadata(f, lambda m: _entry(m, relative_path="../a")), "a file outside of"),
    "compressed entry": (
        lambda f: rewrite_metadata(f, lambda m: _entry(m, transform_descriptors=["zstd"])),
        "compressed",
    ),
    "chunks repeated endlessly": (lambda f: rewrite_metadata(f, _repeat), "repeats its lists of chunks"),
    "no storage": (lambda f: _put(f, storage_data=None), "has NoneType in the place of dict"),
    "list in the place of the metadata": (
        lambda f: rewrite_metadata(f, lambda _: pickle.dumps([1])),
        "has list in the place of Metadata",
    ),
    "no pickle": (lambda f: rewrite_metadata(f, lambda _: b"hello"), ".metadata: can't be read"),
    "position of an element": (lambda f: _put(f, planner_data={"weight": ("a", 10**9)}), "position is 1000000000"),
}


@pytest.mark.parametrize(("damage", "reason"), [*_CHANGED.values(), *_USELESS.values()], ids=[*_CHANGED, *_USELESS])
def test_a_damaged_checkpoint_is_refused_on_all_ranks(folder: Path, damage: Callable[[Path], Any], reason: str) -> None:
    damage(folder)
    found = _why_invalid(folder)
    assert found is not None
    assert reason in found


def _calls(mark: Path) -> bytes:
    return pickle.dumps(_Attack(mark))


def _calls_within(mark: Path) -> bytes:
    return pickle.dumps(Metadata({}, planner_data={"a": (_Attack(mark),)}, storage_data={}))


def _calls_by_a_name_with_dots(mark: Path) -> bytes:
    text = os.fspath(mark).encode()
    return b"\x80\x04\x8c\x05torch\x8c\x08os.mkdir\x93\x8c" + bytes([len(text)]) + text + b"\x85R."


@pytest.mark.parametrize("attack", [_calls, _calls_within, _calls_by_a_name_with_dots])
def test_a_pickle_that_runs_code_is_refused_although_the_manifest_has_its_hash(
    folder: Path, tmp_path: Path, attack: Callable[[Path], bytes]
) -> None:
    mark = tmp_path / "attacked"
    content = attack(mark)
    pickle.loads(content)
    mark.rmdir()  # it does run code
    rewrite_metadata(folder, lambda _: content)
    found = _why_invalid(folder)
    assert found is not None
    assert "mkdir, which DCP's metadata never contains" in found
    with pytest.raises(CheckpointError, match="never contains"):
        _load(folder)
    assert not mark.exists()


def test_a_pickle_can_not_change_torch_s_classes(folder: Path) -> None:
    names = b"\x80\x04\x8c\x28torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93"
    names = names.replace(b"\x28", bytes([len("torch.distributed.checkpoint.metadata")]))
    change = names + b"N}\x8c\x07versionK\x05s\x86b."  # the class's state: (None, {"version": 5})
    pickle.loads(change)
    assert Metadata.version == 5  # type: ignore[comparison-overlap]
    Metadata.version = None
    rewrite_metadata(folder, lambda _: change)
    found = _why_invalid(folder)
    assert found is not None
    assert "can't be read" in found
    assert Metadata.version is None


def test_a_state_that_runs_code_is_never_loaded(folder: Path, tmp_path: Path) -> None:
    mark, content = tmp_path / "attacked", io.BytesIO()
    torch.save(_Attack(mark), content)
    path = _shard(folder, 0)

    def change(metadata: Metadata) -> None:
        info = _StorageInfo(path.name, path.stat().st_size, len(content.getvalue()))
        metadata.storage_data[MetadataIndex("train_state.step")] = info

    rewrite_metadata(folder, change)
    path.write_bytes(path.read_bytes() + content.getvalue())
    renew_manifest(folder)
    assert _why_invalid(folder) is None  # the hashes fit, and all is there
    with pytest.raises(CheckpointError, match=r"train_state\.step: is neither tensors nor plain values"):
        _load(folder)
    assert not mark.exists()


def test_a_tensor_that_runs_code_is_never_loaded(folder: Path, tmp_path: Path) -> None:
    mark, content = tmp_path / "attacked", io.BytesIO()
    torch.save(_Attack(mark), content)
    path = _shard(folder, 0)
    rewrite_metadata(folder, lambda m: _moved(m, path, len(content.getvalue())))
    path.write_bytes(path.read_bytes() + content.getvalue())
    with pytest.raises(CheckpointError, match=r"weights_only|Weights only"):
        _load(folder)
    assert not mark.exists()


def _moved(metadata: Metadata, path: Path, length: int) -> None:
    _entry(metadata, relative_path=path.name, offset=path.stat().st_size, length=length)


@pytest.mark.parametrize("code", [b"cposix\nsystem\n(S'touch %s'\ntR.", b"cposix\nsystem\n}S'%s'\nI1\nsb."])
def test_objects_of_any_class_are_read_without_its_code(tmp_path: Path, code: bytes) -> None:
    """The second pickle would set an attribute of the class itself."""
    before = dict(vars(_Inert))
    with zipfile.ZipFile(tmp_path / "common.pt", "w") as archive:
        archive.writestr("common/data.pkl", code % os.fsencode(tmp_path / "proof"))
    with suppress(CheckpointError):
        assert attributes(read_objects(tmp_path, "common.pt")) == {}
    assert (dict(vars(_Inert)), (tmp_path / "proof").exists()) == (before, False)


def test_a_compressed_pickle_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "common.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("common/data.pkl", pickle.dumps({"a": "b" * 1000}))
    with pytest.raises(CheckpointError, match=r"common\.pt: can't be read \(its pickle is compressed"):
        read_objects(tmp_path, "common.pt")
