"""``neuron-monitor``: check the hardware's error counters ("Neuron Monitor User Guide")."""

from __future__ import annotations

import json
from typing import Any

from hlatctl.run.checks import Check
from trainer.neuron import tools

_NAME, _COMMAND = "Neuron error counters", "neuron-monitor | head -1"
#: The tool reports every 5 s by default.
_TIMEOUT_S = 12
#: Corrected errors are harmless; after an uncorrected one a device has computed with wrong bits.
_FATAL = ("mem_ecc_uncorrected", "sram_ecc_uncorrected")
_HARMLESS = ("mem_ecc_corrected", "sram_ecc_corrected")


def check() -> Check:
    """Check that no device has counted an uncorrected error."""
    try:
        return check_report(tools.first_line("neuron-monitor", timeout_s=_TIMEOUT_S))
    except tools.ToolError as error:
        return Check(name=_NAME, status="fail", shows=str(error), command=_COMMAND)


def check_report(line: str) -> Check:
    """Return the check of one report, which is one line of JSON.

    Raises:
        ToolError: the format is unknown.
    """
    try:
        report = json.loads(line)
        group = report["system_data"]["neuron_hw_counters"]
        devices = {int(device["neuron_device_index"]): device for device in group["neuron_devices"] or []}
        counts = {name: {i: int(d[name]) for i, d in devices.items()} for name in (*_FATAL, *_HARMLESS)}
        messages = [report["neuron_hardware_info"].get("error"), group.get("error"), *_runtime_errors(report)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise tools.ToolError(f"neuron-monitor: its output can't be read ({type(error).__name__}: {error})") from None
    problems = [f"device {i}: {name}={n}" for name in _FATAL for i, n in counts[name].items() if n]
    problems += [text for text in messages if text]
    if not devices and not problems:
        problems = ["it reports no device"]
    corrected = sum(sum(counts[name].values()) for name in _HARMLESS)
    values = {name: sum(by_device.values()) for name, by_device in counts.items()}
    return Check.of(
        _NAME,
        "; ".join(problems),
        f"{len(devices)} devices, {corrected} corrected ECC events, none uncorrected",
        command=_COMMAND,
        values=values,
    )


def _runtime_errors(report: dict[str, Any]) -> list[str]:
    errors = []
    for runtime in report.get("neuron_runtime_data") or []:
        stats = (runtime.get("report") or {}).get("execution_stats") or {}
        number = int((stats.get("error_summary") or {}).get("hardware", 0))
        errors += [f"process {runtime.get('pid')}: {number} hardware errors"] if number else []
    return errors
