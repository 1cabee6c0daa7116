"""Evaluate milestones: the queue of a run's evaluations, and one evaluation in separate processes alongside training.

First a milestone's folder is written for the runner, with a link to the checkpoint's weights or a copy of them. It is
removed if an evaluation fails before it has measured anything. ``ask_contracts`` determines what an evaluation would
measure, and whether the run's record of contracts allows it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import conf.load
from conf.schema import Config
from flows.launch.base import Job
from flows.runtime import amended
from flows.runtime.context import FlowContext, is_simulated
from flows.runtime.jobs import end_staying, run_job
from flows.runtime.programs import ask_about
from hlatctl.report.eval_queue import behind_text, evaluation_queue
from hlatctl.run import files
from hlatctl.run.checkpoint import read_manifest
from hlatctl.run.contract import SIMULATED
from hlatctl.run.errors import HlatctlError, StoppedError
from hlatctl.run.evaluations import in_words, skipped_in_words
from hlatctl.run.fold import BEHIND
from hlatctl.run.lease import driver_pid, is_held
from hlatctl.run.model_folder import Link, fingerprint, read_link
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import MilestoneState

#: Folders with an evaluation's results, in a milestone's folder and in those of further contracts.
_MEASURED = ("tasks", "answers")


def model_folder(run: RunPaths, milestone_tokens: int, own: str) -> Path:
    """Return the folder to which a milestone is exported; ``own`` separates two flows that evaluate the same one."""
    folder = run.own_model(milestone_tokens)
    return folder.with_name(f"{folder.name}{own}")


def _measured(folder: Path) -> set[tuple[Path, int, int]]:
    """Return the scores and answers of a milestone with their sizes and times of change; a run has some hundred."""
    found = set()
    for path in (path for name in _MEASURED for way in (name, f"*/{name}") for path in folder.glob(f"{way}/*")):
        with suppress(FileNotFoundError):  # another evaluator removes the answers of a task that it has scored
            found.add((path, (info := path.stat()).st_size, info.st_mtime_ns))
    return found


def remove_left_over(run: RunPaths, milestones: Iterable[MilestoneState]) -> None:
    """Remove models of evaluated milestones that a dead driver has left, because they keep checkpoints.

    Models of milestones that are still to be evaluated are reused.
    """
    for milestone in milestones:
        if milestone.is_done and not is_held(run.eval_lease(milestone.milestone_tokens)):
            shutil.rmtree(run.own_model(milestone.milestone_tokens), ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The request of ``hlatctl eval``; the run's own flow has no special request.

    Args:
        name: hash of all contracts of the evaluation.
        contracts: hashes by task or group, by the number that the run gives to their contracts.
        new_contract: contracts may be new to the run.
        model: the folder of an external Hugging Face model; None: the milestone's checkpoint.
    """

    name: str
    contracts: dict[str, dict[str, str]]
    new_contract: bool = False
    model: Path | None = None


def due_milestones(ctx: FlowContext) -> list[int]:
    """Return the announced milestones (in tokens) without scores of the run's suite, including failed ones."""
    state, own = ctx.refresh(), set(ctx.config.milestones.values())
    pending = [m.milestone_tokens for m in state.milestones.values() if not m.is_done]
    return sorted(tokens for tokens in pending if tokens in own)


def evaluate_milestone(ctx: FlowContext, milestone_tokens: int, asked: Asked | None = None) -> str:
    """Evaluate a milestone's checkpoint, with retries after failures; a failure doesn't stop training.

    Returns ``evaluated``, ``failed``, or the milestone's status if the run stops during the evaluation.

    Raises:
        KeyboardInterrupt, SystemExit: this process is asked to end.
    """
    ctx.event("eval_taken", milestone_tokens=milestone_tokens, step=ctx.state.milestones[milestone_tokens].step)
    tries, folder = 1 + ctx.config.eval.max_retries, ctx.run.eval(milestone_tokens)
    before = _measured(folder)
    for number in range(1, tries + 1):
        try:
            _evaluate_once(ctx, milestone_tokens, number, asked)
            return "evaluated"
        except StoppedError:
            _tell_cut_short(ctx, milestone_tokens)
            break
        except (KeyboardInterrupt, SystemExit):
            _tell_cut_short(ctx, milestone_tokens)
            raise
        except HlatctlError as error:
            step = ctx.state.milestones[milestone_tokens].step
            final = number == tries
            ctx.event("eval_failed", milestone_tokens=milestone_tokens, step=step, message=error.message, final=final)
            retry = "no further retry" if final else "retrying"
            ctx.message(f"{title(milestone_tokens)} failed, {retry}: {error.message}")
            if final:
                # A corrected evaluation would not use the model, but the same command continues one that has measured
                # something. A job that its scheduler has lost may hold the lease, and still read the model.
                if _measured(folder) == before and not is_held(ctx.run.eval_lease(milestone_tokens)):
                    shutil.rmtree(model_folder(ctx.run, milestone_tokens, _own(asked)), ignore_errors=True)
                return "failed"
    return ctx.refresh().milestones[milestone_tokens].status


