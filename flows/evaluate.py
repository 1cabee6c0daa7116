"""The evaluation flow: evaluates milestones of a run, one of its checkpoints, or an external model.

It can run alongside training: it has its own journal file and doesn't disturb the run's driver. An external model gets
a run directory that contains only its evaluation; so do scores that others published in a file.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import conf.load
import hlatctl
from conf.schema import Config
from flows.pretrain import Caller, PlainCaller
from flows.runtime.context import FlowContext, is_simulated, open_context
from flows.runtime.driver import Observer
from flows.runtime.jobs import end_staying
from flows.stages import record_provenance, write_report
from flows.stages.evaluate import Asked, ask_contracts, evaluate_milestone, title, weights_of
from flows.tracking import follower, prefect_flow, prefect_stale
from hlatctl.report.exchange.source import Source
from hlatctl.run import contract, files, provenance, runs
from hlatctl.run.checkpoint import MANIFEST
from hlatctl.run.errors import CheckpointError, EvaluationError, HlatctlError, StoppedError
from hlatctl.run.evaluations import find_milestone
from hlatctl.run.files import DAMAGED, new_file
from hlatctl.run.journal import EVALUATE_WRITER, FLOW_WRITER, JournalWriter
from hlatctl.run.lease import driver_pid, driver_token, hold_driver, hold_evaluator
from hlatctl.run.paths import RunPaths
from hlatctl.run.redact import hide
from hlatctl.run.state import RunState
from hlatctl.units import count

_CONTRACT = "contract"
#: Context length of an external model whose configuration doesn't state one.
_CONTEXT_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """What to evaluate, and how.

    Args:
        config: the run's configuration, possibly with other evaluation settings.
        steps: optimizer step by milestone tokens.
        new_contract: allow tasks whose contracts differ from the run's earlier evaluations.
        model: the Hugging Face folder of an external model; None: evaluate the run's checkpoints.
        asked: the contracts, if :func:`create` has already determined them.
    """

    run: RunPaths
    config: Config
    steps: dict[int, int]
    new_contract: bool = False
    model: Path | None = None
    asked: Asked | None = None


def of_run(
    run: RunPaths,
    config: Config,
    state: RunState,
    *,
    at: int | None = None,
    step: int | None = None,
    new_contract: bool = False,
    asked: Asked | None = None,
) -> EvaluationRequest:
    """Return the request for every milestone that a run has reached, or for the one at some tokens or of a step.

    Raises:
        ConfigError, EvaluationError, CheckpointError: there is no such milestone, or nothing to evaluate.
    """
    if state.imported:
        raise EvaluationError(
            f"{run.run_id}: has scores that were imported, and no model to evaluate",
            hint=f"`hlatctl compare {run.run_id} RUN` shows them beside those of a run",
        )
    if state.evaluates:
        return EvaluationRequest(
            run=run, config=config, steps={0: 0}, new_contract=new_contract, model=Path(state.evaluates), asked=asked
        )
    planned = {
        tokens: at_step
        for at_step, tokens in replace(config, eval=replace(config.eval, enabled=True)).milestones.items()
    }
    known = planned | {tokens: milestone.step for tokens, milestone in state.milestones.items()}
    if step is not None:
        tokens = next((t for t, s in known.items() if s == step), config.tokens_at(step))
        return EvaluationRequest(run=run, config=config, steps={tokens: step}, new_contract=new_contract)
    if at is not None:
        chosen = _milestone_at(run, known, at)
        return EvaluationRequest(run=run, config=config, steps={chosen: known[chosen]}, new_contract=new_contract)
    reached = {
        t: s for t, s in sorted(known.items()) if t in state.milestones or (run.checkpoint(s) / MANIFEST).is_file()
    }
    if not reached:
        raise EvaluationError(
            f"{run.run_id}: no checkpoint of a milestone yet; the first is at {count(min(known))} tokens",
            hint=f"`hlatctl status {run.run_id}` shows its progress; TARGET can also be the folder of a checkpoint",
        )
    return EvaluationRequest(run=run, config=config, steps=reached, new_contract=new_contract)


def create(config: Config, folder: Path, *, argv: list[str]) -> tuple[RunPaths, Asked]:
    """Create the run directory of an external model, and return it with the contracts of its first evaluation.

    ``train.seq_len`` becomes the model's context length.

    Raises:
        ConfigError, DataError, DependencyError: the suite can't be run; nothing was created.
        StorageError: the directory can't be created.
    """
    config = replace(config, train=replace(config.train, seq_len=_context_tokens(folder)), experiment_name="evaluation")
    asked = ask_contracts(config, model=folder)
    mode, run_id = int(config.runs_mode, 8), runs.new_run_id(f"eval-{_plain(folder.name) or 'model'}")
    created = {
        "run_id": run_id,
        "simulated": is_simulated(config),
        "argv": [hide(word) for word in argv],
        "evaluates": os.fspath(folder),
    }

    def begin(run: RunPaths) -> None:
        with JournalWriter(run, FLOW_WRITER) as journal:
            journal.append("run_created", durable=True, **created)
            journal.append("milestone", durable=True, milestone_tokens=0, tokens=0, step=0)

    return runs.create_run(Path(config.runs_dir), run_id, conf.load.dump(config), mode, begin), asked


def drive(request: EvaluationRequest, observer: Observer | None = None) -> list[Path]:
    """Evaluate pending milestones, and return the results folders of all requested ones.

    Raises:
        RunBusyError: another process is evaluating the run.
        StoppedError: the evaluation was interrupted; the same request continues it.
        EvaluationError: a task's contract differs from the run's, or an evaluation failed for good.
        HlatctlError: an error that a restart can't fix.
    """
    run = request.run
    with ExitStack() as held:
        held.enter_context(files.created_like(run.root))
        held.enter_context(hold_evaluator(run))
        if request.model:
            held.enter_context(hold_driver(run))
        ctx = open_context(
            run, observer, config=request.config, writer=EVALUATE_WRITER, heeds_stop=request.model is not None
        )
        held.callback(ctx.close)
        if request.model:
            ctx.event("head_started", pid=os.getpid(), host=platform.node(), token=driver_token(run))
        folders: list[Path] = []
        view = prefect_flow.begin(ctx, prefect_stale.EVALUATE)
        if view:
            held.callback(view.finish, ctx.config.tracking.final_sync_timeout_s)
        try:
            with ctx.signals.kept(), view or nullcontext():
                try:
                    pipeline(ctx, view or PlainCaller(ctx.clock), request, folders)
                finally:
                    end_staying(ctx)
            _finish(ctx, request, "finished", "")
        except HlatctlError as error:
            _finish(ctx, request, "stopped" if isinstance(error, StoppedError) else "failed", error.message)
            raise
        except KeyboardInterrupt:
            ctx.signals.take()
            message = f"evaluation of {run.run_id}: interrupted; finished evaluations are kept"
            _finish(ctx, request, "stopped", message)
            raise StoppedError(message, hint=f"`hlatctl eval {run.run_id}` continues it") from None
        return folders


def pipeline(ctx: FlowContext, caller: Caller, request: EvaluationRequest, folders: list[Path]) -> None:
    """Run the stages in order and add the results folders to ``folders``."""
    if request.model and not ctx.run.provenance.is_file():
        caller.call("provenance", partial(record_provenance, ctx, sys.argv))
    asked = caller.call(_CONTRACT, partial(contracts_of, request))
    failed = []
    for tokens, step in request.steps.items():
        if tokens not in ctx.refresh().milestones:
            ctx.event("milestone", milestone_tokens=tokens, tokens=ctx.config.tokens_at(step), step=step)
        if _is_done(ctx, tokens, asked):
            ctx.message(f"{title(tokens)}: done before")
        elif not (request.model or (ctx.run.checkpoint(step) / MANIFEST).is_file()):
            ctx.message(f"{title(tokens)}: skipped, the checkpoint of step {step} no longer exists")
            continue
        elif caller.call(f"evaluate {tokens:,} tokens", partial(evaluate_milestone, ctx, tokens, asked)) != "evaluated":
            ctx.check_stop()
            failed.append(tokens)
            continue
        folders += [ctx.run.eval(tokens) / contract.folder(number) for number in asked.contracts]
    _conclude(ctx, request, failed, folders)
    if _is_alone(ctx, request):
        caller.call("report", partial(write_report, ctx))


def contracts_of(request: EvaluationRequest) -> Asked:
    """Return the contracts of an evaluation; it raises the errors of ``ask_contracts``."""
    if request.asked:
        return request.asked
    return ask_contracts(request.config, run=request.run, model=request.model, new_contract=request.new_contract)


def _is_done(ctx: FlowContext, milestone_tokens: int, asked: Asked) -> bool:
    """Return whether all tasks have undamaged results, computed from the current weights if those still exist.

    Returns False if a task was skipped, because it may be possible now.
    """
    return all(_has(ctx, milestone_tokens, asked, number) for number in asked.contracts)


def _has(ctx: FlowContext, milestone_tokens: int, asked: Asked, number: str) -> bool:
    wanted = asked.contracts[number]
    try:
        path = ctx.run.eval(milestone_tokens) / contract.folder(number) / "results.json"
        record = files.read_sealed_json(path)
        if record.get("contract") != number or not wanted.items() <= record.get("contracts", {}).items():
            return False
    except (OSError, *DAMAGED):
        return False
    if number not in ctx.state.milestones[milestone_tokens].judgements:
        return False
    try:
        if record.get("weights") != weights_of(ctx, milestone_tokens, asked):
            ctx.message(f"{title(milestone_tokens)}: the model's files have changed; earlier results are replaced")
            return False
    except CheckpointError:
        pass  # the checkpoint was deleted after its evaluation
    return True


def _conclude(ctx: FlowContext, request: EvaluationRequest, failed: list[int], folders: list[Path]) -> None:
    if failed:
        why = ctx.state.milestones[failed[-1]].last_failure
        raise EvaluationError(
            f"{len(failed)} of {len(request.steps)} evaluations failed, the last: {why}",
            hint=f"see {ctx.run.logs(0)}; finished evaluations are kept, and the same command continues with the rest",
        )
    if not folders:
        raise CheckpointError(
            f"{ctx.run.run_id}: none of its {len(request.steps)} milestones still has a checkpoint",
            hint="`hlatctl checkpoint ls` lists the existing ones; TARGET can be the folder of each",
        )


def _is_alone(ctx: FlowContext, request: EvaluationRequest) -> bool:
    """Return whether no driver writes the run's report and copies its journal to MLflow."""
    return request.model is not None or driver_pid(ctx.run) is None


