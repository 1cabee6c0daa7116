"""The restart policy of stages: decide what follows the end of a stage's job. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from conf.schema import RecoveryConfig
from flows.recovery.failure_causes import NODE_CAUSES
from flows.recovery.policy import Decision, wait_s
from hlatctl.run.errors import LaunchError

#: Ends that come from outside, without a fault of a node.
_OUTSIDE = ("preempted", "time_limit", "port_in_use")


def decide_job(ends: Sequence[LaunchError], config: RecoveryConfig) -> Decision:
    """Decide what follows the end of a stage's job, by the limits and delays of training's attempts.

    A job is restarted after a signal, after a time-out of a collective, if it was lost or hung, if a node failed, if
    the scheduler ended it or its port was taken, and once after it ran out of memory. One that somebody cancelled stops
    the run.

    Args:
        ends: errors of the stage's jobs in this flow that left no error of their own, newest last.
        config: the policy's limits.
    """
    newest, limit = ends[-1], config.max_restarts_without_progress
    alike = sum(end.code == newest.code for end in ends)
    if newest.code == "cancelled":
        return Decision(action="stop", why="hlatctl did not cancel it, so it stops the run")
    if newest.code not in (*NODE_CAUSES, *_OUTSIDE, "out_of_memory"):
        return Decision(action="stop", why="a restart can't fix this")
    if not config.enabled:
        return Decision(action="stop", why="nothing is restarted automatically (recovery.enabled=false)")
    if newest.code == "out_of_memory" and alike > 1:
        return Decision(action="stop", why="out of memory again after a restart")
    if len(ends) > limit:
        return Decision(
            action="stop", why=f"{limit} restarts did not help (recovery.max_restarts_without_progress={limit})"
        )
    return Decision(action="restart", why="restarting", wait_s=wait_s(len(ends), config))
