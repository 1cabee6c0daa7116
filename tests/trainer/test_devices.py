"""The trainer on a device that is neither a CPU nor CUDA: by configuration alone."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import backend_registration

from conf.devices import DEVICES
from conf.environment import STOCHASTIC_ROUNDING
from hlatctl.run.errors import ConfigError, DependencyError
from tests.trainer.conftest import EventsOf, Finish, MakeConfig, MakeRun, Start, TrainRun
from trainer.backends.torch_native import TorchNative
from trainer.device_check import check_fp8
from trainer.model.decoder import Llama
from trainer.model.precision import PRECISIONS
from trainer.parallel.layout import make_layout, prepare

_STEPS = {"tokens": 6 * 4 * 32}


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this PyTorch is older than those with TorchNeuron: tests.trainer.fake_neuron can't make the device",
)
@pytest.mark.processes
def test_neuron_trains_like_the_cpu_by_configuration_alone(
    tmp_path: Path, make_run: MakeRun, start: Start, finish: Finish, train_run: TrainRun, events_of: EventsOf
) -> None:
    changes = {"train": _STEPS, "checkpoint": {"every_steps": 3}}
    here = train_run(**changes)
    there = make_run(
        tmp_path / "neuron", **changes, backend={"device": "neuron", "compile": True}, cluster={"processes_per_node": 2}
    )
    output = finish(
        start("tests.trainer.fake_neuron", "--run-dir", os.fspath(there.root), "--attempt", "1", processes=2)
    )
    (began,) = events_of(there, "train_started")
    assert began["device"] == "neuron:0"
    losses = [[event["loss"] for event in events_of(run, "step")] for run in (here, there)]
    assert len(losses[1]) == 6
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert [event["step"] for event in events_of(there, "checkpoint_verified")] == [3, 6]
    calls = json.loads(output.split("calls ")[-1].splitlines()[0])
    assert min(calls.values()) > 0
    assert not events_of(there, "compile_cache")


def test_a_device_that_rounds_stochastically_gets_the_switch_and_no_noise_from_the_host(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["cpu"], rounds_stochastically=True))
    config = make_config(precision={"name": "bf16_sr"}, model={"num_layers": 1})
    monkeypatch.setenv(STOCHASTIC_ROUNDING, "0")
    with pytest.raises(
        ConfigError, match=rf"{STOCHASTIC_ROUNDING}=0 in the environment: .* need {STOCHASTIC_ROUNDING}=1"
    ):
        TorchNative(config)
    monkeypatch.delenv(STOCHASTIC_ROUNDING)
    backend = TorchNative(config)
    assert os.environ[STOCHASTIC_ROUNDING] == "1"
    optimizer = backend.optimizer(backend.build_model(document_end_id=None))
    before = optimizer.tensors()["model.norm.weight"].clone()
    optimizer.gradients.fill_(1.0)
    monkeypatch.setattr(torch, "randint", None)
    optimizer.step(lr=1e-4, number=1)
    assert optimizer.tensors()["model.norm.weight"].equal(before), "this device rounds 0.9999 to the nearest"


@pytest.mark.parametrize("device", DEVICES)
def test_each_device_is_compiled_for_by_its_own_compiler(
    device: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def compiled(function: Callable[..., Any], *, backend: str, **_: Any) -> Callable[..., Any]:
        asked.append(backend)
        return function

    monkeypatch.setattr(torch, "compile", compiled)
    config = make_config(model={"num_layers": 1})
    layout = make_layout(config, device, 1)
    prepare(Llama(config.model, 8), layout, PRECISIONS["fp32"], compile_backend=DEVICES[device].compile_backend)
    assert asked == ["neuron" if device == "neuron" else "inductor"]


@pytest.mark.parametrize("device", [name for name in DEVICES if name != "cpu"])
def test_missing_device_is_an_error_with_a_hint(device: str, make_config: MakeConfig) -> None:
    if getattr(torch, device, None) is not None and torch.get_device_module(device).is_available():
        pytest.skip(f"this machine has {device}")
    with pytest.raises(
        DependencyError, match=rf"backend\.device={device}: .*(no such device|does not support it)"
    ) as caught:
        TorchNative(make_config(backend={"device": device}))
    assert "backend.device=cpu" in caught.value.hint


def test_a_node_without_torchao_or_without_fp8_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def get_device_capability(device: Any) -> tuple[int, int]:
            return capability

    installed = [True]
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed[0] or None)
    device, capability = torch.device("cuda", 0), (9, 0)
    check_fp8(device)
    capability = (8, 0)
    with pytest.raises(DependencyError, match=r"needs compute capability 8\.9, but this device has 8\.0") as error:
        check_fp8(device)
    assert error.value.hint == "set precision=mixed"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for name, works in (("gfx942:sramecc+:xnack-", True), ("gfx90a", False)):
        properties = SimpleNamespace(gcnArchName=name)
        Module.get_device_properties = lambda device, properties=properties: properties  # type: ignore[attr-defined]
        if works:
            check_fp8(device)
            continue
        with pytest.raises(DependencyError, match=r"needs one of gfx942, gfx950, but this device is gfx90a"):
            check_fp8(device)
    installed[0] = False
    with pytest.raises(DependencyError, match="torchao is not installed") as error:
        check_fp8(device)
    assert "pip install torchao" in error.value.hint


def test_only_the_table_names_devices() -> None:
    root = Path(__file__).parents[2]
    words = re.compile(r"cuda|nccl|[\"']gloo[\"']|TORCHINDUCTOR", re.IGNORECASE)
    naming = {
        path.relative_to(root).as_posix()
        for package in ("trainer", "eval", "flows", "hlatctl")
        for path in (root / package).rglob("*.py")
        if any(words.search(line) for line in _code_of(path))
    }
    # Log messages of all devices' libraries, their variables for one machine, a runner with one device, and names of
    # torchtitan's settings.
    settings = {"trainer/torchtitan/configuration.py", "trainer/torchtitan/training.py"}
    gpus = "trainer/gpu_node.py"  # the vendors' libraries and variables
    assert naming == {"flows/recovery/failure_causes.py", "hlatctl/node.py", "eval/serving/runners.py", gpus, *settings}


def _code_of(path: Path) -> list[str]:
    """Strings and names of a module, without comments and docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    return [
        str(node.value) if isinstance(node, ast.Constant) else node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(tree)
        if isinstance(node, (ast.Constant, ast.Attribute, ast.Name)) and id(node) not in docstrings
    ]
