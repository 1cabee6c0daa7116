"""Run PyTorch's profiler on steps of running training, for `hlatctl profile`, and print its operators as a table.

All processes take the order with the same step and count the same steps, including those that record nothing, so all of
them meet at the end. A failure in a process is reported as its result: a profile never ends training. The table is
plain text that fits 120 columns; PyTorch's own is twice as wide.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, schedule

from hlatctl.run.fence import Fence
from hlatctl.run.paths import ProfileOrder, RunPaths, table_name, trace_name
from hlatctl.units import size
from trainer.backends.base import Member

_ROWS = 20
_NAME_CHARS = 35
#: "Self" excludes the operators that an operator calls.
_HEAD = ("OPERATOR", "CALLS", "SELF CPU ms", "SHARE", "CPU ms")
_DEVICE_HEAD = ("SELF DEVICE ms", "SHARE")


def tables(averages: Iterable[Any], *, on_device: bool, memory: bool) -> str:
    """Return the operators that take the most time, and those that allocate the most.

    Args:
        averages: ``torch.profiler.profile.key_averages()``, whose times are in microseconds.
        on_device: a device other than the CPU does the work.
        memory: allocations were recorded.
    """
    own = "device" if on_device else "cpu"
    events = list(averages)
    parts = [_table(events, f"self_{own}_time_total", on_device=on_device, memory=memory and own)]
    if memory:
        parts.append(_table(events, f"self_{own}_memory_usage", on_device=on_device, memory=own))
    return "\n\n".join(parts) + "\n"


def _table(events: list[Any], key: str, *, on_device: bool, memory: str | bool) -> str:
    head = [*_HEAD, *(_DEVICE_HEAD if on_device else ()), *(("SELF MEMORY",) if memory else ())]
    whole = {own: sum(getattr(event, f"self_{own}_time_total") for event in events) for own in ("cpu", "device")}
    rows = [head]
    for event in sorted(events, key=lambda event: getattr(event, key), reverse=True)[:_ROWS]:
        cells = [_cut(event.key), f"{event.count:,}", *_time(event.self_cpu_time_total, whole["cpu"])]
        cells.append(_time(event.cpu_time_total, 0)[0])
        cells += _time(event.self_device_time_total, whole["device"]) if on_device else ()
        cells += (_signed(getattr(event, f"self_{memory}_memory_usage")),) if memory else ()
        rows.append(cells)
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(_line(row, widths) for row in rows)


def _line(row: list[str], widths: list[int]) -> str:
    name, *numbers = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    return "  ".join([name.strip().ljust(widths[0]), *numbers])


def _time(value_us: float, whole_us: float) -> tuple[str, str]:
    return f"{value_us / 1e3:,.3f}", f"{value_us / whole_us:.1%}" if whole_us else "-"


def _signed(value_bytes: int) -> str:
    return f"-{size(-value_bytes)}" if value_bytes < 0 else size(value_bytes)


def _cut(name: str) -> str:
    return name if len(name) <= _NAME_CHARS else f"{name[: _NAME_CHARS - 1]}…"


#: Steps that are recorded and dropped, because the first steps of a profiler are slow.
_WARM_UP_STEPS = 2
#: Maximum characters of an error that rank 0 receives.
_ERROR_LENGTH = 300


class Profiling:
    """The profiles of one attempt, after whose end nothing is written. Costs nothing until one is requested.

    The backend's processes meet when the steps are recorded. ``note`` journals an event, on rank 0.
    """

    def __init__(self, run: RunPaths, attempt: int, backend: Member, note: Callable[..., None]) -> None:
        self._run, self._fence, self._backend, self._note = run, Fence(run, attempt), backend, note
        self._order: ProfileOrder | None = None
        self._recorder: _Recorder | None = None
        self._done_steps = 0

    def begin(self, order: dict[str, Any] | None) -> None:
        """Record the next steps; call it on all processes at the same step. Ignored if None or during a profile."""
        if order and not self._order:
            self._order, self._done_steps = ProfileOrder.of(order), 0
            if self._backend.rank in self._order.ranks:
                self._recorder = _Recorder(self._order, self._run.partial_profile(self._order.number))

    def step(self, step: int) -> None:
        """End a step. After the last recorded one, all processes wait until the traces are written."""
        if not self._order:
            return
        if self._done_steps == _WARM_UP_STEPS + self._order.steps:
            self._finish(self._order, step)
        elif self._recorder:
            self._recorder.step()
        self._done_steps += 1

    def close(self) -> None:
        """Drop an incomplete profile when training ends.

        After an error it isn't stopped: that waits for the device, which may wait for the other ranks.
        """
        if self._order:
            if sys.exception():
                self._recorder = None
            self._drop(self._order, "training ended before the last of its steps")

    def _finish(self, order: ProfileOrder, step: int) -> None:
        self._fence.check(now=True)
        error = self._recorder.save(self._backend.rank, self._backend.device) if self._recorder else ""
        errors = [text for text in self._backend.gather(error) if text]
        if errors:
            self._drop(order, errors[0])
            return
        self._order = self._recorder = None
        if self._backend.rank != 0:
            return
        try:
            folder = self._run.partial_profile(order.number).rename(self._run.profile(order.number))
            size_bytes = sum(path.stat().st_size for path in folder.iterdir())
        except OSError as problem:
            self._note("profile_failed", number=order.number, message=str(problem))
            return
        first = step - order.steps + 1
        self._note("profiled", number=order.number, first_step=first, step=step, bytes=size_bytes)

    def _drop(self, order: ProfileOrder, why: str) -> None:
        if self._recorder:
            self._recorder.drop()
        self._order = self._recorder = None
        if self._backend.rank == 0:
            shutil.rmtree(self._run.partial_profile(order.number), ignore_errors=True)
            self._note("profile_failed", number=order.number, message=why)


class _Recorder:
    """PyTorch's profiler in one process, and its first error."""

    def __init__(self, order: ProfileOrder, folder: Path) -> None:
        self._folder, self._memory, self._error, self._started = folder, order.memory, "", False
        self._profile = profile(
            schedule=schedule(wait=0, warmup=_WARM_UP_STEPS, active=order.steps, repeat=1),
            profile_memory=order.memory,
            acc_events=True,
        )

    def step(self) -> None:
        self._try(self._profile.step if self._started else self._profile.start)
        self._started = True

    def save(self, rank: int, device: torch.device) -> str:
        """End the last step and write its files; return the error, or an empty text."""
        self._try(self._profile.stop)
        self._started = False
        self._try(lambda: self._write(rank, device))
        return self._error

    def drop(self) -> None:
        """Stop recording, ignoring errors."""
        if self._started:
            self._try(self._profile.stop)

    def _write(self, rank: int, device: torch.device) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._folder / trace_name(rank)))
        averages = self._profile.key_averages()
        text = tables(averages, on_device=device.type != "cpu", memory=self._memory)
        (self._folder / table_name(rank)).write_text(text, encoding="utf-8")

    def _try(self, action: Callable[[], Any]) -> None:
        if self._error:
            return
        try:
            action()
        except Exception as error:  # from the profiler, its tracer of the device, or a full disk
            self._error = f"{type(error).__name__}: {error}"[:_ERROR_LENGTH]
