"""The sum of gradients over replicas, in buckets, while the backward pass still runs.

A bucket is a range of the optimizer's gradient buffer. It is exchanged as soon as the step's last backward pass has
filled it, so the network works beside the device (PyTorch DDP, arXiv 2006.15704, section 3.2.3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor, nn

from trainer.optim import AdamW

#: Gradients of a bucket, at least: 160 MB in FP32, which uses a network well (Megatron-LM's default).
BUCKET_ENTRIES = 40_000_000


@dataclass
class _Bucket:
    """A range of the buffer, and how many of its gradients are not complete yet in this step."""

    values: Tensor
    names: set[str]
    missing: set[str] = field(default_factory=set)
    work: dist.Work | None = None


class OverlappedSum:
    """Sums an optimizer's gradients over replicas.

    Args:
        optimizer: of the whole parameters that each replica has.
        group: the replicas.
        passes: backward passes of a step.
    """

    def __init__(self, optimizer: AdamW, group: dist.ProcessGroup, passes: int) -> None:
        self._optimizer, self._group, self._passes = optimizer, group, passes
        self._buckets = _buckets(optimizer)
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self._done: dict[str, int] = {}
        for name, parameter in optimizer.parameters():
            parameter.register_post_accumulate_grad_hook(self._counter(name))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Begin a step: no gradient is complete."""
        self._done = dict.fromkeys(self._bucket_of, 0)
        for bucket in self._buckets:
            bucket.missing, bucket.work = set(bucket.names), None

    def finish(self) -> None:
        """Exchange what is left, such as gradients that no hook has reported, and wait for all sums."""
        for bucket in self._buckets:
            self._exchange(bucket)
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()

    def _counter(self, name: str) -> Callable[[nn.Parameter], None]:
        def count(_: nn.Parameter) -> None:
            self._done[name] = self._done.get(name, 0) + 1
            if self._done[name] == self._passes:
                bucket = self._bucket_of[name]
                bucket.missing.discard(name)
                if not bucket.missing:
                    self._exchange(bucket)

        return count

    def _exchange(self, bucket: _Bucket) -> None:
        if bucket.work is None:
            for name in bucket.names:
                self._optimizer.collect(name)
            bucket.work = dist.all_reduce(bucket.values, group=self._group, async_op=True)


def _buckets(optimizer: AdamW) -> list[_Bucket]:
    """Divide the buffer. The last bucket comes first, as the backward pass fills it first."""
    buckets: list[_Bucket] = []
    names: set[str] = set()
    stop = start = len(optimizer.gradients)
    for name, _ in reversed(optimizer.parameters()):
        names.add(name)
        start -= optimizer.gradient(name).numel()
        if stop - start >= BUCKET_ENTRIES or start == 0:
            buckets.append(_Bucket(optimizer.gradients[start:stop], names))
            names, stop = set(), start
    return buckets
