"""Run one task of an evaluation: report its progress, and store its answers, items and scores.

``eval.milestone`` decides which tasks run and in which order, and combines their scores. :func:`keep_continuations`
also stores how the milestone continues ``eval.prompts``, to show how texts change over training. These texts belong to
no contract, and an evaluation never fails because of them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from conf.sampling import Sampling
from conf.schema import Config, EvalConfig
from eval import code, generate, harness, programs, scores, validation
from eval.results import Results
from eval.serving import answers, chat, model, runners
from eval.serving.pool import Pool, Settings
from eval.tasks import suites
from hlatctl.run import continuations
from hlatctl.run.contract import Record
from hlatctl.run.errors import EvaluationError
from hlatctl.run.journal import JournalWriter
from hlatctl.run.paths import RunPaths

#: Scores, the harness's metrics, and the samples with their documents and prompts.
_Outcome = tuple[scores.Scores, harness.Metrics, list[dict[str, Any]]]
_PROGRESS_EVERY_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The checkpoint or external model to evaluate.

    Args:
        milestone_tokens: tokens of the milestone; 0 for an external model.
        weights: identifies the weights, such as a manifest's checksum; stored results of other weights are not used.
        from_elsewhere: the model is external: no run trained it, so it has no held-out text.
    """

    run: RunPaths
    milestone_tokens: int
    step: int
    model_folder: Path
    weights: str = ""
    from_elsewhere: bool = False


@dataclass(kw_only=True)
class TaskRunner:
    """Run tasks on one checkpoint under their contracts.

    Args:
        held: closes all resources after the last task.
        skipped: the tasks that can't run here, with the reason; filled by :meth:`run`.
    """

    subject: Subject
    config: Config
    contracts: dict[str, tuple[str, int]]
    record: Record
    held_out: Path | None
    scratch: Path
    journal: JournalWriter
    held: ExitStack
    skipped: dict[str, str] = field(default_factory=dict)

    @cached_property
    def pool(self) -> Pool | None:
        """The processes that compute, started at the first access; None if this process computes."""
        wanted, folder = self.config.eval, self.subject.model_folder
        if wanted.runner != "hf" or wanted.replicas * wanted.tensor_parallel_size == 1:
            return None
        model.check_devices(self.config, self.config.eval_device)
        model.check_heads(folder, wanted.tensor_parallel_size)
        settings = Settings(
            folder=str(folder),
            max_length=self.config.train.seq_len,
            device=self.config.eval_device,
            dtype=runners.dtype("hf", wanted),
            batch_size=wanted.batch_size,
            processes=wanted.replicas * wanted.tensor_parallel_size,
            share_prefixes=wanted.share_prefixes,
        )
        size = wanted.tensor_parallel_size
        pool = Pool(settings, replicas=wanted.replicas, tensor_parallel_size=size, scratch=self.scratch)
        self.held.callback(pool.close)
        return pool

    @cached_property
    def loaded(self) -> model.Loaded:
        """The model in memory, loaded at the first access; without weights if a pool computes."""
        config, folder = self.config, self.subject.model_folder
        if self.pool:
            return model.describe(folder, seq_len=config.train.seq_len)
        model.check_devices(config, config.eval_device)
        dtype = runners.dtype("hf", config.eval)
        return model.load(folder, seq_len=config.train.seq_len, device=config.eval_device, dtype=dtype)

    @cached_property
    def lm(self) -> answers.Remembering:
        """The harness's model, created at the first access."""
        config, device = self.config, runners.vllm_device(self.config)
        if config.eval.runner == "vllm":
            model.check_devices(config, device)
        request = runners.RunnerArguments(
            folder=self.subject.model_folder,
            loaded=lambda: self.loaded,
            max_length=config.train.seq_len,
            batch_size=config.eval.batch_size,
            seed=config.seed,
            dtype=runners.dtype(config.eval.runner, config.eval),
            device=device,
            tensor_parallel_size=config.eval.tensor_parallel_size,
            pool=self.pool,
            share_prefixes=config.eval.share_prefixes,
        )
        lm = runners.make(config.eval.runner, request)
        if config.eval.chat_template:
            chat.select(lm.tokenizer, config.eval.chat_template)
        return answers.Remembering(lm, batch_size=runners.requests_at_once(lm, request), seed=config.seed)

    def continue_prompt(self, ids: list[int], sampling: Sampling) -> generate.Text:
        """Return the continuation of a prompt."""
        if not self.pool:
            return generate.generate(self.loaded, ids, sampling)
        return generate.Text(**self.pool.ask("continue_prompt", ids=ids, sampling=asdict(sampling)))

    @cached_property
    def results(self) -> Results:
        """The stored results of this model at this milestone."""

        def damaged(path: Path, message: str) -> None:
            print(message, file=sys.stderr, flush=True)
            self.append("eval_rejected", path=str(path), message=message)

        subject = self.subject
        model_of = {"step": subject.step, "weights": subject.weights}
        return Results(subject.run.eval(subject.milestone_tokens), model_of, self.record, damaged)

    def identity(self, task: str) -> dict[str, Any]:
        """Return the fields by which stored results of a task are recognized as this evaluation's."""
        return {"step": self.subject.step, "weights": self.subject.weights, "contract": self.contracts[task][0]}

    def folder(self, task: str) -> Path:
        """Return the folder of a task's results."""
        return self.results.folder(self.contracts[task][1])

    def append(self, kind: str, *, once: bool = False, wall_s: float | None = None, **fields: Any) -> None:
        """Append an event of this evaluation to the journal.

        Args:
            once: append only if the journal has no event with these fields, and do so durably.
            wall_s: a further field, ignored when an event is compared.
        """
        fields = {**fields, "milestone_tokens": self.subject.milestone_tokens}
        events = (event for event in self.journal.events() if event["kind"] == kind) if once else ()
        if not any(fields.items() <= event.items() for event in events):
            measured = {} if wall_s is None else {"wall_s": wall_s}
            self.journal.append(kind, durable=once, **fields, **measured)

    def append_of(self, task: str, kind: str, *, once: bool = False, **fields: Any) -> None:
        """Append an event of a task, with the number of its contract."""
        self.append(kind, once=once, task=task, contract=str(self.contracts[task][1]), **fields)

    def stored(self, task: str) -> dict[str, Any] | None:
        """Return the stored results of a task, or None."""
        return self.results.of_task(task, self.contracts[task][0], "measured again")

    def run(self, name: str, task: suites.Task | None) -> dict[str, Any] | None:
        """Score a task (None: the held-out text), store its samples and scores, and return its record.

        None if it can't run here (see ``skipped``).
        """
        started = time.monotonic()
        self.append_of(name, "eval_task_started")
        outcome = self._outcome(task)
        if outcome is None:
            return None
        task_scores, metrics, samples = outcome
        if task:
            scores.write_items(self.folder(name) / f"items-{name}.parquet", name, samples)
        scores.check_finite(task_scores)
        of_contract = {"contract": self.contracts[name][0]}
        record = scores.write_results(
            self.folder(name) / "tasks" / f"{name}.json",
            identity=self.identity(name),
            metrics=metrics,
            wall_s=round(time.monotonic() - started, 3),
            scores={title: {**score, **of_contract} for title, score in scores.to_json(task_scores).items()},
        )
        self._answers_file(name).unlink(missing_ok=True)
        return record

    def _outcome(self, task: suites.Task | None) -> _Outcome | None:
        """Score a task. Everything decided here must be in its contract, because this module's code is not."""
        wanted, seed = self.config.eval, self.config.seed
        if task is None:
            assert self.held_out is not None
            tokens, losses = wanted.validation_tokens, self._losses if self.pool else None
            return validation.evaluate(self.loaded, self.held_out, max_tokens=tokens, losses=losses), {}, []
        if not task.is_code:
            result = harness.run(
                self._begin(task.name),
                task,
                self.scratch,
                seed=seed,
                limit=wanted.limit,
                is_trained_here=not self.subject.from_elsewhere,
            )
            return result.scores, result.metrics, result.samples
        if not can_run_code(wanted):
            reason = self.skipped[task.name] = str(programs.why_unavailable())
            print(f"{task.name}: skipped, {reason}", file=sys.stderr, flush=True)
            return None
        lm = self._begin(task.name)
        found, tested = code.evaluate(lm, task, self.scratch, wanted.code, limit=wanted.limit, seed=seed)
        return found, {}, tested

    def _losses(self, batches: list[validation.Windows]) -> Iterator[list[float]]:
        assert self.pool
        return self.pool.map("losses", ({"windows": batch} for batch in batches))

    def _begin(self, name: str) -> answers.Remembering:
        last_s = 0.0

        def progress(done: int, total: int) -> None:
            nonlocal last_s
            now_s = time.monotonic()
            if now_s - last_s >= _PROGRESS_EVERY_S:
                last_s = now_s
                self.append_of(name, "eval_progress", done=done, total=total)

        self.lm.begin(self._answers_file(name), json.dumps(self.identity(name)), progress)
        return self.lm

    def _answers_file(self, task: str) -> Path:
        return self.folder(task) / "answers" / f"{task}.jsonl"


