"""Monitor training: gradient norms, a loss close to zero, weight drift, slow ranks. The loop journals the alarms.

HLAT's rule for spikes is 0.1 above a mean of 20 steps. It counts every bump of a small or noisy model, so it is only a
statistic. The alarm compares a norm with the median of many steps, in units of their spread, so noise doesn't trigger
it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from conf.devices import DEVICES

if TYPE_CHECKING:
    from trainer.backends.base import Stopwatch

#: Number of steps whose median and spread a norm is compared with.
ALARM_WINDOW_STEPS = 100
#: A norm this many deviations above the median triggers an alarm (docs/decisions/0058-a-report-like-a-paper.md).
DEVIATIONS = 20.0
#: The deviation is at least this share of the median: a norm below 4 times the median is never an alarm.
LEAST_DEVIATION = 0.15
#: Multiplied by this, the median absolute deviation estimates a normal distribution's standard deviation.
_TO_SIGMA = 1 / statistics.NormalDist().inv_cdf(0.75)


class NormAlarm:
    """Compares each gradient norm with the ``ALARM_WINDOW_STEPS`` before it; checkpoints store its state."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        state = state or {}
        self._norms: deque[float] = deque(state.get("norms", []), maxlen=ALARM_WINDOW_STEPS)
        self._alarmed_step: int | None = state.get("alarmed_step")

    @property
    def state(self) -> dict[str, Any]:
        """The alarm's state, as JSON."""
        return {"norms": list(self._norms), "alarmed_step": self._alarmed_step}

    def observe(self, step: int, grad_norm: float) -> str:
        """Add a step. Return the alarm's message, at most once in ``WINDOW_STEPS``; empty: no alarm."""
        if not math.isfinite(grad_norm):
            return ""
        message = self._message(step, grad_norm) if len(self._norms) == ALARM_WINDOW_STEPS else ""
        self._norms.append(grad_norm)
        if message:
            self._alarmed_step = step
        return message

    def _message(self, step: int, grad_norm: float) -> str:
        if self._alarmed_step is not None and step - self._alarmed_step < ALARM_WINDOW_STEPS:
            return ""
        median = statistics.median(self._norms)
        spread = _TO_SIGMA * statistics.median(abs(norm - median) for norm in self._norms)
        deviation = max(spread, LEAST_DEVIATION * median)
        above = (grad_norm - median) / deviation if deviation > 0 else 0.0
        if above < DEVIATIONS:
            return ""
        return (
            f"step {step}: the gradient norm is {grad_norm:.3g}, {above:.0f} deviations above the median of the last "
            f"{ALARM_WINDOW_STEPS} steps, {median:.3g} (an alarm from {DEVIATIONS:.0f})"
        )


#: Steps of the running means; a gradient norm that is above its mean by more than the threshold is a spike (HLAT,
#: arXiv 2404.10630, section 4.3). Spikes are only statistics.
WINDOW_STEPS = 20
THRESHOLD = 0.1
#: In nats per token. No model of real text gets this low, but a model that sees its targets does (HLAT's authors
#: noticed a wrong mask only after 10,000 steps).
LEAK_LOSS_NATS = 0.5
#: A larger relative difference between replicas of a weight isn't rounding.
DRIFT_LIMIT = 1e-4
#: Replicas are compared this often.
DRIFT_EVERY_STEPS = 100
#: Processes' times are compared this often; each is a median over this many steps.
RANK_TIMES_EVERY_STEPS = 20


#: Steps whose mean and standard deviation a step is compared with before its update, how many of them there must be,
#: and how many deviations above the mean are too many (the skip-step optimizers of OLMo-core, which trained OLMo 2).
UPDATE_WINDOW_STEPS, UPDATE_LEAST_STEPS, UPDATE_DEVIATIONS = 128, 64, 6.0


