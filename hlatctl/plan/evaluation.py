"""What the evaluation of a milestone costs: items, requests, tokens, FLOPs and hours; pure arithmetic.

The amount of work comes from the data (``eval.workload``, if ``eval.data_dir`` is set) or from the published datasets'
sizes (``evaluation_tasks.json``). The time assumes that reading prompts reaches ``UTILISATION`` of the devices' peak,
and that a generated token takes one pass over the weights for the whole batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from conf.schema import Config, EvalConfig, EvalGroupConfig
from conf.sizes import BF16_BYTES, FP32_BYTES, checkpoint_bytes, export_bytes, parameters
from hlatctl.plan.memory import memory as training_memory
from hlatctl.plan.sections import DERIVED, GIVEN, MEASURED, Figure, Section
from hlatctl.run.errors import ConfigError
from hlatctl.units import count, counted, duration, size

#: Share of the peak that reading prompts is assumed to reach. `hlatctl status` shows measured times.
UTILISATION = 0.4
#: Characters of a token in work measured on the data: the mean of Llama 2's tokenizer on the requests of hlat_core.
CHARACTERS_PER_TOKEN = 3.3
#: Assumed batch size of generated answers with `eval.batch_size=auto`.
_AUTO_BATCH = 256
_FILE = Path(__file__).with_name("evaluation_tasks.json")
_VALIDATION = "validation"
#: Bytes of a weight in the computation without `eval.dtype`, by runner (``eval.serving.runners.DTYPES``).
_WEIGHT_BYTES = {"hf": FP32_BYTES, "vllm": BF16_BYTES, "neuron": BF16_BYTES}


@dataclass(frozen=True, kw_only=True)
class TaskWork:
    """The work of one task, or of several tasks of a group.

    Args:
        requests: number of requests, as the harness counts them.
        sequences: texts that the model reads; choices of one letter share one.
        prompt_tokens: total over all sequences.
        generated_tokens: maximum total over all requests.
        decode_steps: passes over the weights to generate these tokens, batch by batch.
        estimated: the lengths were not measured.
    """

    group: str
    items: int
    requests: int
    sequences: int
    prompt_tokens: float
    generated_tokens: float = 0.0
    decode_steps: float = 0.0
    estimated: bool = False


@dataclass(frozen=True, kw_only=True)
class EvaluationCost:
    """The cost of one milestone's evaluation. Times are None if the device is unknown.

    Args:
        groups: groups in the suite's order; held-out text comes last.
        unknown: tasks whose size is not known.
        devices: devices that share one copy of the model.
        weights_bytes: size of the weights on each device.
        fits: whether the model fits; None if the device's memory is unknown.
        times_s: time of each group.
        interval_s: training time between two milestones; None without a step time.
    """

    groups: list[TaskWork]
    unknown: list[str]
    flops: dict[str, float]
    devices: int
    weights_bytes: float
    fits: bool | None
    times_s: dict[str, float] | None
    interval_s: float | None

    @property
    def total_s(self) -> float | None:
        """The whole milestone."""
        return None if self.times_s is None else sum(self.times_s.values())


def _weight_bytes(wanted: EvalConfig) -> int:
    if wanted.dtype is None:
        return _WEIGHT_BYTES[wanted.runner]
    return FP32_BYTES if wanted.dtype == "float32" else BF16_BYTES


def evaluation_cost(
    config: Config, step_s: float | None, records: Iterable[Mapping[str, Any]] | None = None
) -> EvaluationCost:
    """Return the cost of evaluating one milestone.

    Args:
        step_s: time of a training step.
        records: records of ``eval.workload``; None: use the published datasets' sizes.
    """
    works, unknown = ([_of_record(config, record) for record in records], []) if records else _published(config)
    groups = _by_group([*works, *_held_out(config)])
    weights, devices = parameters(config.model).total, config.eval.tensor_parallel_size
    flops = {work.group: 2.0 * weights * (work.prompt_tokens + work.generated_tokens) for work in groups}
    on_device = weights * _weight_bytes(config.eval) / devices
    memory = config.cluster.hardware.memory_bytes
    every_steps = config.eval.every_tokens / config.tokens_per_step
    return EvaluationCost(
        groups=groups,
        unknown=unknown,
        flops=flops,
        devices=devices,
        weights_bytes=on_device,
        fits=None if memory is None else on_device <= memory,
        times_s=_times_s(config, groups, on_device),
        interval_s=None if step_s is None else step_s * min(every_steps, config.total_steps),
    )


def check_shared_devices(config: Config) -> None:
    """Refuse evaluations during training on devices whose memory has no room for both, if that is known.

    Raises:
        ConfigError: names the device's memory and both needs.
    """
    if not config.eval.enabled or config.eval_placement == "between" or not config.eval_shares_devices:
        return
    device_bytes, need_bytes = config.cluster.hardware.memory_bytes, training_memory(config).need_bytes
    weights_bytes = evaluation_cost(config, None).weights_bytes
    if device_bytes is not None and need_bytes + weights_bytes > device_bytes:
        raise ConfigError(
            f"eval.placement=beside: training needs {size(need_bytes)} of a device and the evaluated model "
            f"{size(weights_bytes)} (eval.runner={config.eval.runner}); cluster.hardware.memory_bytes={device_bytes} "
            f"({size(device_bytes)}) has no room for both",
            hint="set eval.placement=between, or eval.device=cpu",
        )


def peak_of_device(config: Config) -> float | None:
    """Return the peak of one of the devices that evaluate, in the evaluation's number format; None: unknown."""
    peak: float | None = getattr(config.cluster.hardware, peak_key(config))
    return peak


