from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from eval.data import download
from eval.tasks import bundle, core
from hlatctl.run.errors import DataError
from tests.eval.tasks.test_core import _SUITE

_PLACE = "eval_bundle/eval_data/a/b.jsonl"


def _archive(**files: bytes) -> io.BytesIO:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, text in {_PLACE: b"items\n", **files}.items():
            packed.writestr(name, text)
    return content


def test_only_the_named_files_are_written_whatever_paths_an_archive_has(tmp_path: Path) -> None:
    archive = _archive(**{"../escaped": b"x", "/tmp/escaped": b"x", "eval_bundle/other": b"x"})
    bundle.unpack(archive, [_PLACE], tmp_path / "to")
    files = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [f"to/{_PLACE}"]
    assert (tmp_path / "to" / _PLACE).read_bytes() == b"items\n"


def test_a_file_that_unpacks_to_too_much_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MOST_FILE_BYTES", 1 << 20)
    with pytest.raises(DataError, match=r"b\.jsonl: has more than 1 MiB, so it was not written"):
        bundle.unpack(_archive(**{_PLACE: b"0" * (2 << 20)}), [_PLACE], tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_missing_file_and_a_damaged_archive_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no file eval_bundle/c"):
        bundle.unpack(_archive(), ["eval_bundle/c"], tmp_path)
    with pytest.raises(DataError, match="can't be unpacked"):
        bundle.unpack(io.BytesIO(b"<html>"), [_PLACE], tmp_path)


def test_a_download_fetches_what_is_missing_and_stops_an_endless_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    described = {"eval_bundle/core.yaml": b"icl_tasks: []\n", "eval_bundle/eval_meta_data.csv": b"Eval Task\n"}
    archive = _archive(**{row.place: b"{}\n" for row in core.ROWS}, **described).getvalue()
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: io.BytesIO(archive))
    records = download(_SUITE.eval, tmp_path / "data")["datasets"]
    assert (len(records), {record["rows"] for record in records}) == (21, {1})
    assert (tmp_path / "data" / "eval_bundle" / "core.yaml").is_file()
    monkeypatch.setattr(bundle, "MOST_BYTES", 100)
    with pytest.raises(DataError, match="has more than 100 bytes"):
        download(_SUITE.eval, tmp_path / "other")
    assert not list((tmp_path / "other").iterdir())


def test_without_a_network_nothing_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="HF_HUB_OFFLINE is set"):
        download(_SUITE.eval, tmp_path / "data")
    monkeypatch.delenv("HF_HUB_OFFLINE")

    def fail(url: str, timeout: float) -> None:
        raise OSError("no route")

    monkeypatch.setattr("urllib.request.urlopen", fail)
    with pytest.raises(DataError, match=r"can't be fetched \(no route\), so nothing was written"):
        download(_SUITE.eval, tmp_path / "data")
    assert not (tmp_path / "data").exists()
