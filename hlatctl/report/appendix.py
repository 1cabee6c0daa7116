"""The appendix of a report: environment, data, interruptions, and continuations of the prompts by milestone."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from conf.schema import Config
from conf.stages import source_tokens
from conf.training_rules import learning_rate
from hlatctl.plan.budget import epochs
from hlatctl.report.record import Record
from hlatctl.run.continuations import Kept
from hlatctl.units import count, duration, host_names, printable, size, utc


def environment_facts(provenance: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the facts of the provenance, as name and text; empty if there is none."""
    host, git = _object(provenance, "host"), _object(provenance, "git")
    packages = _object(provenance, "packages")
    commit = str(git.get("commit") or "")
    known = [
        ("command", shlex.join(map(str, provenance.get("argv") or []))),
        ("commit", commit + (" with uncommitted changes" if commit and git.get("dirty") else "")),
        ("branch", str(git.get("branch") or "")),
        ("driver's host", str(host.get("name") or "")),
        ("driver's processors", str(host.get("cpus") or "")),
        ("platform", str(host.get("platform") or "")),
        ("Python", str(provenance.get("python") or "")),
        ("packages", ", ".join(f"{name} {version}" for name, version in packages.items())),
        ("configuration's fingerprint", str(provenance.get("config_fingerprint") or "")),
        ("corpus's fingerprint", str(provenance.get("dataset_fingerprint") or "")),
        ("tokenizer's fingerprint", str(provenance.get("tokenizer_fingerprint") or "")),
    ]
    return [(name, text) for name, text in known if text]


def _object(provenance: dict[str, Any], key: str) -> dict[str, Any]:
    value = provenance.get(key)
    return value if isinstance(value, dict) else {}


SOURCES_HEADER = (
    "source",
    "documents",
    "text",
    "tokens (estimate)",
    "share",
    "consumed tokens",
    "epochs",
    "epochs at the end",
)


def sources(record: Record) -> list[list[str]]:
    """Return a row for each source, in the order of ``SOURCES_HEADER``; empty if the corpus is not prepared."""
    found: list[dict[str, Any]] = record.dataset.get("sources") or []
    all_tokens = max(1, record.numbers.tokens)
    shares = [tokens / all_tokens for tokens in source_tokens(record.config, all_tokens)]
    if len(shares) != len(found):
        shares = [1.0] * len(found) if len(found) == 1 else []
    planned = epochs(record.config, record.dataset)
    rows = []
    for at, source in enumerate(found):
        share = shares[at] if shares else None
        consumed = None if share is None else share * record.numbers.tokens
        tokens = source.get("estimated_tokens")
        rows.append(
            [
                str(source.get("path") or "unknown"),
                _known(source.get("documents"), "{:,}".format),
                _known(source.get("text_bytes"), size),
                _known(tokens, count),
                _known(share, lambda value: f"{100 * value:.1f} %"),
                _known(consumed, count),
                f"{consumed / tokens:.2f}" if consumed is not None and tokens else "–",
                f"{planned[at].count:.2f}" if planned else "–",
            ]
        )
    return rows


TRAINING_STAGES_HEADER = ("stage", "steps", "tokens", "batch", "learning rate", "shares of the sources")


def training_stages(record: Record) -> list[list[str]]:
    """Return a row for each stage of the run, in the order of ``TRAINING_STAGES_HEADER``; empty if it has none."""
    rows = []
    for stage in record.config.stages:
        config, weights = stage.config, stage.config.data.source_weights
        first, last = (learning_rate(step, config) for step in (stage.after_step + 1, stage.last_step))
        named = zip(source_names(config), weights, strict=True)
        shares = (f"{name} {100 * w / sum(weights):.3g} %" for name, w in named if w)
        rows.append(
            [
                stage.name,
                f"{stage.after_step + 1:,} to {stage.last_step:,}",
                count(stage.tokens),
                f"{config.train.global_batch_size:,} x {config.train.seq_len:,}",
                f"{first:.3g} to {last:.3g}",
                ", ".join(shares),
            ]
        )
    return rows


SOURCES_OF_STAGES_HEADER = ("stage", "source", "share", "share read", "tokens read", "documents begun")


