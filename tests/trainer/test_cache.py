from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hlatctl.cache.graphs import write_manifest
from hlatctl.run.errors import StorageError, load_error
from tests.trainer.conftest import Finish, MakeConfig, MakeRun, Start
from trainer.model.decoder import Llama
from trainer.model.precision import PRECISIONS
from trainer.parallel.layout import make_layout, prepare
from trainer.step import coverage

pytestmark = pytest.mark.processes


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
    printed, imported = result.stdout.splitlines()
    assert imported == "[]"
    assert json.loads(printed) == {
        "modules": 2,
        "copied": 2,
        "copied_bytes": 9,
        "skipped": [],
        "quarantined": [],
        "stale_locks": [],
    }
    assert {name: content for name, content in _tree(target).items() if "/" in name} == {
        name: content for name, content in _tree(source).items() if "/" in name
    }


def test_a_command_runs_after_the_copy_and_also_without_one(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "fxgraph" / "ab").mkdir(parents=True)
    (source / "fxgraph" / "ab" / "graph").write_bytes(b"graph")
    write_manifest(source)
    argv = [sys.executable, "-m", "trainer.cache", "--to", os.fspath(target), "--from"]
    for place, warning in ((source, ""), (tmp_path / "missing", "graphs are compiled again")):
        command = ("--", sys.executable, "-c", "import sys; print('ran'); sys.exit(7)")
        result = subprocess.run([*argv, os.fspath(place), *command], capture_output=True, text=True, check=False)
        assert (result.stdout, result.returncode) == ("ran\n", 7)
        assert warning in result.stderr
    assert (target / "fxgraph" / "ab" / "graph").read_bytes() == b"graph"


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # PyTorch's own
def test_nothing_compiled_comes_from_the_folder_for_temporary_files(
    tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There any user can write. tests/e2e/test_train.py has the graphs of a whole run."""
    from torch._inductor import codecache
    from torch._inductor import config as inductor

    headers = tmp_path / "precompiled_headers"
    monkeypatch.setattr(codecache, "_HEADER_DIR", os.fspath(headers))
    monkeypatch.setattr(codecache, "_HEADER_LOCK_DIR", os.fspath(headers / "locks"))
    monkeypatch.setattr(inductor, "cpp_cache_precompile_headers", True)
    monkeypatch.setattr(inductor, "compile_threads", 1)
    monkeypatch.setattr(inductor.cpp, "vec_isa_ok", False)  # compiles faster
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.fspath(tmp_path / "cache"))
    config = make_config()
    prepare(Llama(config.model, 8), make_layout(config, "cpu", 1), PRECISIONS["fp32"], compile_backend="inductor")
    compiled = torch.compile(lambda x: x.sin() + 1, backend="inductor")
    assert torch.equal(compiled(torch.zeros(8)), torch.ones(8))
    assert list((tmp_path / "cache").glob("**/*.so"))
    assert not headers.exists()


def test_no_process_compiles_into_a_folder_that_others_may_write(
    tmp_path: Path, make_run: MakeRun, start: Start, finish: Finish, error_file: Path
) -> None:
    run = make_run(tmp_path / "run", backend={"compile": True})
    (public := tmp_path / "public").mkdir()
    public.chmod(0o777)
    for what in ("--compile-only", "--check-coverage", "--max-checkpoint-step=0"):
        argv = ("trainer", "--run-dir", os.fspath(run.root), "--attempt", "0", what)
        finish(start(*argv, TORCHINDUCTOR_CACHE_DIR=os.fspath(public)), StorageError.exit_code)
        error = load_error(error_file)
        assert isinstance(error, StorageError)
        assert "public: other users may write there (mode 0777); code is only run from" in error.message
    assert list(public.iterdir()) == []


def test_without_counters_only_the_cache_decides() -> None:
    processes: list[dict[str, Any]] = [{"host": "node-1", "rank": rank, "missing": []} for rank in range(2)]
    assert coverage.summary(processes) == {"hits": 0, "misses": 0, "missing": []}
    processes[1]["missing"] = ["neuronxcc-2/MODULE_1+a"]
    assert coverage.summary(processes) == {"hits": 0, "misses": 1, "missing": ["node-1: neuronxcc-2/MODULE_1+a"]}
