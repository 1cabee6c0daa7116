from __future__ import annotations

import pytest

from hlatctl.cache.store import File, modules, why_no_neff
from tests.hlatctl.cache.conftest import VERSION, neff

MODULE = f"{VERSION}/MODULE_1+d41d8cd9"


def test_neuron_modules_are_complete_with_the_wrapper_s_last_file() -> None:
    names = ("model.done", "model.neff", "compile_flags.json", "model.hlo_module.pb.gz")
    (module,) = modules([File(f"{MODULE}/{name}", 1) for name in names])
    assert (module.name, module.layout, module.bytes, module.problem) == (MODULE, "neuron", 4, "")
    assert module.files[-1].path.endswith("model.done")


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"model.neff": 9}, "has no model.done: its compilation did not finish"),
        ({"model.done": 0, "model.log": 9}, "has model.done but no model.neff: its compilation failed"),
        ({"model.done": 0, "model.neff": 0}, "has model.done but no model.neff: its compilation failed"),
    ],
)
def test_unfinished_and_failed_compilations_are_named(files: dict[str, int], problem: str) -> None:
    (module,) = modules([File(f"{MODULE}/{name}", size) for name, size in files.items()])
    assert module.problem == problem


def test_locks_temporary_files_and_our_own_belong_to_no_module() -> None:
    names = ("model.hlo_module.pb.gz.lock", ".model.neff.123.tmp", "model.neff.tmp")
    ours = [File(".copy/0", 1), File(".quarantine/x/model.neff", 1), File("cache_manifest.json", 1)]
    assert modules([*(File(f"{MODULE}/{name}", 1) for name in names), *ours]) == []


def test_inductors_kernels_and_graphs_are_modules_by_their_keys() -> None:
    paths = (
        "ab/cab1.cpp",
        "ab/cab1.main.so",
        "ab/cab2.so",
        "fxgraph/ky/fky3/one",
        "fxgraph/ky/fky3/two",
        "aotautograd/akx/one",
        "triton/0/KEY/kernel.json",
        "locks/cab1.lock",
    )
    graphs = modules(File(path, 1) for path in paths)
    assert {module.name: len(module.files) for module in graphs} == {
        "ab/cab1": 2,
        "ab/cab2": 1,
        "fxgraph/ky/fky3": 2,
        "aotautograd/akx": 1,
        "triton/0/KEY": 1,
    }
    assert {module.layout for module in graphs} == {"inductor"}


def test_torch_neurons_programs_stand_alone() -> None:
    graphs = modules([File("ab12.neff", 5), File("deep/cd34.neff", 0)])
    assert [(module.name, module.layout, module.problem) for module in graphs] == [
        ("ab12.neff", "torch_neuron", ""),
        ("deep/cd34.neff", "torch_neuron", "is empty"),
    ]


def test_a_neffs_header_gives_its_length() -> None:
    whole = neff(b"program")
    assert why_no_neff(whole[:64], len(whole)) == ""
    assert why_no_neff(whole[:64], len(whole) - 3) == f"has {len(whole) - 3} bytes, its header says {len(whole)}"
    assert why_no_neff(b"", 0) == "is empty: its compilation failed"
    assert why_no_neff(b"short", 5) == "has 5 bytes, less than a header"
    assert why_no_neff(b"another kind of file, longer than a header", 5000) == ""
