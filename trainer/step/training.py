"""What every engine's training shares: the driver's orders, the journal, checkpoints, and the figures of a step.

An engine's loop is a subclass: ``trainer.step.loop`` for this project's own model, ``trainer.torchtitan.training``.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from conf.amendments import with_changes
from conf.data_changes import DATA_CHANGED, SKIP_STEPS, TRAIN_STARTED, ranges
from conf.devices import DEVICES
from conf.schema import Config
from conf.training_rules import EXIT_CODES, CheckpointPolicy, Outcome, SaveReason, next_corruption_check
from hlatctl.run import files, startup
from hlatctl.run.errors import NONFINITE, NONFINITE_WEIGHTS, TrainingError
from hlatctl.run.fence import Fence
from hlatctl.run.files import DAMAGED
from hlatctl.run.journal import JournalWriter, train_writer
from hlatctl.run.paths import ProfileOrder, RunPaths
from hlatctl.run.processes import node_name
from hlatctl.run.step_metrics import texts
from trainer.backends.base import ENDS, NEWS, STOP, Member, Stopwatch
from trainer.checkpoint.manager import CheckpointManager, Restored, rng_state, set_rng_state
from trainer.checkpoint.writer import Storage
from trainer.data.loader import Batches
from trainer.gpu_node import described
from trainer.optim.adamw import local
from trainer.process import StopRequest
from trainer.step.corruption import HINT, CorruptionCheck, Subject
from trainer.step.inputs import open_batches, read_dataset
from trainer.step.monitor import PRODUCT_EVERY_STEPS, Monitor, MonitorEvent, Place, Product, RankTimes
from trainer.step.profiling import Profiling

#: The same as torchtitan's ``log_freq``.
EVERY_STEPS = 10


class StepLine:
    """Makes the lines that rank 0 prints, for people who read a run's logs."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._last_step: int | None = None

    def is_due(self, step: int) -> bool:
        """Return whether a step gets a line: the first of the attempt, and every tenth."""
        due = self._last_step is None or step % EVERY_STEPS == 0 or step == self._config.total_steps
        self._last_step = step if due else self._last_step
        return due

    def text(self, event: dict[str, Any]) -> str:
        """Return the line of a step from the fields of its event. Unknown values are omitted."""
        parts = [
            f"step {event['step']}/{self._config.total_steps}",
            f"tokens {event['tokens']:,}",
            *texts(event),
            f"data wait {event['data_wait_s'] / event['step_s']:.0%}",
        ]
        return "  ".join(parts)


#: Linux, proc(5): the second number counts the resident pages.
_OWN_PAGES = Path("/proc/self/statm")


class StepFigures:
    """Computes the figures of a process's steps: speed, share of the device's peak, and memory.

    Without the peak of one device, MFU is unknown.
    """

    def __init__(
        self, config: Config, device: torch.device, peak_flops_per_s: float | None, flops_per_token: float
    ) -> None:
        self._config, self._device = config, device
        self._peak_flops_per_s, self._flops_per_token = peak_flops_per_s, flops_per_token

    def of(self, step_s: float) -> dict[str, float | int | None]:
        """Return the fields of a step event that follow from its duration, and this process's memory, without waiting.

        Costs about 35 us on a CPU.
        """
        tokens_per_s, world = self._config.tokens_per_step / step_s, self._config.world_size
        flops_per_s, peak_flops_per_s = tokens_per_s * self._flops_per_token, self._peak_flops_per_s
        current, peak = memory_bytes(self._device)
        return {
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_device": tokens_per_s / world,
            "mfu": flops_per_s / (peak_flops_per_s * world) if peak_flops_per_s else None,
            "memory_bytes": current,
            "peak_memory_bytes": peak,
        }


