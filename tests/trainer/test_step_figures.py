from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from conf.devices import DEVICES
from conf.schema import Config
from conf.sizes import flops_per_token
from trainer.step_figures import StepFigures, memory_bytes

CONFIG = Config()
TWO = replace(CONFIG, cluster=replace(CONFIG.cluster, processes_per_node=2))
CPU = torch.device("cpu")


def test_mfu_is_the_used_share_of_all_devices_and_none_without_the_peak() -> None:
    used = flops_per_token(TWO.model, TWO.train.seq_len) * TWO.tokens_per_step / 0.5
    assert StepFigures(TWO, CPU, used / 2 / 0.4).of(0.5)["mfu"] == pytest.approx(0.4)
    assert StepFigures(TWO, CPU, None).of(0.5)["mfu"] is None


def test_each_device_has_its_share_of_the_tokens() -> None:
    figures = StepFigures(TWO, CPU, None).of(0.5)
    assert figures["tokens_per_s"] == 2 * TWO.tokens_per_step
    assert figures["tokens_per_s_per_device"] == TWO.tokens_per_step


def test_the_memory_of_a_cpu_is_that_of_the_process_and_grows_with_it() -> None:
    before, _ = memory_bytes(CPU)
    held = bytearray(64 << 20)
    held[:: 4 << 10] = b"x" * len(held[:: 4 << 10])  # touch every page
    after, peak = memory_bytes(CPU)
    assert before is not None
    assert after is not None
    assert peak is not None
    assert before + (48 << 20) < after <= peak < 1 << 40


def test_the_memory_of_a_device_is_what_its_module_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"allocated_bytes.all.current": 5, "allocated_bytes.all.peak": 7}
    module = SimpleNamespace(memory_stats=lambda device: counts)
    monkeypatch.setattr("trainer.step_figures.torch.get_device_module", lambda device: module)
    assert memory_bytes(torch.device("cuda", 1)) == (5, 7)


def test_memory_that_nothing_counts_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cpu", DEVICES["neuron"])
    assert memory_bytes(CPU) == (None, None)
    assert memory_bytes(torch.device("xla", 0)) == (None, None), "the device of backend nxd"