def _tell_cut_short(ctx: FlowContext, milestone_tokens: int) -> None:
    """Journal that an evaluation was interrupted because the run or this process stops; it is pending again.

    The next driver re-attaches to one whose driver hands over.
    """
    milestone = ctx.refresh().milestones[milestone_tokens]
    if milestone.progress and not ctx.hands_over:
        ctx.event("eval_stopped", milestone_tokens=milestone_tokens, step=milestone.step)
        ctx.message(f"{title(milestone_tokens)}: interrupted; it is evaluated after `hlatctl resume {ctx.run.run_id}`")


def weights_of(ctx: FlowContext, milestone_tokens: int, asked: Asked | None = None) -> str:
    """Return the SHA-256 of the checkpoint's manifest, or of the external model's files.

    Raises:
        CheckpointError: the checkpoint doesn't exist.
    """
    if asked and asked.model:
        return fingerprint(asked.model)
    return read_manifest(ctx.run.checkpoint(ctx.state.milestones[milestone_tokens].step)).sha256


def title(milestone_tokens: int) -> str:
    """Return the name of an evaluation for messages; an external model has no tokens."""
    return f"evaluation at {milestone_tokens:,} tokens" if milestone_tokens else "evaluation"


def _evaluate_once(ctx: FlowContext, milestone_tokens: int, number: int, asked: Asked | None) -> None:
    weights = weights_of(ctx, milestone_tokens, asked)
    own = _own(asked)
    made = model_folder(ctx.run, milestone_tokens, own)
    model = asked.model if asked and asked.model else made
    run_dir, step = os.fspath(ctx.run.root), str(ctx.state.milestones[milestone_tokens].step)
    ctx.message(f"{title(milestone_tokens)}: started")
    if model == made and not _is_usable(ctx, made, int(step), weights):
        export = ["-m", "trainer.convert.export", "--run-dir", run_dir, "--step", step, "--to", os.fspath(made)]
        export += ["--weights", ctx.config.eval.weights]
        export += ["--link", "only" if ctx.config.eval.reads_checkpoints else "also"]
        _run_beside_training(ctx, int(step), f"export-{milestone_tokens}{own}", *export)
    name = f"eval-{milestone_tokens}{own}"
    argv = ["-m", "eval", "--run-dir", run_dir, "--milestone-tokens", str(milestone_tokens), "--step", step]
    argv += ["--model", os.fspath(model), "--weights", weights, "--try", str(number)]
    argv += _asked_words(ctx, name, asked) if asked else ()
    _run_beside_training(ctx, int(step), name, *argv, reattach=True, devices=ctx.config.eval_devices)
    if model == made:
        shutil.rmtree(made, ignore_errors=True)
    milestone = ctx.refresh().milestones[milestone_tokens]
    wanted = asked.contracts if asked else {}
    found = [one for number, one in milestone.judgements.items() if number in wanted]
    scores = [one.scores for one in found] or [milestone.scores]
    ctx.message(f"{title(milestone_tokens)}: {'; '.join(map(in_words, scores))}")
    skipped = [one.skipped for one in found] or [milestone.skipped]
    for line in [line for tasks in skipped for line in skipped_in_words(tasks)]:
        ctx.message(f"{title(milestone_tokens)}: {line}")


def _own(asked: Asked | None) -> str:
    """Return a suffix that makes names unique: two flows may evaluate a milestone, and the lease admits one."""
    return f"-{asked.name[:8]}" if asked else ""


def _is_usable(ctx: FlowContext, folder: Path, step: int, weights: str) -> bool:
    """Return whether an earlier try left a model of these weights that the runner can read; remove any other model."""
    kind = ctx.config.eval.weights
    wanted = Link(run_dir=os.fspath(ctx.run.root), step=step, manifest_sha256=weights, weights=kind)
    is_readable = ctx.config.eval.reads_checkpoints or any(folder.glob("*.safetensors"))
    if folder.is_dir() and not (is_readable and read_link(folder) == wanted):
        shutil.rmtree(folder)
    return folder.is_dir()


def _run_beside_training(
    ctx: FlowContext, step: int, name: str, *argv: str, reattach: bool = False, devices: int = 0
) -> None:
    """Run a job at low priority while training runs, or with ``eval.placement=between`` on the nodes of training.

    An unprivileged process can't raise its own priority. So a job that is still running when training ends is restarted
    at normal priority: an evaluation keeps its finished tasks and generated answers.
    """
    job, stays = replace(_job(ctx, name, *argv), devices=devices), reattach and _stays(ctx)
    if ctx.config.eval_placement == "between" and ctx.heeds_stop:
        run_job(ctx, replace(job, nodes=1, keeps_nodes=ctx.launcher.keeps_nodes), reattach=reattach, stays=stays)
        return
    if _yields(ctx, step):
        until = (lambda: not _yields(ctx, step)) if ctx.launcher.weighs_jobs else None
        if run_job(ctx, replace(job, beside_training=True), reattach=reattach, until=until, stays=stays):
            return
        ctx.message(f"{name}: restarted at normal priority, because training has ended")
    run_job(ctx, job, reattach=reattach, stays=stays)


