"""The peer: torchtitan's Llama 3 on the same model shape, batch and tokens.

Written for torchtitan 0.2.2, whose functions do the work as its own trainer calls them: model, initial weights,
``torch.compile`` of each block and of the loss, autocast to BF16 on one device, clipping and fused AdamW. ``--fsdp``
shards over the one device instead, which is its mixed precision on several. Data loading, metrics, checkpoints and the
schedule of the learning rate are not used. Prints what it measured as JSON.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import peers
from conf.devices import DEVICES
from conf.load import load
from conf.schema import Config, ModelConfig


def main() -> None:
    """Train some steps and print what was measured."""
    peers.add_packages()
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.distributed import utils as distributed
    from torchtitan.tools.utils import GarbageCollection

    parser = peers.arguments()
    parser.add_argument("--fsdp", action="store_true")
    given = parser.parse_args()
    config, device = load(given.config), torch.device(given.device)
    job, dims = _job(config), _one_device()
    mesh = _mesh(device, given.config.with_name("titan-store")) if given.fsdp else None
    model = _model(config, job, dims, device, mesh)
    optimizers = build_optimizers([model], job.optimizer, dims)
    loss_of, amp = build_cross_entropy_loss(job), distributed.maybe_enable_amp(dims, "bfloat16", device.type)
    collector = GarbageCollection(gc_freq=job.training.gc_freq)
    batches, times = peers.micro_batches(config, given, device), peers.StepTimes(device)
    for number, parts in enumerate(batches, 1):
        collector.run(number)
        optimizers.zero_grad()
        total = torch.zeros((), device=device)
        for tokens in parts:
            with nullcontext() if given.fsdp else amp:
                logits = model(tokens[:, :-1].contiguous())
                loss = loss_of(logits, tokens[:, 1:].contiguous()) / config.tokens_per_step
            del logits  # before the backward pass, for less memory
            loss.backward()
            total += loss.detach()
        distributed.clip_grad_norm_(list(model.parameters()), config.optimizer.max_grad_norm, foreach=True)
        optimizers.step()
        times.end_step()
    peers.report(model, times, device, total)
    if mesh is not None:
        dist.destroy_process_group()


def _job(config: Config) -> Any:
    from torchtitan.config import JobConfig

    job = JobConfig()
    job.compile.enable = True
    job.training.seq_len = config.train.seq_len
    job.optimizer.lr = config.optimizer.lr
    job.optimizer.beta1, job.optimizer.beta2 = config.optimizer.beta1, config.optimizer.beta2
    job.optimizer.weight_decay = config.optimizer.weight_decay
    return job


def _one_device() -> Any:
    from torchtitan.distributed import ParallelDims

    return ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)


def _model(config: Config, job: Any, dims: Any, device: torch.device, mesh: DeviceMesh | None) -> nn.Module:
    """Build the model on the meta device and compile it, then allocate and initialize it."""
    from torchtitan.models.llama3 import Transformer, parallelize_llama
    from torchtitan.models.llama3.infra.parallelize import apply_fsdp

    with torch.device("meta"):
        model = Transformer(_shape(config.model, config.train.seq_len))
    parallelize_llama(model, dims, job)
    if mesh is not None:
        apply_fsdp(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, pp_enabled=False)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights()
    return model  # type: ignore[no-any-return]


def _shape(model: ModelConfig, seq_len: int) -> Any:
    """Return torchtitan's arguments of the model.

    Raises:
        ValueError: torchtitan 0.2.2 has no such model.
    """
    from torchtitan.models.llama3 import TransformerModelArgs

    if model.tie_embeddings or model.query_width != model.hidden_size or model.qk_norm != "none":
        raise ValueError("torchtitan's Llama 3 needs untied embeddings, heads of hidden / heads and no norm of heads")
    return TransformerModelArgs(
        dim=model.hidden_size,
        n_layers=model.num_layers,
        n_heads=model.num_heads,
        n_kv_heads=model.num_kv_heads,
        vocab_size=model.vocab_size,
        # It rounds multiplier x 8/3 x dim up to a multiple: of the intermediate size, if that is not exceeded.
        multiple_of=model.intermediate_size,
        ffn_dim_multiplier=model.intermediate_size / (4 * model.hidden_size),
        norm_eps=model.rms_norm_eps,
        rope_theta=model.rope_theta,
        max_seq_len=seq_len,
    )


def _mesh(device: torch.device, store: Path) -> DeviceMesh:
    """Return a mesh of this process alone, which meets itself in the file ``store``."""
    store.unlink(missing_ok=True)
    group = DEVICES[device.type].process_group
    dist.init_process_group(group, init_method=f"file://{store.absolute()}", rank=0, world_size=1)
    return init_device_mesh(device.type, (1,), mesh_dim_names=("fsdp",))


if __name__ == "__main__":
    main()
