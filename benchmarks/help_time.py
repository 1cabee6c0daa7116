"""Wall time of ``hlatctl --help``, in turn with a bare interpreter."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

_RUNS = 11
_GOAL_S = 0.25


def run() -> None:
    """Print both medians and their ratio."""
    ours, bare = [], []
    for _ in range(_RUNS):
        ours.append(_wall_s([sys.executable, "-m", "hlatctl", "--help"]))
        bare.append(_wall_s([sys.executable, "-c", "pass"]))
    help_s, python_s = statistics.median(ours[1:]), statistics.median(bare[1:])
    print(f"hlatctl --help  {help_s:.3f} s (goal {_GOAL_S} s)")
    print(f"python -c pass  {python_s:.3f} s")
    print(f"ratio           {help_s / python_s:.1f}")


def _wall_s(argv: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(argv, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start