class UpdateLimits:
    """The loss and the gradient norm above which an update is skipped; checkpoints store the state."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        state = state or {}
        self._losses: deque[float] = deque(state.get("losses", []), maxlen=UPDATE_WINDOW_STEPS)
        self._norms: deque[float] = deque(state.get("norms", []), maxlen=UPDATE_WINDOW_STEPS)

    @property
    def state(self) -> dict[str, Any]:
        """The windows, as JSON."""
        return {"losses": list(self._losses), "norms": list(self._norms)}

    def observe(self, loss: float, grad_norm: float) -> None:
        """Add a step, also one whose update was skipped."""
        self._losses.append(loss)
        self._norms.append(grad_norm)

    @property
    def limits(self) -> tuple[float, float]:
        """The limits of the loss and of the gradient norm; infinite until enough steps are known."""
        if len(self._losses) < UPDATE_LEAST_STEPS:
            return math.inf, math.inf
        windows = self._losses, self._norms
        loss, norm = (statistics.fmean(each) + UPDATE_DEVIATIONS * statistics.stdev(each) for each in windows)
        return loss, norm


#: The host of a process, and its device.
Place = tuple[str, str]


@dataclass(frozen=True)
class MonitorEvent:
    """An event to journal."""

    kind: str
    fields: dict[str, Any]


class Monitor:
    """Detects gradient spikes, gradient norms that trigger an alarm, and a loss close to zero.

    A spike begins at a norm that is above the mean of the last 20 steps by more than 0.1. It ends at the first norm
    that isn't, and its length is the number of steps in between. Checkpoints store the state.
    """

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        state = state or {}
        self._norms: deque[float] = deque(state.get("grad_norms", []), maxlen=WINDOW_STEPS)
        self._losses: deque[float] = deque(state.get("losses", []), maxlen=WINDOW_STEPS)
        self._spike: dict[str, Any] | None = state.get("spike")
        self._leaking = bool(state.get("leaking"))
        self._norm_alarm = NormAlarm(state.get("norm_alarm"))
        self.update_limits = UpdateLimits(state.get("update_limits"))

    @property
    def state(self) -> dict[str, Any]:
        """The monitor's state, as JSON."""
        return {
            "grad_norms": list(self._norms),
            "losses": list(self._losses),
            "spike": self._spike,
            "leaking": self._leaking,
            "norm_alarm": self._norm_alarm.state,
            "update_limits": self.update_limits.state,
        }

    def observe(self, step: int, loss: float, grad_norm: float) -> list[MonitorEvent]:
        """Add a step and return its events, usually none."""
        self.update_limits.observe(loss, grad_norm)
        message = self._norm_alarm.observe(step, grad_norm)
        alarms = [MonitorEvent("alarm", {"step": step, "what": "gradient_norm", "message": message})] if message else []
        return [*self._observe_norm(step, grad_norm), *alarms, *self._observe_loss(step, loss)]

    def _observe_norm(self, step: int, grad_norm: float) -> list[MonitorEvent]:
        full = len(self._norms) == WINDOW_STEPS
        mean = sum(self._norms) / max(1, len(self._norms))
        self._norms.append(grad_norm)
        if full and grad_norm > mean + THRESHOLD:
            if self._spike:
                self._spike = {**self._spike, "peak_grad_norm": max(self._spike["peak_grad_norm"], grad_norm)}
                return []
            self._spike = {"step": step, "peak_grad_norm": grad_norm}
            return [MonitorEvent("gradient_spike", {"step": step, "grad_norm": grad_norm, "mean": mean})]
        ended, self._spike = self._spike, None
        return [MonitorEvent("gradient_spike_ended", {**ended, "length_steps": step - ended["step"]})] if ended else []

    def _observe_loss(self, step: int, loss: float) -> list[MonitorEvent]:
        self._losses.append(loss)
        mean = sum(self._losses) / len(self._losses)
        leaking = len(self._losses) == WINDOW_STEPS and mean < LEAK_LOSS_NATS
        begins, self._leaking = leaking and not self._leaking, leaking
        if not begins:
            return []
        message = (
            f"step {step}: the loss of the last {WINDOW_STEPS} steps is {mean:.3f} nats per token, too good to be "
            "true. Does the model see what it has to predict (a wrong mask, or targets that are not shifted)?"
        )
        return [MonitorEvent("alarm", {"step": step, "what": "loss_to_zero", "message": message})]


def skipped_alarm(step: int, loss: float, grad_norm: float) -> MonitorEvent:
    """Return the alarm for a step whose update was skipped (``train.on_spike=skip``)."""
    message = (
        f"step {step}: the update is skipped: the loss {loss:.4g} or the gradient norm {grad_norm:.3g} is more than "
        f"{UPDATE_DEVIATIONS:g} standard deviations above the mean of the last {UPDATE_WINDOW_STEPS} steps"
    )
    return MonitorEvent("alarm", {"step": step, "what": "update_skipped", "message": message})


def drift_alarm(step: int, difference: float) -> list[MonitorEvent]:
    """Return an alarm if the largest relative difference between replicas of a weight is above the limit."""
    if difference <= DRIFT_LIMIT:
        return []
    message = (
        f"step {step}: copies of a weight that should be equal on several processes differ by {difference:.1e} of its "
        "norm; they drift apart when their updates are not the same (a gradient that is not reduced, unequal rounding)"
    )
    return [MonitorEvent("alarm", {"step": step, "what": "weight_drift", "difference": difference, "message": message})]


#: A small product is timed in every such step, so that a window has five.
PRODUCT_EVERY_STEPS = 4
#: Products of one measurement: their starts take the host less time than they take a device.
_PRODUCTS = 8
#: Rows and columns. On an H100 the largest takes a fifth of a millisecond in all, and 24 MiB.
_PRODUCT_SIZES: tuple[int, ...] = (2048, 1024, 512, 256, 128, 64)
#: The share of training's arithmetic that products may add.
_PRODUCT_SHARE = 1e-3


