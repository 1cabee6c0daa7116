"""The interface between the training loop and a backend, and what the backends share.

Shared are torchrun's environment variables, exchanges over torch process groups, and stopwatches for parts of a step.
Only the backend that needs an optional package imports it.
"""

from __future__ import annotations

import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from conf.devices import DEVICES
from conf.schema import Config
from hlatctl.run.errors import ConfigError
from trainer.checkpoint.shards import ShardFile, ShardIndex
from trainer.model.decoder import Llama
from trainer.model.precision import PRECISIONS


class Stopwatch(Protocol):
    """A stopwatch that runs from its creation until :meth:`stop`."""

    def stop(self) -> None:
        """Mark the end of the work issued so far."""

    def read_s(self) -> float:
        """Return the seconds between start and end; wait until the device has reached the end."""


class HostStopwatch:
    """A stopwatch that reads the host's clock, at the end after ``wait``, which waits for the device."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait, self._started_s = wait, time.perf_counter()
        self._stopped_s = self._started_s

    def stop(self) -> None:
        """See :class:`Stopwatch`."""
        self._wait()
        self._stopped_s = time.perf_counter()

    def read_s(self) -> float:
        """See :class:`Stopwatch`."""
        return self._stopped_s - self._started_s


class DeviceStopwatch:
    """A stopwatch for a device that runs behind the host: the device records the times, so the host doesn't wait."""

    def __init__(self, device: torch.device) -> None:
        events = torch.get_device_module(device).Event
        self._start, self._stop = events(enable_timing=True), events(enable_timing=True)
        self._start.record()

    def stop(self) -> None:
        """See :class:`Stopwatch`."""
        self._stop.record()

    def read_s(self) -> float:
        """See :class:`Stopwatch`."""
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop)) / 1e3


#: The bits of a step's signal, which each process adds up: a process was told to stop; rank 0 has new orders; rank 0
#: ends training for an amendment. FP32 adds them exactly for two million processes.
STOP, NEWS, ENDS = 1, 1 << 21, 1 << 22