def _finish(ctx: FlowContext, request: EvaluationRequest, outcome: str, message: str) -> None:
    """Journal the end of an external model's run (any other run has its own end), and copy the journal to MLflow."""
    if request.model:
        ctx.event("run_finished", outcome=outcome, step=0, tokens=0, message=message)
    ctx.watch()
    if _is_alone(ctx, request):
        follower.finish(ctx, follower.start(ctx))


def _milestone_at(run: RunPaths, known: dict[int, int], at: int) -> int:
    error = f"--at={count(at)}: {run.run_id} has no milestone of {at:,} tokens"
    tokens = find_milestone(at, known, error)
    step = known[tokens]
    if not (run.checkpoint(step) / MANIFEST).is_file() and not run.eval(tokens).is_dir():
        raise CheckpointError(
            f"--at={count(at)}: {run.run_id} has no checkpoint of step {step}, the milestone's step",
            hint=f"`hlatctl checkpoint ls {run.run_id}` lists the existing ones",
        )
    return tokens


def _context_tokens(folder: Path) -> int:
    try:
        tokens = files.read_json(folder / "config.json").get("max_position_embeddings")
    except (OSError, *DAMAGED) as error:
        raise EvaluationError(f"{folder}/config.json: can't be read ({error})") from None
    return tokens if isinstance(tokens, int) and tokens > 0 else _CONTEXT_TOKENS


