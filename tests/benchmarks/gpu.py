"""Tokens/s, MFU and memory of the trainer on one accelerator: each switch on its own, and a plain loop beside it.

Needs no package but those of the trainer. Each case is a process of its own, so that its peak of memory is its own. It
trains with the real loop on packed text from this interpreter's library. Without a GPU the same cases run on the CPU
with a small model, which shows that they work and nothing else. ``HLATCTL_BENCH_SECONDS`` (540) limits the whole.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from conf import load
from conf.schema import Config
from hlatctl.plan.memory import memory
from hlatctl.run import files
from hlatctl.run.paths import RunPaths

_ROOT = Path(__file__).parents[2]
#: Models for "the largest that fits", largest first; the smallest is the one of all other cases.
_MODELS = ("llama_7b", "llama_3b", "llama_1b")
_SHAPES = {"llama_3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_layers": 26, "num_heads": 24}}
_LIMIT_S = float(os.environ.get("HLATCTL_BENCH_SECONDS", "540"))

Changes = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Args:
        changes: of the configuration, by group.
        model: its shape.
        flags: of ``gpu_case``.
        is_peer: it is the plain loop.
    """

    name: str
    changes: Changes = field(default_factory=dict)
    model: str = _MODELS[-1]
    flags: tuple[str, ...] = ()
    is_peer: bool = False


_PLAIN = Case("plain PyTorch loop, compiled", is_peer=True)
_OURS = Case("hlatctl")
#: In this order; what the time does not suffice for is not run. The two that are compared are run twice, alternating.
_CASES = (
    _PLAIN,
    _OURS,
    replace(_PLAIN, name=f"{_PLAIN.name}, again"),
    replace(_OURS, name="hlatctl, again"),
    Case("not compiled", {"backend": {"compile": False}}),
    Case("precision=fp8, rowwise", {"precision": {"name": "fp8"}}),
    Case("precision=fp8, tensorwise", {"precision": {"name": "fp8", "fp8_scaling": "tensorwise"}}),
    Case("host waits for the device", flags=("--wait",)),
    Case("precision=bf16_sr", {"precision": {"name": "bf16_sr"}}),
    Case("activation_checkpointing=selective", {"parallel": {"activation_checkpointing": "selective"}}),
    Case("activation_checkpointing=operators", {"parallel": {"activation_checkpointing": "operators"}}),
    Case("activation_checkpointing=full", {"parallel": {"activation_checkpointing": "full"}}),
    Case("optimizer=muon", {"optimizer": {"name": "muon"}}),
    Case("mask_across_documents", {"data": {"mask_across_documents": True}}),
    Case("with checkpoints", {"checkpoint": {"every_steps": 25}, "train": {"max_steps": 60}}, flags=("--save",)),
    Case("profile", flags=("--profile",)),
)


def run() -> None:
    """Print the table."""
    started_s = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _introduce(device)
    with tempfile.TemporaryDirectory(prefix="hlatctl-gpu-") as folder:
        dataset = _prepare(Path(folder), device)
        for case in _with_largest(device):
            left_s = _LIMIT_S - (time.monotonic() - started_s)
            if left_s < 20:
                print(f"{case.name:36s} not run: {_LIMIT_S:g} s are over")
                continue
            _print(case, _measure(case, Path(folder), dataset, device, left_s))


def _introduce(device: str) -> None:
    if device == "cuda":
        name, total = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
        print(f"{name}, {total / 2**30:.1f} GiB, torch {torch.__version__}; sequences of 4,096 tokens")
    else:
        print("No GPU: a small model on the CPU, to see that the cases run. The figures mean nothing for a GPU.")
    print("MFU: 6 x parameters + 12 x layers x hidden x sequence FLOPs per token; recomputation does not count")
    print(f"{'':36s} {'step s: median':>14s} {'min':>7s} {'tokens/s':>10s} {'MFU':>6s} {'peak GiB':>9s} {'waits':>6s}")