@dataclass(frozen=True)
class StepMetrics:
    """A step's metrics over all processes.

    Args:
        loss: mean of the whole batch.
        signal: sum of all processes' signals.
        grad_norm: norm of the whole model's gradients before clipping; counts each parameter once.
        param_norm: norm of the whole model's parameters before the update; counts each parameter once.
        others: the model's :class:`trainer.model.decoder.StepNumbers` by name; ``hlatctl.run.step_metrics`` can
            can describe them.
        skipped: the parameters were not updated.
    """

    loss: float
    signal: float
    grad_norm: float
    param_norm: float
    others: Mapping[str, float] = field(default_factory=dict)
    skipped: bool = False

    @classmethod
    def of(cls, sums: Sequence[float], names: Sequence[str] = ()) -> StepMetrics:
        """Make metrics from sums over all processes: loss, signal, the squares of both norms, and ``StepNumbers``."""
        loss, signal, grad_square, param_square, *totals = sums
        others = {
            name: total / count
            for name, total, count in zip(names, totals[::2], totals[1::2], strict=True)
            if count and math.isfinite(total)
        }
        return cls(loss, signal, math.sqrt(grad_square), math.sqrt(param_square), others)

    @property
    def stops(self) -> bool:
        """Whether a process was told to stop."""
        return bool(int(self.signal) % NEWS)

    @property
    def has_news(self) -> bool:
        """Whether rank 0 has new orders."""
        return bool(int(self.signal) & NEWS)

    @property
    def ends(self) -> bool:
        """Whether training ends for an amendment."""
        return bool(int(self.signal) & ENDS)

    @property
    def finite(self) -> bool:
        """Whether the loss and the gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


#: The largest loss and gradient norm of a step that updates the parameters; None: every finite one does.
Limits = tuple[float, float] | None


class Optimizer(Protocol):
    """The part of an optimizer that the loop uses."""

    @property
    def step_count(self) -> int:
        """Updates so far, without skipped ones; may wait for the device."""

    def zero_grad(self) -> None:
        """Clear the gradients."""

    def replicated_norms(self, axis: str) -> Tensor:
        """Return the L2 norms, FP32, of the parameters that are replicated along a mesh axis, in the same order."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by name, as views: ``model.*``, ``exp_avg.*``, ``exp_avg_sq.*``.

        With ``optimizer.ema_decay`` also ``ema.*``, the average of the weights.
        """

    def loaded(self, step_count: int) -> None:
        """Set the number of updates after a checkpoint has been read into :meth:`tensors`."""


class Member(Protocol):
    """One of the processes that train together: its place among them, and what they exchange."""

    device: torch.device
    rank: int
    world_size: int
    data_parallel_rank: int
    data_parallel_size: int
    is_replica_leader: bool
    """This process saves the loader's state for the processes of its replica."""
    data_ranks: list[int]
    """The ranks of this process's replica and node that need tokens, perhaps without this one; the first reads them."""

    def take_values(self, config: Config) -> None:
        """Use the values of another configuration of the same processes, before anything is built."""

    def from_rank0(self, value: Any) -> Any:
        """Return rank 0's JSON value, on every process."""

    def gather(self, value: Any) -> list[Any]:
        """Return every process's JSON value in the order of ranks, on every process."""

    def gather_beside(self, value: Any) -> list[Any]:
        """As :meth:`gather`, for a thread other than the training thread; uses a separate process group."""

    def to_rank0_beside(self, value: Any) -> list[Any]:
        """As :meth:`gather_beside`, but other ranks get an empty list; for values that are large in total."""

    def from_rank0_beside(self, value: Any) -> Any:
        """As :meth:`from_rank0`, over the process group of :meth:`gather_beside`."""

    @property
    def steps_ahead(self) -> int:
        """Return how many of the newest steps' metrics the loop may leave unread; 0: it reads them immediately."""

    def numbers_on_rank0(self, number: float) -> Tensor | None:
        """Return every process's number (world) in FP32 on rank 0, None on others; for regular use by many ranks."""

    def stopwatch(self) -> Stopwatch:
        """Return a running stopwatch, which measures the time of each process's work."""

    def peak_flops_per_s(self) -> float | None:
        """Return the device's peak in the precision used for training, or None if unknown."""


