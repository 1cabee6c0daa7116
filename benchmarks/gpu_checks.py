"""Whether training on an accelerator is right: each check is a process of ``python -m benchmarks gpu``, and a test.

They train a small model on the same packed text as the speed's cases. A check raises an AssertionError, or returns its
figures. On a CPU they show that they work themselves. ``python -m benchmarks.gpu_checks NAME DEVICE FOLDER`` runs one
in a folder with a prepared corpus (``prepare``), and prints its figures as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu_cases import Changes
from conf import load
from conf.devices import DEVICES
from conf.environment import check_torchtitan
from conf.schema import Config
from conf.training_rules import LOSS_TOLERANCE, NORM_TOLERANCE, relative_difference
from conf.validate import validate
from hlatctl.run import files
from hlatctl.run.checkpoint import checkpoint_steps
from hlatctl.run.errors import ERROR_FILE_ENV, DependencyError, TrainingError, load_error
from hlatctl.run.journal import Event, read_events
from hlatctl.run.paths import RunPaths
from trainer.device_check import check_fp8
from trainer.process import run_rank

#: BF16 keeps 8 bits; a gradient sums over four layers of it.
_BF16_GRADIENT = 3e-2
_FP32_GRADIENT = 1e-3
#: FP8 keeps 3 or 4 bits of each factor, scaled.
_FP8_LOSS = 2e-2
_STEPS = 6
_EXITS_S = 10.0
#: The name of a child of the check ``exit_after_error``.
_FAILS = "fails"
_numbers = itertools.count(1)

Figures = dict[str, Any]


def config_of(folder: Path, device: str, changes: Changes | None = None) -> Config:
    """Return the configuration of a check: a small model with heads that fused attention takes, smaller on a CPU."""
    small = not torch.cuda.is_available()
    groups: dict[str, dict[str, Any]] = {
        "model": {
            "vocab_size": 512 if small else 2048,
            "hidden_size": 64 if small else 256,
            "intermediate_size": 128 if small else 512,
            "num_layers": 2 if small else 4,
            "num_heads": 4,
            "num_kv_heads": 2,
        },
        "tokenizer": {"train_vocab_size": 500 if small else 2000},
        "precision": {"name": "mixed"},
        "train": {
            "seq_len": 64 if small else 256,
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "tokens": 10**9,
            "max_steps": _STEPS,
        },
        "optimizer": {"lr": 1e-3, "warmup_steps": 2},
        "eval": {"enabled": False},
        "checkpoint": {"every_steps": _STEPS // 2, "keep": 9},
        "backend": {"name": "torch_native", "device": device, "compile": False},
        "cluster": {"threads_per_process": 1},
    }
    for group, keys in (changes or {}).items():
        groups[group] = {**groups.get(group, {}), **keys}
    config = load.decode({"runs_dir": os.fspath(folder), **groups})
    validate(config)
    return config


def prepare(folder: Path) -> None:
    """Prepare the corpus of all checks in a folder."""
    from trainer.data.prepare import prepare

    if not (folder / "data").exists():
        prepare(config_of(folder, "cpu"), folder / "data")


def _new_run(config: Config, folder: Path) -> RunPaths:
    run = RunPaths(folder / f"check-{os.getpid()}-{next(_numbers)}")
    files.write_text(run.config, files.seal_lines(load.dump(config)))
    files.write_text(run.dataset, (folder / "data" / "dataset.json").read_text(encoding="utf-8"))
    return run


def _train(run: RunPaths, attempt: int = 1) -> list[dict[str, Any]]:
    """Train in this process; return the events of the attempt's steps. DependencyError: torchtitan can't train here."""
    config = load.load(run.config)
    from trainer.__main__ import main

    if config.backend.name == "torchtitan":
        check_torchtitan(config)
    assert main(["--run-dir", os.fspath(run.root), "--attempt", str(attempt)]) == 0
    return [event for event in read_events(run) if event["kind"] == "step" and event["attempt"] == attempt]


class _Once:
    """Loss and gradients of one batch by the native trainer."""

    def __init__(self, config: Config, folder: Path, *, shards: bool = False) -> None:
        from trainer.backends.torch_native import TorchNative
        from trainer.data.loader import Loader

        backend = TorchNative(config)
        if shards:
            backend._layout = _sharded_over_one(config, backend.device)
        self.model = backend.build_model(document_end_id=None)
        optimizer = backend.optimizer(self.model)
        optimizer.zero_grad()
        dataset = json.loads((folder / "data" / "dataset.json").read_text(encoding="utf-8"))
        loader = Loader(config, dataset, rank=0, size=1)
        inputs, targets = loader.next()
        loader.close()
        self.loss = float(backend.forward_backward(self.model, inputs, targets))
        self.gradients: Tensor = optimizer.gradients.float().cpu()


def _sharded_over_one(config: Config, device: torch.device) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    from trainer.parallel.layout import Layout

    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(DEVICES[device.type].process_group, store=store, rank=0, world_size=1)
    mesh = DeviceMesh(device.type, torch.zeros(1, 1, 1, dtype=torch.int), mesh_dim_names=("pp", "tp", "dp"))
    return Layout(config=config, mesh=mesh, shards_parameters=True)


def _difference(ours: Tensor, exact: Tensor) -> float:
    return float((ours - exact).norm() / exact.norm())


def gradients(device: str, folder: Path) -> Figures:
    """Check losses and gradients against FP32 on a CPU, in FP32 and mixed precision."""
    exact = _Once(config_of(folder, "cpu", {"precision": {"name": "fp32"}}), folder)
    figures: Figures = {}
    for precision, most in (("fp32", _FP32_GRADIENT), ("mixed", _BF16_GRADIENT)):
        ours = _Once(config_of(folder, device, {"precision": {"name": precision}}), folder)
        off = _difference(ours.gradients, exact.gradients)
        figures |= {f"{precision}_loss_off": relative_difference(ours.loss, exact.loss), f"{precision}_off": off}
        assert off < most, f"{precision}: gradients differ by {off:.2g}, must be below {most:g}"
        assert figures[f"{precision}_loss_off"] < LOSS_TOLERANCE, figures
    return figures


def recomputation(device: str, folder: Path) -> Figures:
    """Check that each recomputation, compiled or not, gives the gradients of the plain layers."""
    plain = _Once(config_of(folder, device), folder)
    figures: Figures = {}
    for level, compiled in itertools.product(("none", "selective", "full"), (False, True)):
        if (level, compiled) == ("none", False) or (compiled and device == "cpu"):
            continue
        changes: Changes = {"parallel": {"activation_checkpointing": level}, "backend": {"device": device}}
        config = config_of(folder, device, changes)
        ours = _Once(replace(config, backend=replace(config.backend, compile=compiled)), folder)
        name = f"{level}{', compiled' * compiled}"
        figures[name] = off = _difference(ours.gradients, plain.gradients)
        assert off < _BF16_GRADIENT, f"{name}: gradients differ by {off:.2g}, must be below {_BF16_GRADIENT:g}"
    return figures


def fsdp_of_one(device: str, folder: Path) -> Figures:
    """Check that FSDP on a mesh of one process gives the gradients of the plain layers, with its prefetching."""
    config = config_of(folder, device, {"parallel": {"data_parallel": "fsdp"}})
    plain, sharded = _Once(config, folder), _Once(config, folder, shards=True)
    off = _difference(sharded.gradients, plain.gradients)
    assert off < _BF16_GRADIENT, f"gradients differ by {off:.2g}, must be below {_BF16_GRADIENT:g}"
    return {"off": off, "loss_off": relative_difference(sharded.loss, plain.loss)}


def no_waits(device: str, folder: Path) -> Figures:
    """Check that the host never waits for the device in five steps, and that no step after the first recompiles."""
    from torch._dynamo.utils import counters

    from trainer.backends.torch_native import TorchNative
    from trainer.step.loop import Training

    config = config_of(folder, device, {"train": {"max_steps": 9}, "backend": {"compile": device != "cpu"}})
    run = _new_run(config, folder)
    training = Training(config, run, TorchNative(config), None)

    def step(count: int) -> None:
        for _ in range(count):
            training.step += 1
            training._start_step()
            if len(training.pending) > 2:
                training.pending.popleft()  # without reading it

    step(3)
    graphs = counters["stats"]["unique_graphs"]
    if device != "cpu":
        torch.get_device_module(device).synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        step(5)
    finally:
        if device != "cpu":
            torch.cuda.set_sync_debug_mode("default")
    recompiled = counters["stats"]["unique_graphs"] - graphs
    assert recompiled == 0, f"{recompiled} graphs were compiled after the first steps"
    training._finish_steps(leave=0)
    training.batches.close()
    return {"graphs": graphs}


def pinned_copies(device: str, folder: Path) -> Figures:
    """Check that copies for a checkpoint are the tensors' bits, while later steps change the tensors."""
    from trainer.backends.torch_native import TorchNative
    from trainer.step.loop import Training

    config = config_of(folder, device)
    training = Training(config, _new_run(config, folder), TorchNative(config), None)
    host: dict[str, Tensor] = {}
    for _ in range(3):
        training.step += 1
        training._start_step()
        before = {name: tensor.detach().clone() for name, tensor in training.optimizer.tensors().items()}
        host = training.backend.to_host(training.optimizer.tensors(), host)
        training.step += 1
        training._start_step()
        assert all(torch.equal(host[name], before[name].cpu()) for name in before), "a copy has other bits"
    training._finish_steps(leave=0)
    training.batches.close()
    return {"bytes": sum(tensor.nbytes for tensor in host.values())}


