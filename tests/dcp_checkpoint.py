"""Checkpoints in DCP's format, written by torch's own planners and writer for several ranks in one process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Size, Tensor

from hlatctl.run import files
from hlatctl.run.checkpoint import MANIFEST, write_manifest

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class _Rows(Tensor):
    """One rank's rows of a tensor, by the protocol through which DTensor gives DCP its local part."""

    begin: int
    whole: Size

    @classmethod
    def of(cls, whole: Tensor, rank: int, ranks: int) -> _Rows:
        rows = -(-whole.size(0) // ranks)
        begin = min(rank * rows, whole.size(0))
        part = whole[begin : begin + rows].clone().as_subclass(cls)
        part.begin, part.whole = begin, whole.size()
        return part

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        values = self.as_subclass(Tensor)
        offsets = Size([self.begin, *[0] * (values.ndim - 1)])
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=values.size())
        data = TensorWriteData(chunk=chunk, properties=TensorProperties.create_from_tensor(values), size=self.whole)
        return [WriteItem(index=MetadataIndex(fqn, offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, _index: MetadataIndex) -> Tensor:
        return self.as_subclass(Tensor)


def write_dcp(
    folder: Path, state: Mapping[str, Any], *, ranks: int = 3, step: int = 7, others: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint whose matrices are divided by rows; the last ranks may have none.

    Args:
        state: tensors, and nested states of plain values.
        others: content of further JSON files by name.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    writer = FileSystemWriter(folder, sync_files=False)
    planners = [DefaultSavePlanner() for _ in range(ranks)]
    for rank, planner in enumerate(planners):
        part = {
            name: _Rows.of(value, rank, ranks) if isinstance(value, Tensor) and value.ndim == 2 else value
            for name, value in state.items()
        }
        planner.set_up_planner(part, writer.storage_meta(), rank == 0)
    writer.set_up_storage_writer(True, rank=0)
    local = [writer.prepare_local_plan(planner.create_local_plan()) for planner in planners]
    plans, metadata = planners[0].create_global_plan(local)
    plans = writer.prepare_global_plan(plans)
    pairs = zip(planners, plans, strict=True)
    written = [writer.write_data(planner.finish_plan(plan), planner).wait() for planner, plan in pairs]
    writer.finish(metadata, written)
    for name, value in (others or {}).items():
        files.write_json(folder / name, value)
    write_manifest(folder, step=step, tokens=step, world={"world_size": ranks})


def rewrite_metadata(folder: Path, change: Callable[[Metadata], Any]) -> None:
    """Change ``.metadata``, or replace it by what ``change`` returns, with a manifest that fits."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    changed = change(metadata)
    path.write_bytes(changed if isinstance(changed, bytes) else pickle.dumps(metadata))
    renew_manifest(folder)


def renew_manifest(folder: Path, *, step: int = 7, ranks: int = 3) -> None:
    """Write the manifest of what is in a folder now."""
    (folder / MANIFEST).unlink(missing_ok=True)
    write_manifest(folder, step=step, tokens=step, world={"world_size": ranks})
