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
    scale_checkpoints,
    scale_data,
    scale_driver,
    scale_ranks,
    tokenize_speed,
    trainer_speed,
    uptime,
)

BENCHMARKS = {
    "help_time": help_time.run,
    "flow_overhead": flow_overhead.run,
    "loader_speed": loader_speed.run,
    "tokenize_speed": tokenize_speed.run,
    "trainer_speed": trainer_speed.run,
    "checkpoint_stall": checkpoint_stall.run,
    "cache_speed": cache_speed.run,
    "code_speed": code_speed.run,
    "eval_parity": eval_parity.run,
    "uptime": uptime.run,
    "policy_scale": policy_scale.run,
    "plan_accuracy": plan_accuracy.run,
    "scale_checkpoints": scale_checkpoints.run,
    "scale_data": scale_data.run,
    "scale_ranks": scale_ranks.run,
    "scale_driver": scale_driver.run,
}
#: Names that stand for all benchmarks that begin with them.
GROUPS = {"scale": "scale_"}


def _members(name: str) -> list[str]:
    return [each for each in BENCHMARKS if each.startswith(GROUPS[name])] if name in GROUPS else [name]


def main() -> int:
    """Run the named benchmarks."""
    names = sys.argv[1:] or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS and name not in GROUPS]
    if unknown:
        known = ", ".join([*BENCHMARKS, *GROUPS])
        print(f"error: {unknown[0]}: no such benchmark\nhint: one of {known}", file=sys.stderr)
        return 2
    for member in (each for name in names for each in _members(name)):
        print(f"== {member}", flush=True)
        BENCHMARKS[member]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
