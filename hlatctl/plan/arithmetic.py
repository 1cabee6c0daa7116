"""FLOPs and the budget of a run; pure functions. Parameters and checkpoint sizes are in ``conf.sizes``."""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import Config
from conf.sizes import checkpoint_bytes, checkpoints_kept, flops_per_token, parameters, runs_dir_bytes


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a run needs.

    Args:
        flops_per_token: forward and backward pass.
        checkpoints_kept: the most that are stored at once, without the one that is being written.
        disk_bytes: of these checkpoints and the one that is being written.
    """

    parameters: int
    flops_per_token: int
    total_steps: int
    tokens_per_step: int
    total_tokens: int
    total_flops: int
    milestones: dict[int, int]
    world_size: int
    data_parallel_size: int
    micro_batch_size: int
    grad_accum_steps: int
    checkpoint_bytes: int
    checkpoints_kept: int
    disk_bytes: int


def budget(config: Config) -> Budget:
    """Return the budget of a configuration."""
    total_parameters = parameters(config.model).total
    per_token = flops_per_token(config.model, config.train.seq_len)
    return Budget(
        parameters=total_parameters,
        flops_per_token=per_token,
        total_steps=config.total_steps,
        tokens_per_step=config.tokens_per_step,
        total_tokens=config.total_tokens,
        total_flops=per_token * config.total_tokens,
        milestones=config.milestones,
        world_size=config.world_size,
        data_parallel_size=config.data_parallel_size,
        micro_batch_size=config.micro_batch_size,
        grad_accum_steps=config.grad_accum_steps,
        checkpoint_bytes=checkpoint_bytes(config),
        checkpoints_kept=checkpoints_kept(config),
        disk_bytes=runs_dir_bytes(config),
    )
