"""The table of devices: the peak by which MFU is computed."""

from __future__ import annotations

from typing import get_args

import pytest

from conf.devices import DEVICES, DeviceName


@pytest.mark.parametrize(
    ("name", "number_format", "peak_flops_per_s"),
    [
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H200", "float8", 1979e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "float8", None),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),  # slower than the H100 80GB HBM3
        ("NVIDIA H200 NVL", "bfloat16", 835e12),
        ("NVIDIA B300 SXM6 AC", "float8", 4500e12),
        ("AMD Instinct MI250X/MI250", "bfloat16", 191.5e12),  # PyTorch's device is a half
        ("AMD Instinct MI250X/MI250", "float8", None),
        ("NVIDIA GeForce RTX 4090", "bfloat16", None),
    ],
)
def test_a_peak_belongs_to_a_name_and_a_number_format(
    name: str, number_format: str, peak_flops_per_s: float | None
) -> None:
    assert DEVICES["cuda"].peak(name, number_format) == peak_flops_per_s


@pytest.mark.parametrize(("name", "peak_flops_per_s"), [("trn2u", 667e12 / 4), ("trn3", 671e12 / 4), ("trn1", None)])
def test_a_logical_core_of_trainium_has_a_quarter_of_its_chip(name: str, peak_flops_per_s: float | None) -> None:
    assert DEVICES["neuron"].peak(name, "bfloat16") == peak_flops_per_s


def test_every_name_that_a_key_accepts_has_a_row() -> None:
    assert set(get_args(DeviceName)) == set(DEVICES)
