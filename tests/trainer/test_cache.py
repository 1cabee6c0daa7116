from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hlatctl.run.errors import CompileError, StorageError, load_error
from hlatctl.run.paths import RunPaths
from trainer import cache


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for name, content in {"fxgraph/ab/graph": b"graph", "cd/kernel.so": b"\x7fELF", "cd/kernel.cpp": b""}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    cache.write_manifest(folder)
    return folder


def _tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_copy_equals_its_source_and_a_second_one_copies_nothing(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "local" / "cache"
    assert cache.copy(source, target) == 3
    assert _tree(target) == _tree(source)
    assert cache.copy(source, target) == 0


def test_damaged_local_file_is_replaced(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    cache.copy(source, target)
    (target / "cd/kernel.so").write_bytes(b"\x7fEL!")
    assert cache.copy(source, target) == 1
    assert _tree(target) == _tree(source)


def test_file_that_differs_from_the_manifest_is_never_copied(source: Path, tmp_path: Path) -> None:
    (source / "cd/kernel.so").write_bytes(b"\x7fEL!")
    with pytest.raises(StorageError, match=r"differs from its manifest: cd/kernel\.so: checksum differs"):
        cache.copy(source, tmp_path / "target")
    assert not (tmp_path / "target" / "cd/kernel.so").exists()
    assert not (tmp_path / "target" / cache.MANIFEST).exists()


def test_missing_file_and_missing_manifest_are_named(source: Path, tmp_path: Path) -> None:
    (source / "cd/kernel.so").unlink()
    with pytest.raises(StorageError, match=r"cd/kernel\.so: missing"):
        cache.copy(source, tmp_path / "target")
    (source / cache.MANIFEST).unlink()
    with pytest.raises(StorageError, match=r"cache_manifest\.json: no readable manifest"):
        cache.copy(source, tmp_path / "target")


def test_manifest_that_leads_out_of_its_folder_is_refused(source: Path, tmp_path: Path) -> None:
    entry = {"path": "../outside", "bytes": 0, "sha256": ""}
    (source / cache.MANIFEST).write_text(json.dumps({"v": 1, "files": [entry]}))
    with pytest.raises(StorageError, match="names a file outside of its folder"):
        cache.copy(source, tmp_path / "target")


def test_command_needs_only_the_standard_library(source: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from trainer.cache import main; main(sys.argv[1:]); "
        "print(sorted({'torch', 'numpy', 'yaml', 'pyarrow'} & set(sys.modules)))"
    )
    argv = [sys.executable, "-c", code, "--from", os.fspath(source), "--to", os.fspath(tmp_path / "target")]
    result = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert result.stdout.strip() == "[]"
    assert "3 files copied" in result.stderr


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler")
def test_warm_cache_at_another_path_compiles_nothing_and_a_graph_that_it_lacks_is_named(
    tmp_path: Path, make_run: Callable[..., RunPaths], start: Callable[..., Any], finish: Callable[..., str],
    events_of: Callable[..., list[dict[str, Any]]], error_file: Path,
) -> None:  # fmt: skip
    run = make_run(
        tmp_path / "run", backend={"compile": True}, cluster={"processes_per_node": 2}, model={"num_layers": 1},
        train={"tokens": 2 * 4 * 32},
    )  # fmt: skip
    argv = ("trainer", "--run-dir", os.fspath(run.root), "--attempt")
    shared, local = tmp_path / "shared", tmp_path / "elsewhere" / "local"
    shared.mkdir()
    # One process fills the cache for both: no rank enters a graph.
    finish(start(*argv, "0", "--compile-only", TORCHINDUCTOR_CACHE_DIR=os.fspath(shared)))
    assert not run.journal.exists()
    cache.copy(shared, local)
    before = _tree(local)

    finish(start(*argv, "1", processes=2, TORCHINDUCTOR_CACHE_DIR=os.fspath(local)))

    (counted,) = events_of(run, "compile_cache")
    assert counted["misses"] == 0
    assert counted["hits"] > 0
    libraries = {name for name in _tree(local) if name.endswith(".so")}
    assert libraries
    assert libraries == {name for name in before if name.endswith(".so")}

    graph = min((shared / "fxgraph").glob("*/*"))
    shutil.rmtree(graph)
    missed = start(*argv, "0", "--check-coverage", TORCHINDUCTOR_CACHE_DIR=os.fspath(shared))
    finish(missed, CompileError.exit_code)
    told = load_error(error_file)
    assert isinstance(told, CompileError)
    assert told.message == (
        "graphs that a short attempt needs and the cache lacks: 1, the first "
        f"{platform.node()}: {graph.relative_to(shared).as_posix()}"
    )
    assert len(events_of(run, "step")) == 2, "the run itself is not touched"
    assert not (run.root / ".short-attempt").exists()