def peak_key(config: Config) -> str:
    """Return the key of that peak in ``cluster.hardware``."""
    return "fp32_flops_per_s" if _weight_bytes(config.eval) == FP32_BYTES else "bf16_flops_per_s"


def _times_s(config: Config, groups: list[TaskWork], weights_bytes: float) -> dict[str, float] | None:
    """Return the seconds of each group; None without the device's peak.

    Generating takes the time of its FLOPs or of reading the weights, whichever is longer. Replicas share the work.
    """
    peak = peak_of_device(config)
    if peak is None:
        return None
    wanted, bandwidth = config.eval, config.cluster.hardware.memory_bytes_per_s
    reached = UTILISATION * peak * wanted.tensor_parallel_size * wanted.replicas
    each = 2.0 * parameters(config.model).total / reached
    pass_s = weights_bytes / bandwidth / wanted.replicas if bandwidth else 0.0
    return {
        work.group: each * work.prompt_tokens + max(each * work.generated_tokens, pass_s * work.decode_steps)
        for work in groups
    }


def _of_record(config: Config, record: Mapping[str, Any]) -> TaskWork:
    return _work(config, record, mean_tokens=record["characters"] / CHARACTERS_PER_TOKEN)


def _work(config: Config, record: Mapping[str, Any], *, mean_tokens: float) -> TaskWork:
    requests, sequences = record["items"] * record["requests"], record["items"] * record["sequences"]
    generated = int(record.get("generated_tokens", 0))
    batch = _AUTO_BATCH if config.eval.batch_size == "auto" else config.eval.batch_size
    return TaskWork(
        group=str(record["group"]),
        items=int(record["items"]),
        requests=round(requests),
        sequences=round(sequences),
        prompt_tokens=sequences * min(mean_tokens, max(1, config.train.seq_len - generated)),
        generated_tokens=requests * generated,
        decode_steps=math.ceil(requests / batch) * generated,
        estimated=bool(record.get("estimated")),
    )


def _items(limit: float | None, items: int, tasks: int) -> int:
    """Return the evaluated items of some tasks; a limit below 1 is a fraction."""
    if limit is None:
        return items
    return math.ceil(limit * items) if limit < 1 else min(items, int(limit) * tasks)


def _published(config: Config) -> tuple[list[TaskWork], list[str]]:
    known, works, unknown = _table(), [], []
    for group, settings, name in _asked(config):
        row = known.get(name)
        if row is None:
            unknown.append(name)
            continue
        asked = _items(config.eval.limit, row["items"], row.get("tasks", 1))
        generated = row.get("generated_tokens", 0)  # the evaluation's own rule for a short context
        repeats = config.eval.code.samples_per_problem if settings.judge != "harness" else 1
        record = {
            **row,
            "group": group,
            "items": len(config.eval.items[name]) if name in config.eval.items else asked,
            "requests": row["requests"] * repeats,
            "sequences": row["sequences"] * repeats,
            "generated_tokens": generated if generated < config.train.seq_len else config.train.seq_len // 2,
        }
        tokens = row["question_tokens"] + (settings.shots or 0) * row["example_tokens"]
        works.append(_work(config, record, mean_tokens=tokens))
    return works, unknown


def _asked(config: Config) -> Iterable[tuple[str, EvalGroupConfig, str]]:
    wanted, found = config.eval, set[str]()
    groups = wanted.groups or {name: EvalGroupConfig(tasks=[name]) for name in _table() if name.startswith("smoke_")}
    for name, group in groups.items():
        for task in group.tasks:
            if not wanted.tasks or name in wanted.tasks or task in wanted.tasks:
                found |= {name, task}
                yield name, group, task
    yield from ((name, EvalGroupConfig(), name) for name in wanted.tasks if name not in found | {_VALIDATION})


def _held_out(config: Config) -> list[TaskWork]:
    wanted = config.eval
    if wanted.tasks and _VALIDATION not in wanted.tasks:
        return []
    count = math.ceil(wanted.validation_tokens / config.train.seq_len)
    tokens = float(wanted.validation_tokens)
    return [TaskWork(group=_VALIDATION, items=count, requests=count, sequences=count, prompt_tokens=tokens)]


