"""What Neuron's tools print, in the formats that AWS documents; values are made up."""

from __future__ import annotations

import json
from typing import Any


def neuron_ls(devices: int = 16, **changes: Any) -> str:
    """``neuron-ls -j`` of a trn1.32xlarge, which names no logical cores; ``changes`` are device 0's."""
    entries = [
        {
            "neuron_device": index,
            "bdf": f"{index:02x}:00.0",
            "cpu_affinity": "0-31",
            "numa_node": "0",
            "connected_to": [1, 4, 12, 3],
            "nc_count": 2,
            "memory_size": 34359738368,
            "neuroncore_ids": [2 * index, 2 * index + 1],
            "neuron_processes": [],
        }
        for index in range(devices)
    ]
    if entries:
        entries[0].update(changes)
    return json.dumps(entries, indent=4)


def neuron_monitor(device_1: dict[str, int] | None = None, *, hardware_errors: int = 0, error: str = "") -> str:
    """One line of ``neuron-monitor``."""
    counters = ("mem_ecc_corrected", "mem_ecc_uncorrected", "sram_ecc_uncorrected", "sram_ecc_corrected")
    devices = [{"neuron_device_index": index, **dict.fromkeys(counters, 0)} for index in range(2)]
    devices[1].update(device_1 or {})
    summary = {"generic": 0, "numerical": 0, "transient": 0, "model": 0, "runtime": 0, "hardware": hardware_errors}
    return json.dumps(
        {
            "neuron_runtime_data": [
                {
                    "pid": 4711,
                    "address": "",
                    "neuron_runtime_tag": "4711",
                    "error": "",
                    "report": {"execution_stats": {"period": 5.0, "error_summary": summary, "error": ""}},
                }
            ],
            "system_data": {"neuron_hw_counters": {"period": 5.0, "neuron_devices": devices, "error": ""}},
            "instance_info": {"instance_type": "trn1.32xlarge", "error": ""},
            "neuron_hardware_info": {"neuron_device_type": "trainium", "neuron_device_count": 2, "error": error},
        }
    )


NCCOM = json.dumps(
    {
        "results": [
            {
                "size(B)": size,
                "count(elems)": size // 4,
                "type": "fp32",
                "algbw(GB/s)": bandwidth / 1.94,
                "busbw(GB/s)": bandwidth,
                "time:avg(us)": 100.0,
            }
            for size, bandwidth in ((1 << 20, 3.5), (1 << 28, 41.17))
        ]
    }
)


def parallel_compile(cache: str, *, failed: tuple[str, ...] = (), compiled: tuple[str, ...] = ("1+ab", "2+ab")) -> str:
    """The end of ``neuron_parallel_compile``'s output, between other lines of its log."""
    graphs = {name: name not in failed for name in (*compiled, *failed)}
    report = {
        "compilation_summary": {"true": len(compiled), **({"false": len(failed)} if failed else {})},
        "compilation_report": {
            f"{cache}/neuronxcc-2.16.372.0+4a9b2326/MODULE_{name}/model.hlo_module.pb": {
                "status": status,
                "retry": 0,
                "compile_time": 9.5 * (index + 1),
            }
            for index, (name, status) in enumerate(graphs.items())
        },
        "start_time": 1737076372.65,
        "compilation_time": 195.3,
    }
    stamp = "2025-01-17 01:16:07.000981:  32201  INFO ||NEURON_PARALLEL_COMPILE||:"
    return (
        "Compiler status PASS\n"
        "2025-01-17 01:16:07.000970:  42821  INFO ||NEURON_CACHE||: Current remaining items are 0, total is 2\n"
        f"{stamp} {json.dumps(report, indent=4)}\n{stamp} Total graphs: {len(graphs)}\n"
        f"{stamp} Total failed compilations: {len(failed)}\n"
    )
