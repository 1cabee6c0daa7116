"""How often to write a checkpoint, from the cost of a save and the rate of failures; pure functions.

Both optima take the cost of a save and the mean time between failures in seconds, and return the seconds of training
between the end of one save and the start of the next. Failures are assumed to be random with a constant rate.
"""

from __future__ import annotations

import math

#: With no failure in a time T, the mean time between failures is above T / ln(1 / 0.05) with this confidence.
CONFIDENCE = 0.95


def young_s(save_s: float, mean_time_between_failures_s: float) -> float:
    """Return the first-order optimum, sqrt(2 C M) (Young 1974, Communications of the ACM 17(9))."""
    return math.sqrt(2 * save_s * mean_time_between_failures_s)


def daly_s(save_s: float, mean_time_between_failures_s: float) -> float:
    """Return the higher-order optimum, which also holds if saves are not much shorter than the time between failures.

    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C, and M if C is 2 M or more (Daly 2006, Future Generation
    Computer Systems 22(3)).
    """
    if save_s >= 2 * mean_time_between_failures_s:
        return mean_time_between_failures_s
    ratio = save_s / (2 * mean_time_between_failures_s)
    return young_s(save_s, mean_time_between_failures_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def least_time_between_failures_s(without_failure_s: float) -> float:
    """Return the 95 % lower bound of the mean time between failures after this long without one."""
    return without_failure_s / -math.log(1 - CONFIDENCE)
