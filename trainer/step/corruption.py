"""Find processes that compute wrong numbers without an error: silent data corruption.

A check gives the same random tokens to every replica and compares what they compute. Processes with the same stage and
slice have the same weights and the same input, so their bits must be equal: of their weights and moments, of their
layers' outputs, and of their gradients before any exchange. Most replicas are right. Each pass is repeated: a process
that doesn't reproduce its own bits is wrong, even if there is no other one, or only one other. Google (Gemini, arXiv
2312.11805, section 5) and ByteDance (ByteRobust, arXiv 2509.16293) find faulty machines by such replays, Megatron-LM by
repeating a suspicious step, first on the same device and then on another one.

A check changes nothing that training uses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from conf.schema import Config
from conf.training_rules import LOSS_TOLERANCE, NORM_TOLERANCE, relative_difference
from trainer.backends.base import Member
from trainer.optim.adamw import local

#: What is compared, in the order in which one corrupts the next.
Part = Literal["weights", "forward", "backward"]
_PARTS: tuple[Part, ...] = get_args(Part)
_WHAT = {
    "weights": "different weights or moments from the same gradients",
    "forward": "different outputs from the same tokens",
    "backward": "different gradients from the same tokens",
}
HINT = "test the node's devices and memory, or exclude it; `hlatctl status` shows whether the run continues without it"
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What one process computed from the tokens of a check.

    Args:
        stage, slice, shard: its place; see :class:`trainer.backends.base.Backend`.
        replica: its data-parallel rank.
        weights, forward, backward: checksums of the bits of weights and moments, layers' outputs and gradients.
        loss: its share of the loss.
        output_norm, grad_norm: L2 norms of all outputs of its layers and of its gradients.
    """

    stage: int
    slice: int
    shard: int
    replica: int
    device: str
    weights: int
    forward: int
    backward: int
    loss: float
    output_norm: float
    grad_norm: float

    def bits(self, part: Part) -> int:
        """Return the checksum of a part."""
        return {"weights": self.weights, "forward": self.forward, "backward": self.backward}[part]

    def norm(self, part: Part) -> float:
        """Return the norm of a part; 0: it has none."""
        return {"weights": 0.0, "forward": self.output_norm, "backward": self.grad_norm}[part]

    def difference(self, other: Replay, part: Part) -> float:
        """Return the largest relative difference of the loss and the part's norm."""
        return max(_difference(self.loss, other.loss), _difference(self.norm(part), other.norm(part)))

    def is_like(self, other: Replay, part: Part, *, exactly: bool) -> bool:
        """Return whether both computed the same."""
        if exactly:
            return self.bits(part) == other.bits(part)
        return (
            _difference(self.loss, other.loss) <= LOSS_TOLERANCE
            and _difference(self.norm(part), other.norm(part)) <= NORM_TOLERANCE
        )


def _difference(now: float, then: float) -> float:
    return 0.0 if math.isnan(now) and math.isnan(then) else relative_difference(now, then)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Processes that computed something else than others, or than themselves.

    Args:
        part: the first part that differs.
        ranks: the suspects, ascending.
        hosts, devices: where each of them runs.
        blamed_hosts: those that certainly have a faulty device; empty: any of the hosts may have it.
        difference: largest relative difference of a loss or a norm; 0: of bits only; infinite: one isn't finite.
        repeatable: the suspects reproduced their own numbers.
    """

    part: Part
    ranks: list[int]
    hosts: list[str]
    blamed_hosts: list[str]
    devices: list[str]
    difference: float
    repeatable: bool

    @property
    def message(self) -> str:
        """The finding in a sentence."""
        who = ", ".join(
            f"rank {rank} ({device} on {host})"
            for rank, device, host in list(zip(self.ranks, self.devices, self.hosts, strict=True))[:4]
        )
        more = f" and {len(self.ranks) - 4} more" if len(self.ranks) > 4 else ""
        one = "" if self.blamed_hosts else "one of "
        by = f"by {self.difference:.2g} of a loss or norm" if self.difference else "in bits only"
        again = "reproduces its numbers" if self.repeatable else "doesn't reproduce its own numbers"
        return f"{one}{who}{more} computed {_WHAT[self.part]} ({by}), and {again}"

    @property
    def fields(self) -> dict[str, object]:
        """The fields of the event ``corruption_suspected``."""
        difference = self.difference if math.isfinite(self.difference) else None
        return {**asdict(self), "difference": difference, "message": self.message}


def judge(first: Sequence[Replay], second: Sequence[Replay], hosts: Sequence[str], *, exactly: bool) -> Finding | None:
    """Compare two replays of the same tokens by every process, in the order of ranks; return None if none differs.

    Args:
        exactly: equal processes compute equal bits, as on a CPU. Otherwise processes may use different kernels, so they
            are compared within rounding, and each one's outputs with its own, bit by bit. Their weights are still equal
            bit by bit, or all replicas of a weight differ by rounding.
    """
    unsteady_bits = [part for part in _PARTS if _most_differ(first, second, part)]
    for part in _PARTS:
        between = exactly or part == "weights"
        alone = between or (part == "forward" and part not in unsteady_bits)
        odd, tied = set[int](), set[int]()
        for replays in (first, second):
            for group in _groups(replays, part):
                like = _most(replays, group, part, exactly=between)
                if 2 * len(like) > len(group):
                    odd |= group - like
                elif exactly or part != "weights":
                    tied |= group
        pairs = enumerate(zip(first, second, strict=True))
        unsteady = {rank for rank, (one, other) in pairs if not one.is_like(other, part, exactly=alone)}
        if suspects := odd | unsteady or tied:
            return _finding(first, second, hosts, part, suspects, is_tie=suspects is tied, is_steady=not unsteady)
    return None


def _most_differ(first: Sequence[Replay], second: Sequence[Replay], part: Part) -> bool:
    """Return whether most processes don't reproduce the bits of a part: the device adds in an order that changes."""
    return 2 * sum(one.bits(part) != other.bits(part) for one, other in zip(first, second, strict=True)) > len(first)


