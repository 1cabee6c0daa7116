"""Archives of a configuration's data: what is listed, what is packed, and that nothing else is ever unpacked."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import shlex
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from conf.schema import Config, DataConfig, EvalConfig, SourceConfig, TokenizerConfig
from flows.data_archive import needs, pack, unpack
from hlatctl.cli.main import main
from hlatctl.run.errors import DataError, StorageError


def config_of(**parts: Any) -> Config:
    return dataclasses.replace(Config(), eval=EvalConfig(enabled=False), **parts)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two corpora, one of them linked as in a cache of Hugging Face, token ids, and a model's folder."""
    here = tmp_path / "here"
    for name, text in {
        "web/a.jsonl": '{"text": "a"}\n',
        "web/more/b.jsonl": '{"text": "b"}\n',
        "blobs/c": '{"text": "c"}\n',
        "ids/books.idx": "index",
        "ids/books.bin": "tokens",
        "model/tokenizer.json": "{}",
        "model/model.safetensors": "weights",
    }.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    (here / "web" / "c.jsonl").symlink_to("../blobs/c")
    return here


def mixture(folder: Path) -> Config:
    sources = [SourceConfig(path=str(folder / "web"), weight=3.0), SourceConfig(path=str(folder / "ids" / "books"))]
    tokenizer = TokenizerConfig(path=str(folder / "model"))
    return config_of(data=DataConfig(sources=sources), tokenizer=tokenizer)


def test_what_a_configuration_reads_is_listed_with_its_state(folder: Path) -> None:
    here = {need.key: (need.state, need.files, need.bytes) for need in needs(mixture(folder))}
    assert here == {
        "data.sources.0.path": ("present", 3, 42),
        "data.sources.1.path": ("present", 2, 11),
        "tokenizer.path": ("present", 1, 2),  # without the model's weights
    }
    made, remote, missing = (
        needs(config_of(data=DataConfig(path=path)))[0] for path in (None, "s3://bucket/web", str(folder / "none"))
    )
    assert [made.state, remote.state, missing.state] == ["nothing", "remote", "missing"]
    assert "aws s3 sync s3://bucket/web" in remote.fetch
    with pytest.raises(DataError, match=r"data\.path=.*none: is missing"):
        pack(config_of(data=DataConfig(path=str(folder / "none"))), folder / "x.tar")


@pytest.mark.parametrize("inside", ["web/data.tar", "web/more/data.tar", "model/data.tar"])
def test_an_archive_is_not_written_into_what_it_packs(folder: Path, inside: str) -> None:
    with pytest.raises(DataError, match=r"--to=.*data\.tar: is inside (data\.sources\.0|tokenizer)\.path=") as caught:
        pack(mixture(folder), folder / inside)
    assert caught.value.hint
    assert not (folder / inside).exists()


@pytest.mark.processes
def test_an_archive_carries_the_data_and_its_settings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive, to = folder.parent / "data.tar", folder.parent / "there, far"
    done = pack(mixture(folder), archive)
    assert done["sha256"] == hashlib.sha256(archive.read_bytes()).hexdigest()
    assert main(["data", "unpack", str(archive), "--to", str(to)]) == 0
    overrides = [shlex.split(line)[0] for line in capsys.readouterr().out.splitlines()]
    config = compose([*overrides, "eval.enabled=false"], to_start=False)
    assert [(os.path.relpath(s.path, to), s.weight) for s in config.data.sources] == [
        ("data-sources-0", 3.0),
        ("data-sources-1/books", 1.0),
    ]
    assert config.tokenizer.path == str(to / "tokenizer")
    assert [need.bytes for need in needs(config)] == [42, 11, 2]
    assert not (to / "data-sources-0" / "c.jsonl").is_symlink()
    again = folder.parent / "again.tar"
    pack(mixture(folder), again)
    assert again.read_bytes() == archive.read_bytes()
    with pytest.raises(StorageError, match="exists"):
        unpack(archive, to)


def written(
    path: Path,
    names: dict[str, bytes],
    change: Callable[[dict[str, Any]], None] = lambda contents: None,
    sums: dict[str, str] | None = None,
    kind: bytes = tarfile.REGTYPE,
) -> Path:
    contents: dict[str, Any] = {
        "v": 1,
        "settings": {"data.path": "data"},
        "sources": [],
        "files": [{"path": name, "bytes": len(content)} for name, content in names.items()],
    }
    change(contents)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in names.items()} if sums is None else sums
    members = {"contents.json": json.dumps(contents).encode(), **names, "checksums.json": json.dumps(digests).encode()}
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            if name in names and kind != tarfile.REGTYPE:
                member.type, member.linkname, member.size = kind, "/etc/passwd", 0
            tar.addfile(member, io.BytesIO(content))
    return path


