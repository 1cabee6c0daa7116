"""How other software runs a layout, where that differs from this project's; so that published runs can be planned."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Differences from what the configuration says. The defaults are this project's own software.

    Args:
        fp8: the layers' products run in FP8 (torchao's dynamic scaling); attention and the head don't.
        asynchronous_tensor_parallel: products overlap the collectives of tensor parallelism.
        flash_attention: scores never leave the chip, and masked blocks are skipped; None: as the backend does.
        recomputes_half: with selective recomputation, every second product of a layer is recomputed, and attention is
            not (torchtitan's option ``op``).
        chunks: pipeline stages of each process (interleaved 1F1B; arXiv 2104.04473, section 2.2.2).
        logit_bytes: memory for each entry of the logits; None: the loss is computed in blocks.
    """

    fp8: bool = False
    asynchronous_tensor_parallel: bool = False
    flash_attention: bool | None = None
    recomputes_half: bool = False
    chunks: int = 1
    logit_bytes: int | None = None


#: This project's software.
OURS = Execution()
