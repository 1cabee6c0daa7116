"""Sizes and counts that follow from a configuration alone; pure functions.

Nothing here knows how fast a machine is: what was measured is in the journal.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import Config, ModelConfig
from conf.sizes import checkpoint_bytes, checkpoints_kept, parameters, runs_dir_bytes


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a run takes.

    Args:
        flops_per_token: forward and backward pass.
        checkpoints_kept: at most so many lie on disk when the run ends.
        disk_bytes: of these checkpoints, and one more that is being written.
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
    """FLOPs of one token's forward and backward pass: 6 N + 12 layers x hidden x seq_len.

    Counted as in PaLM (arXiv 2204.02311, appendix B): a multiplication and an addition are two FLOPs, the backward pass
    costs twice the forward pass, attention scores are counted in full although half of them are masked, and nothing
    that is recomputed counts. N leaves out the embedding, which is looked up and not multiplied (unless it is the
    output projection too).
    """
    counts = parameters(model)
    multiplied = counts.total - (0 if model.tie_embeddings else counts.embedding)
    return 6 * multiplied + 12 * model.num_layers * model.hidden_size * seq_len


def budget(config: Config) -> Budget:
    """All of it for a configuration."""
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