def _stays(ctx: FlowContext) -> bool:
    """Return whether an evaluator stays for the next milestone (``eval.__main__``).

    It doesn't stay on a cluster, where it would hold a node between two milestones, or with accelerators: it forks, and
    their drivers must not be used on both sides of a fork.
    """
    device = ctx.config.eval.device or ctx.config.backend.device
    return sys.platform == "linux" and ctx.launcher.weighs_jobs and ctx.config.eval.runner == "hf" and device == "cpu"


def _job(ctx: FlowContext, name: str, *argv: str) -> Job:
    """Return a job of one process. A scheduler places it alongside training, never on nodes that training has alone."""
    cluster = ctx.config.eval.cluster
    return replace(
        ctx.job(name, *argv),
        partition=cluster.partition,
        options=tuple(cluster.extra),
        resources=dict(cluster.resources),
        node_selector=dict(cluster.node_selector),
    )


def _yields(ctx: FlowContext, step: int) -> bool:
    attempt = ctx.state.attempt
    is_trained = step >= ctx.config.total_steps or (attempt is not None and attempt.cause == "finished")
    return not is_trained and (ctx.heeds_stop or driver_pid(ctx.run) not in (None, os.getpid()))


def _asked_words(ctx: FlowContext, name: str, asked: Asked) -> tuple[str, ...]:
    config = ctx.run.launch(0) / f"{name}.yaml"
    files.write_text(config, conf.load.dump(ctx.config))
    flags = (("--new-contract", asked.new_contract), ("--from-elsewhere", asked.model is not None))
    return ("--config", os.fspath(config), *(flag for flag, wanted in flags if wanted))


_POLL_S = 0.2


class Evaluations:
    """Hands milestones to evaluators. Only the flow's own thread calls its methods.

    ``eval.order`` and ``eval.concurrent`` may change during the run. ``submit`` is that of ``flows.pretrain.Caller``.
    """

    def __init__(self, ctx: FlowContext, submit: Callable[..., Future[Any]]) -> None:
        self._ctx, self._submit = ctx, submit
        self._lock = threading.Lock()
        self._waiting: list[int] = []
        self._handed: set[int] = set()
        self._held = 0
        self._futures: list[Future[Any]] = []

    @property
    def done(self) -> bool:
        """Whether no evaluation is waiting or running."""
        return not self._held and all(future.done() for future in self._futures)

    def add(self, milestone_tokens: int) -> None:
        """Queue a milestone once; with ``eval.placement=between`` hold it until :meth:`finish`."""
        if milestone_tokens in self._handed:
            return
        self._handed.add(milestone_tokens)
        with self._lock:
            self._waiting.append(milestone_tokens)
        self._held += 1
        if self._ctx.config.eval_placement == "beside":
            self._start()

    def announce(self, milestone_tokens: int) -> None:
        """Queue a milestone that training has just reached, and raise an alarm if the queue has grown."""
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
        """Wait for all evaluations, and return the status of each milestone.

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
        for _ in range(self._held):
            self._futures.append(self._submit(self._next, most=self._ctx.config.eval.concurrent))
        self._held = 0

    def _next(self) -> tuple[str, Callable[[], str]]:
        choose = max if self._ctx.config.eval.order == "newest" else min
        with self._lock:
            milestone_tokens = choose(self._waiting)
            self._waiting.remove(milestone_tokens)
        return f"evaluate {milestone_tokens:,} tokens", partial(evaluate_milestone, self._ctx, milestone_tokens)


def ask_contracts(
    config: Config, *, run: RunPaths | None = None, model: Path | None = None, new_contract: bool = False
) -> Asked:
    """Return the contracts of an evaluation, which takes seconds because each task's data is read.

    Without a run no contract is recorded. Without a model it is the run's own.

    Raises:
        EvaluationError: the run evaluated a task under another contract, and no new one was requested.
        ConfigError, DataError, DependencyError: the suite can't be run.
    """
    if is_simulated(config):
        return Asked(name=SIMULATED, contracts={SIMULATED: {}}, new_contract=new_contract, model=model)
    words = ["--run-dir", os.fspath(run.root)] if run else []
    words += ["--new-contract"] if new_contract else []
    words += ["--model", os.fspath(model.absolute())] if model else []
    answer = json.loads(ask_about("eval.check", config, *words, show_talk=True))
    return Asked(
        name=str(answer["contract"]),
        contracts={number: answer["contracts"][number] for number in sorted(answer["contracts"], key=int)},
        new_contract=new_contract,
        model=model,
    )
