"""Evaluate one milestone's checkpoint, in separate processes beside training.

First its folder for the runner is written: with a link to the checkpoint's weights, or with a copy of them.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import conf.load
from flows.launch.base import Job
from flows.runtime.context import FlowContext
from flows.runtime.jobs import run_job
from flows.stages.exported import Measured, model_folder, remove_unmeasured
from hlatctl.run import files
from hlatctl.run.errors import HlatctlError, StoppedError
from hlatctl.run.lease import driver_pid
from hlatctl.run.manifest import read_manifest
from hlatctl.run.model_folder import fingerprint
from hlatctl.run.model_link import Link, read_link, write_link
from hlatctl.run.scores import in_words, skipped_in_words


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What ``hlatctl eval`` asks for; the run's own flow asks for nothing special.

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
    """Return the announced milestones (tokens) without scores of the run's suite, including failed ones."""
    state, own = ctx.refresh(), set(ctx.config.milestones.values())
    pending = [m.milestone_tokens for m in state.milestones.values() if not m.is_done]
    return sorted(tokens for tokens in pending if tokens in own)


def evaluate_milestone(ctx: FlowContext, milestone_tokens: int, asked: Asked | None = None) -> str:
    """Evaluate a milestone's checkpoint, with retries after failures; a failure doesn't stop training.

    Returns:
        ``evaluated``, ``failed``, or the milestone's status if the run stops meanwhile.

    Raises:
        KeyboardInterrupt, SystemExit: this process is asked to end.
    """
    ctx.event("eval_taken", milestone_tokens=milestone_tokens, step=ctx.state.milestones[milestone_tokens].step)
    tries, measured = 1 + ctx.config.eval.max_retries, Measured(ctx.run, milestone_tokens)
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
                remove_unmeasured(ctx.run, milestone_tokens, _own(asked), measured)
                return "failed"
    return ctx.refresh().milestones[milestone_tokens].status


def _tell_cut_short(ctx: FlowContext, milestone_tokens: int) -> None:
    """Journal that an evaluation was interrupted because the run or this process stops; it is pending again."""
    milestone = ctx.refresh().milestones[milestone_tokens]
    if milestone.progress:
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
        export += ["--link"] if ctx.config.eval.reads_checkpoints else []
        _run_beside_training(ctx, int(step), f"export-{milestone_tokens}{own}", *export)
        if made.is_dir() and not read_link(made):  # a copy; a simulated job leaves no folder
            write_link(made, run_dir=ctx.run.root, step=int(step), manifest_sha256=weights)
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
    """Return an ending of names: two flows may evaluate a milestone, and the lease lets one of them work."""
    return f"-{asked.name[:8]}" if asked else ""


def _is_usable(ctx: FlowContext, folder: Path, step: int, weights: str) -> bool:
    """Return whether an earlier try has left a model of these weights that the runner can read; remove any other."""
    wanted = Link(run_dir=os.fspath(ctx.run.root), step=step, manifest_sha256=weights)
    is_readable = ctx.config.eval.reads_checkpoints or any(folder.glob("*.safetensors"))
    if folder.is_dir() and not (is_readable and read_link(folder) == wanted):
        shutil.rmtree(folder)
    return folder.is_dir()


def _run_beside_training(
    ctx: FlowContext, step: int, name: str, *argv: str, reattach: bool = False, devices: int = 0
) -> None:
    """Run a job, at low priority while training runs; with ``eval.placement=between``, on the nodes of training.

    An unprivileged process can't raise its own priority. So a job that is still running when training ends is restarted
    at normal priority: an evaluation keeps its finished tasks and generated answers.
    """
    job, stays = replace(_job(ctx, name, *argv), devices=devices), reattach and _stays(ctx)
    if ctx.config.eval.placement == "between" and ctx.heeds_stop:
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

    Not on a cluster, where it would hold a node between two milestones. It forks, and a driver of accelerators must not
    be used on both sides of a fork.
    """
    device = ctx.config.eval.device or ctx.config.backend.device
    return sys.platform == "linux" and ctx.launcher.weighs_jobs and ctx.config.eval.runner == "hf" and device == "cpu"


def _job(ctx: FlowContext, name: str, *argv: str) -> Job:
    """Return a job of one process. A scheduler places it beside training, never on nodes that training has alone."""
    cluster = ctx.config.eval.cluster
    return replace(
        ctx.job(name, *argv),
        partition=cluster.partition,
        options=tuple(cluster.extra),
        resources=dict(cluster.resources),
        node_selector=dict(cluster.node_selector),
    )


def _yields(ctx: FlowContext, step: int) -> bool:
    """Return whether an evaluation of this step's checkpoint could slow training."""
    attempt = ctx.state.attempt
    is_trained = step >= ctx.config.total_steps or (attempt is not None and attempt.cause == "finished")
    return not is_trained and (ctx.heeds_stop or driver_pid(ctx.run) not in (None, os.getpid()))


def _asked_words(ctx: FlowContext, name: str, asked: Asked) -> tuple[str, ...]:
    config = ctx.run.launch(0) / f"{name}.yaml"
    files.write_text(config, conf.load.dump(ctx.config))
    flags = (("--new-contract", asked.new_contract), ("--from-elsewhere", asked.model is not None))
    return ("--config", os.fspath(config), *(flag for flag, wanted in flags if wanted))