def resume(device: str, folder: Path) -> Figures:
    """Check that a resumed run repeats the steps after its checkpoint, and writes the bits that it read."""
    return _resumed(config_of(folder, device))


def torchtitan_resume(device: str, folder: Path) -> Figures:
    """Check the same with torchtitan, whose documents are masked by FlexAttention."""
    backend = {"name": "torchtitan", "compile": device != "cpu"}
    return _resumed(config_of(folder, device, {"data": {"mask_across_documents": True}, "backend": backend}))


def _resumed(config: Config) -> Figures:
    folder, exactly = Path(config.runs_dir), config.backend.device == "cpu"
    run = _new_run(config, folder)
    whole = {event["step"]: event for event in _train(run)}
    last = max(checkpoint_steps(run))
    shutil.rmtree(run.checkpoint(last))
    again = _train(run, 2)
    assert len(again) == _STEPS // 2, "it did not continue from its checkpoint"
    return repeated(whole, again, exactly=exactly)


def repeated(whole: Mapping[int, Event], again: Iterable[Event], *, exactly: bool) -> Figures:
    """Check that steps of a resumed run have the losses and gradient norms of the run that it continues."""
    pairs = [(event, whole[event["step"]]) for event in again if event["step"] in whole]
    assert pairs, "no step was trained twice"
    loss, norm = (max(relative_difference(a[key], b[key]) for a, b in pairs) for key in ("loss", "grad_norm"))
    limits = (0.0, 0.0) if exactly else (LOSS_TOLERANCE, NORM_TOLERANCE)
    assert loss <= limits[0], f"losses differ by {loss:.2g}"
    assert norm <= limits[1], f"gradient norms differ by {norm:.2g}"
    return {"steps": len(pairs), "loss_off": loss, "norm_off": norm, "last_loss": pairs[-1][0]["loss"]}


