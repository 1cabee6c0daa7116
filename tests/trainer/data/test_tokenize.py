"""Token ids of a text corpus: the files, what continues after a kill, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.errors import DataError, StorageError
from hlatctl.run.files import lock_folder
from trainer.data import tokenize, tokenize_part
from trainer.data.tokenize_part import Part, write_part

MakeConfig = Callable[..., Config]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts also of a tiny corpus."""
    monkeypatch.setattr(tokenize, "_LEAST_PART_BYTES", 8 << 10)
    monkeypatch.setattr(tokenize, "_PARTS", 5)


def run(dataset: Path, target: Path, *, processes: int = 1) -> dict[str, Any]:
    tokenize_part._prepared.cache_clear()
    return tokenize.tokenize(dataset, target, processes=processes, validation_fraction=0.02)


@pytest.fixture(scope="module")
def whole(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished folder."""
    target = tmp_path_factory.mktemp("whole") / "ids"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize, "_LEAST_PART_BYTES", 8 << 10)
        patch.setattr(tokenize, "_PARTS", 5)
        run(dataset, target)
    return target


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_folder_describes_itself_and_appears_whole(whole: Path, dataset: Path) -> None:
    text = json.loads(dataset.read_text())
    manifest = files.read_sealed_json(whole / "token_ids.json")
    shards = manifest["shards"]
    assert len(shards) == 5
    assert manifest["documents"] == sum(shard["documents"] for shard in shards) == text["documents"]
    assert manifest["text_bytes"] == text["text_bytes"]
    names = {f"{shard['name']}.{end}" for shard in shards for end in ("bin", "idx")}
    sums = dict(line.split("  ")[::-1] for line in (whole / "SHA256SUMS").read_text().splitlines())
    assert {name: hashlib.sha256((whole / name).read_bytes()).hexdigest() for name in names} == sums
    assert {p.name for p in whole.iterdir()} == {
        *names,
        "token_ids.json",
        "SHA256SUMS",
        "validation.jsonl",
        "tokenizer",
    }
    assert [p.name for p in whole.parent.iterdir()] == ["ids"], "no temporary folder is left"


def test_complete_parts_are_kept_after_a_kill_and_torn_ones_written_again(
    whole: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed_at_the_fourth(part: Part) -> dict[str, Any]:
        if part.number == 3:
            Path(f"{part.prefix}.bin").write_bytes(b"torn")
            raise KeyboardInterrupt
        return write_part(part)

    monkeypatch.setattr(tokenize, "write_part", killed_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        run(dataset, tmp_path / "ids")
    assert not (tmp_path / "ids").exists()
    work = tmp_path / ".ids.tokenizing"
    kept = [(work / f"part-00000{i}.bin").stat().st_ino for i in (0, 1)]
    (work / "part-000002.bin").write_bytes(b"shorter than its record says")
    written: list[int] = []

    def noted(part: Part) -> dict[str, Any]:
        written.append(part.number)
        return write_part(part)

    monkeypatch.setattr(tokenize, "write_part", noted)
    run(dataset, tmp_path / "ids")
    assert written == [2, 3, 4]
    assert [(tmp_path / "ids" / f"part-00000{i}.bin").stat().st_ino for i in (0, 1)] == kept
    assert content(tmp_path / "ids") == content(whole)


@pytest.mark.processes
def test_several_processes_write_the_same_files(whole: Path, dataset: Path, tmp_path: Path) -> None:
    run(dataset, tmp_path / "ids", processes=2)
    assert content(tmp_path / "ids") == content(whole)


def test_a_finished_folder_is_left_as_it_is(
    whole: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "write_part", None)
    assert run(dataset, whole)["documents"] > 0
    other = {**json.loads(dataset.read_text()), "fingerprint": "another"}
    other.pop("sha256")
    files.write_sealed_json(tmp_path / "other.json", other)
    with pytest.raises(StorageError, match="contains ids of another corpus or tokenizer"):
        run(tmp_path / "other.json", whole)
    with pytest.raises(StorageError, match="exists, and is not a corpus of token ids"):
        run(dataset, tmp_path)


def test_parts_of_another_corpus_are_not_continued(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / ".ids.tokenizing").mkdir()
    plan = {"dataset": "d.json", "fingerprint": "another", "documents": 1, "part_documents": 1, "dtype": "uint16"}
    files.write_sealed_json(tmp_path / ".ids.tokenizing" / "plan.json", plan)
    with pytest.raises(StorageError, match="parts of another corpus") as caught:
        run(dataset, tmp_path / "ids")
    shutil.rmtree(caught.value.hint.removeprefix("rm -r "))
    assert run(dataset, tmp_path / "ids")["tokens"] > 0


def test_only_one_process_writes_a_folder(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / ".ids.tokenizing").mkdir()
    lock = lock_folder(tmp_path / ".ids.tokenizing")
    assert lock is not None
    with pytest.raises(StorageError, match="is locked"):
        run(dataset, tmp_path / "ids")


def test_a_disk_that_is_too_small_is_refused_first(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    with pytest.raises(StorageError, match=r"about 0\.[1-9] MiB are needed, 0\.0 MiB are free") as caught:
        run(dataset, tmp_path / "ids")
    assert caught.value.code == "disk_full"


def test_a_mixture_is_refused(mixed: dict[str, Any], tmp_path: Path) -> None:
    files.write_json(tmp_path / "dataset.json", mixed)
    with pytest.raises(DataError, match="2 sources; one corpus is tokenized at a time"):
        run(tmp_path / "dataset.json", tmp_path / "ids")