class Product:
    """A matrix product that every process times between two steps, when it waits for nobody.

    With FSDP processes wait for each other in every layer, so the parts of a step take all of them equally long, and
    only such a product shows that a device is slower than the others. It draws no random numbers, and training's own
    work runs as without it.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        dtype = torch.bfloat16 if DEVICES[device.type].own_for_each_process else torch.float32
        values = torch.linspace(-1, 1, size * size, device=device, dtype=dtype)
        self._left = values.view(size, size)
        self._right, self._into = self._left.t().contiguous(), torch.empty_like(self._left)

    @classmethod
    def beside(cls, flops_per_step: float, device: torch.device) -> Product | None:
        """Return the largest product whose arithmetic is a thousandth of a device's; None: even the smallest is more.

        The share of its time is smaller: a product comes closer to the device's peak than a step.
        """
        most = _PRODUCT_SHARE * PRODUCT_EVERY_STEPS * flops_per_step
        size = next((size for size in _PRODUCT_SIZES if _PRODUCTS * 2 * size**3 <= most), None)
        return None if size is None or device.type not in DEVICES else cls(size, device)

    def time(self, stopwatch: Stopwatch) -> Stopwatch:
        """Start the product; return the stopwatch, which was just started and stops with the product."""
        for _ in range(_PRODUCTS):
            torch.mm(self._left, self._right, out=self._into)
        stopwatch.stop()
        return stopwatch


class RankTimes:
    """Compares the time that each process needs for the same work, once per window of steps.

    A process's own work is everything before the exchange of gradients. With tensor parallelism and pipelines it
    includes waiting for other processes of the replica, so it only identifies slow replicas. With FSDP it identifies
    nothing, and a :class:`Product` is compared instead.

    Args:
        factor: a process is slow if it takes more than this many times the median.
        steps: a process that is slow for this many steps in a row is reported once, as a straggler.
        of_product: the times are those of a product, one in ``PRODUCT_EVERY_STEPS`` steps.
    """

    def __init__(self, factor: float, steps: int, *, of_product: bool = False) -> None:
        self._factor, self._windows = factor, -(-steps // RANK_TIMES_EVERY_STEPS)
        self._of_product = of_product
        self._times = RANK_TIMES_EVERY_STEPS // (PRODUCT_EVERY_STEPS if of_product else 1)
        self._own_s: list[float] = []
        self._slow = torch.zeros((), dtype=torch.int64)
        """For each rank, the number of consecutive windows in which it was slow."""

    def add(self, own_s: float) -> None:
        """Add this process's time in one step."""
        self._own_s.append(own_s)

    @property
    def full(self) -> bool:
        """Whether the window is complete; all processes complete it at the same step."""
        return len(self._own_s) >= self._times

    def take_s(self) -> float:
        """Return this process's median time in the window, and begin a new window."""
        median_s = statistics.median(self._own_s)
        self._own_s.clear()
        return median_s

    def compare(self, step: int, own_s: Tensor, places: Sequence[Place]) -> list[MonitorEvent]:
        """Return the events for the times (world), on the CPU, and the places of all ranks.

        The lower median is used, so that with two processes the slow one is compared with the fast one.
        """
        median_s = own_s.median()
        ratios = own_s / median_s.clamp_min(1e-9)
        self._slow = torch.where(ratios > self._factor, self._slow + 1, 0)
        slowest = int(own_s.argmax())
        times = {
            "step": step,
            "what": "product" if self._of_product else "own_work",
            "median_s": float(median_s),
            "slowest_rank": slowest,
            "host": places[slowest][0],
            "ratio": float(ratios[slowest]),
            "max_s": float(own_s[slowest]),
            "min_s": float(own_s.min()),
        }
        named = (self._slow == self._windows).nonzero().flatten().tolist()
        stragglers = [self._straggler(step, rank, places[rank], float(ratios[rank])) for rank in named]
        return [MonitorEvent("rank_times", times), *stragglers]

    def _straggler(self, step: int, rank: int, place: Place, ratio: float) -> MonitorEvent:
        host, device = place
        steps = self._windows * RANK_TIMES_EVERY_STEPS
        who = f"rank {rank} ({device}) on {host}" if ":" in device else f"rank {rank} on {host}"
        work = " for a matrix product" if self._of_product else ""
        message = (
            f"step {step}: {who} has taken {ratio:.1f} times the median process's time{work} for {steps} steps; all "
            "others wait for it"
        )
        fields = {"step": step, "rank": rank, "host": host, "device": device, "ratio": ratio, "message": message}
        return MonitorEvent("straggler", fields)
