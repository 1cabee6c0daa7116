"""Fingerprints: short hashes of exactly the values that a stage's result depends on.

So a changed learning rate does not recompile a graph, and a changed seed does not rebuild a corpus.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import sysconfig
from pathlib import Path
from typing import Any

from conf.listing import is_url, kept
from conf.load import flatten
from conf.schema import Config
from hlatctl import __version__

_DATA_KEYS = ("data.source", "data.on_corrupt", "data.validation_fraction", "tokenizer.path")
_GRAPH_KEYS = (
    "precision.name",
    "data.mask_across_documents",
    "backend.name",
    "backend.device",
    "backend.compile",
    "backend.compiler_flags",
    "train.seq_len",
    "cluster.threads_per_process",
)
_GRAPH_GROUPS = ("model.", "parallel.", "backend.torchtitan.")
#: Names, counts and initial values of models.
_NO_GRAPH_KEYS = (
    "model.name",
    "model.total_parameters",
    "model.active_parameters",
    "model.flops_per_token",
    "model.score_flops_per_token",
    "model.initializer_range",
    "model.scaled_initialization",
    "model.mup_base_width",
)
#: PyTorch/XLA also traces the optimizer's step and the communication between processes.
_WHOLE_STEP_KEYS = (
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.decay",
    "optimizer.max_grad_norm",
)
#: Prefixes of variables of the runtime, the network and the C library, which no compiler reads.
_NO_GRAPH_VARIABLES = ("NEURON_RT_", "FI_", "CCOM_", "MALLOC_", "TORCH_DIST_")


def digest(value: Any) -> str:
    """Return a hash of a JSON value, 16 hexadecimal digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def data_fingerprint(config: Config) -> str:
    """Return the fingerprint of corpus and tokenizer: their keys, and name, size and time of every source file.

    The files of a corpus in object storage come from the stored listing; nothing is read from the network.
    """
    values = flatten(config)
    parts: dict[str, Any] = {key: values[key] for key in _DATA_KEYS}
    # A source's weight does not change its contents.
    parts["inputs"] = [[source.path, source.text_column] for source in config.data.inputs]
    parts["hlatctl"] = __version__
    if config.tokenizer.path is None:
        parts["tokenizer.train_vocab_size"] = config.tokenizer.train_vocab_size
    if not config.data.inputs:
        parts["python"] = [sys.version, sysconfig.get_path("stdlib")]
    paths = [*(source.path for source in config.data.inputs), config.tokenizer.path]
    parts["files"] = [_listed(config, path) if is_url(path) else _stat_tree(path) for path in paths if path]
    return digest(parts)


def graph_fingerprint(config: Config, versions: dict[str, str]) -> str:
    """Return the fingerprint of compiled graphs: shapes, precision, layout, software versions and processor.

    Args:
        versions: package versions that a graph depends on, such as ``{"torch": "2.13.0"}``.
    """
    values = flatten(config)
    parts: dict[str, Any] = {key: values[key] for key in _GRAPH_KEYS}
    parts.update({key: value for key, value in values.items() if key.startswith(_GRAPH_GROUPS)})
    for key in _NO_GRAPH_KEYS:
        del parts[key]
    parts["micro_batch_size"] = config.micro_batch_size
    parts["env"] = {n: v for n, v in config.backend.env.items() if not n.startswith(_NO_GRAPH_VARIABLES)}
    if config.backend.kind.torch_xla:
        parts.update({key: values[key] for key in _WHOLE_STEP_KEYS})
        parts["world_size"], parts["grad_accum_steps"] = config.world_size, config.grad_accum_steps
    parts["versions"] = versions
    parts["python"] = platform.python_version()
    # Neuron's graphs don't depend on the processor that compiled them.
    parts["machine"] = [platform.machine(), "" if config.backend.device == "neuron" else _cpu_flags()]
    return digest(parts)


def hardware_fingerprint(config: Config) -> str:
    """Return the fingerprint of a preflight's settings; for display only, because a worker's fitness can change."""
    values = flatten(config)
    return digest(
        {key: value for key, value in values.items() if key.startswith(("cluster.", "preflight.", "backend."))}
    )


def config_fingerprint(config: Config) -> str:
    """Return the fingerprint of the whole configuration."""
    return digest(flatten(config))


def _listed(config: Config, url: str) -> list[Any]:
    listing = kept(config.runs_dir, url)
    return [[entry.path, entry.size, entry.version] for entry in listing.entries] if listing else []


def _stat_tree(path: str) -> list[tuple[str, int, int]]:
    root = Path(path)
    # A corpus of token ids can be named by the prefix of its two files, or by one of them.
    pair = [root.with_name(root.name.removesuffix(".bin").removesuffix(".idx") + end) for end in (".bin", ".idx")]
    files = sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else sorted({root, *pair})
    return [(os.fspath(p.absolute()), p.stat().st_size, p.stat().st_mtime_ns) for p in files if p.exists()]


def _cpu_flags() -> str:
    """Return this processor's instruction sets, which Inductor's C++ is compiled for."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((" ".join(sorted(line.split(":")[1].split())) for line in lines if line.startswith("flags")), "")
