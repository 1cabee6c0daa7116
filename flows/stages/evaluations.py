"""The queue of a run's evaluations: which milestone comes next, how many at once, and an alarm when it grows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from flows.runtime import amended
from flows.runtime.context import FlowContext
from flows.runtime.jobs import end_staying
from flows.stages.evaluate import evaluate_milestone
from hlatctl.report.eval_queue import evaluation_queue
from hlatctl.report.eval_queue_text import behind_text
from hlatctl.run.fold_evaluation import BEHIND

_POLL_S = 0.2


class Submit(Protocol):
    """Runs a stage beside the pipeline (``flows.pretrain.Caller.submit``)."""

    def __call__(self, choose: Callable[[], tuple[str, Callable[[], Any]]], *, most: int) -> Future[Any]:
        """Queue a stage that ``choose`` names once one of ``most`` threads is free."""


class Evaluations:
    """Hands milestones to evaluators. Only the flow's own thread calls its methods.

    Args:
        ctx: of the run; ``eval.order`` and ``eval.concurrent`` may change meanwhile.
        submit: starts a stage beside the pipeline.
    """

    def __init__(self, ctx: FlowContext, submit: Submit) -> None:
        self._ctx, self._submit = ctx, submit
        self._lock = threading.Lock()
        self._waiting: list[int] = []
        self._handed: set[int] = set()
        self._held = 0
        self._futures: list[Future[Any]] = []

    @property
    def done(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._held and all(future.done() for future in self._futures)

    def add(self, milestone_tokens: int) -> None:
        """Queue a milestone, with ``eval.placement=between`` until :meth:`finish`; no milestone is queued twice."""
        if milestone_tokens in self._handed:
            return
        self._handed.add(milestone_tokens)
        with self._lock:
            self._waiting.append(milestone_tokens)
        self._held += 1
        if self._ctx.config.eval.placement == "beside":
            self._start()

    def announce(self, milestone_tokens: int) -> None:
        """Queue a milestone that training has just reached, and give an alarm if the queue has grown."""
        self.add(milestone_tokens)
        state, config = self._ctx.state, self._ctx.config
        queue = evaluation_queue(state, config, self._ctx.clock.now_unix_s())
        is_last = state.milestones[milestone_tokens].step >= config.total_steps
        if is_last or state.evaluation_behind or len(queue.waiting) <= config.eval.concurrent:
            return
        more = f"`hlatctl amend {self._ctx.run.run_id} eval.concurrent={config.eval.concurrent + 1}`"
        message = f"{behind_text(queue)}; {more} evaluates more at once"
        self._ctx.event("alarm", step=state.step, what=BEHIND, message=message)
        self._ctx.message(message)

    def finish(self) -> list[str]:
        """Wait until nothing is left, and return the status of each milestone.

        Raises:
            StoppedError: the run was asked to stop.
        """
        self._start()
        while not self.done:
            self._ctx.watch()
            amended.follow(self._ctx)
            self._ctx.clock.wait_for_event(_POLL_S)
        end_staying(self._ctx)
        statuses = [future.result() for future in self._futures]
        if set(statuses) - {"evaluated", "failed"}:
            self._ctx.check_stop()  # a stop interrupted an evaluation
        return statuses

    def interrupt(self) -> None:
        """End running evaluations; their milestones are pending again when the run is resumed."""
        self._ctx.cancelled.set()
        while not all(future.done() for future in self._futures):
            self._ctx.clock.sleep(_POLL_S)
        end_staying(self._ctx)

    def _start(self) -> None:
        """Start the evaluations that were held until training pauses."""
        for _ in range(self._held):
            self._futures.append(self._submit(self._next, most=self._ctx.config.eval.concurrent))
        self._held = 0

    def _next(self) -> tuple[str, Callable[[], str]]:
        """Take a milestone, in a worker's thread."""
        choose = max if self._ctx.config.eval.order == "newest" else min
        with self._lock:
            milestone_tokens = choose(self._waiting)
            self._waiting.remove(milestone_tokens)
        return f"evaluate {milestone_tokens:,} tokens", partial(evaluate_milestone, self._ctx, milestone_tokens)
