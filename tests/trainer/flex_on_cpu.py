"""FlexAttention with gradients on a CPU, for tests: PyTorch has the operations, but refuses them to users."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from torch.nn.attention import flex_attention

from conf.devices import DEVICES


def allow_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the check of the device."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


@contextmanager
def cpu_like_an_accelerator() -> Iterator[None]:
    """Let the backend use FlexAttention on the CPU. The compiler makes graphs, but no code, which has no gradients."""
    facts = replace(DEVICES["cpu"], flex_attention=True, compile_backend="aot_eager", compiles_with_cpp=False)
    with pytest.MonkeyPatch.context() as monkeypatch:
        allow_gradients(monkeypatch)
        monkeypatch.setitem(DEVICES, "cpu", facts)
        yield
