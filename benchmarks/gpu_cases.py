"""The cases of the benchmark ``gpu``: their configurations, programs and order."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from conf import load
from conf.schema import Config
from hlatctl.plan.memory import memory

_ROOT = Path(__file__).parents[1]
#: Models for "the largest that fits", largest first; the smallest is the one of all other cases.
_MODELS = ("llama_7b", "llama_3b", "llama_1b")
_SHAPES = {"llama_3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_layers": 26, "num_heads": 24}}

Changes = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Args:
        changes: changes to the configuration, by group.
        model: its shape.
        program: module of ``benchmarks`` that measures.
        flags: arguments of the program.
    """

    name: str
    changes: Changes = field(default_factory=dict)
    model: str = _MODELS[-1]
    program: str = "gpu_case"
    flags: tuple[str, ...] = ()


def _recomputing(how: str) -> Case:
    return Case(f"activation_checkpointing={how}", {"parallel": {"activation_checkpointing": how}})


def _titan(name: str, changes: Changes | None = None, *flags: str) -> Case:
    return Case(name, {"backend": {"name": "torchtitan"}, **(changes or {})}, program="titan_loop", flags=flags)


#: To which the others are compared.
OURS = Case("hlatctl")
#: The plain loop compiles longest, so it is last.
_BF16 = (
    _titan("torchtitan by itself", None, "--alone"),
    _titan("hlatctl, backend=torchtitan"),
    OURS,
    Case("plain PyTorch loop", program="plain_loop"),
)
_LOSS = Case("the loss alone", program="loss_case")
_PROFILE = Case("profile", flags=("--profile",))
_SWITCHES = (
    Case("not compiled", {"backend": {"compile": False}}),
    _titan("torchtitan, mask_across_documents", {"data": {"mask_across_documents": True}}),
    _titan("torchtitan, all recomputed", {"parallel": {"activation_checkpointing": "full"}}),
    Case("host waits for the device", flags=("--wait",)),
    Case("precision=bf16_sr", {"precision": {"name": "bf16_sr"}}),
    *map(_recomputing, ("selective", "full")),
    Case("optimizer=muon", {"optimizer": {"name": "muon"}}),
    Case("mask_across_documents", {"data": {"mask_across_documents": True}}),
    Case("with checkpoints", {"checkpoint": {"every_steps": 25}, "train": {"max_steps": 60}}, flags=("--save",)),
)


def schedule(wanted: Sequence[str], memory_bytes: int | None) -> list[Case]:
    """Return the cases in the order in which they run, most important first; those that are compared run twice.

    Args:
        wanted: parts of names; empty: all cases.
        memory_bytes: memory of the device; None: no case for the largest model that fits.
    """
    largest = [] if memory_bytes is None else _largest(memory_bytes)
    cases = [*_BF16, _LOSS, *_BF16, _PROFILE, *largest, *_SWITCHES]
    return [case for case in cases if not wanted or any(part in case.name for part in wanted)]


def _largest(memory_bytes: int) -> list[Case]:
    """Return the case with the largest model that fits by the planner's arithmetic, if it is not the usual one."""
    for model in _MODELS[:-1]:
        case = Case(f"{model}, all recomputed", {"parallel": {"activation_checkpointing": "full"}}, model)
        if memory(config_of(case, Path("unused"), "cuda")).need_bytes < 0.95 * memory_bytes:
            return [case]
    return []


def prepare(folder: Path, device: str) -> None:
    """Prepare the corpus of all cases in a folder, and the peers' tokens; nothing is done twice."""
    from trainer.data.loader import Loader
    from trainer.data.prepare import prepare

    if (folder / "tokens.npy").exists():
        return
    config = config_of(OURS, folder, device)
    prepare(config, folder / "data")
    dataset = json.loads((folder / "data" / "dataset.json").read_text(encoding="utf-8"))
    loader = Loader(config, dataset, rank=0, size=1)
    steps = [loader.next() for _ in range(config.total_steps)]
    loader.close()
    tokens = [torch.cat((inputs, targets[:, -1:]), dim=1).int().numpy() for inputs, targets in steps]
    np.save(folder / "tokens.npy", np.stack(tokens))


def config_of(case: Case, folder: Path, device: str) -> Config:
    """Return a case's configuration: 1.1 B parameters and 4,096 tokens, or a small model on a CPU."""
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
            "max_steps": 12 if small else 20,
        },
        "optimizer": {"warmup_steps": 5},
        "eval": {"enabled": False},
        "checkpoint": {"every_steps": 10**6, "keep": 1},
        "backend": {"name": "torch_native", "device": device},
        "cluster": {"threads_per_process": 1 if small else 8},
    }
    for group, keys in case.changes.items():
        groups[group] = {**groups.get(group, {}), **keys}
    if small:
        groups["backend"]["compile"] = False  # a CPU's compiler says nothing of a GPU's, and takes minutes
    return load.decode({"runs_dir": os.fspath(folder), **groups})
