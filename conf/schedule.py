"""The learning rate by step; pure."""

from __future__ import annotations

import math

from conf.schema import Config


def learning_rate(step: int, config: Config) -> float:
    """Return the rate of optimizer step ``step`` (1-based): linear warm-up to ``lr``, then decay to the final rate.

    The last step has exactly the final rate (cosine: HLAT, arXiv 2404.10630, section 4.1; WSD: MiniCPM, arXiv
    2404.06395, section 4).
    """
    optimizer, total = config.optimizer, config.total_steps
    warmup = config.warmup_steps
    if step <= warmup:
        return optimizer.lr * step / warmup
    start = warmup
    if optimizer.schedule == "wsd":
        start = max(warmup, total - math.ceil(optimizer.wsd_decay_fraction * total))
    progress = min(1.0, max(0.0, (step - start) / max(1, total - start)))
    height = 0.5 * (1.0 + math.cos(math.pi * progress)) if optimizer.schedule == "cosine" else 1.0 - progress
    low = optimizer.lr * optimizer.min_lr_fraction
    return low + (optimizer.lr - low) * height
