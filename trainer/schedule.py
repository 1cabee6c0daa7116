"""The learning rate by step; pure."""

from __future__ import annotations

import math

from conf.schema import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, *, total_steps: int) -> float:
    """The rate of optimizer step ``step`` (1-based): linear warm-up to ``lr``, then cosine to its ``min_lr_fraction``.

    The last step has exactly the final rate (HLAT, arXiv 2404.10630, section 4.1).
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    low = config.lr * config.min_lr_fraction
    return low + (config.lr - low) * 0.5 * (1.0 + math.cos(math.pi * progress))
