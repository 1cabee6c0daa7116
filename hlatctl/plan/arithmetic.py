"""Sizes and counts that follow from a configuration alone; pure functions.

Nothing here knows how fast a machine is: what was measured is in the journal.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import Config, ModelConfig

#: Weights and AdamW's two moments, which is what a checkpoint holds, by ``precision.name``.
CHECKPOINT_BYTES_PER_PARAMETER = {"fp32": 12, "mixed": 12, "bf16_sr": 6, "bf16": 6}


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters of a model, by what they do."""

    embedding: int
    attention: int
    feed_forward: int
    norms: int
    lm_head: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.attention + self.feed_forward + self.norms + self.lm_head


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


def parameters(model: ModelConfig) -> Parameters:
    """Exact parameter counts of a LLaMA-family decoder without biases.

    Per layer: query and output projections of hidden x hidden, key and value projections of hidden x (kv_heads x
    head_dim), gate, up and down projections of hidden x intermediate, two RMSNorms. One RMSNorm follows the last layer.
    """
    hidden, layers = model.hidden_size, model.num_layers
    kv_width = model.num_kv_heads * model.head_dim
    return Parameters(
        embedding=model.vocab_size * hidden,
        attention=layers * (2 * hidden * hidden + 2 * hidden * kv_width),
        feed_forward=layers * 3 * hidden * model.intermediate_size,
        norms=(2 * layers + 1) * hidden,
        lm_head=0 if model.tie_embeddings else model.vocab_size * hidden,
    )


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


def checkpoint_bytes(config: Config) -> int:
    """Bytes of one checkpoint: weights and two moments."""
    return CHECKPOINT_BYTES_PER_PARAMETER[config.precision.name] * parameters(config.model).total


def checkpoints_kept(config: Config) -> int:
    """Checkpoints on disk, at most: the newest ones and, besides, those of milestones and the permanent ones."""
    every, total = config.checkpoint.every_steps, config.total_steps
    last = total - total % every
    regular = range(last, max(0, last - every * config.checkpoint.keep), -every)
    newest = sorted({*regular, *config.milestones, total})[-config.checkpoint.keep :]
    return len({*newest, *config.milestones}) + config.permanent_checkpoints


def budget(config: Config) -> Budget:
    """All of it for a configuration."""
    total_parameters = parameters(config.model).total
    per_token = flops_per_token(config.model, config.train.seq_len)
    one, kept = checkpoint_bytes(config), checkpoints_kept(config)
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
        checkpoint_bytes=one,
        checkpoints_kept=kept,
        disk_bytes=one * (kept + 1),
    )
