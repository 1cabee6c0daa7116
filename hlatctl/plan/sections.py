"""A plan as titled lists of figures, each with its origin; pure. ``hlatctl.cli.plan`` prints it.

One section shows the rest of a run that has begun, and how its learning rate continues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from conf.parametrization import rate_factor
from conf.registries import OPTIMIZERS
from conf.schema import Config
from conf.sizes import (
    FAST_CHECKPOINTS,
    MEMORY_COPIES,
    checkpoint_bytes,
    checkpoints_kept,
    fast_dir_bytes,
    flops_per_token,
    has_shape,
    memory_copies_bytes,
    parameters,
    runs_dir_bytes,
)
from conf.stages import Stage
from conf.training_rules import learning_rate
from hlatctl.machine_speed import Speed, measure
from hlatctl.plan.budget import GOOD_EPOCHS, Epochs, cost, total_flops, volume
from hlatctl.plan.memory import Memory, largest_stage, memory
from hlatctl.plan.published import Compose, points
from hlatctl.plan.search import remedies
from hlatctl.plan.step_time import (
    StepTime,
    corruption_check_cost_steps,
    mean_step_s,
    missing,
    peak_flops_per_s,
    step_time,
    step_time_s,
)
from hlatctl.units import count, counted, duration, seconds, size

#: The origin of a figure: the configuration, arithmetic, arithmetic with fitted numbers, a measurement.
GIVEN, DERIVED, CALIBRATED, MEASURED = "given", "derived", "calibrated", "measured"

#: Titles of sections that the plan of a run's rest shows too.
MEMORY, TIME = "memory of a process", "time of a step"


@dataclass(frozen=True)
class Figure:
    """One line of a plan.

    Args:
        value: value for programs, in the unit that the name or the text gives.
        text: value for people.
        kind: origin of the figure.
    """

    name: str
    value: float | int | str | bool | None
    text: str
    kind: str


@dataclass(frozen=True)
class Section:
    """A titled list of figures."""

    title: str
    figures: list[Figure]


Measure = Callable[[tuple[int, int, int], int, int], Speed | None]


def measured(config: Config, speed_of: Measure = measure) -> tuple[Config, Speed | None]:
    """Return a configuration with measured values in place of unknown ones, and the measurement.

    It measures only if the plan has no step time without it, and the run would train in FP32 on this machine's
    processor, because the speed of other hardware differs. The product has the shape of a feed-forward projection of
    one micro-batch.
    """
    cluster = config.cluster
    here = cluster.jobs_run == "here" and cluster.nodes == 1 and config.backend.device == "cpu"
    if not here or config.precision.name != "fp32" or not missing(config):
        return config, None
    shape = (config.micro_batch_size * config.train.seq_len, config.model.hidden_size, config.model.intermediate_size)
    speed = speed_of(shape, cluster.processes_per_node, cluster.threads_per_process)
    if speed is None:
        return config, None
    names = ("fp32_flops_per_s", "memory_bytes_per_s", "link_bytes_per_s")
    unknown = {name: getattr(speed, name) for name in names if getattr(cluster.hardware, name) is None}
    hardware = replace(cluster.hardware, **unknown)
    return replace(config, cluster=replace(cluster, hardware=hardware)), speed


def sections(config: Config, compose: Compose, speed: Speed | None = None) -> list[Section]:
    """Return the whole plan of a configuration, the most important figures first.

    Args:
        config: the run's configuration, with measured values if this machine was measured.
        compose: returns the configurations of published runs.
        speed: this machine's measured speed.
    """
    largest = largest_stage(config)
    time, need = step_time(config), memory(largest)
    plan = [
        Section("memory, time and cost", _in_short(config, need, time)),
        Section("the run", _run(config)),
        Section("its stages", [_stage(stage) for stage in config.stages]),
        Section(MEMORY, _memory(largest, need)),
        Section(TIME, _time(config, time, speed)),
    ]
    if time is not None:
        plan.append(Section("cost, if nothing breaks", _cost(config, mean_step_s(config) or time.total_s)))
    plan.append(Section("data, disk and tracking", _volume(config, time)))
    if time is not None and speed is None:
        plan.append(Section("how far to trust this: published figures", _trust(compose, config.cluster.name)))
    plan = [section for section in plan if section.figures]
    return plan if speed is None else [_as_measured(section) for section in plan]


def _as_measured(section: Section) -> Section:
    figures = [replace(figure, kind=MEASURED) if figure.kind == CALIBRATED else figure for figure in section.figures]
    return Section(section.title, figures)


def corpus_section(sources: list[Epochs]) -> Section:
    """Return the figures of a corpus, prepared or published; without any, how to prepare it."""
    if not sources:
        how = "unknown until it is prepared: `hlatctl data inspect` with the same configuration does it"
        return Section("the corpus", [Figure("tokens", None, how, GIVEN)])
    figures = []
    for source in sources:
        text = f"{source.count:.2g}" + (f" (more than {GOOD_EPOCHS:.0f} add little)" if source.warning else "")
        origin, kind = ("published", GIVEN) if source.is_published else ("from a sample", MEASURED)
        figures += [
            Figure(f"tokens in {source.source}", source.tokens, f"{source.tokens:,} ({origin})", kind),
            Figure(f"times trained on {source.source}", source.count, text, DERIVED),
        ]
    return Section("the corpus, as published" if sources[0].is_published else "the corpus, as it is prepared", figures)


def _in_short(config: Config, need: Memory, time: StepTime | None) -> list[Figure]:
    needed, kind = size(need.need_bytes), _kind(need)
    if not has_shape(config.model):
        needed = f"{needed} without activations (the model's shape is unknown)"
    if need.device_bytes is None:
        text = f"{needed} (the device's memory is unknown)"
    else:
        text = f"{needed} of {size(need.device_bytes)}: {_verdict(need)}"
    lines = [Figure("memory of a process", need.need_bytes, text, kind)]
    if time is None:
        return [*lines, Figure("training time", None, f"unknown: set {', '.join(missing(config))}", GIVEN)]
    step_s = mean_step_s(config) or time.total_s
    run_s, of = step_s * config.total_steps, f"{seconds(step_s)}{' on average' * (len(config.stages) > 1)}"
    steps = f"{duration(run_s)}, if nothing breaks: {config.total_steps:,} steps of {of}"
    usd = cost(config, step_s).usd
    price = "unknown: set cluster.price_usd_per_node_hour" if usd is None else f"${usd:,.0f}, if nothing breaks"
    return [
        *lines,
        Figure("training time", run_s, steps, CALIBRATED),
        Figure("training cost", usd, price, GIVEN if usd is None else CALIBRATED),
        *_budgets(config, step_s),
    ]


def _stage(stage: Stage) -> Figure:
    """Return the line of a stage, whose value is its number of tokens."""
    config, step_s = stage.config, step_time_s(stage.config)
    first, last = (learning_rate(step, config) for step in (stage.after_step + 1, stage.last_step))
    parts = [
        f"{count(stage.tokens)} tokens",
        f"{stage.steps:,} steps of {config.train.global_batch_size:,} x {config.train.seq_len:,}",
        f"learning rate {first:.3g} to {last:.3g}",
        *([] if step_s is None else [f"{duration(step_s * stage.steps)} at {seconds(step_s)} a step"]),
    ]
    if step_s is not None and (hours := step_s * stage.steps / 3600 * config.world_size) >= 1:
        parts.append(f"{hours:,.0f} accelerator-hours")
    return Figure(stage.name, stage.tokens, ", ".join(parts), DERIVED if step_s is None else CALIBRATED)


def _budgets(config: Config, step_s: float) -> list[Figure]:
    whole = cost(config, step_s)
    figures = []
    for key, limit, need, unit in (
        ("budget.usd", config.budget.usd, whole.usd, "USD"),
        ("budget.node_hours", config.budget.node_hours, whole.node_hours, "node-hours"),
    ):
        if limit is not None and need is not None:
            end = "enough" if need <= limit else f"the run stops at about step {config.total_steps * limit / need:,.0f}"
            figures.append(
                Figure(
                    key,
                    limit,
                    f"{limit:,.0f} {unit}; the run needs {100 * need / limit:,.0f} % of it: {end}",
                    CALIBRATED,
                )
            )
    return figures


def _kind(need: Memory) -> str:
    return CALIBRATED if any(part.kind == CALIBRATED for part in need.parts) else DERIVED


def _verdict(need: Memory) -> str:
    return "fits" if need.fits else "DOES NOT FIT"


def _run(config: Config) -> list[Figure]:
    weights, per_token = parameters(config.model), flops_per_token(config.model, config.train.seq_len)
    flops = total_flops(config)
    steps = f"{config.total_steps:,}" + f" of {config.tokens_per_step:,} tokens" * (not config.stages)
    layout = (
        f"{config.world_size}, data-parallel {config.data_parallel_size}, micro-batch {config.micro_batch_size}, "
        f"gradient accumulation {config.grad_accum_steps}"
    )
    active = Figure("active parameters", weights.active, f"{weights.active:,} (used by one token)", DERIVED)
    milestones = ", ".join(f"{count(tokens)} (step {step})" for step, tokens in config.milestones.items())
    return [
        Figure("parameters", weights.total, f"{weights.total:,}", DERIVED),
        *([] if weights.active == weights.total else [active]),
        Figure("FLOPs per token", per_token, f"{per_token:,} (forward, backward)", DERIVED),
        Figure("FLOPs in all", flops, f"{flops:.3g}", DERIVED),
        Figure("steps", config.total_steps, steps, DERIVED),
        Figure("tokens", config.total_tokens, f"{config.total_tokens:,}", DERIVED),
        *_rates(config),
        Figure("nodes", config.cluster.nodes, f"{config.cluster.nodes} of {config.cluster.name}", GIVEN),
        Figure("processes", config.world_size, layout, DERIVED),
        Figure("milestones", len(config.milestones), milestones or "none", DERIVED),
    ]


def _rates(config: Config) -> list[Figure]:
    """Return the learning rate of matrices, if it follows the width."""
    model, peak = config.model, config.optimizer.lr
    if model.mup_base_width is None:
        return []
    orthogonalizes = OPTIMIZERS[config.optimizer.name].orthogonalizes
    matrices = peak * rate_factor("layers.0.mlp.down.weight", model, orthogonalized=orthogonalizes)
    head = peak * rate_factor("head.weight", model)
    text = (
        f"{matrices:.3g} for the matrices of layers and {head:.3g} for the output projection, at "
        f"{model.width_factor:.4g} times the base width; {peak:.3g} for all others"
    )
    return [Figure("peak learning rates (muP)", matrices, text, DERIVED)]


def _memory(config: Config, need: Memory) -> list[Figure]:
    lines = [Figure(part.name, part.value_bytes, size(part.value_bytes), part.kind) for part in need.parts]
    kind = _kind(need)
    lines.append(Figure("needed", need.need_bytes, size(need.need_bytes), kind))
    if need.device_bytes is None:
        return [*lines, Figure("device", None, "unknown: set cluster.hardware.memory_bytes", GIVEN)]
    lines.append(Figure("device", need.device_bytes, size(need.device_bytes), GIVEN))
    lines.append(Figure("verdict", need.fits, _verdict(need), kind))
    if need.fits:
        return lines
    fixes = [
        Figure("would fit with", text, f"{text} ({size(other.need_bytes)})", kind) for text, other in remedies(config)
    ]
    none = "no single or double change; `hlatctl plan --search` tries all layouts"
    return [*lines, *(fixes or [Figure("would fit with", None, none, DERIVED)])]


def _time(config: Config, time: StepTime | None, speed: Speed | None) -> list[Figure]:
    if time is None:
        return [Figure("step", None, f"unknown: set {', '.join(missing(config))}", GIVEN)]
    tokens_per_s = config.tokens_per_step / time.total_s
    parts = {
        "products": time.compute_s,
        "element-wise operations": time.elementwise_s,
        "tensor-parallel collectives": time.tensor_parallel_s,
        "context-parallel collectives": time.context_parallel_s,
        "expert-parallel exchanges": time.expert_parallel_s,
        "pipeline": time.pipeline_s,
        "data-parallel collectives": time.data_parallel_s,
        "optimizer": time.optimizer_s,
    }
    return [
        *(_published_speed(config) if speed is None else _measured_speed(speed)),
        *(Figure(name, value_s, seconds(value_s), CALIBRATED) for name, value_s in parts.items() if value_s),
        Figure("step", time.total_s, seconds(time.total_s), CALIBRATED),
        Figure("tokens per second", tokens_per_s, count(tokens_per_s), CALIBRATED),
        *_checks(config),
        *([Figure("MFU", time.mfu_fraction, f"{time.mfu_fraction:.1%}", CALIBRATED)] if speed is None else []),
    ]


def _checks(config: Config) -> list[Figure]:
    every = config.recovery.corruption_check_steps
    if every is None:
        return []
    share = corruption_check_cost_steps(config) / every
    what = "a step" if config.parallel.pipeline_parallel_size > 1 else "a micro-batch"
    text = f"at most {share:.2%} of the time: {what} twice, every {counted(every, 'step')}"
    return [Figure("checks for wrong numbers", share, text, DERIVED)]


def _published_speed(config: Config) -> list[Figure]:
    hardware, peak = config.cluster.hardware, peak_flops_per_s(config) or 0.0
    shares = {"large products": hardware.compute_efficiency, "collectives on the links": hardware.collective_efficiency}
    return [
        Figure("peak of all devices", peak, f"{peak / 1e15:.4g} PFLOP/s", GIVEN),
        *(Figure(f"share of the peak: {name}", share, f"{share:.1%}", CALIBRATED) for name, share in shares.items()),
    ]


def _measured_speed(speed: Speed) -> list[Figure]:
    rows, inner, columns = speed.shape
    product, copied, sent = speed.fp32_flops_per_s, speed.memory_bytes_per_s, speed.link_bytes_per_s
    at_once = counted(speed.processes, "process", "processes")
    how = f"NumPy, in {at_once} at once, {counted(speed.threads, 'thread')} each; the fastest repetition"
    return [
        Figure("measured on this machine", how, how, MEASURED),
        Figure(
            "product in FP32, a process",
            product,
            f"{product / 1e9:.3g} GFLOP/s ({rows:,} x {inner:,} by {inner:,} x {columns:,})",
            MEASURED,
        ),
        Figure("copy in memory, a process", copied, f"{size(copied)}/s", MEASURED),
        Figure("loopback connection, a process", sent, f"{size(sent)}/s", MEASURED),
    ]


def _cost(config: Config, step_s: float) -> list[Figure]:
    costs, other = cost(config, step_s), config.cluster.baseline
    lines = [
        Figure("days", costs.days, _amount(costs.days), CALIBRATED),
        Figure("node-hours", costs.node_hours, _amount(costs.node_hours), CALIBRATED),
        Figure("accelerator-hours", costs.accelerator_hours, _amount(costs.accelerator_hours), CALIBRATED),
    ]
    if costs.usd is None or costs.usd_per_4m_tokens is None:
        lines.append(Figure("dollars", None, "unknown: set cluster.price_usd_per_node_hour", GIVEN))
        return lines
    price = config.cluster.price_usd_per_node_hour
    lines += [
        Figure("price of a node-hour", price, f"${price:.2f}", GIVEN),
        Figure("dollars", costs.usd, f"${costs.usd:,.0f}", CALIBRATED),
        Figure("dollars per 4 M tokens", costs.usd_per_4m_tokens, f"${costs.usd_per_4m_tokens:.4g}", CALIBRATED),
    ]
    base, share = costs.baseline_usd_per_4m_tokens, costs.of_baseline_fraction
    if base is not None and share is not None:
        text = f"${base:.4g} (${other.price_usd_per_node_hour:.2f} a node-hour, MFU {other.mfu_fraction:.1%})"
        lines += [
            Figure(f"the same on {other.name}", base, text, DERIVED),
            Figure(f"of the cost on {other.name}", share, f"{share:.0%}", CALIBRATED),
        ]
    return lines


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _volume(config: Config, time: StepTime | None) -> list[Figure]:
    volumes = volume(config, None if time is None else time.total_s)
    one, kept = checkpoint_bytes(config), runs_dir_bytes(config)
    a_node_s, fast = one // config.cluster.nodes, fast_dir_bytes(config)
    disk = f"{size(kept)} ({checkpoints_kept(config)} kept, one being written)"
    checkpoint = [
        Figure("checkpoint", one, size(one), DERIVED),
        Figure("of it a node's", a_node_s, size(a_node_s), DERIVED),
    ]
    stored = [
        Figure("checkpoints on disk", kept, disk, DERIVED),
        Figure("journal", volumes.journal_bytes, size(volumes.journal_bytes), MEASURED),
        Figure("MLflow's database", volumes.mlflow_bytes, size(volumes.mlflow_bytes), MEASURED),
    ]
    if fast:
        text = f"{size(fast)} ({FAST_CHECKPOINTS} at once)"
        stored.insert(1, Figure("checkpoints in checkpoint.fast_dir", fast, text, DERIVED))
    stored += _in_memory(config, None if time is None else time.total_s)
    loader, every_s, rate = volumes.loader_tokens_per_s, volumes.checkpoint_every_s, volumes.checkpoint_bytes_per_s
    if loader is None or every_s is None or rate is None:
        return [*checkpoint, *stored]
    rates = f"{size(rate)}/s in all, {size(rate / config.cluster.nodes)}/s a node"
    return [
        Figure("a replica's loader, tokens per second", loader, f"{loader:,.0f}", CALIBRATED),
        *checkpoint,
        Figure("checkpoint every", every_s, duration(every_s), CALIBRATED),
        Figure("written in time at", rate, rates, CALIBRATED),
        *stored,
    ]


def _in_memory(config: Config, step_s: float | None) -> list[Figure]:
    """Return what ``checkpoint.memory_every_steps`` costs a node."""
    every, needed = config.checkpoint.memory_every_steps, memory_copies_bytes(config)
    if every is None:
        return []
    nodes = config.cluster.nodes
    of = f"{MEMORY_COPIES} of its own" + f", {MEMORY_COPIES} of its partner's" * (nodes > 1)
    lines = [Figure("copies in a node's memory", needed, f"{size(needed)} ({of})", DERIVED)]
    if nodes > 1 and step_s is not None:
        rate = checkpoint_bytes(config) / nodes / (every * step_s)
        text = f"{size(rate)}/s on average, every {duration(every * step_s)}"
        lines.append(Figure("sent to the partner node", rate, text, CALIBRATED))
    return lines


def _trust(compose: Compose, cluster: str) -> list[Figure]:
    lines = []
    for point in points(compose, cluster):
        error = point.error_fraction
        if error is None:
            verdict = "as published" if point.predicted == point.published else "NOT as published"
            text = f"{'yes' if point.predicted else 'no'}, {verdict}"
        else:
            speed = point.unit == "tokens/s"
            form = "{:,.0f} tokens/s a device" if speed else "{:.1%}"
            planned, published = form.format(point.predicted), form.format(point.published)
            text = f"{planned}, published {published}, off by {round(error, 3) + 0.0:+.1%}"
        lines.append(Figure(point.name, point.predicted, text, CALIBRATED if point.calibrates else "check"))
    return lines


_WIDTH, _HEIGHT = 64, 10
#: A larger change of the rate from one step to the next is named.
_JUMP = 0.02


def continuation_section(before: Config, after: Config, step: int) -> Section:
    """Return the rest of the run with a changed configuration.

    Args:
        before, after: the configuration before and after the change.
        step: the last step that the run keeps.
    """
    left = after.total_steps - step
    figures = [
        Figure("steps done", step, f"{step:,}, {count(after.tokens_at(step))} tokens", DERIVED),
        Figure("last step", after.total_steps, _changed(before.total_steps, after.total_steps), DERIVED),
        Figure("steps left", left, f"{left:,}, {count(after.total_tokens - after.tokens_at(step))} tokens", DERIVED),
        Figure("learning rate of the next step", learning_rate(step + 1, after), _rate(before, after, step), DERIVED),
        Figure("learning rate of the last step", learning_rate(after.total_steps, after), _last(after), DERIVED),
    ]
    if (step_s := mean_step_s(after, done=step)) is not None:
        rest = cost(after, step_s, steps=left)
        figures.append(Figure("time left, if nothing breaks", left * step_s, duration(left * step_s), DERIVED))
        if rest.usd is not None:
            figures.append(Figure("cost of that", rest.usd, f"{rest.usd:,.0f} USD", DERIVED))
    return Section("the rest of the run", figures)


def rate_chart(before: Config, after: Config, step: int) -> str:
    """Draw the learning rate over all steps as text: ``*`` with the change, ``.`` as planned."""
    last = max(before.total_steps, after.total_steps)
    steps = [1 + round(column * (last - 1) / (_WIDTH - 1)) for column in range(_WIDTH)]
    planned = [learning_rate(at, before) if at <= before.total_steps else None for at in steps]
    changed = [
        (learning_rate(at, before) if at <= step else learning_rate(at, after)) if at <= after.total_steps else None
        for at in steps
    ]
    highest = max(rate for rate in [*planned, *changed] if rate is not None)
    rows = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for rates, mark in ((planned, "."), (changed, "*")):
        for column, rate in enumerate(rates):
            if rate is not None:
                rows[_HEIGHT - 1 - min(_HEIGHT - 1, int(rate / highest * (_HEIGHT - 1) + 0.5))][column] = mark
    now = min(_WIDTH - 1, round((step - 1) * (_WIDTH - 1) / max(1, last - 1))) if step else 0
    labels = [f"{highest:.2e}", *[""] * (_HEIGHT - 2), "0"]
    lines = [f"{label:>8} |{''.join(row)}".rstrip() for label, row in zip(labels, rows, strict=True)]
    return "\n".join([*lines, f"{'':8} +{'-' * _WIDTH}", _axis(now, step, last)])


def _axis(now: int, step: int, last: int) -> str:
    end = f"step {last:,}"
    here = f"^ step {step:,}"
    line = f"{'':10}{' ' * now}{here}"
    room = 10 + _WIDTH - len(end)
    return f"{line:<{room}}{end}" if len(line) < room else f"{line}\n{'':{room}}{end}"


def _changed(before: int, after: int) -> str:
    return f"{after:,}" if before == after else f"{after:,}, was {before:,}"


def _last(after: Config) -> str:
    return f"{learning_rate(after.total_steps, after):.3e}"


def _rate(before: Config, after: Config, step: int) -> str:
    rate = learning_rate(step + 1, after)
    if step == 0:
        return f"{rate:.3e}"
    trained = learning_rate(step, before)
    ratio = rate / trained if trained else 1.0
    if abs(ratio - 1.0) < _JUMP:
        return f"{rate:.3e}, continues that of step {step:,}"
    text = f"{rate:.3e}, jumps {'up' if ratio > 1 else 'down'} from {trained:.3e} at step {step:,}"
    return f"{text}; the warm-up goes on" if step < after.warmup_steps else text
