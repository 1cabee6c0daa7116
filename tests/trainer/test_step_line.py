from __future__ import annotations

from dataclasses import replace

import torch

from conf.schema import Config
from conf.sizes import flops_per_token
from trainer.step_line import StepLine, peak_memory_bytes

CONFIG = Config()
CPU = torch.device("cpu")


def text(line: StepLine) -> str:
    return line.text(20, loss=3.5, grad_norm=0.25, lr=1e-3, step_s=0.5, data_wait_s=0.05)


def test_the_first_step_every_tenth_and_the_last_one_get_a_line() -> None:
    line = StepLine(CONFIG, CPU, None)
    total = CONFIG.total_steps
    assert [step for step in (13, 14, 20, 21, 30, total) if line.is_due(step)] == [13, 20, 30, total]


def test_a_line_says_what_a_reader_looks_for() -> None:
    assert text(StepLine(CONFIG, CPU, None)).split("  ")[:7] == [
        f"step 20/{CONFIG.total_steps}",
        "tokens 81,920",
        "loss 3.5000",
        "grad norm 0.250",
        "lr 1.00e-03",
        "8,192 tokens/s",
        "data wait 10%",
    ]


def test_mfu_is_the_used_share_of_all_devices() -> None:
    two = replace(CONFIG, cluster=replace(CONFIG.cluster, processes_per_node=2))
    used = flops_per_token(two.model, two.train.seq_len) * two.tokens_per_step / 0.5
    assert "MFU 40.0%" in text(StepLine(two, CPU, used / 2 / 0.4))


def test_memory_is_that_of_this_process() -> None:
    assert 10 << 20 < peak_memory_bytes(CPU) < 1 << 40