def can_run_code(wanted: EvalConfig) -> bool:
    """Return whether generated programs can run here; only tasks that need them are ever skipped."""
    return wanted.code.allow_unsandboxed or programs.why_unavailable() is None


def keep_continuations(runner: TaskRunner) -> None:
    """Write the greedy continuations of a milestone, unless they exist or can't be made here.

    Uses the model in memory. A runner other than ``hf`` loads none, unless the held-out text is scored.
    """
    wanted, subject = runner.config.eval, runner.subject
    if not wanted.prompts or subject.from_elsewhere or not (wanted.runner == "hf" or runner.held_out):
        return
    identity = {
        "step": subject.step,
        "weights": subject.weights,
        "prompts": wanted.prompts,
        "prompt_tokens": wanted.prompt_tokens,
    }
    tokens, started = subject.milestone_tokens, time.monotonic()
    try:
        if continuations.is_written(subject.run, tokens, identity):
            return
        texts = _continue(runner, wanted.prompts, Sampling(temperature=0, max_new_tokens=wanted.prompt_tokens))
        continuations.write(subject.run, tokens, identity, texts)
        print(f"eval.prompts: {len(texts)} texts ({time.monotonic() - started:.1f} s)", file=sys.stderr, flush=True)
    except Exception as error:  # whatever the error, the milestone's scores are complete
        print(f"eval.prompts: no texts ({type(error).__name__}: {error})", file=sys.stderr, flush=True)


def _continue(runner: TaskRunner, prompts: list[str], sampling: Sampling) -> list[dict[str, Any]]:
    texts = []
    for prompt in prompts:
        try:
            ids = generate.encode(runner.loaded, prompt, after_document=True)
        except EvaluationError as error:
            print(f"eval.prompts: {prompt[:40]!r} has no text ({error.message})", file=sys.stderr, flush=True)
            continue
        text = runner.continue_prompt(ids, sampling)
        texts.append({"prompt": prompt, "text": text.text, "stop": text.stop})
    return texts