class Backend(Member, Protocol):
    """A device, its processes, and how a step runs on them."""

    compiles: bool
    """The layers are compiled."""
    attention: str | None
    """Name of the kernel of attention, if it is another one than the device's usual one."""
    warnings: list[str]
    """Messages for the journal and the terminal, such as a missing compiler."""

    def build_model(self, *, document_end_id: int | None, drawn: bool = True) -> Llama:
        """Return this process's part of the model, on its device.

        Args:
            document_end_id: attention stays within documents, which end with this token; None: it doesn't.
            drawn: it has its initial weights, at the latest from :meth:`optimizer` on; otherwise weights are undefined
                until a checkpoint is read into the optimizer's tensors.
        """

    def optimizer(self, model: Llama) -> Optimizer:
        """Return the optimizer of a model from :meth:`build_model`."""

    def forward_backward(self, model: Llama, inputs: Tensor, targets: Tensor) -> Tensor:
        """Accumulate the gradients of this replica's (batch, seq) token ids and next ids, in host memory.

        Returns this process's share of the mean loss of the whole batch; the shares of all processes add up to it.
        """

    def update(
        self, optimizer: Optimizer, loss_share: Tensor, *, lr: float, step: int, signal: int = 0, limits: Limits = None
    ) -> Callable[[], StepMetrics]:
        """Update with the clipped gradients of the whole batch; return a reader of the step's metrics.

        The share of the loss from :meth:`forward_backward` and this process's signal (``STOP``, ``NEWS``, ``ENDS``) are
        summed over all processes, with the gradients. The device may do all this later, so the reader may wait for it.
        An eager device skips an update that is not finite, or whose loss or gradient norm is above ``limits``.
        """

    def expect_steps(self, step_s: float) -> None:
        """Shorten the timeouts of collectives: every process has compiled its graphs, and a step takes this long."""

    @property
    def place(self) -> tuple[int, int, int]:
        """Return the numbers of this process's pipeline stage, slice of tensors, and shard of them: (0, 0, 0)."""

    def replay(self, model: Llama, optimizer: Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run :meth:`forward_backward` of a micro-batch, or of a pipeline's step, without an effect on training.

        Gradients aren't exchanged, except by FSDP, and are cleared before and after.
        """

    def drift(self, optimizer: Optimizer) -> float:
        """Return the largest relative difference between the norms of a weight's replicas on different processes."""

    def reduce_sum(self, tensor: Tensor) -> None:
        """Sum a tensor over all processes, in place."""

    def step_boundary(self) -> None:
        """Mark the end of a step's operations; a lazily executing device starts them here."""

    def to_host(self, tensors: dict[str, Tensor], into: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy this process's shards to host memory; the copy is complete when this returns.

        The copies keep each shard's position in the whole. ``into`` is the result of an earlier call, whose memory is
        reused, or empty.
        """

    def for_writing(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of an optimizer in a form that another thread can read while training waits."""

    def save(self, tensors: dict[str, Tensor], folder: Path) -> ShardFile | None:
        """Write this process's share of tensors from :meth:`to_host` or :meth:`for_writing` into a folder durably.

        May run in another thread. Returns None if other processes write all of this process's tensors.
        """

    def load(self, tensors: dict[str, Tensor], folder: Path, index: ShardIndex) -> Callable[[], None]:
        """Read tensors of an optimizer from a folder whose shards the index lists; may run in another thread.

        The training thread calls the returned function to put them in place. On some devices it does nothing.
        """

    def compile_counters(self) -> dict[str, int]:
        """Return how many graphs of this process came from the cache (``hits``) or not (``misses``); {} if unknown."""

    def close(self) -> None:
        """End the process group."""


def require_variables(config: Config, wanted: Mapping[str, str]) -> None:
    """Set environment variables that a device's library reads on import.

    Raises a ConfigError if one has another value already.
    """
    for name, value in wanted.items():
        if os.environ.setdefault(name, value) != value:
            raise ConfigError(
                f"{name}={os.environ[name]} in the environment: backend.device={config.backend.device} and "
                f"precision.name={config.precision.name} need {name}={value}",
                hint=f"unset {name}",
            )


_HOST = torch.device("cpu")


class TorchDistributed(ABC):
    """One process of a job that torchrun started, or a single process."""

    device: torch.device

    def __init__(self, config: Config) -> None:
        self._config, self._precision = config, PRECISIONS[config.precision.name]
        self._facts = DEVICES[config.backend.device]
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.warnings: list[str] = []
        self.attention: str | None = None
        #: Connects the hosts; training does not use it. None: this is the only process.
        self._beside: dist.ProcessGroup | None = None
        torch.set_num_threads(config.cluster.threads_per_process)

    def take_values(self, config: Config) -> None:
        """See :class:`Member`."""
        self._config = config

    @property
    @abstractmethod
    def _exchange(self) -> tuple[torch.device, dist.ProcessGroup | None]:
        """Return the training thread's group for host values, and its tensors' device; None: the default group."""

    @property
    def place(self) -> tuple[int, int, int]:
        """See :class:`Backend`; backends with ``recovery.corruption_check_steps`` have it."""
        raise NotImplementedError

    def replay(self, model: Llama, optimizer: Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
        """See :class:`Backend`; backends with ``recovery.corruption_check_steps`` have it."""
        raise NotImplementedError

    def gather(self, value: Any) -> list[Any]:
        """See :class:`Backend`."""
        return [value] if self.world_size == 1 else gather_json(value, *self._exchange)

    def from_rank0(self, value: Any) -> Any:
        """See :class:`Backend`."""
        return value if self.world_size == 1 else json_from_rank0(value, *self._exchange)

    def numbers_on_rank0(self, number: float) -> Tensor | None:
        """See :class:`Backend`."""
        return torch.tensor([number]) if self.world_size == 1 else gather_numbers(number, *self._exchange)

    def gather_beside(self, value: Any) -> list[Any]:
        """See :class:`Backend`."""
        return [value] if self._beside is None else gather_json(value, _HOST, self._beside)

    def to_rank0_beside(self, value: Any) -> list[Any]:
        """See :class:`Backend`."""
        return [value] if self._beside is None else gather_json_on_rank0(value, self._beside)

    def from_rank0_beside(self, value: Any) -> Any:
        """See :class:`Backend`."""
        return value if self._beside is None else json_from_rank0(value, _HOST, self._beside)

    def reduce_sum(self, tensor: Tensor) -> None:
        """See :class:`Backend`."""
        if self.world_size > 1:
            dist.all_reduce(tensor)

    def peak_flops_per_s(self) -> float | None:
        """Return the peak from the table of devices."""
        if not self._facts.peak_flops_per_s:
            return None
        name = torch.get_device_module(self.device).get_device_name(self.device)
        return self._facts.peak(name, self._precision.fastest)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def gather_json(value: Any, device: torch.device, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every process's JSON value: gather the lengths, then the padded texts.

    Every process receives and parses every text, so don't call it every few steps.
    """
    mine = _as_bytes(value, device)
    lengths = _gather_rows(torch.tensor([len(mine)], device=device), group).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(mine)] = mine
    texts = _gather_rows(padded, group).cpu().numpy()
    return [json.loads(row[:length].tobytes()) for row, length in zip(texts, lengths, strict=True)]


def json_from_rank0(value: Any, device: torch.device, group: dist.ProcessGroup | None) -> Any:
    """Return rank 0's JSON value: broadcast its length, then its text."""
    mine = _as_bytes(value if dist.get_rank(group) == 0 else None, device)
    size = torch.tensor([len(mine)], device=device)
    dist.broadcast(size, 0, group=group)
    text = mine if dist.get_rank(group) == 0 else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(text, 0, group=group)
    return json.loads(text.cpu().numpy().tobytes())


def gather_numbers(number: float, device: torch.device, group: dist.ProcessGroup | None) -> Tensor | None:
    """Return every process's number (world) in FP32 on rank 0, None on others.

    Between hosts, only rank 0 receives. On devices all ranks gather, because otherwise the library would connect every
    process to rank 0.
    """
    mine = torch.tensor([number], dtype=torch.float32, device=device)
    first = dist.get_rank(group) == 0
    if device.type != "cpu":
        numbers = _gather_rows(mine, group)
        return numbers.flatten().cpu() if first else None
    numbers = mine.new_empty(dist.get_world_size(group))
    dist.gather(mine, list(numbers.view(-1, 1)) if first else None, dst=0, group=group)
    return numbers if first else None


def _gather_rows(mine: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return all processes' tensors (n) as rows (world, n)."""
    rows = mine.new_empty(dist.get_world_size(group), len(mine))
    dist.all_gather(list(rows), mine, group=group)
    return rows


def _as_bytes(value: Any, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)


def gather_json_on_rank0(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return every process's JSON value on rank 0, and an empty list on others. The group must connect hosts."""
    mine = _as_bytes(value, _HOST)
    lengths = _gather_rows(torch.tensor([len(mine)]), group).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(mine)] = mine
    texts = padded.new_empty(len(lengths), len(padded)) if dist.get_rank(group) == 0 else None
    dist.gather(padded, None if texts is None else list(texts), dst=0, group=group)
    rows = [] if texts is None else zip(texts.numpy(), lengths, strict=True)
    return [json.loads(row[:length].tobytes()) for row, length in rows]


def largest_difference(norms: Tensor, group: dist.ProcessGroup) -> float:
    """Return the largest relative difference between the processes' norms (n); 0 without norms."""
    ends = torch.cat((norms, -norms))
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    largest, smallest = ends.cpu().chunk(2)
    return max(((largest + smallest) / largest.clamp_min(1e-12)).tolist(), default=0.0)