def _config(case: Case, folder: Path, device: str) -> Config:
    small = device == "cpu"
    model = yaml.safe_load(
        (_ROOT / "conf/model" / f"{'llama_1b' if case.model in _SHAPES else case.model}.yaml").read_text()
    )
    model |= _SHAPES.get(case.model, {}) | {"name": case.model}
    if small:
        model |= {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4}
        model["vocab_size"] = 2048
    micro = 4 if case.model == _MODELS[-1] else 1
    groups: dict[str, dict[str, Any]] = {
        "model": model,
        "tokenizer": {"train_vocab_size": 2000 if small else 8192},
        "precision": {"name": "mixed"},
        "train": {
            "seq_len": 64 if small else 4096,
            "micro_batch_size": micro,
            "global_batch_size": 2 * micro,
            "tokens": 10**12,
            "max_steps": 12 if small else 30,
        },
        "optimizer": {"warmup_steps": 5},
        "eval": {"enabled": False},
        "checkpoint": {"every_steps": 10**6, "keep": 1},
        "backend": {"name": "torch_native", "device": device},
        "cluster": {"threads_per_process": 1 if small else 8},
    }
    for group, keys in case.changes.items():
        groups[group] = {**groups.get(group, {}), **keys}
    return load.decode({"runs_dir": os.fspath(folder), **groups})


def _prepare(folder: Path, device: str) -> str:
    from trainer.data.prepare import prepare

    prepare(_config(_OURS, folder, device), folder / "data")
    return (folder / "data" / "dataset.json").read_text(encoding="utf-8")


def _with_largest(device: str) -> list[Case]:
    """Return all cases, with the largest model that fits by the planner's arithmetic after the first four."""
    cases = list(_CASES)
    if device != "cuda":
        return cases
    held = torch.cuda.get_device_properties(0).total_memory
    for model in _MODELS[:-1]:
        case = Case(f"{model}, all recomputed", {"parallel": {"activation_checkpointing": "full"}}, model)
        if memory(_config(case, Path("unused"), device)).need_bytes < 0.95 * held:
            return [*cases[:4], case, *cases[4:]]
    return cases


def _measure(case: Case, folder: Path, dataset: str, device: str, left_s: float) -> dict[str, Any]:
    """Run a case, and return what it printed, or ``error``."""
    run = RunPaths(folder / case.name.replace(" ", "-").replace("/", "-"))
    config = _config(case, folder, device)
    files.write_text(run.config, files.seal_lines(load.dump(config)))
    files.write_text(run.dataset, dataset)
    program = "plain_loop" if case.is_peer else "gpu_case"
    own = [
        "--config",
        os.fspath(run.config),
        "--steps",
        str(config.total_steps),
        "--processes",
        "1",
        "--device",
        device,
    ]
    arguments = own if case.is_peer else [os.fspath(run.root), *case.flags]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": os.fspath(folder / "inductor")}
    environment["OMP_NUM_THREADS"] = str(config.cluster.threads_per_process)
    try:
        done = subprocess.run(
            [sys.executable, "-m", f"tests.benchmarks.{program}", *arguments],
            cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=left_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"not finished in the {left_s:.0f} s that were left"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:200]}
    result: dict[str, Any] = json.loads(lines[-1])
    result.setdefault("tokens_per_s", config.tokens_per_step / result["step_s"])
    return result


def _print(case: Case, result: dict[str, Any]) -> None:
    if "error" in result:
        print(f"{case.name:36s} {result['error']}", flush=True)
        return
    mfu, peak, waits = (result.get(key) for key in ("mfu", "peak_bytes", "data_wait"))
    cells = [
        f"{result['step_s']:14.3f} {result['least_s']:7.3f} {result['tokens_per_s']:10,.0f}",
        "     ?" if mfu is None else f"{mfu:6.1%}",
        "        ?" if peak is None else f"{peak / 2**30:9.2f}",
        "" if waits is None else f"{waits:6.2%}",
    ]
    print(f"{case.name:36s} {' '.join(cells)}", flush=True)
    for line in result.get("notes", []):
        print(f"    {line}")


if __name__ == "__main__":
    run()