def memory_bytes(device: torch.device) -> tuple[int | None, int | None]:
    """Return this process's memory where the model is, current and peak; None if unknown.

    A device's own count is PyTorch's allocated memory. Reading it doesn't wait for the device.
    """
    facts = DEVICES.get(device.type)  # torch-xla's device has no row
    where = facts.memory if facts else "unknown"
    if where == "device":
        counts = torch.get_device_module(device).memory_stats(device)
        return counts.get("allocated_bytes.all.current"), counts.get("allocated_bytes.all.peak")
    return _host_memory_bytes() if where == "host" else (None, None)


def _host_memory_bytes() -> tuple[int | None, int]:
    current = None
    with suppress(OSError):
        current = int(_OWN_PAGES.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    unit_bytes = 1 if sys.platform == "darwin" else 1024  # getrusage(2)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
    return current, max(peak, current or 0)  # the kernel updates the peak later than the pages


#: Interval between reads of the file.
_LOOK_EVERY_S = 2.0
#: While the driver wants training to end, it touches the file more often than this. Without a driver, training
#: continues, because nothing would start the next attempt.
_FRESH_S = 120.0


class Orders:
    """The driver's orders to a running attempt: amendments of the run's configuration, and profiles.

    Only rank 0 reads the driver's file, a small one, at most once in two seconds. It notifies the others through the
    signal that each step's metrics carry, so that all begin or end with the same step.

    Args:
        attempt: number of the attempt.
        ahead: number of steps between the signal and its effect on every rank.
    """

    def __init__(self, run: RunPaths, attempt: int, *, ahead: int = 0) -> None:
        self._path, self._ahead = run.orders(attempt), ahead
        self._looked_s = self._changed_s = -_FRESH_S
        self._version: tuple[int, int] = (0, 0)
        self._order: dict[str, Any] = {}
        self._taken: set[int] = set()
        self._profiled = 0

    def signal(self, step: int) -> int:
        """Return what rank 0 adds to the signal of a step."""
        self._look()
        if not self._order:
            return 0
        end, is_fresh = self._order["end_after_step"], time.monotonic() - self._changed_s < _FRESH_S
        ends = end is not None and step + self._ahead >= end and is_fresh
        return ENDS * ends + NEWS * bool(set(self._order["numbers"]) - self._taken or self._new_profile())

    def take(self) -> tuple[list[int], dict[str, Any], dict[str, Any] | None]:
        """Return the numbers of the new amendments, the values of all amendments by key, and a profile if it is new."""
        new = sorted(set(self._order["numbers"]) - self._taken)
        self._taken.update(new)
        profile = self._new_profile()
        self._profiled = profile["number"] if profile else self._profiled
        return new, self._order["values"], profile

    def _new_profile(self) -> dict[str, Any] | None:
        profile: dict[str, Any] | None = self._order["profile"]
        return profile if profile and profile["number"] > self._profiled else None

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        try:
            status = os.stat(self._path)
            version = (status.st_mtime_ns, status.st_ino)
            if version != self._version:
                order = files.read_json(self._path)
                profile = order["profile"]
                self._order = {
                    **{name: order[name] for name in ("numbers", "values", "end_after_step")},
                    "profile": asdict(ProfileOrder.of(profile)) if profile else None,
                }
                self._version, self._changed_s = version, now_s
        except (OSError, *DAMAGED):  # it is written again, or not at all
            return


class Training:
    """One process's part of one training attempt.

    Only rank 0 has a journal. Nothing is written after the end of the attempt. Raises an HlatctlError if data,
    checkpoints or storage can't be used.

    Args:
        storage: format of the checkpoints' tensors; None: this project's own.
        max_checkpoint_step: newer checkpoints are ignored; None: none is.
    """

    def __init__(
        self,
        config: Config,
        run: RunPaths,
        member: Member,
        journal: JournalWriter | None,
        *,
        attempt: int,
        max_checkpoint_step: int | None,
        storage: Storage | None = None,
    ) -> None:
        self.config, self.run_paths, self.member, self.journal = config, run, member, journal
        self.policy, self.stop = CheckpointPolicy(config), StopRequest()
        self.orders = Orders(run, attempt, ahead=member.steps_ahead) if attempt and member.rank == 0 else None
        self.profiling = Profiling(run, attempt, member, self.note)
        self.dataset = read_dataset(run, member)
        self.checkpoints = CheckpointManager(config, run, member, journal, attempt=attempt, storage=storage)
        self.chosen = self.checkpoints.choose(max_checkpoint_step)
        begins_after = self.chosen[0] if self.chosen else config.fork.step
        self.config = config = config.during(begins_after + 1)
        member.take_values(config)
        self.monitor, self.line = Monitor(), StepLine(config)
        self._product: Product | None = None
        self.waits_within_steps = config.parallel.data_parallel == "fsdp"
        self.rank_times = RankTimes(
            config.recovery.straggler_factor, config.recovery.straggler_steps, of_product=self.waits_within_steps
        )
        self.places: list[Place] = [(host, device) for host, device in member.gather([node_name(), str(member.device)])]
        self.peak_flops_per_s = member.peak_flops_per_s()
        self.nonfinite_steps = 0
        self.added_skips: list[int | str] = []
        self._batches: Batches | None = None
        self._corruption: CorruptionCheck | None = None

    @property
    def batches(self) -> Batches:
        """Return the batches, which :meth:`open_batches` has opened."""
        assert self._batches is not None
        return self._batches

    @property
    def document_end_id(self) -> int | None:
        """Return the token that ends a document, beyond which attention doesn't reach; None: it does."""
        return int(self.dataset["tokenizer"]["eos_id"]) if self.config.data.mask_across_documents else None

    def restore(self, tensors: dict[str, Any]) -> Restored | None:
        """Read the chosen checkpoint into the tensors, or otherwise the weights of ``train.init_from``."""
        restored = self.checkpoints.restore(tensors, self.chosen)
        if restored:
            self.monitor = Monitor(restored.shared["monitor"])
            set_rng_state(restored.rng)
        elif self.config.train.init_from:
            self.checkpoints.begin_from(Path(self.config.train.init_from), tensors)
        return restored

    def open_batches(self, restored: Restored | None) -> None:
        """Open the batches from the checkpoint's position."""
        self._batches, self.added_skips = open_batches(self.config, self.run_paths, self.dataset, self.member, restored)

    def note_start(self, step: int, parameters: int, **fields: Any) -> None:
        """Journal that training starts after a step."""
        stage = self.config.stage_at(step + 1)
        if stage and stage.after_step == step:
            self.note("training_stage_started", durable=True, name=stage.name, number=stage.number, step=step + 1)
        self.note(
            TRAIN_STARTED,
            resumed_from_step=step,
            tokens=self.config.tokens_at(step),
            world=self.member.world_size,
            device=str(self.member.device),
            device_name=described(self.member.device),
            parameters=parameters,
            peak_flops_per_s=self.peak_flops_per_s,
            added_skips=self.added_skips,
            groups_s=startup.since("imported", "connected"),
            load_s=startup.since("connected"),
            restored_from=self.checkpoints.restored_from,
            warm=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0",
            **fields,
        )

    def signal(self, step: int) -> int:
        """Return what this process adds to the signal of a step."""
        return STOP * self.stop.requested + (self.orders.signal(step) if self.orders else 0)

    def take_orders(self, step: int) -> None:
        """Carry out, on every rank, the orders that rank 0 has found: change values, or begin a profile."""
        numbers, values, profile = self.member.from_rank0(self.orders.take() if self.orders else None)
        self.config = with_changes(self.config, values)
        self.policy = CheckpointPolicy(self.config)
        self.checkpoints.reconfigure(self.config)
        for number in numbers:
            self.note("amendment_applied", durable=True, number=number, step=step)
        self.profiling.begin(profile)

    def note_step(self, step: int, *, step_s: float, **numbers: Any) -> None:
        """Journal a step with its figures, and print its line if it is due. Only rank 0 does."""
        if self.journal is None:
            return
        tokens, figures = self.config.tokens_at(step), self._figures.of(step_s)
        fields = {"step": step, "tokens": tokens, **numbers, "step_s": step_s, **figures}
        self.note("step", **fields)
        if self.line.is_due(step):
            with suppress(OSError):  # a full disk, which training survives
                print(self.line.text(fields), flush=True)

    def nonfinite(
        self,
        step: int,
        batches: list[int],
        loss: float,
        grad_norm: float,
        weights: Callable[[], Iterable[torch.Tensor]] | None = None,
    ) -> Outcome | None:
        """Do what ``train.on_nonfinite`` says about a step whose loss or gradients are not finite.

        If this process's weights were not finite before the step, no batch is to blame, and every further step would
        end in the same way: training stops.

        Args:
            batches: those that may be the cause; the last one is the step's.
            weights: returns this process's weights and moments, which such a step leaves as they were; None: it
                changes them, so they show nothing.

        Raises:
            TrainingError: training must stop.
        """
        action, numbers = self.config.train.on_nonfinite, f"loss={loss}, grad_norm={grad_norm}"
        self.nonfinite_steps += 1
        spoiled = self._ranks_with_spoiled(weights) if weights else []
        if spoiled or (action == "skip" and self.nonfinite_steps > self.config.train.max_nonfinite_steps):
            action = "stop"
        hosts = sorted({self.places[rank][0] for rank in spoiled})
        self.note(
            "nonfinite",
            durable=True,
            step=step,
            tokens=self.config.tokens_at(step),
            batch=batches[-1],
            loss=str(loss),
            grad_norm=str(grad_norm),
            action=action,
            ranks=spoiled,
            # If all weights are spoiled, nothing shows where that began.
            blamed_hosts=hosts if len(hosts) == 1 and len(spoiled) < self.member.world_size else [],
        )
        if spoiled:
            ranks = f"{'ranks' if len(spoiled) > 1 else 'rank'} {', '.join(map(str, spoiled[:4]))}"
            more = f" and {len(spoiled) - 4} more" if len(spoiled) > 4 else ""
            raise TrainingError(
                f"step {step}: {numbers}: the weights or moments of {ranks}{more} were not finite before the step",
                hint="the newest checkpoint has finite ones; if it repeats, test the memory of these ranks' devices",
                code=NONFINITE_WEIGHTS,
            )
        if action == "stop":
            raise TrainingError(
                f"step {step}: {numbers}: not finite; no checkpoint has this step",
                hint="lower optimizer.lr, or inspect the previous steps in the journal",
                code=NONFINITE,
            )
        if action == "skip":
            return None
        self.note(DATA_CHANGED, durable=True, key=SKIP_STEPS, value=ranges(batches), by="trainer", why=numbers)
        return "rollback"

    def _ranks_with_spoiled(self, weights: Callable[[], Iterable[torch.Tensor]]) -> list[int]:
        """Return the ranks with a weight or moment that is not finite. All ranks call this together."""
        parts = (part for part in map(local, weights()) if part.is_floating_point())
        mine = all(bool(torch.isfinite(part).all()) for part in parts)
        return [rank for rank, is_finite in enumerate(self.member.gather(mine)) if not is_finite]

    def measure(self, flops_per_token: float) -> None:
        """Prepare a step's figures, and the product that is timed if processes wait for each other within steps."""
        self._figures = StepFigures(self.config, self.member.device, self.peak_flops_per_s, flops_per_token)
        if self.waits_within_steps and self.member.world_size > 1:
            flops_per_step = flops_per_token * self.config.tokens_per_step / self.member.world_size
            self._product = Product.beside(flops_per_step, self.member.device)

    def time_product(self, step: int) -> Stopwatch | None:
        """Start a product on the device before a step, if one is due in it; the stopwatch is read later."""
        if self._product is None or step % PRODUCT_EVERY_STEPS:
            return None
        return self._product.time(self.member.stopwatch())

    def compare_ranks(self, step: int) -> list[MonitorEvent]:
        """Compare the ranks' times once per window of steps, on rank 0."""
        if not self.rank_times.full:
            return []
        own_s = self.rank_times.take_s()
        times_s = self.member.numbers_on_rank0(own_s) if self.member.world_size > 1 else None
        return [] if times_s is None else self.rank_times.compare(step, times_s, self.places)

    def watch_for_corruption(self, subject: Callable[[], Subject]) -> None:
        """Prepare the checks of ``recovery.corruption_check_steps``, if it is set."""
        if self.config.recovery.corruption_check_steps:
            hosts = [host for host, _ in self.places]
            self._corruption = CorruptionCheck(self.config, self.member, subject(), hosts)

    def is_checked(self, step: int) -> bool:
        """Return whether the processes are compared after a step; an attempt's first check precedes its steps."""
        return next_corruption_check(self.config, step) == step

    def check_for_corruption(self, step: int) -> float:
        """Compare what the processes compute after a step, if there are checks; return the seconds that took.

        Checkpoints up to a step without differences are trusted.

        Raises:
            TrainingError: a process computes something else.
        """
        if self._corruption is None:
            return 0.0
        started_s = time.perf_counter()
        found = self._corruption.run(step)
        if found is None:
            wall_s = time.perf_counter() - started_s
            self.note("corruption_checked", step=step, wall_s=wall_s)
            return wall_s
        self.note("corruption_suspected", durable=True, step=step, **found.fields)
        raise TrainingError(f"after step {step}: {found.message}", hint=HINT)

    def save(self, tensors: dict[str, Any], step: int, reason: SaveReason, *, optimizer_steps: int) -> None:
        """Save a checkpoint; see :meth:`CheckpointManager.save`."""
        shared, own = self._states(optimizer_steps)
        tokens = self.config.tokens_at(step)
        self.checkpoints.save(tensors, step=step, tokens=tokens, reason=reason, shared=shared, own=own)

    def copy_to_memory(self, tensors: dict[str, Any], step: int, *, optimizer_steps: int) -> None:
        """Copy a step to memory; see :meth:`CheckpointManager.copy_to_memory`."""
        self.checkpoints.copy_to_memory(tensors, step, *self._states(optimizer_steps))

    def _states(self, optimizer_steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state that all ranks share, and this rank's own."""
        shared = {
            "optimizer_steps": optimizer_steps,
            "monitor": self.monitor.state,
            "dataset_fingerprint": str(self.dataset["fingerprint"]),
        }
        return shared, {"loader": self.batches.state if self.member.is_replica_leader else [], "rng": rng_state()}

    def end(self, step: int, outcome: Outcome | None) -> int:
        """Journal the end of training after a step, and return the process's exit code."""
        if outcome != "rollback" and step >= self.config.total_steps:
            outcome = "finished"
        assert outcome is not None
        self.checkpoints.leave_memory()
        self.note("train_stopped", durable=True, step=step, tokens=self.config.tokens_at(step), reason=outcome)
        return EXIT_CODES[outcome]

    def close(self) -> None:
        """End what runs beside training, also after an error."""
        self.checkpoints.close()
        if self._batches:
            self._batches.close()
        self.profiling.close()

    def note(self, kind: str, *, durable: bool = False, **fields: Any) -> None:
        """Write an event, on rank 0."""
        if self.journal:
            self.journal.append(kind, durable=durable, **fields)


def train_journal(run: RunPaths, member: Member, attempt: int) -> JournalWriter | None:
    """Open rank 0's journal; return None on other ranks."""
    if member.rank != 0:
        return None
    return JournalWriter(run, train_writer(0), attempt, check=Fence(run, attempt).check)