def _by_group(works: Iterable[TaskWork]) -> list[TaskWork]:
    groups: dict[str, list[TaskWork]] = {}
    for work in works:
        groups.setdefault(work.group, []).append(work)
    return [
        TaskWork(
            group=name,
            items=sum(work.items for work in of_group),
            requests=sum(work.requests for work in of_group),
            sequences=sum(work.sequences for work in of_group),
            prompt_tokens=sum(work.prompt_tokens for work in of_group),
            generated_tokens=sum(work.generated_tokens for work in of_group),
            decode_steps=sum(work.decode_steps for work in of_group),
            estimated=any(work.estimated for work in of_group),
        )
        for name, of_group in groups.items()
    ]


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))["tasks"]
    return table


TITLE = "evaluation of milestones"


def evaluation_section(config: Config, cost: EvaluationCost, *, measured: bool) -> Section:
    """Return the evaluation's figures.

    Args:
        cost: cost of one milestone.
        measured: the work comes from the data, not from published sizes.
    """
    figures = [_group(work, cost, MEASURED if measured else DERIVED) for work in cost.groups]
    if cost.unknown:
        names = ", ".join(cost.unknown)
        text = f"{names}: left out, not among the published sizes; with eval.data_dir they are measured"
        figures.append(Figure("tasks of unknown size", names, text, GIVEN))
    return Section(TITLE, [*figures, *_model(config, cost), *_time(config, cost), *_files(config)])


def _group(work: TaskWork, cost: EvaluationCost, kind: str) -> Figure:
    mean = work.prompt_tokens / work.sequences if work.sequences else 0.0
    parts = [
        f"{counted(work.items, 'item')}, {counted(work.requests, 'request')}",
        f"{count(work.sequences)} sequences of {mean:,.0f} tokens{' (estimated)' if work.estimated else ''}",
    ]
    if work.generated_tokens:
        parts.append(f"at most {count(work.generated_tokens)} tokens generated")
    flops = cost.flops[work.group]
    parts.append(f"{flops:.2g} FLOPs")
    if cost.times_s is not None:
        parts.append(duration(cost.times_s[work.group]))
    return Figure(work.group, flops, ", ".join(parts), kind)


def _model(config: Config, cost: EvaluationCost) -> list[Figure]:
    each, memory = size(cost.weights_bytes), config.cluster.hardware.memory_bytes
    on = f"{each} on each of {counted(cost.devices, 'device')} (eval.runner={config.eval.runner})"
    if config.eval.replicas > 1:
        on = f"{config.eval.replicas} replicas of {on}"
    if cost.fits is None or memory is None:
        return [Figure("evaluated model", cost.weights_bytes, on, DERIVED)]
    more = "" if cost.fits else "; eval.tensor_parallel_size devices share it, and eval.dtype=bfloat16 halves it"
    verdict = f"{'fits' if cost.fits else 'DOES NOT FIT'} in {size(memory)}{more}"
    return [Figure("evaluated model", cost.weights_bytes, f"{on}: {verdict}", DERIVED)]


def _time(config: Config, cost: EvaluationCost) -> list[Figure]:
    flops, milestones = sum(cost.flops.values()), len(config.milestones)
    whole = f"{flops:.3g} FLOPs (2 x parameters x tokens)"
    peak, total_s = peak_of_device(config), cost.total_s
    if peak is None or total_s is None:
        unknown = f"{whole}; time unknown: set cluster.hardware.{peak_key(config)}"
        return [Figure("a milestone", None, unknown, GIVEN)]
    devices = counted(cost.devices * config.eval.replicas, "device")
    reached = f"{UTILISATION:.0%} of {peak / 1e12:.4g} TFLOP/s of {devices} assumed"
    figures = [
        Figure("a milestone", total_s, f"{duration(total_s)}: {whole}, {reached}", DERIVED),
        Figure("all milestones", total_s * milestones, f"{duration(total_s * milestones)}: {milestones}", DERIVED),
    ]
    if cost.interval_s is None:
        return figures
    share = total_s / config.eval.concurrent / cost.interval_s
    at_once = f", {config.eval.concurrent} at once" if config.eval.concurrent > 1 else ""
    behind = "; evaluation falls behind training" if share > 1 and config.eval_placement == "beside" else ""
    text = f"evaluation takes {share:.2g} of the {duration(cost.interval_s)} between milestones{at_once}{behind}"
    return [*figures, Figure("share of training's time", share, text, DERIVED)]


def _files(config: Config) -> list[Figure]:
    one, exported = checkpoint_bytes(config), export_bytes(config)
    copy = f"{size(exported)}, removed after the evaluation" if exported else "none: its weights are read directly"
    text = f"{copy}; its checkpoint has {size(one)}"
    return [Figure("export of a milestone", exported, text, DERIVED)]
