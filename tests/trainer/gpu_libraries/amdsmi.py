"""A stand-in of amdsmi 7.0 with its names; ``FAKE_GPUS`` is a JSON list of what each GPU's functions return."""

from __future__ import annotations

import json
import os
from typing import Any


class AmdSmiException(Exception):
    """The base of all errors."""


def amdsmi_init() -> None:
    pass


def amdsmi_shut_down() -> None:
    pass


def amdsmi_get_processor_handles() -> list[dict[str, Any]]:
    return list(json.loads(os.environ["FAKE_GPUS"]))


def _value(gpu: dict[str, Any], name: str, default: Any) -> Any:
    value = gpu.get(name, default)
    if value == "error":
        raise AmdSmiException("Error code:\n\t2 | AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported")
    return value


def amdsmi_get_gpu_driver_info(gpu: dict[str, Any]) -> Any:
    return {"driver_name": "amdgpu", "driver_version": "6.12.12", "driver_date": "N/A"}


def amdsmi_get_gpu_asic_info(gpu: dict[str, Any]) -> Any:
    return {"market_name": "AMD Instinct MI300X"}


def amdsmi_get_gpu_device_bdf(gpu: dict[str, Any]) -> Any:
    return _value(gpu, "bdf", "0000:0c:00.0")


def amdsmi_get_gpu_total_ecc_count(gpu: dict[str, Any]) -> Any:
    counts = {"correctable_count": 3, "uncorrectable_count": 0, "deferred_count": 0}
    return {**counts, **_value(gpu, "ecc", {})}


def amdsmi_get_violation_status(gpu: dict[str, Any]) -> Any:
    return {"active_hbm_thrm": False, "active_vr_thrm": "N/A", **_value(gpu, "violations", {})}


def amdsmi_gpu_xgmi_error_status(gpu: dict[str, Any]) -> Any:
    return _value(gpu, "xgmi", 0)
