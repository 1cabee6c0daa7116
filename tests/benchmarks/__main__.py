"""Runs benchmarks by name, or all of them: ``python -m tests.benchmarks [NAME ...]``."""

from __future__ import annotations

import sys

from tests.benchmarks import (
    cache_speed,
    checkpoint_stall,
    code_speed,
    eval_parity,
    flow_overhead,
    help_time,
    loader_speed,
    plan_accuracy,
    policy_scale,
    scale,
    scale_checkpoints,
    scale_data,
    scale_ranks,
    trainer_speed,
    uptime,
)

BENCHMARKS = {
    "help_time": help_time.run,
    "flow_overhead": flow_overhead.run,
    "loader_speed": loader_speed.run,
    "trainer_speed": trainer_speed.run,
    "checkpoint_stall": checkpoint_stall.run,
    "cache_speed": cache_speed.run,
    "code_speed": code_speed.run,
    "eval_parity": eval_parity.run,
    "uptime": uptime.run,
    "policy_scale": policy_scale.run,
    "plan_accuracy": plan_accuracy.run,
    "scale": scale.run,
    "scale_checkpoints": scale_checkpoints.run,
    "scale_data": scale_data.run,
    "scale_ranks": scale_ranks.run,
}


def main() -> int:
    """Run the named benchmarks."""
    names = sys.argv[1:] or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"error: {unknown[0]}: no such benchmark\nhint: one of {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    for name in names:
        print(f"== {name}", flush=True)
        BENCHMARKS[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