def _groups(replays: Sequence[Replay], part: Part) -> list[set[int]]:
    """Return the groups of ranks that must have the same: shards of weights differ, gathered weights don't."""
    groups: dict[tuple[int, int, int], set[int]] = {}
    for rank, replay in enumerate(replays):
        shard = replay.shard if part == "weights" else 0
        groups.setdefault((replay.stage, replay.slice, shard), set()).add(rank)
    return list(groups.values())


def _most(replays: Sequence[Replay], group: set[int], part: Part, *, exactly: bool) -> set[int]:
    """Return the ranks of the largest part of a group that computed the same; on a tie, one of these parts."""
    if exactly:
        (bits, _), *_others = Counter(replays[rank].bits(part) for rank in sorted(group)).most_common(1)
        return {rank for rank in group if replays[rank].bits(part) == bits}
    ordered = sorted((replays[rank] for rank in group), key=lambda each: (math.isnan(each.norm(part)), each.norm(part)))
    reference = ordered[(len(ordered) - 1) // 2]
    return {rank for rank in group if replays[rank].is_like(reference, part, exactly=False)}


def _finding(
    first: Sequence[Replay],
    second: Sequence[Replay],
    hosts: Sequence[str],
    part: Part,
    suspects: set[int],
    *,
    is_tie: bool,
    is_steady: bool,
) -> Finding:
    ranks = sorted(_where_it_began(first, suspects, part))
    # The processes of a replica exchange what they compute, so all of its slices may differ because of one.
    units: dict[int, set[str]] = {}
    for rank in ranks:
        unit = 0 if is_tie else rank if part == "weights" else first[rank].replica
        units.setdefault(unit, set()).add(hosts[rank])
    peers = [(rank, peer) for group in _groups(first, part) for rank in group.intersection(ranks) for peer in group]
    differences = [replays[a].difference(replays[b], part) for a, b in peers for replays in (first, second)]
    differences += [first[rank].difference(second[rank], part) for rank in ranks]
    return Finding(
        part=part,
        ranks=ranks,
        hosts=[hosts[rank] for rank in ranks],
        blamed_hosts=sorted({host for found in units.values() if len(found) == 1 for host in found}),
        devices=[first[rank].device for rank in ranks],
        difference=max(differences),
        repeatable=is_steady,
    )


def _where_it_began(replays: Sequence[Replay], suspects: set[int], part: Part) -> set[int]:
    """Return the suspects of each replica's stage that came first: later ones get what it computed."""
    if part == "weights":
        return suspects
    first = min if part == "forward" else max  # the backward pass begins at the last stage
    stages: dict[int, int] = {}
    for rank in suspects:
        replica, stage = replays[rank].replica, replays[rank].stage
        stages[replica] = first(stages.get(replica, stage), stage)
    return {rank for rank in suspects if replays[rank].stage == stages[replays[rank].replica]}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a check compares: an engine's model and optimizer in this process.

    Args:
        place: stage, slice and shard; processes with the same ones have the same weights.
        replica: number of the replica; processes of one replica exchange what they compute.
        parts: the modules of the process; each has all of its parameters.
        blocks: returns the layers, while they are watched.
        tensors: returns the weights and moments.
        replay: runs a micro-batch, or a pipeline's step, of inputs and targets (batch, seq) forward and backward, and
            returns the process's share of the loss. Training must not notice it.
    """

    place: tuple[int, int, int]
    replica: int
    parts: Sequence[nn.Module]
    blocks: Callable[[], AbstractContextManager[Sequence[nn.Module]]]
    tensors: Callable[[], Collection[Tensor]]
    replay: Callable[[Tensor, Tensor], Tensor]


class CorruptionCheck:
    """Checks all processes together, every ``recovery.corruption_check_steps`` steps.

    A check costs two forward and backward passes of a micro-batch; with pipelines two of a step.
    """

    def __init__(self, config: Config, member: Member, subject: Subject, hosts: list[str]) -> None:
        self._config, self._member, self._subject, self._hosts = config, member, subject, hosts
        #: Whether a pipeline may run its layers once more than later, because it finds out the sizes of its messages.
        self._is_first = config.parallel.pipeline_parallel_size > 1

    def run(self, step: int) -> Finding | None:
        """Check the processes after a step. All ranks call this together, and get the same result."""
        if self._is_first:
            self._subject.replay(*self._tokens(step))
            self._is_first = False
        first, second = self._replay(step), self._replay(step)
        return judge(first, second, self._hosts, exactly=self._member.device.type == "cpu")

    def _replay(self, step: int) -> list[Replay]:
        subject, device = self._subject, self._member.device
        with subject.blocks() as blocks, _recorded(subject.parts, blocks, device) as (outputs, gradients):
            loss = subject.replay(*self._tokens(step))
        tensors = subject.tensors()
        weights = _Recorder(len(tensors), device)
        for number, tensor in enumerate(tensors):
            weights.add(number, tensor)
        stage, slice_, shard = subject.place
        replay = Replay(
            stage=stage,
            slice=slice_,
            shard=shard,
            replica=subject.replica,
            device=str(device),
            weights=weights.checksum,
            forward=outputs.checksum,
            backward=gradients.checksum,
            loss=float(loss),
            output_norm=outputs.norm,
            grad_norm=gradients.norm,
        )
        return [Replay(**row) for row in self._member.gather(asdict(replay))]

    def _tokens(self, step: int) -> tuple[Tensor, Tensor]:
        config = self._config
        in_stages = config.parallel.pipeline_parallel_size > 1
        rows = config.micro_batch_size * (config.grad_accum_steps if in_stages else 1)
        generator = torch.Generator().manual_seed((config.seed * 1_000_003 + step) % 2**63)
        tokens = torch.randint(config.model.vocab_size, (rows, config.train.seq_len + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]


class _Recorder:
    """Adds up the bits and the squares of numbered tensors on their device, each of which may come several times."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._sums = torch.zeros(count, dtype=torch.int64, device=device)
        self._square = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def add(self, number: int, tensor: Tensor) -> None:
        values = local(tensor.detach()).contiguous()
        bits = values.view(_WORDS[values.element_size()]).sum(dtype=torch.int64)
        # Multiplied by odd numbers, so that opposite changes of two tensors don't cancel out.
        self._sums[number] = self._sums[number] * 1_000_003 + bits
        self._square += torch.linalg.vector_norm(values, dtype=torch.float32).square()

    @property
    def checksum(self) -> int:
        odd = 2 * torch.arange(len(self._sums), device=self._sums.device) + 1
        return int((self._sums * odd).sum())

    @property
    def norm(self) -> float:
        return math.sqrt(float(self._square))


@contextmanager
def _recorded(
    parts: Sequence[nn.Module], blocks: Sequence[nn.Module], device: torch.device
) -> Iterator[tuple[_Recorder, _Recorder]]:
    """Record the outputs of layers, and the gradients of all parameters, in this block.

    Gradients are seen before FSDP reduces them: in a forward pass the modules have whole weights, whose hooks get the
    gradients that this process computed. Parameters are numbered in the order in which the forward pass comes to them.
    """
    inside = {module for block in blocks for module in block.modules()}
    outside = [module for part in parts for module in part.modules() if module not in inside]
    # Sharded and whole parameters are different objects, of which FSDP's hooks may show both.
    count = 2 * sum(1 for part in parts for _ in part.parameters())
    outputs, gradients = _Recorder(len(blocks), device), _Recorder(count, device)
    handles: dict[int, RemovableHandle] = {}

    def watch(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            number = len(handles)
            if parameter.requires_grad and id(parameter) not in handles:
                handles[id(parameter)] = parameter.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient, n=number: gradients.add(n, gradient)
                )

    def of_others(_module: nn.Module, _inputs: Any) -> None:
        watch(parameter for module in outside for parameter in module.parameters(recurse=False))

    with ExitStack() as stack:
        for number, block in enumerate(blocks):
            stack.callback(block.register_forward_pre_hook(lambda block, _inputs: watch(block.parameters())).remove)
            hook = block.register_forward_hook(lambda _block, _inputs, output, n=number: outputs.add(n, output))
            stack.callback(hook.remove)
        for module in outside:
            stack.callback(module.register_forward_pre_hook(of_others).remove)
        yield outputs, gradients
        for handle in handles.values():
            stack.callback(handle.remove)
