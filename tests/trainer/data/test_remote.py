"""Corpora in object storage: the same batches as from a disk, little that is fetched, and failures that are named."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("fsspec", reason="no extra for object storage is installed")

import fsspec

from conf.fingerprint import data_fingerprint
from conf.listing import kept_at
from conf.schema import Config, SourceConfig
from hlatctl.run.errors import STORAGE_AWAY, DataError, DependencyError
from hlatctl.run.paths import cache_dir, partial_data
from tests.trainer.conftest import EventsOf, MakeRun, TrainHere
from tests.trainer.data.test_documents import write
from tests.trainer.s3_server import Server
from trainer.data import remote
from trainer.data.arrow_index import _block, fill_headers, index_file
from trainer.data.formats import fail
from trainer.data.loader import Loader
from trainer.data.prepare import check, prepare
from trainer.data.remote import RemoteObject, list_corpus, stand_ins
from trainer.data.tokenize import tokenize

MakeConfig = Callable[..., Config]
_URL = "memory://bucket/corpus"


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The in-memory storage is this process's; and pauses are short."""
    monkeypatch.setattr("trainer.data.workers.os.sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(remote, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(remote, "_LAST_PAUSE_S", 0.01)


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def _arrow(path: Path, count: int, *, stream: bool = False, words: int = 1, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [f"document {i} of {path.stem}, with some {'words ' * words}" if i % 7 else None for i in range(count)]
    table = pa.table({"id": list(range(count)), "text": pa.array(texts, pa.string())})
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(str(path), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=20)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """Files of all kinds: read by ranges, and converted."""
    folder = tmp_path / "corpus"
    _arrow(folder / "a.arrow", 300)
    _arrow(folder / "below" / "b.arrow", 200, stream=True)
    _arrow(folder / "c.arrow", 60, compression="zstd")
    lines = [json.dumps({"text": f"line {i}, and more words"}) + "\n" for i in range(80)]
    (folder / "d.jsonl").write_text("".join(lines))
    (folder / "notes.pdf").write_bytes(b"%PDF")
    return folder


def _upload(system: Any, folder: Path, to: str = "bucket/corpus") -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            system.pipe_file(f"{to}/{path.relative_to(folder)}", path.read_bytes())


def _config(make_config: MakeConfig, path: str, runs: Path, **data: Any) -> Config:
    return make_config(runs_dir=os.fspath(runs), data={"path": path, "validation_fraction": 0.1, **data})


def _prepared(config: Config, target: Path) -> dict[str, Any]:
    prepare(config, target)
    dataset: dict[str, Any] = json.loads((target / "dataset.json").read_text())
    return dataset


def _batches(config: Config, dataset: dict[str, Any], count: int = 60) -> list[list[list[int]]]:
    loader = Loader(config, dataset, rank=0, size=1)
    try:
        return [loader.next()[0].tolist() for _ in range(count)]
    finally:
        loader.close()


def test_batches_are_those_of_the_same_corpus_on_a_disk(
    make_config: MakeConfig, local: Path, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.corpus.UNIT_BYTES", 700)  # the JSON Lines are several ranges
    _upload(memory, local)
    config = _config(make_config, _URL, tmp_path)
    check(config)
    there, here = (
        _prepared(config, tmp_path / "there"),
        _prepared(on_disk := _config(make_config, os.fspath(local), tmp_path), tmp_path / "here"),
    )
    assert there["fingerprint"] == here["fingerprint"]
    assert _batches(config, there) == _batches(on_disk, here)
    assert (there["sources"][0]["path"], there["warnings"]) == (
        _URL,
        ["data: 1 file in " + _URL + " is not read: 1 .pdf"],
    )
    loader = Loader(config, there, rank=0, size=1)
    origins = {loader.sources[0].origin(i).file for i in range(len(loader.sources[0].documents))}
    loader.close()
    assert origins == {f"{_URL}/{name}" for name in ("a.arrow", "below/b.arrow", "c.arrow", "d.jsonl")}
    kept = [
        path.relative_to(tmp_path / "there") for path in (tmp_path / "there").rglob("*.remote/**/*") if path.is_file()
    ]
    assert kept == [Path("source-00.remote/.listing.json")]


@pytest.mark.parametrize("stream", [False, True])
def test_index_is_that_of_the_disk_and_only_headers_are_fetched(
    make_config: MakeConfig, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    path = tmp_path / "corpus" / "a.arrow"
    path.parent.mkdir()
    table = pa.table({"text": pa.array([f"{i} " * 2000 for i in range(1000)], pa.large_string())})
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    _upload(memory, path.parent)
    got: list[int] = []
    read = RemoteObject.read

    def counted(self: RemoteObject, start: int, size: int) -> bytes:
        got.append(size)
        return read(self, start, size)

    monkeypatch.setattr(RemoteObject, "read", counted)
    here = stand_ins(_config(make_config, _URL, tmp_path), tmp_path, fresh=True)
    assert here.data.path is not None
    stand_in = Path(here.data.path) / "a.arrow"
    fill_headers(stand_in)
    there, on_disk = index_file(stand_in, "text", fail), index_file(path, "text", fail)
    assert there is not None
    assert on_disk is not None
    assert (there.batches.tolist(), there.fingerprint) == (on_disk.batches.tolist(), on_disk.fingerprint)
    assert (there.size, there.rows, there.text_bytes) == (on_disk.size, on_disk.rows, on_disk.text_bytes)
    assert sum(got) < path.stat().st_size / 20


def test_damaged_headers_are_found_as_on_a_disk(
    make_config: MakeConfig, local: Path, memory: Any, tmp_path: Path
) -> None:
    for name in ("below", "c.arrow", "d.jsonl", "notes.pdf"):
        shutil.rmtree(local / name) if (local / name).is_dir() else (local / name).unlink()
    content = (local / "a.arrow").read_bytes()
    for damaged in (content[:-20], content[:200] + b"\x7f" * (len(content) - 210) + content[-10:]):
        memory.pipe_file("bucket/corpus/a.arrow", damaged)
        with pytest.raises(DataError, match=rf"{_URL}/a.arrow: truncated or damaged"):
            prepare(_config(make_config, _URL, tmp_path), tmp_path / "there")
        shutil.rmtree(tmp_path / ".cache")


def test_changed_and_missing_objects_are_named(
    make_config: MakeConfig, local: Path, memory: Any, tmp_path: Path
) -> None:
    _upload(memory, local)
    config = _config(make_config, _URL, tmp_path)
    dataset = _prepared(config, tmp_path / "d")
    before = data_fingerprint(config)
    content = memory.cat_file("bucket/corpus/a.arrow")
    memory.pipe_file("bucket/corpus/a.arrow", content)
    _forget()
    with pytest.raises(DataError, match=rf"{_URL}/a.arrow: has changed since it was listed \(its version\)"):
        _batches(config, dataset)
    memory.rm("bucket/corpus/a.arrow")
    with pytest.raises(DataError, match=rf"{_URL}/a.arrow: is missing"):
        _batches(config, dataset)
    assert data_fingerprint(config) == before
    check(config)
    assert data_fingerprint(config) != before


def _forget() -> None:
    """Forget what another process would not know."""
    remote.remote_object.cache_clear()
    _block.cache_clear()


def test_failing_requests_are_repeated_and_at_last_name_object_and_step(
    make_config: MakeConfig, local: Path, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _upload(memory, local)
    config = _config(make_config, _URL, tmp_path)
    dataset = _prepared(config, tmp_path / "d")
    expected = _batches(config, dataset)
    _forget()
    numbers, cat, away = itertools.count(), type(memory).cat_file, [False]

    def flaky(self: Any, path: str, **more: Any) -> bytes:
        if next(numbers) % 3 or away[0]:
            raise ConnectionError("aws_secret_access_key=NotForTheLog AKIAABCDEFGHIJKLMNOP")
        content: bytes = cat(self, path, **more)
        return content

    monkeypatch.setattr(type(memory), "cat_file", flaky)
    assert _batches(config, dataset) == expected
    monkeypatch.setattr(remote, "_PATIENCE_S", 0.05)
    _forget()
    away[0] = True
    with pytest.raises(DataError, match=rf"^step 1: {_URL}/.*arrow: can't be read for 0 s \(ConnectionError") as caught:
        _batches(config, dataset)
    assert caught.value.code == STORAGE_AWAY
    assert "AKIA" not in str(caught.value)


def test_a_preparation_that_was_killed_or_lost_its_storage_continues(
    make_config: MakeConfig, local: Path, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _upload(memory, local)
    config = _config(make_config, _URL, tmp_path)
    whole = _prepared(config, tmp_path / "whole")
    for error in (KeyboardInterrupt(), DataError("s3://x: away", code=STORAGE_AWAY)):

        def ends(*_: object, error: BaseException = error, **__: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr("trainer.data.dataset._estimated_tokens", ends)
            with pytest.raises(type(error)):
                prepare(config, tmp_path / "d")
        assert list(partial_data(tmp_path / "d").glob("unit-*.json"))
    assert _prepared(config, tmp_path / "d")["fingerprint"] == whole["fingerprint"]
    assert not partial_data(tmp_path / "d").exists()


def test_token_ids_are_read_by_ranges(
    make_config: MakeConfig, local: Path, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = _config(make_config, os.fspath(local), tmp_path)
    _prepared(text, tmp_path / "text")
    tokenize(tmp_path / "text" / "dataset.json", tmp_path / "ids", processes=1, validation_fraction=0.1)
    rng = np.random.default_rng(0)
    (tmp_path / "megatron").mkdir()
    write(tmp_path / "megatron" / "web_document", [rng.integers(3, 90, n).tolist() for n in range(1, 60)])
    for folder in ("ids", "megatron"):
        _upload(memory, tmp_path / folder, f"bucket/{folder}")
    tokenizer = {"tokenizer": {"path": os.fspath(tmp_path / "text" / "tokenizer"), "train_vocab_size": 400}}
    for name, more in (("ids", {}), ("megatron", tokenizer), ("megatron/web_document", tokenizer)):
        runs = {"runs_dir": os.fspath(tmp_path), **more}
        there = make_config(data={"path": f"memory://bucket/{name}", "validation_fraction": 0.1}, **runs)
        here = make_config(data={"path": os.fspath(tmp_path / name), "validation_fraction": 0.1}, **runs)
        check(there)
        target = tmp_path / f"of-{name.replace('/', '-')}"
        remote_dataset, dataset = _prepared(there, target), _prepared(here, target.with_suffix(".disk"))
        assert remote_dataset["fingerprint"] == dataset["fingerprint"]
        assert _batches(there, remote_dataset) == _batches(here, dataset)
        assert Path(dataset["validation"]["path"]).read_text() == Path(remote_dataset["validation"]["path"]).read_text()


def test_what_can_not_be_used_is_refused_by_a_check(
    make_config: MakeConfig, local: Path, memory: Any, tmp_path: Path
) -> None:
    _upload(memory, local)
    refused: list[tuple[str, type[Exception], str]] = [
        ("memory://bucket/none", DataError, r"data.path=memory://bucket/none: can't be listed \(FileNotFoundError"),
        ("bogus://bucket/x", Exception, r"data.path=bogus://bucket/x: .*Protocol not known"),
        ("abfs://box/x", DependencyError, r"(?s)data.path=abfs://box/x: needs a package.*hint: pip install .*'adlfs'"),
        ("gs://box/x", DependencyError, r"(?s)data.path=gs://box/x: needs a package.*\[gcs\]'? for gs://"),
    ]
    memory.makedirs("bucket/empty")
    refused.append(("memory://bucket/empty", DataError, "data.path=memory://bucket/empty: the folder is empty"))
    for url, kind, message in refused:
        with pytest.raises(kind, match=message):
            check(_config(make_config, url, tmp_path))
    with pytest.raises(DataError, match=rf"{_URL}/a.arrow: data.text_column='content' is not there"):
        check(_config(make_config, _URL, tmp_path, text_column="content"))
    memory.pipe_file("bucket/corpus/../../escape.arrow", b"x")
    if any(".." in name for name in memory.store):
        with pytest.raises(DataError, match="can't be a file of a folder"):
            check(_config(make_config, _URL, tmp_path))


def test_a_kept_listing_is_as_private_as_the_folder_that_it_is_in(memory: Any, tmp_path: Path) -> None:
    memory.pipe("/bucket/corpus/a.txt", b"text")
    for mode in (0o700, 0o770):
        runs_dir = tmp_path / oct(mode)
        cache_dir(runs_dir).mkdir(parents=True)
        cache_dir(runs_dir).chmod(mode)
        list_corpus(os.fspath(runs_dir), _URL)
        kept = kept_at(os.fspath(runs_dir), _URL)
        assert (kept.parent.stat().st_mode & 0o777, kept.stat().st_mode & 0o777) == (mode, mode & 0o666)


def test_mixtures_can_have_both_kinds_of_places(
    make_config: MakeConfig, local: Path, memory: Any, tmp_path: Path
) -> None:
    _upload(memory, local)
    sources = [SourceConfig(path=_URL, weight=2.0), SourceConfig(path=os.fspath(local / "d.jsonl"))]
    config = make_config(runs_dir=os.fspath(tmp_path), data={"path": None, "sources": sources})
    on_disk = [SourceConfig(path=os.fspath(local), weight=2.0), sources[1]]
    here = make_config(runs_dir=os.fspath(tmp_path), data={"path": None, "sources": on_disk})
    there, dataset = _prepared(config, tmp_path / "there"), _prepared(here, tmp_path / "here")
    assert _batches(config, there) == _batches(here, dataset)


@pytest.mark.processes
def test_training_reads_s3_and_gives_the_losses_of_the_disk(
    make_config: MakeConfig,
    make_run: MakeRun,
    s3_server: Server,
    tmp_path: Path,
    train_here: TrainHere,
    events_of: EventsOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "_MOST_AHEAD", 16)  # moto's server is slow
    local, system = tmp_path / "corpus", fsspec.filesystem("s3")
    _arrow(local / "a.arrow", 40, words=100)
    _upload(system, local)
    losses = []
    for name, path in (("there", "s3://bucket/corpus"), ("here", os.fspath(local))):
        config = _config(make_config, path, tmp_path)
        check(config)
        _prepared(config, tmp_path / name)
        run = make_run(tmp_path / f"run-{name}", data={"path": path, "validation_fraction": 0.1})
        shutil.copy(tmp_path / name / "dataset.json", run.dataset)
        assert train_here(run, 1) == 0
        losses.append([event["loss"] for event in events_of(run, "step")])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 24
    system.pipe_file("bucket/corpus/a.arrow", b"x" * (local / "a.arrow").stat().st_size)
    _forget()
    config = _config(make_config, "s3://bucket/corpus", tmp_path)
    with pytest.raises(DataError, match=r"s3://bucket/corpus/a.arrow: has changed since it was listed \(its ETag\)"):
        _batches(config, json.loads((tmp_path / "there" / "dataset.json").read_text()))


@pytest.mark.processes
def test_s3_without_bucket_or_credentials_is_refused_and_a_secret_is_not_repeated(
    make_config: MakeConfig, s3_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"(?s)data.path=s3://no-such-bucket/x: can't be listed .*hint: check the URL"):
        check(_config(make_config, "s3://no-such-bucket/x", tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(DataError, match=r"can't be listed \(NoCredentialsError|can't be listed \(PermissionError"):
        check(_config(make_config, "s3://bucket/x", tmp_path))
    fsspec.filesystem("s3").clear_instance_cache()


def test_a_line_without_an_end_is_fetched_up_to_a_limit(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_END_BYTES", 100)
    monkeypatch.setattr(remote, "_MAX_LINE_BYTES", 1000)
    memory.pipe("/bucket/corpus/d.jsonl", b"x" * 10_000)
    root = remote._make(tmp_path / "source-00.remote", remote.list_corpus(os.fspath(tmp_path), _URL))
    remote.fetch(root / "d.jsonl", 0, 50, whole_lines=True)
    assert 1000 < (root / "d.jsonl").read_bytes().count(b"x") < 1500
