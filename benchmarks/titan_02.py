"""The peer on machines whose PyTorch is too old for torchtitan 0.3: torchtitan 0.2 by itself, in one process.

``titan_loop --alone`` uses it where 0.2 is installed. It has the same model, batch and number format, its own optimizer
and metrics, and logs every step. Its tokens are in memory, so it spends no time on data.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from conf.devices import DEVICES
from conf.schema import Config, ModelConfig

_MODEL = "hlatctl"


def engine_of(config: Config, tokens: Path) -> Any:
    """Return torchtitan's trainer.

    Args:
        tokens: of each step: .npy, (steps, sequences, length + 1).
    """
    import torchtitan

    device = config.backend.device
    os.environ["LOCAL_RANK"] = "0"
    if device == "cpu":
        from trainer.torchtitan.cpu import device_module

        for name, module in list(sys.modules.items()):  # the package has imported what reads them
            if name.startswith(torchtitan.__name__) and hasattr(module, "device_type"):
                module.device_type, module.device_module = "cpu", device_module()  # type: ignore[attr-defined]
        torch._dynamo.config.disable = True
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(DEVICES[device].process_group, store=store, rank=0, world_size=1)
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.models.llama3 import get_train_spec
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import Trainer

    class Batches(BaseDataLoader):  # type: ignore[misc]
        def __init__(self, **_: Any) -> None:
            self.state: dict[str, Any] = {}

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            for step in torch.from_numpy(np.load(tokens)).long():
                for batch in step.chunk(config.grad_accum_steps):
                    yield {"input": batch[:, :-1].contiguous()}, batch[:, 1:].contiguous()

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.state = state_dict

    changed = {"model_args": {_MODEL: _model(config.model)}, "build_dataloader_fn": Batches, "build_tokenizer_fn": None}
    register_train_spec(_MODEL, dataclasses.replace(get_train_spec(), **changed))
    return Trainer(_settings(config))


def _settings(config: Config) -> Any:
    from torchtitan.config import JobConfig

    job, optimizer, device = JobConfig(), config.optimizer, config.backend.device
    job.model.name = job.model.flavor = _MODEL
    job.job.dump_folder = config.runs_dir
    job.metrics.log_freq = 1
    job.optimizer.lr, job.optimizer.eps, job.optimizer.weight_decay = (
        optimizer.lr,
        optimizer.eps,
        optimizer.weight_decay,
    )
    job.optimizer.beta1, job.optimizer.beta2 = optimizer.beta1, optimizer.beta2
    job.optimizer.implementation = "fused" if DEVICES[device].fused_adamw else "foreach"
    job.lr_scheduler.warmup_steps = optimizer.warmup_steps
    job.training.local_batch_size = config.micro_batch_size
    job.training.global_batch_size = config.train.global_batch_size
    job.training.seq_len, job.training.steps = config.train.seq_len, config.total_steps
    job.training.max_norm = optimizer.max_grad_norm
    job.activation_checkpoint.mode = "full" if config.parallel.activation_checkpointing == "full" else "none"
    job.compile.enable = config.backend.compile
    return job


def _model(model: ModelConfig) -> Any:
    from torchtitan.models.llama3 import TransformerModelArgs

    usual = int(2 * 4 * model.hidden_size / 3)
    return TransformerModelArgs(
        dim=model.hidden_size,
        n_layers=model.num_layers,
        n_heads=model.num_heads,
        n_kv_heads=model.num_kv_heads,
        vocab_size=model.vocab_size,
        # torchtitan rounds up to a multiple: of the wanted size, from half of it.
        ffn_dim_multiplier=model.intermediate_size / 2 / usual,
        multiple_of=model.intermediate_size,
        rope_theta=model.rope_theta,
    )
