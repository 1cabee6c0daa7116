"""Tensors to and from a folder of safetensors shards, through torch.distributed.checkpoint. No pickle is involved.

Each process writes the parts that it holds; whoever reads gets what it asks for, whatever layout wrote it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hlatctl.run.errors import CheckpointError, HlatctlError, StorageError, code_of
from hlatctl.run.files import read_json

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


def save_tensors(tensors: dict[str, Tensor], folder: Path, *, alone: bool, group: ProcessGroup | None = None) -> None:
    """Write tensors, each process its parts of them; what several hold is written by one.

    Args:
        tensors: by name.
        folder: of the shards; it exists.
        alone: this process has all of them.
        group: for the processes to agree over; none: the default one.

    Raises:
        StorageError: a process can't write.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(os.fspath(folder), save_distributed=True)
    _alone_is_no_warning()
    with _raised_as(StorageError, folder):
        save(dict(tensors), storage_writer=writer, no_dist=alone, process_group=group)


def load_tensors(tensors: dict[str, Tensor], folder: Path, *, alone: bool, group: ProcessGroup | None = None) -> None:
    """Read into the tensors in place, converted to their number formats; arguments as in :func:`save_tensors`.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or can't be read.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(os.fspath(folder))
    _alone_is_no_warning()
    with _raised_as(CheckpointError, folder):
        load(dict(tensors), storage_reader=reader, no_dist=alone, process_group=group)


def describe_tensors(folder: Path) -> dict[str, Tensor]:
    """Shape and dtype of every tensor of a folder, as tensors without memory (on the meta device), by name."""
    import torch
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    described = HuggingFaceStorageReader(os.fspath(folder)).read_metadata().state_dict_metadata
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in described.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def why_not_loadable(folder: Path, listed: Iterable[str]) -> str | None:
    """The first file that can't be read as what its name says, as ``"name: reason"``; None if all load.

    Args:
        folder: of a checkpoint.
        listed: names that its manifest has; a shard besides them would be loaded with the others.
    """
    from safetensors import SafetensorError, safe_open

    known = set(listed)
    for path in sorted(folder.iterdir()):
        try:
            if path.suffix == ".json":
                read_json(path)
            elif path.suffix == ".safetensors":
                if path.name not in known:
                    return f"{path.name}: not in the manifest"
                with safe_open(path, framework="pt") as shard:
                    for name in shard.keys():  # noqa: SIM118 (it is no mapping)
                        shard.get_tensor(name)
        except (OSError, ValueError, SafetensorError) as error:
            return f"{path.name}: {error}"
    return None


def read_tensors(folder: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Whole tensors, by name, into this process alone."""
    import torch

    described = {name: tensor for name, tensor in describe_tensors(folder).items() if wanted(name)}
    tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in described.items()}
    load_tensors(tensors, folder, alone=True)
    return tensors


def _alone_is_no_warning() -> None:
    """No word from torch about a process that is alone, where that was asked for.

    For the whole process: ``catch_warnings`` puts back what it found, and so would undo what another thread does.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


@contextmanager
def _raised_as(error_type: type[HlatctlError], folder: Path) -> Iterator[None]:
    """Torch's own exception is no ``Exception``, so that nobody would catch it, and holds a traceback as its text."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        message = f"{folder}: rank {rank}: {type(cause).__name__}: {cause}"
        raise error_type(message, code=code_of(cause)) from None