GOOD = {"data/a.jsonl": b"text"}


@pytest.mark.parametrize(
    ("archive", "says"),
    [
        ({"names": {"../a": b"x"}}, "outside of the archive's folder"),
        ({"names": {"/tmp/hlatctl-evil": b"x"}}, "outside of the archive's folder"),
        ({"names": {"data/../../a": b"x"}}, "outside of the archive's folder"),
        ({"names": GOOD, "change": lambda c: c["settings"].update({"data.path": "/etc"})}, "outside of the archive's"),
        ({"names": GOOD, "change": lambda c: c["files"][0].update(bytes=5)}, "not as its index says"),
        ({"names": GOOD, "change": lambda c: c["files"].clear()}, "not as its index says"),
        ({"names": GOOD, "change": lambda c: c["files"].append({"path": "b", "bytes": 0})}, "or it is missing"),
        ({"names": GOOD, "change": lambda c: c.pop("files")}, "has no list of files"),
        ({"names": GOOD, "change": lambda c: c["settings"].update({"backend.env.LD_PRELOAD": "x"})}, "no key of data"),
        ({"names": GOOD, "change": lambda c: c["settings"].update({"eval.data_dir\nx": "x"})}, "no key of data"),
        ({"names": GOOD, "change": lambda c: c.pop("sources")}, "its settings can't be read"),
        ({"names": GOOD, "change": lambda c: c["sources"].append({"path": "s3://a/b"})}, "its settings can't be read"),
        (
            {
                "names": GOOD,
                "change": lambda c: c["sources"].append({"path": "/etc", "weight": 1, "text_column": None}),
            },
            "its settings can't be read",
        ),
        ({"names": GOOD, "change": lambda c: c.update(sources=[{}])}, "its settings can't be read"),
        ({"names": GOOD, "change": lambda c: c["settings"].update({"data.path": 5})}, "its settings can't be read"),
        ({"names": GOOD, "sums": {"data/a.jsonl": "0"}}, "its checksum differs"),
        ({"names": GOOD, "sums": {}}, "its checksum differs"),
        ({"names": GOOD, "kind": tarfile.SYMTYPE}, "not as its index says"),
        ({"names": GOOD, "kind": tarfile.LNKTYPE}, "not as its index says"),
        ({"names": GOOD, "kind": tarfile.FIFOTYPE}, "not as its index says"),
    ],
)
def test_an_archive_that_is_not_as_it_says_leaves_nothing(archive: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = written(tmp_path / "data.tar", **archive)
    with pytest.raises(DataError, match=says):
        unpack(path, tmp_path / "to")
    assert os.listdir(tmp_path) == ["data.tar"]


@pytest.mark.parametrize(("change", "says"), [(Path.unlink, "can't be read"), (Path.touch, "was changed while")])
def test_a_file_that_changes_while_it_is_packed_is_named(
    change: Callable[[Path], None], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "a.jsonl"
    corpus.write_text("text")

    def listed(*_: object) -> None:
        corpus.write_text("more text")
        change(corpus)

    monkeypatch.setattr("flows.data_archive._add_json", listed)
    with pytest.raises(DataError, match=rf"a\.jsonl: {says}"):
        pack(config_of(data=DataConfig(path=str(corpus))), tmp_path / "data.tar")
    assert not (tmp_path / "data.tar").exists()


@pytest.mark.parametrize(
    ("size_bytes", "headers", "says"), [(1 << 40, 1, "a header of 1 TiB"), (512, 3000, "recursion")]
)
def test_headers_of_headers_are_read_with_limits(size_bytes: int, headers: int, says: str, tmp_path: Path) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, size_bytes
    content = b"11 path=ab\n".ljust(512, b"\0")
    (tmp_path / "data.tar").write_bytes((header.tobuf(tarfile.GNU_FORMAT) + content) * headers)
    with pytest.raises(DataError, match=says):
        unpack(tmp_path / "data.tar", tmp_path / "to")


def test_an_archive_without_room_or_cut_short_leaves_nothing(tmp_path: Path) -> None:
    path = written(tmp_path / "data.tar", GOOD, lambda contents: contents["files"][0].update(bytes=1 << 60))
    with pytest.raises(StorageError, match="are needed"):
        unpack(path, tmp_path / "to")
    whole = written(path, GOOD).read_bytes()
    for part in (b"", whole[:700], whole[:2000]):
        path.write_bytes(part)
        with pytest.raises(DataError):
            unpack(path, tmp_path / "to")
    path.unlink()
    with pytest.raises(DataError, match="can't be read"):
        unpack(path, tmp_path / "to")
    assert os.listdir(tmp_path) == []