def sources_of_stages(record: Record) -> list[list[str]]:
    """Return a row for each source that a stage has read, in the order of ``SOURCES_OF_STAGES_HEADER``.

    A stage is counted between the checkpoints at its bounds; the one that is trained, up to the newest checkpoint.
    Tokens of skipped batches are included.
    """
    rows, before = [], record.config.data.source_weights
    for stage in record.config.stages:
        weights, begun = stage.config.data.source_weights, record.drawn.get(stage.after_step)
        reached = max((step for step in record.drawn if stage.after_step < step <= stage.last_step), default=0)
        ended = record.drawn.get(reached)
        mixed_anew, before = weights != before, weights
        if not begun or not ended or not reached:
            continue
        tokens = [
            now.finished_tokens + now.open_tokens - then.open_tokens - (0 if mixed_anew else then.finished_tokens)
            for then, now in zip(begun, ended, strict=True)
        ]
        for name, weight, own, then, now in zip(
            source_names(record.config), weights, tokens, begun, ended, strict=True
        ):
            if weight or own:
                share, read = weight / sum(weights), own / max(1, sum(tokens))
                documents = now.documents - then.documents
                row = [f"{100 * share:.3f} %", f"{100 * read:.3f} %", f"{own:,}", f"{documents:,}"]
                rows.append([stage.name, name, *row])
    return rows


def source_names(config: Config) -> list[str]:
    """Return the names of a corpus's sources, by which ``data.weights`` knows them; `all` for a nameless one."""
    return [s.name or s.path.rstrip("/").rpartition("/")[2] for s in config.data.inputs] or ["all"]


def data_facts(record: Record) -> list[tuple[str, str]]:
    """Return the facts about all sources, as name and text."""
    data, found = record.config.data, record.dataset
    tokenizer, held_out = found.get("tokenizer") or {}, found.get("validation") or {}
    known = [
        ("tokens in a sequence", f"{record.config.train.seq_len:,}"),
        ("vocabulary", _known(tokenizer.get("vocab_size"), "{:,} tokens".format)),
        ("attention", "within a document" if data.mask_across_documents else "to all earlier tokens of a sequence"),
        ("held-out documents", _known(held_out.get("documents"), "{:,}".format)),
        ("skipped rows", _known(found.get("skipped_rows"), "{:,}".format)),
        ("skipped batches", ", ".join(map(str, data.skip_steps))),
        ("fingerprint", str(found.get("fingerprint") or "")),
    ]
    return [(name, text) for name, text in known if text and text != "–"]


def _known(value: Any, text: Any) -> str:
    return "–" if value is None else str(text(value))


INCIDENTS_HEADER = ("attempt", "ended (UTC)", "cause", "evidence", "nodes at fault", "lost", "decision")
_FINISHED = "finished"


def incidents(record: Record) -> list[list[str]]:
    """Return a row for each attempt that ended before the run's last step, in the order of ``INCIDENTS_HEADER``."""
    attempts = record.numbers.attempts
    nodes = {attempt.number: attempt.blamed_hosts for attempt in record.state.attempts}
    starts = [attempt.started_unix_s for attempt in attempts[1:]]
    rows = []
    for at, attempt in enumerate(attempts):
        if attempt.wall_s is None or attempt.cause == _FINISHED:
            continue
        ended_unix_s = attempt.started_unix_s + attempt.wall_s
        waited_s = starts[at] - ended_unix_s if at < len(starts) else None
        rows.append(
            [
                str(attempt.number),
                utc(ended_unix_s).removesuffix(" UTC"),
                attempt.cause or "unknown",
                attempt.evidence or "–",
                host_names(blamed) if (blamed := nodes.get(attempt.number)) else "–",
                _lost(attempt.lost_steps, record.time.checkpointing.step_s, waited_s),
                ": ".join(filter(None, [attempt.decision, attempt.why])) or "–",
            ]
        )
    return rows


def _lost(steps: int, step_s: float | None, waited_s: float | None) -> str:
    redone = f"{steps:,} step{'s' * (steps != 1)}" + (f" ({duration(steps * step_s)})" if steps and step_s else "")
    return redone + (f", {duration(max(0.0, waited_s))} until the next attempt" if waited_s is not None else "")


#: A prompt, and the tokens and the text of each milestone.
Table = tuple[str, list[tuple[str, str]]]
_BLANK = "(only blank lines)"


def by_prompt(kept: Sequence[Kept]) -> list[Table]:
    """Return the continuations of each prompt, without control characters and without more than one blank line."""
    rows: dict[str, list[tuple[str, str]]] = {}
    for each in kept:
        for one in each.continuations:
            rows.setdefault(printable(one.prompt), []).append((count(each.milestone_tokens), _compact(one.text)))
    return list(rows.items())


def evenly(kept: Sequence[Kept], most: int) -> list[Kept]:
    """Return at most ``most`` milestones at equal distances, with the first and the last."""
    if len(kept) <= most:
        return list(kept)
    return [kept[at * (len(kept) - 1) // (most - 1)] for at in range(most)]


def _compact(text: str) -> str:
    return re.sub(r"\n\s*\n", "\n\n", printable(text)).rstrip() or _BLANK
