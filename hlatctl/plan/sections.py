"""A plan as titled lists of figures, each with where it comes from; pure. Printing is the command's business."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conf.schema import Config
from conf.sizes import FAST_CHECKPOINTS
from hlatctl.plan.arithmetic import Budget, budget
from hlatctl.plan.cost import cost
from hlatctl.plan.epochs import GOOD_EPOCHS, Epochs
from hlatctl.plan.memory import Memory, memory
from hlatctl.plan.published import Compose, points
from hlatctl.plan.remedies import remedies
from hlatctl.plan.search import Candidate
from hlatctl.plan.step_time import StepTime, missing, peak_flops_per_s, step_time
from hlatctl.plan.volume import Volume, volume
from hlatctl.units import count, duration, size

#: Where a figure comes from: the configuration, arithmetic, arithmetic with fitted numbers, a measurement, the paper.
GIVEN, DERIVED, CALIBRATED, MEASURED, PUBLISHED = "given", "derived", "calibrated", "measured", "published"


@dataclass(frozen=True)
class Figure:
    """One line of a plan.

    Args:
        value: for programs, in the unit that the name or the text says.
        text: for people.
        kind: where it comes from.
    """

    name: str
    value: float | int | str | bool | None
    text: str
    kind: str


@dataclass(frozen=True)
class Section:
    """Lines that belong together."""

    title: str
    figures: list[Figure]


def sections(config: Config, compose: Compose) -> list[Section]:
    """The whole plan of a configuration."""
    time = step_time(config)
    found = [
        Section("the run", _run(config, budget(config))),
        Section("memory of a process", _memory(config, memory(config))),
        Section("time of a step", _time(config, time)),
    ]
    if time is not None:
        found.append(Section("cost, if nothing breaks", _cost(config, time.total_s)))
    found.append(Section("data, disk and tracking", _volume(config, time)))
    if time is not None:
        found.append(Section("how far to trust this: HLAT's published figures", _trust(compose)))
    return [section for section in found if section.figures]


def corpus_section(found: list[Epochs]) -> Section:
    """What is known of a corpus that is prepared already."""
    figures = []
    for source in found:
        text = f"{source.count:.2g}" + (f" (more than {GOOD_EPOCHS:.0f} add little)" if source.warning else "")
        figures += [
            Figure(f"tokens in {source.source}", source.tokens, f"{source.tokens:,} (from a sample)", MEASURED),
            Figure(f"times trained on {source.source}", source.count, text, DERIVED),
        ]
    return Section("the corpus, as it is prepared", figures)


def _run(config: Config, found: Budget) -> list[Figure]:
    layout = (
        f"{found.world_size}, data-parallel {found.data_parallel_size}, micro-batch {found.micro_batch_size}, "
        f"gradient accumulation {found.grad_accum_steps}"
    )
    milestones = ", ".join(f"{count(tokens)} (step {step})" for step, tokens in found.milestones.items())
    return [
        Figure("parameters", found.parameters, f"{found.parameters:,}", DERIVED),
        Figure("FLOPs per token", found.flops_per_token, f"{found.flops_per_token:,} (forward, backward)", DERIVED),
        Figure("FLOPs in all", found.total_flops, f"{found.total_flops:.3g}", DERIVED),
        Figure("steps", found.total_steps, f"{found.total_steps:,} of {found.tokens_per_step:,} tokens", DERIVED),
        Figure("tokens", found.total_tokens, f"{found.total_tokens:,}", DERIVED),
        Figure("nodes", config.cluster.nodes, f"{config.cluster.nodes} of {config.cluster.name}", GIVEN),
        Figure("processes", found.world_size, layout, DERIVED),
        Figure("milestones", len(found.milestones), milestones or "none", DERIVED),
    ]


def _memory(config: Config, found: Memory) -> list[Figure]:
    lines = [Figure(part.name, part.value_bytes, size(part.value_bytes), part.kind) for part in found.parts]
    fitted = any(part.kind == CALIBRATED for part in found.parts)
    lines.append(Figure("needed", found.need_bytes, size(found.need_bytes), CALIBRATED if fitted else DERIVED))
    if found.device_bytes is None:
        lines.append(Figure("device", None, "not known: give cluster.hardware.memory_bytes", GIVEN))
        return lines
    lines.append(Figure("device", found.device_bytes, size(found.device_bytes), GIVEN))
    verdict = "fits" if found.fits else "DOES NOT FIT"
    lines.append(Figure("verdict", found.fits, verdict, CALIBRATED if fitted else DERIVED))
    if found.fits:
        return lines
    found_remedies = remedies(config)
    lines += [
        Figure("would fit with", text, f"{text} ({size(need.need_bytes)})", CALIBRATED if fitted else DERIVED)
        for text, need in found_remedies
    ]
    if not found_remedies:
        lines.append(
            Figure("would fit with", None, "no one or two changes; `hlatctl plan --search` looks at all", DERIVED)
        )
    return lines


def _time(config: Config, found: StepTime | None) -> list[Figure]:
    if found is None:
        return [Figure("step", None, f"not known: give {', '.join(missing(config))}", GIVEN)]
    hardware = config.cluster.hardware
    peak = peak_flops_per_s(config) or 0.0
    shares = {"products": hardware.compute_efficiency, "collectives on the links": hardware.collective_efficiency}
    parts = {
        "products": found.compute_s,
        "tensor-parallel collectives": found.tensor_parallel_s,
        "pipeline": found.pipeline_s,
        "data-parallel collectives": found.data_parallel_s,
        "optimizer": found.optimizer_s,
    }
    return [
        Figure("peak of all devices", peak, f"{peak / 1e15:.4g} PFLOP/s", GIVEN),
        *(Figure(f"share of the peak: {name}", share, f"{share:.1%}", CALIBRATED) for name, share in shares.items()),
        *(Figure(name, value_s, _seconds(value_s), CALIBRATED) for name, value_s in parts.items() if value_s),
        Figure("step", found.total_s, _seconds(found.total_s), CALIBRATED),
        Figure(
            "tokens per second",
            config.tokens_per_step / found.total_s,
            count(config.tokens_per_step / found.total_s),
            CALIBRATED,
        ),
        Figure("MFU", found.mfu_fraction, f"{found.mfu_fraction:.1%}", CALIBRATED),
    ]


def _cost(config: Config, step_s: float) -> list[Figure]:
    found, other = cost(config, step_s), config.cluster.baseline
    lines = [
        Figure("days", found.days, f"{found.days:.1f}", CALIBRATED),
        Figure("node-hours", found.node_hours, f"{found.node_hours:,.0f}", CALIBRATED),
        Figure("accelerator-hours", found.accelerator_hours, f"{found.accelerator_hours:,.0f}", CALIBRATED),
    ]
    if found.usd is None or found.usd_per_4m_tokens is None:
        lines.append(Figure("dollars", None, "not known: give cluster.price_usd_per_node_hour", GIVEN))
        return lines
    price = config.cluster.price_usd_per_node_hour
    lines += [
        Figure("price of a node-hour", price, f"${price:.2f}", GIVEN),
        Figure("dollars", found.usd, f"${found.usd:,.0f}", CALIBRATED),
        Figure("dollars per 4 M tokens", found.usd_per_4m_tokens, f"${found.usd_per_4m_tokens:.4g}", CALIBRATED),
    ]
    base, share = found.baseline_usd_per_4m_tokens, found.of_baseline_fraction
    if base is not None and share is not None:
        text = f"${base:.4g} (${other.price_usd_per_node_hour:.2f} a node-hour, MFU {other.mfu_fraction:.1%})"
        lines += [
            Figure(f"the same on {other.name}", base, text, DERIVED),
            Figure(f"of the cost on {other.name}", share, f"{share:.0%}", CALIBRATED),
        ]
    return lines


def _volume(config: Config, time: StepTime | None) -> list[Figure]:
    found = volume(config, None if time is None else time.total_s)
    lines = [
        Figure("checkpoint", found.checkpoint_bytes, size(found.checkpoint_bytes), DERIVED),
        Figure("of it a node's", found.checkpoint_bytes_per_node, size(found.checkpoint_bytes_per_node), DERIVED),
        Figure(
            "checkpoints on disk",
            found.disk_bytes,
            f"{size(found.disk_bytes)} ({found.checkpoints_kept} kept, one being written)",
            DERIVED,
        ),
        *_fast_dir(found),
        Figure("journal", found.journal_bytes, size(found.journal_bytes), MEASURED),
        Figure("MLflow's database", found.mlflow_bytes, size(found.mlflow_bytes), MEASURED),
    ]
    if found.loader_tokens_per_s is None or found.checkpoint_every_s is None or found.checkpoint_bytes_per_s is None:
        return lines
    rate = found.checkpoint_bytes_per_s
    return [
        Figure(
            "a replica's loader, tokens per second",
            found.loader_tokens_per_s,
            f"{found.loader_tokens_per_s:,.0f}",
            CALIBRATED,
        ),
        *lines[:2],
        Figure("checkpoint every", found.checkpoint_every_s, duration(found.checkpoint_every_s), CALIBRATED),
        Figure(
            "written in time at",
            rate,
            f"{size(rate)}/s in all, {size(rate / config.cluster.nodes)}/s a node",
            CALIBRATED,
        ),
        *lines[2:],
    ]


def _fast_dir(found: Volume) -> list[Figure]:
    if not found.fast_disk_bytes:
        return []
    text = f"{size(found.fast_disk_bytes)} ({FAST_CHECKPOINTS} at once)"
    return [Figure("checkpoints in checkpoint.fast_dir", found.fast_disk_bytes, text, DERIVED)]


def _trust(compose: Compose) -> list[Figure]:
    lines = []
    for point in points(compose):
        error = point.error_fraction
        if error is None:
            told = "as published" if point.predicted == point.published else "NOT as published"
            text = f"{'yes' if point.predicted else 'no'}, {told}"
        else:
            text = f"{point.predicted:.1%}, published {point.published:.1%}, off by {error:+.1%}"
        lines.append(Figure(point.name, point.predicted, text, CALIBRATED if point.calibrates else "check"))
    return lines


def search_records(found: list[Candidate]) -> list[dict[str, Any]]:
    """Ranked candidates as plain values."""
    return [
        {
            "tensor_parallel_size": candidate.config.parallel.tensor_parallel_size,
            "pipeline_parallel_size": candidate.config.parallel.pipeline_parallel_size,
            "data_parallel_size": candidate.config.data_parallel_size,
            "data_parallel": candidate.config.parallel.data_parallel,
            "activation_checkpointing": candidate.config.parallel.activation_checkpointing,
            "micro_batch_size": candidate.config.micro_batch_size,
            "grad_accum_steps": candidate.config.grad_accum_steps,
            "precision": candidate.config.precision.name,
            "memory_bytes": candidate.memory.need_bytes,
            "step_s": candidate.time.total_s,
            "mfu_fraction": candidate.time.mfu_fraction,
            "usd": cost(candidate.config, candidate.time.total_s).usd,
        }
        for candidate in found
    ]


def search_rows(found: list[Candidate]) -> list[list[str]]:
    """The same as rows of cells, with a heading."""
    names = [
        "TP",
        "PP",
        "DP",
        "DATA PARALLEL",
        "RECOMPUTED",
        "MICRO",
        "ACCUM",
        "PRECISION",
        "MEMORY",
        "STEP",
        "MFU",
        "COST",
    ]
    rows = [names]
    for record in search_records(found):
        *layout, memory_bytes, step_s, mfu_fraction, usd = record.values()
        money = "-" if usd is None else f"${usd:,.0f}"
        rows.append([*map(str, layout), size(memory_bytes), _seconds(step_s), f"{mfu_fraction:.1%}", money])
    return rows


def _seconds(value_s: float) -> str:
    return f"{value_s * 1e3:.3g} ms" if value_s < 1 else f"{value_s:.2f} s"
