"""The arguments of the optional runners exist in the harness's classes; their packages are not needed."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from conf.schema import BackendConfig, Config, EvalConfig
from eval import runners
from eval.model import package_folder
from eval.runners import RunnerArguments, arguments


def parameters(module: str, name: str) -> set[str]:
    """Return the arguments of a class's constructor from its source, because importing it needs the package."""
    source = package_folder("lm_eval", "lm-eval") / "models" / f"{module}.py"
    harness_class = next(
        node
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    constructor = next(
        node for node in harness_class.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    return {argument.arg for argument in (*constructor.args.args, *constructor.args.kwonlyargs)}


@pytest.mark.parametrize(
    ("runner", "module", "name"), [("vllm", "vllm_causallms", "VLLM"), ("neuron", "neuron_optimum", "NEURON_HF")]
)
def test_the_harness_takes_what_an_optional_runner_gives(runner: str, module: str, name: str, tmp_path: Path) -> None:
    def loaded() -> Any:
        raise AssertionError("these load the folder themselves")

    request = RunnerArguments(
        folder=tmp_path, loaded=loaded, max_length=512, batch_size=4, seed=7, tensor_parallel_size=8
    )
    given = arguments(runner, request)
    assert given.keys() <= parameters(module, name)
    assert 8 in given.values(), "how many devices"
    assert given["dtype"] == "bfloat16", "Neuron refuses the harness's default, and vLLM's depends on the folder"
    assert given["trust_remote_code"] is False


def test_the_number_format_is_the_runner_s_unless_it_is_set() -> None:
    formats = [runners.dtype(name, EvalConfig()) for name in ("hf", "vllm", "neuron")]
    assert formats == ["float32", "bfloat16", "bfloat16"]
    assert runners.dtype("hf", EvalConfig(dtype="float16")) == "float16"


def test_the_device_is_the_backend_s_unless_it_is_set() -> None:
    backend = BackendConfig(device="cuda")
    assert Config(backend=backend).eval_device == "cuda"
    assert Config(backend=backend, eval=EvalConfig(device="cpu")).eval_device == "cpu"
    assert Config(backend=BackendConfig(name="nxd", device="neuron")).eval_device == "cpu", "torch-xla has none"


def test_vllm_computes_on_a_gpu_unless_there_is_none_and_none_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm, training = EvalConfig(runner="vllm"), BackendConfig(device="cuda")
    for is_there, on_cpu, on_gpu in ((False, "cpu", "cuda"), (True, "cuda", "cuda")):
        monkeypatch.setattr(runners, "is_there", lambda _, found=is_there: found)
        assert runners.vllm_device(Config(eval=vllm)) == on_cpu
        assert runners.vllm_device(Config(eval=vllm, backend=training)) == on_gpu
