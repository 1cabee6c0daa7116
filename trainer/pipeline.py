"""Pipeline parallel training of one stage with the 1F1B schedule of PyTorch's pipelining."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import P2POp
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from trainer.model import Llama
from trainer.parallel import Layout


class Pipeline:
    """Runs the micro-batches of a step through all stages.

    Args:
        model: this stage's layers, sharded and initialized.
        layout: of the processes.
        loss: from hidden states and targets of a micro-batch; called on the last stage.
        device: of the stage.
    """

    def __init__(self, model: Llama, layout: Layout, loss: Callable[[Tensor, Tensor], Tensor], device: torch.device):
        assert layout.mesh is not None
        config = layout.config
        self._first, self._last, self._device = model.is_first, model.is_last, device
        self._masks_documents = model.document_end_id is not None
        sequence = config.train.seq_len // config.parallel.context_parallel_size
        if layout.tp is not None and layout.tp.sequence:
            sequence //= layout.tp.size
        # With given shapes, the stages don't exchange them in the first step.
        hidden = torch.empty(
            config.micro_batch_size,
            sequence,
            config.model.hidden_size,
            dtype=model.compute_dtype,
            device="meta",
            requires_grad=True,
        )
        tokens = torch.empty(config.micro_batch_size, config.train.seq_len, dtype=torch.int64, device="meta")
        stage = _Stage(
            model,
            layout.pp_rank,
            config.parallel.pipeline_parallel_size,
            device,
            input_args=tokens if self._first else hidden,
            output_args=hidden,
            group=layout.mesh["pp"].get_group(),
        )
        # The loss is already scaled.
        self._schedule = Schedule1F1B(stage, config.grad_accum_steps, loss_fn=loss, scale_grads=False)

    def run(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward of (batch, seq) tokens; return the sum of losses on the last stage, else 0."""
        losses: list[Tensor] = []
        masked: dict[str, Any] = {"tokens": inputs} if self._masks_documents else {}
        if self._last:
            self._schedule.step(target=targets, losses=losses, **masked)
        elif self._first:
            self._schedule.step(inputs, **masked)
        else:
            self._schedule.step(**masked)
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self._device)


class _Stage(PipelineStage):
    """A stage that gloo can connect with PyTorch 2.9 too, which sends 8 bytes for the 4 that the next stage expects."""

    def _get_init_p2p_neighbors_ops(self) -> list[P2POp]:
        ops: list[P2POp] = super()._get_init_p2p_neighbors_ops()
        for op in ops:
            op.tensor = op.tensor.to(torch.float32)
        return ops