def import_scores(config: Config, source: Source, *, argv: list[str]) -> RunPaths:
    """Create a run with a checked file's scores at 0 tokens, like that of an external model."""
    config = replace(config, experiment_name="imported")
    mode, run_id = int(config.runs_mode, 8), runs.new_run_id(f"imported-{_plain(source.figures.model) or 'scores'}")
    record = provenance.collect(argv, Path(hlatctl.__file__).parent)

    def begin(run: RunPaths) -> None:
        files.write_json(run.provenance, {**record, "imported": source.provenance})
        _write_samples(run, source)
        _journal_scores(run, run_id, source, argv)

    return runs.create_run(Path(config.runs_dir), run_id, conf.load.dump(config), mode, begin)


def _write_samples(run: RunPaths, source: Source) -> None:
    """Write items where evaluations write them; the first score of an item's task says what its value means."""
    folder = run.eval(0)
    for task, path in source.samples.items():
        if (figure := source.figures.figures.get(task)) is not None:
            folder.mkdir(parents=True, exist_ok=True)
            with new_file(folder / path.name) as temporary:
                shutil.copyfile(path, temporary)
            scores = {task: _score(asdict(figure))}
            files.write_sealed_json(folder / "tasks" / f"{task}.json", {"metrics": {}, "scores": scores})


def _journal_scores(run: RunPaths, run_id: str, source: Source, argv: list[str]) -> None:
    scores = {name: _score(asdict(figure)) for name, figure in source.figures.figures.items()}
    at: dict[str, Any] = {"milestone_tokens": 0, "step": 0}
    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append(
            "run_created",
            run_id=run_id,
            simulated=False,
            argv=[hide(word) for word in argv],
            evaluates=source.figures.model or source.provenance["file"],
            imported=source.provenance,
        )
        journal.append("milestone", tokens=0, **at)
        journal.append("eval_finished", suite=source.figures.form, scores=scores, skipped={}, wall_s=0.0, **at)
        journal.append("run_finished", durable=True, outcome="finished", step=0, tokens=0, message="scores imported")


def _score(figure: dict[str, Any]) -> dict[str, Any]:
    always = ("metric", "value", "stderr", "n")
    return {key: value for key, value in figure.items() if key in always or value is not None}


def _plain(model: str) -> str:
    name = model.rstrip("/").rpartition("/")[2]
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)[:50]
    return plain.strip("-.")
