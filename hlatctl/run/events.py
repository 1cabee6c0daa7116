"""The events of a journal: one row for each kind, with its fields, their types, and its line in `hlatctl logs`.

A new kind needs a row here, the code that writes it, and a handler in ``hlatctl.run.fold`` if it changes the state.
The documentation's page of events follows this table. An event with a field of another type is damaged. Readers ignore
kinds and fields without a row: a newer version may have written them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hlatctl.run.evaluations import in_words
from hlatctl.run.step_metrics import STEP_METRICS, texts
from hlatctl.units import bounded, count, duration, host_names, number, queued, size, tags_text

Event = dict[str, Any]
Line = Callable[[Event], str]
#: Field of an event written after a clock was set back: the time that orders it.
AFTER = "after_unix_s"
#: 9999-12-31, the last day that can be shown.
_LAST_UNIX_S = 253_402_300_799.0
#: The journal's text for floats that JSON doesn't have.
_NOT_FINITE = ("nan", "inf", "-inf")


#: Types of fields: the exact types of values, as JSON gives them (``True`` is not a number), and the type in words. Any
#: field can be null.
TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "text": ((str,), "text"),
    "whole": ((int,), "whole number"),
    "number": ((int, float), "number"),
    "flag": ((bool,), "true or false"),
    "list": ((list,), "list"),
    "object": ((dict,), "object"),
    "any": ((), "anything"),
}
_FIELD, _BETWEEN = re.compile(r"(\w+)(!?) (\w+)(?: \(([^()]*)\))?"), re.compile(r"; (?![^(]*\))")


@dataclass(frozen=True)
class Field:
    """A field of an event: its type, a remark that may be empty, and whether events without it are damaged."""

    type: str
    remark: str
    is_needed: bool


@dataclass(frozen=True)
class Kind:
    """A kind of event.

    Args:
        writers: the writers of the files that have such events.
        meaning: what it records; empty if its name says it.
        line: returns its line of text, and raises one of ``files.DAMAGED`` if the event lacks a field; None: no line.
    """

    writers: str
    meaning: str
    fields: dict[str, Field]
    line: Line | None


def _kind(about: str, fields: str, line: Line | None = None) -> Kind:
    """Return a row of the table.

    Args:
        about: the writers and, after a colon, the meaning.
        fields: ``name type (remark)``, separated by semicolons; an exclamation mark after the name: it is needed.
    """
    writers, _, meaning = about.partition(": ")
    parsed = {}
    for text in filter(None, _BETWEEN.split(fields)):
        match = _FIELD.fullmatch(text)
        assert match, text
        parsed[match[1]] = Field(match[3], match[4] or "", bool(match[2]))
    return Kind(writers, meaning, parsed, line)


def _at(event: Event) -> str:
    tokens = int(event["milestone_tokens"])
    return f"evaluation at {count(tokens)} tokens" if tokens else "evaluation"


def _message(event: Event) -> str:
    return f"{event['kind']}: {event['message']}"


def _labels(event: Event) -> str:
    parts = [f"name {event['name']}" if event.get("name") else "no name" if "name" in event else ""]
    parts += [tags_text(event["tags"]), *(f"without {key}" for key in event["untag"]), event["note"]]
    return f"labelled by {event['by']}: {', '.join(filter(None, parts))}"


def _config_amended(event: Event) -> str:
    changes = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in event["changes"].items())
    when = "" if event.get("at_step") is None else f" after step {event['at_step']}"
    return f"amendment {event['number']}{when} by {event['by']}: {changes}{_after(': ', event.get('why'))}"


def _tracking_back(event: Event) -> str:
    missed = "messages are sent" if event["what"] == "notify" else f"{event['events']} missing events copied"
    return f"{event['what']} answers again, {missed}"


def _drill_outcome(event: Event) -> str:
    outcome = event["failure"] or _after("skipped, ", event["skipped"]) or "recovered"
    return f"drill: {event['title']}: {outcome}"


def _after(sign: str, text: str | None, end: str = "") -> str:
    return f"{sign}{text}{end}" if text else ""


#: Parts of the time that a recovery takes, as fields of `recovered`. The driver's clock measures all up to the start of
#: the new attempt's job, and rank 0's the last three, as durations. Between them is the start: the moment when rank 0
#: began to train is carried over to the driver's clock by the least delay with which the driver read its events.
RECOVERY_PHASES = {
    "detect_s": "until the driver saw the end",
    "decide_s": "until it had decided what follows",
    "retry_s": "attempts in between that made no step",
    "place_s": "until the attempt began: waits, checks of nodes, evaluations",
    "start_s": "until the processes ran and had imported; a wait in a queue too",
    "groups_s": "until rank 0 had met the others and made the groups",
    "load_s": "until it could train: model, checkpoint, data",
    "first_step_s": "its first step, which may compile",
}


#: Values of `restored_from` in `train_started` if training didn't start from storage, in words.
IN_MEMORY = {"memory": "memory", "partner": "a partner's memory"}


def recovery_text(event: Event) -> str:
    """Return the time of a recovery, and its parts, as text."""
    parts = {name: float(event.get(name) or 0.0) for name in RECOVERY_PHASES}
    known = (f"{name.removesuffix('_s').replace('_', ' ')} {duration(part)}" for name, part in parts.items() if part)
    whole = duration(sum(parts.values()))
    return f"{whole} from the last event to the first step{_in_memory(event)}: {', '.join(known)}"


def _in_memory(event: Event) -> str:
    """Return where copies in memory were that training started from, as text; empty: it started from storage."""
    where = IN_MEMORY.get(str(event.get("restored_from")))
    return f" (from {where})" if where else ""


#: The events of a run's journal, in the order of a run.
OF_RUNS: dict[str, Kind] = {
    "run_created": _kind(
        "flow",
        "run_id text; simulated flag; argv list; sweep text (of a trial); trial whole (of a sweep); evaluates text "
        "(folder of an external model: the run is only its evaluation); imported object (file, its SHA-256, "
        "evaluator, model and date of imported scores: the run has nothing but these)",
        lambda e: f"run {e['run_id']}: created",
    ),
    "forecast_made": _kind(
        "flow: what a ladder's rungs say of this run, its target; journalled when the run is created",
        "ladder text; objective text; law text (`size` or `compute`); why text (why not `size`); loss! object (value, "
        "low and high); coverage number (share between the bounds); constants! object; rungs! list; target! object; "
        "held_out! object (forecast for the largest rung by the others); curve! list; scores! object (by task)",
        lambda e: f"forecast by {e['ladder']}: {e['objective']} {bounded(e['loss'])}",
    ),
    "head_started": _kind(
        "flow: a driver starts",
        "pid whole; host text; token text (of its lease)",
        lambda e: f"driver started: process {e['pid']} on {e['host']}",
    ),
    "stage_started": _kind("flow", "stage text; fingerprint text", lambda e: f"stage {e['stage']}: started"),
    "stage_finished": _kind(
        "flow",
        "stage text; fingerprint text; wall_s number; outputs object",
        lambda e: f"stage {e['stage']}: finished in {duration(e['wall_s'])}",
    ),
    "stage_skipped": _kind(
        "flow", "stage text; fingerprint text; why text", lambda e: f"stage {e['stage']}: skipped, {e['why']}"
    ),
    "stage_failed": _kind(
        "flow",
        "stage text; fingerprint text; error text; code text (of the error, or empty); message text; hint text; "
        "restart flag (the stage is started again)",
        lambda e: f"stage {e['stage']}: failed, {e['message']}",
    ),
    "environment_collision": _kind(
        "flow: a variable of the shell differs from the configuration's value, which is used",
        "name text; configured text (null: unset); found text; message text",
        _message,
    ),
    "attempt_started": _kind(
        "flow: journalled before its job is submitted",
        "handle object (of the job); max_checkpoint_step whole (the attempt loads no newer checkpoint); oom_kills "
        "whole (the kernel's count so far); left_out_hosts list (nodes that it must avoid); rejected_hosts list "
        "(nodes of the attempt before that failed a preflight since its end); config_number whole (newest amendment "
        "of its configuration; 0: `config.yaml`)",
        lambda e: f"attempt {e['attempt']}: started",
    ),
    "attempt_attached": _kind(
        "flow: a new driver watches an attempt that an earlier driver started",
        "",
        lambda e: f"attempt {e['attempt']}: still running, re-attached",
    ),
    "job_queued": _kind(
        "flow: a job waits in the scheduler's queue, or its reason changed; `preflight` also waits for a node to be "
        "repaired",
        "job! text; reason text; expected_start_unix_s number (null: unknown); code text (`no_spare_node`: it waits "
        "for a repair)",
        lambda e: f"job {e['job']}: {queued(e.get('reason') or '', e.get('expected_start_unix_s'))}",
    ),
    "job_started": _kind(
        "flow: a queued job runs",
        "job! text; hosts list",
        lambda e: f"job {e['job']}: runs on {host_names(e['hosts'])}",
    ),
    "job_left_queue": _kind(
        "flow: a job left the queue and was never seen running",
        "job! text",
        lambda e: f"job {e['job']}: left the queue",
    ),
    "scheduler_away": _kind(
        "flow: the scheduler does not answer, so nothing is concluded about its jobs",
        "job text",
        lambda e: f"job {e['job']}: the scheduler does not answer",
    ),
    "scheduler_back": _kind(
        "flow: the scheduler answers again", "job text", lambda e: f"job {e['job']}: the scheduler answers again"
    ),
    "hang": _kind(
        "flow: journalled before the attempt is ended",
        "evidence text; stacks text (the result of asking for them); path text (folder in which the processes leave "
        "their stacks and collectives, below the run directory)",
        lambda e: f"attempt {e['attempt']}: hung, {e['evidence']}{_after('; ', e.get('path'))}",
    ),
    "attempt_ended": _kind(
        "flow",
        "cause text; evidence text; signature text (the evidence without addresses, paths and numbers); exit_code "
        "whole; step whole (the last one); decision text (`done`, `restart`, `restart_without`, `walk_back`, "
        "`skip_data` or `stop`); why text; max_checkpoint_step whole (for the next attempt); hosts list (where the "
        "launcher knows them); blamed_hosts list (those that failed first); detect_s number (from the trainer's last "
        "event until the driver saw the end; null: unknown); decide_s number (until the decision)",
        lambda e: f"attempt {e['attempt']}: ended at step {e['step']} ({e['evidence']}){_after('; ', e.get('why'))}",
    ),
    "train_started": _kind(
        "train rank 0",
        "resumed_from_step whole (0: the initial model); tokens whole; world whole (number of processes); device "
        "text; device_name text (of a GPU, and what computes on it; else empty); parameters whole; peak_flops_per_s "
        "number (of one device; null: unknown); added_skips list (batches that `data_changed` events have excluded so "
        "far); groups_s number (rank 0 met the others and made the process groups); load_s number (after that, until "
        "training could start: model, checkpoint, data); warm flag (its processes were forked from a program that an "
        "earlier attempt had started); restored_from text (`nothing`: weights of no checkpoint of its own; `storage`; "
        "`memory`: copies in the memory of its nodes; `partner`: some of these came from another node; null: "
        "`storage`); log_freq whole (steps between two that are journalled; null: 1); attention text "
        "(kernel of attention, such as `FA3`; null: the device's usual one)",
        lambda e: f"attempt {e['attempt']}: training starts from step {e['resumed_from_step']}{_in_memory(e)}",
    ),
    "recovered": _kind(
        "flow: the first step after a restart. Its times follow one another, and add up to the time from the last "
        "event before the end to this step",
        "cause text (of the end); step whole; warm flag (as in `train_started`); restored_from text (the same); "
        + "; ".join(f"{name} number ({meaning})" for name, meaning in RECOVERY_PHASES.items()),
        lambda e: f"attempt {e['attempt']}: recovered from {e['cause']}, {recovery_text(e)}",
    ),
    "initial_weights": _kind(
        "train rank 0: only if the run has no checkpoint of its own",
        "path text (`train.init_from`)",
        lambda e: f"initial weights: {e['path']}",
    ),
    "compile_cache": _kind(
        "train rank 0: after the first step",
        "hits whole; misses whole; wall_s number",
        lambda e: f"compile cache: {e['hits']} hits, {e['misses']} misses",
    ),
    "step": _kind(
        "train rank 0: it may have further numbers, under their names; a dry run lacks what is measured",
        "step! whole; tokens whole; batch whole (its number in the order of the data, from 1; skipped batches "
        "count; not in a dry run); steps whole (of a dry run: the event stands for this many steps, ending with "
        "this one); " + "; ".join(f"{row.name} number ({row.note})" for row in STEP_METRICS),
        lambda e: f"step {e['step']}: {', '.join(texts(e))}",
    ),
    "gradient_spike": _kind(
        "train rank 0: a spike by HLAT's rule begins, which is a statistic and no alarm",
        "step! whole; grad_norm number; mean number (of the last 20 steps)",
    ),
    "gradient_spike_ended": _kind(
        "train rank 0", "step whole (at which it began); peak_grad_norm number; length_steps whole"
    ),
    "nonfinite": _kind(
        "train rank 0: such a step has no `step` event",
        "step whole; tokens whole; batch whole; loss text (it may be `nan`); grad_norm text (it may be `nan`); "
        "action text (`stop`, `skip` or `rollback`); ranks list (those whose weights or moments were not finite "
        "before the step); blamed_hosts list (their node, if those of other ranks were finite)",
        lambda e: f"step {e['step']}: loss {e['loss']}, gradient norm {e['grad_norm']}, not finite: {e['action']}",
    ),
    "rank_times": _kind(
        "train rank 0: the time that each process needs for the same work, every 20 steps",
        "step whole; what text (`own_work`, or with FSDP `product`: a small matrix product between steps); median_s "
        "number; min_s number; max_s number; slowest_rank whole; host text; ratio number",
    ),
    "straggler": _kind(
        "train rank 0: a slow process",
        "step whole; rank whole; host text; device text; ratio number; message text",
        _message,
    ),
    "node_notice": _kind(
        "flow: the provider takes nodes back, or may do so",
        "what text (`spot`, `rebalance` or `capacity`); hosts list; ends_unix_s number (null: they may stay); "
        "message text",
        _message,
    ),
    "alarm": _kind(
        "train rank 0, flow",
        "step whole; what text (`gradient_norm`, `update_skipped`, `loss_to_zero`, `weight_drift`, `disk_full`, "
        "`checkpoint_failed`, `remote_copy`; from the flow `evaluation_behind`, once until no milestone waits, and "
        "`budget`, when 90 % of one is used); "
        "message text; code text (with `checkpoint_failed`: of the error, or empty)",
        _message,
    ),
    "corruption_checked": _kind(
        "train rank 0: all processes compute the same; checkpoints up to this step are trusted",
        "step! whole; wall_s number (of the check)",
    ),
    "corruption_suspected": _kind(
        "train rank 0: processes compute wrong numbers; the attempt ends",
        "step whole (the last one before the check); part text (`weights`, `forward` or `backward`: the first that "
        "differs); ranks list (the suspects); hosts list (of each suspect); devices list (of each suspect); "
        "blamed_hosts list (nodes that certainly have a faulty device; empty: any of the suspects may be wrong); "
        "difference number (largest relative difference of a loss or a norm; 0: of bits only; null: one isn't finite); "
        "repeatable flag (the suspects reproduced their own numbers); message text",
        _message,
    ),
    "warning": _kind("flow, train rank 0", "message text", _message),
    "checkpoint_written": _kind(
        "train rank 0: all files are written, under a temporary name",
        "step whole; tokens whole; bytes whole; wall_s number; stall_s number (time that training waited); reason "
        "text (`interval`, `milestone`, `permanent`, `final` or `stop`)",
    ),
    "checkpoint_committed": _kind(
        "train rank 0: it has its final name and counts from now on",
        "step! whole; manifest_sha256 text",
        lambda e: f"checkpoint of step {e['step']}: written",
    ),
    "checkpoint_verified": _kind(
        "train rank 0: it was read again, after it was written or before it is loaded: sizes and checksums are "
        "equal, the tensors of each shard fill it, and no element is missing",
        "step whole; path text",
    ),
    "checkpoint_survived": _kind(
        "train rank 0: `checkpoint.survived_after_steps` finite steps followed it", "step whole"
    ),
    "checkpoint_skipped": _kind(
        "train rank 0",
        "step whole; reason text (the previous one is still being written, or there is too little space)",
        lambda e: f"checkpoint of step {e['step']}: skipped, {e['reason']}",
    ),
    "checkpoint_rejected": _kind(
        "train rank 0",
        "step whole; path text; reason text (names the file)",
        lambda e: f"checkpoint of step {e['step']}: rejected, {e['reason']}",
    ),
    "checkpoint_uploaded": _kind(
        "train rank 0: it is complete in the remote folder",
        "step whole; bytes whole; wall_s number (since it was verified); url text",
        lambda e: f"checkpoint of step {e['step']}: copied to {e['url']}",
    ),
    "checkpoint_fetched": _kind(
        "train rank 0: it was copied from the remote folder to the run directory, and its checksums are equal; "
        "`checkpoint_committed` and `checkpoint_verified` follow",
        "step whole; bytes whole; wall_s number; url text",
        lambda e: f"checkpoint of step {e['step']}: fetched from {e['url']}",
    ),
    "upload_waiting": _kind(
        "train rank 0: the end of the run waits for the copy; once a minute",
        "step whole; url text; message text (the last failure, or empty)",
        lambda e: f"checkpoint of step {e['step']}: waiting until it is copied to {e['url']}",
    ),
    "checkpoint_deleted": _kind(
        "train rank 0; operator, of a trial that its sweep ended",
        "step whole",
        lambda e: f"checkpoint of step {e['step']}: deleted",
    ),
    "train_stopped": _kind(
        "train rank 0",
        "step whole; tokens whole; reason text (`finished`, `stop`, `rollback` or `amend`)",
        lambda e: f"attempt {e['attempt']}: training ended at step {e['step']} ({e['reason']})",
    ),
    "milestone": _kind(
        "flow, evaluate: it waits for its evaluation",
        "milestone_tokens whole; step whole; tokens whole",
        lambda e: f"{_at(e)}: pending, checkpoint of step {e['step']}",
    ),
    "eval_taken": _kind(
        "flow, evaluate: an evaluator takes the milestone from the queue; its checkpoint is kept until it is "
        "finished, failed or stopped",
        "milestone_tokens whole; step whole",
        lambda e: f"{_at(e)}: taken from the queue",
    ),
    "eval_started": _kind(
        "eval",
        "milestone_tokens whole; step whole; suite text; tasks list (in order); contract text; try whole",
        lambda e: f"{_at(e)}: started",
    ),
    "eval_task_started": _kind(
        "eval",
        "milestone_tokens whole; contract text (number of the task's); task text",
        lambda e: f"{_at(e)}: {e['task']}",
    ),
    "eval_progress": _kind(
        "eval: at most one every 2 s",
        "milestone_tokens whole; contract text (number of the task's); task text; done whole (requests); total "
        "whole (requests)",
        lambda e: f"{_at(e)}: {e['task']}, {e['done']:,} of {e['total']:,} requests",
    ),
    "eval_task_finished": _kind(
        "eval",
        "milestone_tokens whole; contract text (number of the task's); task text; scores object",
        lambda e: f"{_at(e)}: {e['task']} finished: {in_words(e['scores'])}",
    ),
    "eval_rejected": _kind(
        "eval: a results file was changed after it was written",
        "milestone_tokens whole; path text; message text",
        _message,
    ),
    "eval_contract_replaced": _kind(
        "eval: contracts of an earlier evaluation, which measured nothing, were replaced in the record",
        "milestone_tokens whole; message text",
        lambda e: f"{_at(e)}: {e['message']}",
    ),
    "eval_finished": _kind(
        "eval",
        "milestone_tokens! whole; step! whole; suite text; scores object (as in `results.json`); skipped object "
        "(why each task could not run); wall_s number (of this try: loading, tasks and texts); contract text "
        "(number of the contracts); chosen flag (a user chose the tasks, which aren't the run's suite)",
        lambda e: f"{_at(e)}: finished: {in_words(e['scores'])}",
    ),
    "eval_failed": _kind(
        "flow, evaluate",
        "milestone_tokens whole; step whole; message text; final flag (there is no further try)",
        lambda e: f"{_at(e)}: failed, {e['message']}",
    ),
    "eval_stopped": _kind(
        "flow, evaluate: interrupted because the run, or its evaluation, stops; the milestone is pending again",
        "milestone_tokens whole; step whole",
        lambda e: f"{_at(e)}: interrupted, pending again",
    ),
    "stop_requested": _kind(
        "operator; flow, by Ctrl-C (`interrupt`) or when the `budget` is used up",
        "by text; driver text (token of the driver that is to stop; empty: no process drives the run)",
        lambda e: f"stop requested by {e['by']}",
    ),
    "failure_simulated": _kind(
        "simulation: a failure that a dry run has drawn",
        "failure text; host text",
        lambda e: f"simulated failure: {e['failure']} on {e['host']}",
    ),
    "tracking_lost": _kind(
        "mirror-NAME, notify, flow, simulation: a service doesn't answer; the run continues without it",
        "what text (`mlflow`, `tensorboard`, `wandb`, `prefect` or `notify`); message text",
        _message,
    ),
    "tracking_back": _kind(
        "mirror-NAME, notify, simulation: it answers again",
        "what text; events whole (missing events that it has received)",
        _tracking_back,
    ),
    "fault_injected": _kind(
        "drill",
        "fault text; run_id text (the drill's run into which it was injected)",
        lambda e: f"drill: {e['fault']} injected into run {e['run_id']}",
    ),
    "drill_outcome": _kind(
        "drill: one for each fault",
        "fault! text; title! text; failure! text (empty if the run recovered); skipped! text (why the fault was not "
        "tried); detected_as text; detected_s number; recovered_s number; lost_steps whole; losses_equal flag; "
        "largest number (largest relative difference of a loss from the undisturbed run's)",
        _drill_outcome,
    ),
    "drill_baseline": _kind(
        "drill: the undisturbed run",
        "steps whole; cold_start_s number (from its driver's start to its first step, with compiled graphs in the "
        "cache)",
        lambda e: f"drill: {e['steps']} steps without faults, to compare with",
    ),
    "data_changed": _kind(
        "operator, train rank 0, flow: a change of the run's data",
        "key! text (`data.skip_steps`, batches to exclude, or `data.fingerprint`, the corpus to continue with); "
        "value! any; by text; why text",
        lambda e: f"{e['key']} changed to {e['value']} by {e['by']}: {e['why']}",
    ),
    "config_amended": _kind(
        "operator: a change of the run's configuration",
        "number! whole (from 1); changes! object (old and new value by key); by text; why text; at_step whole "
        "(begin after this step; null: as soon as each key may change); newest_step whole (the run's at that time)",
        _config_amended,
    ),
    "training_stage_started": _kind(
        "train rank 0: again after a return to the stage's beginning",
        "name! text; number! whole (from 1); step! whole (its first one)",
        lambda e: f"stage {e['name']} ({e['number']}) begins with step {e['step']}",
    ),
    "amendment_applied": _kind(
        "flow, train rank 0: again after a return to an earlier checkpoint",
        "number! whole; step! whole (the last one without it)",
        lambda e: f"amendment {e['number']}: in force after step {e['step']}",
    ),
    "labelled": _kind(
        "operator: also in a sweep's journal",
        "by text; name text (if it changes; empty: none); tags object (that are set); untag list (tags that are "
        "removed); note text (that is added; empty: none)",
        _labels,
    ),
    "archived": _kind(
        "operator: checkpoints were removed; the run can't be resumed",
        "by text; bytes whole",
        lambda e: f"archived by {e['by']}: {size(number(e, 'bytes'))} of checkpoints removed",
    ),
    "profile_requested": _kind(
        "operator: its `attempt` is the one that is to record it",
        "number! whole (from 1); steps! whole; ranks! list; memory flag; by text",
        lambda e: f"profile {e['number']}: {e['steps']} steps asked for by {e['by']}",
    ),
    "profiled": _kind(
        "train rank 0: its folder is complete",
        "number! whole; first_step! whole; step! whole (the last one); bytes! whole",
        lambda e: f"profile {e['number']}: steps {e['first_step']} to {e['step']}, {size(e['bytes'])}",
    ),
    "profile_failed": _kind(
        "train rank 0: all its files are removed; the end of its attempt ends a profile too",
        "number! whole; message text",
        lambda e: f"profile {e['number']}: failed, {e['message']}",
    ),
    "run_finished": _kind(
        "flow",
        "outcome text (`finished`, `failed` or `stopped`); step whole; tokens whole; message text; hint text",
        lambda e: f"run {e['outcome']} at step {e['step']}{_after(' (', e.get('message'), ')')}",
    ),
}
#: The events that only a sweep's journal has. It also has ``head_started``, ``stop_requested`` and
#: ``labelled``, and a ladder's has ``forecast_made``.
OF_SWEEPS: dict[str, Kind] = {
    "sweep_created": _kind(
        "flow",
        "sweep_id text; simulated flag; folder text (base of relative paths); overrides list (of every trial); "
        "objective text; direction text; accelerators flag; plan any; argv list; axes list; settings object "
        "(`sweep.*`); arms whole; trials whole; target whole (the arm of a ladder's "
        "target; null in a sweep)",
    ),
    "sweep_extended": _kind(
        "flow", "argv list; axes list; settings object (`sweep.*`); arms whole; trials whole; target whole"
    ),
    "trial_asked": _kind(
        "flow: journalled before the run directory is created",
        "trial whole; run_id text; arm whole; point object (by axis); seed whole (null if the sweep uses one seed); "
        "overrides list (all, as `hlatctl train` takes them)",
    ),
    "trial_started": _kind("flow: its driver is about to start", "trial whole; run_id text"),
    "trial_rung": _kind("flow", "trial whole; tokens whole; value number (of the objective)"),
    "trial_stopping": _kind(
        "flow: journalled before the trial is asked to stop",
        "trial whole; outcome text (`pruned` or `diverged`); why text",
    ),
    "trial_paused": _kind("flow, operator: it stops because the sweep stops", "trial whole"),
    "trial_head_lost": _kind("flow: its driver is gone and its journal doesn't say why", "trial whole"),
    "trial_ended": _kind(
        "flow: once per trial",
        "trial whole; outcome text (`finished`, `pruned`, `diverged` or `failed`); why text; value number (the "
        "final one); tokens whole; process_hours number; saved_process_hours number",
    ),
    "sweep_finished": _kind("flow", "outcome text (`finished`, `stopped` or `failed`); message text"),
}
KINDS = OF_RUNS | OF_SWEEPS
_TYPES = {
    kind: {name: TYPES[field.type][0] for name, field in row.fields.items() if field.type != "any"}
    for kind, row in KINDS.items()
}
_NEEDED = {kind: [name for name, field in row.fields.items() if field.is_needed] for kind, row in KINDS.items()}


def is_event(value: Any) -> bool:
    """Return whether a value from JSON is an event: it has the fields of its kind, and each has its type."""
    if type(value) is not dict:
        return False
    time_unix_s, kind = value.get("time_unix_s"), value.get("kind")
    if type(kind) is not str or type(value.get("seq")) is not int or type(value.get("attempt")) is not int:
        return False
    for unix_s in (time_unix_s, value.get(AFTER, 0.0)):
        if not isinstance(unix_s, float | int) or not abs(unix_s) <= _LAST_UNIX_S:
            return False
    types = _TYPES.get(kind)
    if types is None:
        return True
    if any(value.get(name) is None for name in _NEEDED[kind]):
        return False
    for name, item in value.items():  # once for each field of millions of events
        if name in types and type(item) not in types[name] and not _may_be(types[name], item):
            return False
    return "scores" not in types or all(map(_is_score, (value.get("scores") or {}).values()))


def _may_be(types: tuple[type, ...], value: Any) -> bool:
    return value is None or (float in types and value in _NOT_FINITE)


def _is_score(value: Any) -> bool:
    if type(value) is not dict:
        return False
    number = value.get("value")
    return number is None or type(number) in (int, float) or number in _NOT_FINITE


def line_of(event: Event) -> str:
    """Return an event's line of text; empty for a kind without one. An unknown kind's line has its values.

    Raises:
        KeyError, TypeError, ValueError: the event lacks a field (``files.DAMAGED``).
    """
    kind = KINDS.get(event["kind"])
    if kind is not None:
        return kind.line(event) if kind.line else ""
    if isinstance(event.get("message"), str):
        return _message(event)
    values = (
        f"{name} {value}" for name, value in event.items() if name not in _COMMON and not isinstance(value, list | dict)
    )
    return f"{event['kind']}: {', '.join(values)}"


#: Fields that every event has, and the writer that the reader adds.
_COMMON = ("v", "seq", "time_unix_s", AFTER, "attempt", "kind", "writer")
