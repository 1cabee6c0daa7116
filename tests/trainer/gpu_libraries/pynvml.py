"""A stand-in of nvidia-ml-py with the names, numbers and errors of the real one; ``FAKE_GPUS`` says what it finds.

The variable is a JSON list with an object for each GPU, by the function's name after ``nvmlDeviceGet``. A value that is
the name of an error, such as ``NotSupported``, is raised. An object with ``init`` instead of a list fails there.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

NVML_SUCCESS = 0
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
NVML_TEMPERATURE_GPU = 0
NVML_CLOCK_SM = 1
NVML_NVLINK_MAX_LINKS = 18
NVML_NVLINK_ERROR_DL_REPLAY = 0
NVML_NVLINK_ERROR_DL_RECOVERY = 1
NVML_NVLINK_ERROR_DL_CRC_FLIT = 2
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
nvmlClocksEventReasonHwSlowdown = 0x8
nvmlClocksEventReasonSwThermalSlowdown = 0x20
nvmlClocksEventReasonHwThermalSlowdown = 0x40
nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80

_TEXTS = {
    "InvalidArgument": "Invalid Argument",
    "NotSupported": "Not Supported",
    "NoPermission": "Insufficient Permissions",
    "InsufficientPower": "Insufficient External Power",
    "LibraryNotFound": "NVML Shared Library Not Found",
    "CorruptedInforom": "Corrupted infoROM",
    "GpuIsLost": "GPU is lost",
    "ResetRequired": "GPU requires restart",
    "Unknown": "Unknown Error",
}


class NVMLError(Exception):
    """The base of all errors."""


_ERRORS = {name: type(f"NVMLError_{name}", (NVMLError,), {}) for name in _TEXTS}
globals().update({f"NVMLError_{name}": error for name, error in _ERRORS.items()})


def _value(gpu: dict[str, Any], name: str, default: Any) -> Any:
    value = gpu.get(name, default)
    if isinstance(value, str) and value in _ERRORS:
        raise _ERRORS[value](_TEXTS[value])
    return value


def _gpus() -> Any:
    return json.loads(os.environ["FAKE_GPUS"])


def nvmlInit() -> None:
    gpus = _gpus()
    if isinstance(gpus, dict):
        _value(gpus, "init", "")


def nvmlShutdown() -> None:
    pass


def nvmlSystemGetDriverVersion() -> str:
    return "550.54.15"


def nvmlDeviceGetCount() -> int:
    return len(_gpus())


def nvmlDeviceGetHandleByIndex(index: int) -> dict[str, Any]:
    gpu = {"Index": index, **_gpus()[index]}
    _value(gpu, "Handle", "")
    return gpu


def nvmlDeviceGetHandleByUUID(uuid: str) -> dict[str, Any]:
    for index, _ in enumerate(_gpus()):
        gpu = nvmlDeviceGetHandleByIndex(index)
        if nvmlDeviceGetUUID(gpu) == uuid:
            return gpu
    raise _ERRORS["InvalidArgument"](_TEXTS["InvalidArgument"])


def nvmlDeviceGetName(gpu: dict[str, Any]) -> Any:
    return _value(gpu, "Name", "NVIDIA H100 80GB HBM3")


def nvmlDeviceGetUUID(gpu: dict[str, Any]) -> Any:
    return _value(gpu, "UUID", f"GPU-0000000{gpu['Index']}")


def nvmlDeviceGetPciInfo(gpu: dict[str, Any]) -> Any:
    return SimpleNamespace(busId=_value(gpu, "PciInfo", f"00000000:{gpu['Index'] + 10:02X}:00.0").encode())


def nvmlDeviceGetTotalEccErrors(gpu: dict[str, Any], kind: int, counter: int) -> Any:
    assert (kind, counter) == (1, 0)
    return _value(gpu, "TotalEccErrors", 0)


def nvmlDeviceGetRemappedRows(gpu: dict[str, Any]) -> Any:
    return _value(gpu, "RemappedRows", [0, 0, 0, 0])


def nvmlDeviceGetCurrentClocksEventReasons(gpu: dict[str, Any]) -> Any:
    return _value(gpu, "CurrentClocksEventReasons", 0x1)


def nvmlDeviceGetNvLinkState(gpu: dict[str, Any], link: int) -> Any:
    states = _value(gpu, "NvLinkState", [1] * 18)
    if link >= len(states):
        raise _ERRORS["InvalidArgument"](_TEXTS["InvalidArgument"])
    return states[link]


def nvmlDeviceGetNvLinkErrorCounter(gpu: dict[str, Any], link: int, counter: int) -> Any:
    return _value(gpu, "NvLinkErrorCounter", 0)


def nvmlDeviceGetFieldValues(gpu: dict[str, Any], fields: list[int]) -> Any:
    action = _value(gpu, "RecoveryAction", 0)
    return [SimpleNamespace(nvmlReturn=NVML_SUCCESS, value=SimpleNamespace(uiVal=action)) for _ in fields]


def nvmlDeviceGetTemperature(gpu: dict[str, Any], sensor: int) -> Any:
    return _value(gpu, "Temperature", 41)


def nvmlDeviceGetPowerUsage(gpu: dict[str, Any]) -> Any:
    return _value(gpu, "PowerUsage", 70_000)


def nvmlDeviceGetEnforcedPowerLimit(gpu: dict[str, Any]) -> Any:
    return _value(gpu, "EnforcedPowerLimit", 700_000)


def nvmlDeviceGetClockInfo(gpu: dict[str, Any], clock: int) -> Any:
    return _value(gpu, "ClockInfo", 345)


def nvmlDeviceGetMaxClockInfo(gpu: dict[str, Any], clock: int) -> Any:
    return _value(gpu, "MaxClockInfo", 1980)


def nvmlDeviceGetPersistenceMode(gpu: dict[str, Any]) -> Any:
    return _value(gpu, "PersistenceMode", 1)
