"""FLOPs and the budget of a run; pure functions. Parameters and checkpoint sizes are in ``conf.sizes``."""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import Config, ModelConfig
from conf.sizes import checkpoint_bytes, checkpoints_kept, parameters, runs_dir_bytes


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


def flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """Return the FLOPs of one token's forward and backward pass: 6 N + 12 layers x hidden x seq_len.

    Counted as in PaLM (arXiv 2204.02311, appendix B): a multiplication and an addition are two FLOPs, the backward pass
    costs twice the forward pass, attention scores are counted in full although half of them are masked, and
    recomputation does not count. N excludes the embedding, which is looked up and not multiplied (unless it is also
    the output projection).
    """
    counts = parameters(model)
    multiplied = counts.total - (0 if model.tie_embeddings else counts.embedding)
    return 6 * multiplied + 12 * model.num_layers * model.hidden_size * seq_len


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
