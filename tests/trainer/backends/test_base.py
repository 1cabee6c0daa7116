"""How long a process works, by the host's clock and by a device's; and which kernel of attention it has."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.backends.base import DeviceStopwatch, HostStopwatch
from trainer.backends.torch_native import faster_attention


def test_the_host_waits_for_the_device_before_it_reads_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = [10.0]
    monkeypatch.setattr("trainer.backends.base.time.perf_counter", lambda: clock_s[0])
    watch = HostStopwatch(lambda: clock_s.__setitem__(0, 12.5))
    watch.stop()
    clock_s[0] = 99.0
    assert watch.read_s() == 2.5


def test_a_device_notes_the_times_and_the_host_waits_only_when_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("synchronize")

        def elapsed_time(self, end: Any) -> float:
            return 2500.0

    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(Event=Event))
    watch = DeviceStopwatch(torch.device("cpu"))
    watch.stop()
    assert calls == ["record", "record"]
    assert watch.read_s() == 2.5
    assert calls[2:] == ["synchronize"]


@pytest.mark.parametrize(
    ("capability", "failure", "expected"),
    [((9, 0), None, "FA3"), ((9, 0), RuntimeError("no kernels"), None), ((8, 0), None, None)],
)
def test_attention_is_faster_where_a_device_and_an_installed_package_can(
    capability: tuple[int, int], failure: Exception | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def activate(name: str) -> None:
        if failure:
            raise failure
        activated.append(name)

    activated: list[str] = []
    warnings: list[str] = []
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate, raising=False)
    monkeypatch.setattr(
        torch, "get_device_module", lambda _: SimpleNamespace(get_device_capability=lambda _: capability)
    )
    assert faster_attention(device, warnings) is None, "the package is not installed"
    assert not activated
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "flash_attn_interface" or None)
    assert faster_attention(device, warnings) == expected
    assert activated == ([expected] if expected else [])
    assert len(warnings) == (failure is not None)
