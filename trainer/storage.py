"""Reading and writing of safetensors shards through torch.distributed.checkpoint, without pickle.

Each process writes its own shards. A reader can have any layout, regardless of the writer's.
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
    """Write tensors, each process its own shards. One process writes replicated ones.

    Args:
        tensors: by name.
        folder: of the shards; must exist.
        alone: this process has all tensors whole.
        group: over which the processes coordinate; None: the default one.

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
    """Read into the tensors in place, converted to their dtypes. Arguments are those of :func:`save_tensors`.

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
    """Return every tensor of a folder, by name, without its values (on the meta device)."""
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
    """Return the first file that can't be read as its type, as ``"name: reason"``; None if all load.

    Args:
        folder: of a checkpoint.
        listed: file names in its manifest. Any other shard is an error, because it would be loaded too.
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
                    for name in shard.keys():  # noqa: SIM118 (not a mapping)
                        shard.get_tensor(name)
        except (OSError, ValueError, SafetensorError) as error:
            return f"{path.name}: {error}"
    return None


def read_tensors(folder: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return the wanted tensors, whole, by name, in this process."""
    import torch

    described = {name: tensor for name, tensor in describe_tensors(folder).items() if wanted(name)}
    tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in described.items()}
    load_tensors(tensors, folder, alone=True)
    return tensors


def _alone_is_no_warning() -> None:
    """Silence torch's warning about a single process.

    This affects the whole process: ``catch_warnings`` restores filters, and would undo changes of other threads.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


@contextmanager
def _raised_as(error_type: type[HlatctlError], folder: Path) -> Iterator[None]:
    """Raise torch's CheckpointException as ours: it isn't an ``Exception``, and its text contains a traceback."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        message = f"{folder}: rank {rank}: {type(cause).__name__}: {cause}"
        raise error_type(message, code=code_of(cause)) from None
