"""Run benchmarks by name, or all of them: ``python -m benchmarks [NAME ...]``."""

from __future__ import annotations

import sys
from importlib import import_module

#: Modules are imported when they run: the peak memory of a process includes that of the process which started it.
BENCHMARKS = (
    "help_time",
    "flow_overhead",
    "loader_speed",
    "tokenize_speed",
    "trainer_speed",
    "coordinates",
    "gpu",
    "titan_overhead",
    "checkpoint_stall",
    "cache_speed",
    "code_speed",
    "eval_parity",
    "core_parity",
    "eval_kills",
    "eval_logits",
    "eval_checkpoint",
    "uptime",
    "policy_scale",
    "replay",
    "plan_accuracy",
    "live_page",
    "scale_checkpoints",
    "scale_data",
    "scale_ranks",
    "scale_restart",
    "scale_driver",
    "scale_kubernetes",
    "slurm_restart",
)
#: Names that stand for all benchmarks that begin with them.
GROUPS = {"scale": "scale_"}


def _members(name: str) -> list[str]:
    return [each for each in BENCHMARKS if each.startswith(GROUPS[name])] if name in GROUPS else [name]


def main() -> int:
    names = sys.argv[1:] or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS and name not in GROUPS]
    if unknown:
        known = ", ".join([*BENCHMARKS, *GROUPS])
        print(f"error: {unknown[0]}: no such benchmark\nhint: one of {known}", file=sys.stderr)
        return 2
    for member in (each for name in names for each in _members(name)):
        print(f"== {member}", flush=True)
        import_module(f"benchmarks.{member}").run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
