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

from hlatctl.cache.manifest import write_manifest
from hlatctl.run.errors import CompileError, load_error
from hlatctl.run.paths import RunPaths
from trainer import cache, coverage


def _tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_command_needs_only_the_standard_library(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for name, content in {"fxgraph/ab/graph": b"graph", "cd/kernel.so": b"\x7fELF", "cd/kernel.cpp": b""}.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    write_manifest(source)
    code = (
        "import sys; from trainer.cache import main; main(sys.argv[1:]); "
        "print(sorted({'torch', 'numpy', 'yaml', 'pyarrow', 'fsspec'} & set(sys.modules)))"
    )
    argv = [sys.executable, "-c", code, "--from", os.fspath(source), "--to", os.fspath(target)]
    result = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    told, imported = result.stdout.splitlines()
    assert imported == "[]"
    assert json.loads(told) == {
        "modules": 2, "copied": 2, "copied_bytes": 9, "skipped": [], "quarantined": [], "stale_locks": [],
    }  # fmt: skip
    assert {name: content for name, content in _tree(target).items() if "/" in name} == {
        name: content for name, content in _tree(source).items() if "/" in name
    }


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
    assert cache.main(["--from", os.fspath(shared), "--to", os.fspath(local)]) == 0
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


def test_graphs_of_a_compiler_that_counts_nothing_are_judged_by_the_cache_alone() -> None:
    processes: list[dict[str, Any]] = [{"host": "node-1", "rank": rank, "missing": []} for rank in range(2)]
    assert coverage.summary(processes) == {"hits": 0, "misses": 0, "missing": []}
    processes[1]["missing"] = ["neuronxcc-2/MODULE_1+a"]
    assert coverage.summary(processes) == {"hits": 0, "misses": 1, "missing": ["node-1: neuronxcc-2/MODULE_1+a"]}