def engines(device: str, folder: Path) -> Figures:
    """Check that both engines' losses fall alike on the same batches, from different random weights."""
    falls = {}
    for name in ("torchtitan", "torch_native"):
        config = config_of(folder, device, {"backend": {"name": name}, "train": {"max_steps": 20}})
        steps = _train(_new_run(config, folder))
        falls[name] = steps[0]["loss"] - steps[-1]["loss"]
    assert min(falls.values()) > 0.2, falls
    assert relative_difference(*falls.values()) < 0.2, falls
    return falls


def fp8(device: str, folder: Path) -> Figures:
    """Check that FP8's loss is near that of mixed precision, but not equal; skipped where the device has no FP8."""
    if DEVICES[device].fp8_capability is None:
        return {"skipped": "the device has no products in FP8"}
    check_fp8(torch.device(device))  # on AMD's GPUs the architecture decides
    losses = []
    for name in ("mixed", "fp8"):
        backend = {"name": "torchtitan", "compile": True}  # the native engine has no FP8
        config = config_of(folder, device, {"precision": {"name": name}, "backend": backend})
        losses.append(_train(_new_run(config, folder))[-1]["loss"])
    off = relative_difference(losses[1], losses[0])
    assert 0.0 < off < _FP8_LOSS, f"the loss differs by {off:.2g}"
    return {"loss_off": off}


def exit_after_error(device: str, folder: Path) -> Figures:
    """Check that a process in a group of the device's library ends soon after an error, and tells it."""
    run = _new_run(config_of(folder, device, {"optimizer": {"lr": 1e30, "warmup_steps": 0}}), folder)
    error, log = run.root / "error.json", run.root / "log"
    command = [sys.executable, "-m", "benchmarks.gpu_checks", _FAILS, device, os.fspath(run.root)]
    with log.open("w") as output:
        environment = {**os.environ, ERROR_FILE_ENV: os.fspath(error)}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        while process.poll() is None and not error.exists():
            time.sleep(0.05)
        told_s = time.monotonic()
        try:
            code = process.wait(_EXITS_S)
        finally:
            process.kill()
    assert isinstance(load_error(error), TrainingError), log.read_text()[-2000:]
    assert code == TrainingError.exit_code, code
    return {"exits_after_s": time.monotonic() - told_s}


def _fail(run: RunPaths) -> int:
    """Train a run whose loss becomes infinite, in a process group of one."""
    from trainer.backends.torch_native import TorchNative
    from trainer.step.loop import Training

    config = load.load(run.config)
    backend = TorchNative(config)
    _sharded_over_one(config, backend.device)
    dist.all_reduce(torch.zeros(1, device=backend.device))  # NCCL connects when it is first used
    return Training(config, run, backend, None).run()


#: In the order in which they run: the most important first.
CHECKS: dict[str, Callable[[str, Path], Figures]] = {
    function.__name__: function
    for function in (
        gradients,
        resume,
        torchtitan_resume,
        fsdp_of_one,
        recomputation,
        no_waits,
        pinned_copies,
        engines,
        exit_after_error,
        fp8,
    )
}


def run_one(checks: Mapping[str, Callable[[str, Path], Figures]]) -> None:
    """Run the check of the command line, ``NAME DEVICE FOLDER``, and print its figures."""
    name, device, folder = sys.argv[1:]
    try:
        figures = checks[name](device, Path(folder))
    except DependencyError as error:
        figures = {"skipped": error.message}
    print(json.dumps(figures))


if __name__ == "__main__":
    if sys.argv[1] == _FAILS:
        run_rank(lambda: _fail(RunPaths(Path(sys.argv[3]))))
    run_one(CHECKS)
