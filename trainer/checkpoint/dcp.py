"""Checkpoints in the format of torch.distributed.checkpoint (DCP), read without running code that they contain.

DCP's files are ``__RANK_N.distcp``: tensors and small states, each as ``torch.save`` writes it, one after the other.
``.metadata`` is a pickle that says where each is. torch loads it, and the states, with an unpickler that runs any code.
This module loads ``.metadata`` with an unpickler that knows DCP's classes only. It makes stand-ins of them, so a pickle
can't call or change anything of torch. Tensors and states are loaded with torch's restricted unpickler, which accepts
tensors and plain values. :func:`read_objects` makes stand-ins of all classes, for other trainers' settings.

Importing torch.distributed.checkpoint takes seconds. Import this module only where a DCP checkpoint is read.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from conf.devices import DEVICES
from hlatctl.run import files
from hlatctl.run.checkpoint import INDEX_FILES
from hlatctl.run.errors import CheckpointError, StorageError, code_of, first_line, hint_of
from hlatctl.run.files import DAMAGED, open_regular, read_bytes, why

if TYPE_CHECKING:
    from trainer.checkpoint.together import Together

METADATA = INDEX_FILES["dcp"]
#: Prefix of torchtitan's settings of each parameter. The configuration has them too; a converted checkpoint lacks them.
OPTIONAL = ("optimizer.param_groups.",)
#: 70B on 2,048 processes has 370,000 chunks: about 100 MB.
_MAX_METADATA_BYTES = 1 << 30
#: Settings of a run of Megatron-LM have some 100 kB.
_MAX_OBJECTS_BYTES = 64 << 20
#: Longest list of a state dict that DCP divides into elements.
_MAX_LIST = 1 << 20
#: Parts of a tensor that are compared with each other; regular layouts have one per chunk.
_MAX_CELLS = 1 << 24


class _Record:
    """An object of the pickle, with its state; the arguments that it was made with are dropped."""

    __slots__ = ("state",)
    state: Any

    def __new__(cls, *_args: Any) -> _Record:
        record = object.__new__(cls)
        record.state = {}
        return record

    # Also protects this class: an unpickler that is told to change it calls this without an instance, and fails.
    def __setstate__(self, state: Any) -> None:
        self.state = state


_IN_METADATA = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
#: Megatron-core adds the plans of all processes to the metadata (``all_local_plans``); nothing reads them here.
_IN_PLANS = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
_PATHS = [
    (module, name)
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
]
#: What a pickle of DCP names, in torch 2.9 to 2.14 and Python 3.11 to 3.14, by module and name.
_STAND_INS: dict[tuple[str, str], type] = {
    (module, name): type(name, (_Record,), {"__slots__": ()})
    for module, name in (
        *(("torch.distributed.checkpoint.metadata", name) for name in _IN_METADATA),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *(("torch.distributed.checkpoint.planner", name) for name in _IN_PLANS),
        *(("megatron.core.dist_checkpointing.strategies.torch", name) for name in ("MCoreMetadata", "MCoreSavePlan")),
        ("torch.serialization", "_get_layout"),
        *_PATHS,
    )
}
_VALUES = (torch.dtype, torch.layout, torch.memory_format)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _STAND_INS:
            return _STAND_INS[module, name]
        if (module, name) == ("torch", "Size"):
            return torch.Size
        value = vars(torch).get(name) if module == "torch" else None
        if isinstance(value, _VALUES):
            return value
        raise ValueError(f"names {module}.{name}, which DCP's metadata never contains; it is not loaded")


def read_metadata(folder: Path) -> Metadata:
    """Return the content of a folder's ``.metadata``, with the types of all its values checked.

    Files that it names are names without a folder. 370,000 chunks take about 10 s, twice as long as with torch.

    Raises:
        CheckpointError: it is missing, too large, or has anything else than DCP's metadata. Nothing of it was run.
    """
    path = folder / METADATA
    try:
        content = read_bytes(path, _MAX_METADATA_BYTES)
        return _metadata(_Unpickler(io.BytesIO(content)).load(), most_chunks=len(content))
    except (OSError, EOFError, MemoryError, pickle.UnpicklingError, *DAMAGED) as error:
        text = f"{path}: can't be read ({why(error) or type(error).__name__})"
        raise CheckpointError(text, hint="copy the checkpoint again") from None


def _fields(record: Any, kind: str) -> dict[str, Any]:
    if type(record).__name__ != kind or not isinstance(record, _Record) or not isinstance(record.state, dict):
        raise ValueError(f"has {type(record).__name__} in the place of {kind}")
    return record.state


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"has {type(value).__name__} in the place of {kind.__name__}")
    return value


def _metadata(record: Any, *, most_chunks: int) -> Metadata:
    """Convert a stand-in; a pickle can repeat a list of chunks endlessly, so their number has a limit."""
    fields = _fields(record, "Metadata")
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    chunks = 0
    for name, entry in _typed(fields["state_dict_metadata"], dict).items():
        entries[_typed(name, str)] = stored = _entry(entry)
        chunks += len(stored.chunks) if isinstance(stored, TensorStorageMetadata) else 0
        if chunks > most_chunks:
            raise ValueError("repeats its lists of chunks")
    paths = fields.get("planner_data")
    return Metadata(
        state_dict_metadata=entries,
        planner_data=None if paths is None else {_typed(name, str): _path(path) for name, path in paths.items()},
        storage_data=dict(map(_storage, _typed(fields["storage_data"], dict).items())),
        storage_meta=StorageMeta(),
    )


def _entry(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(record).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(record, "TensorStorageMetadata")
    properties = fields["properties"]
    if type(properties).__name__ != "TensorProperties":
        raise ValueError(f"has {type(properties).__name__} in the place of TensorProperties")
    dtype, size = _typed(properties.state[0], torch.dtype), _typed(fields["size"], torch.Size)
    try:
        torch.empty(size, dtype=dtype, device="meta")
    except RuntimeError as error:
        raise ValueError(f"a tensor has an impossible shape ({first_line(error)})") from None
    chunks = [_chunk(chunk, len(size)) for chunk in _typed(fields["chunks"], list)]
    return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=size, chunks=chunks)


def _chunk(record: Any, dimensions: int) -> ChunkStorageMetadata:
    fields = _fields(record, "ChunkStorageMetadata")
    offsets, sizes = _typed(fields["offsets"], torch.Size), _typed(fields["sizes"], torch.Size)
    if not len(offsets) == len(sizes) == dimensions:
        raise ValueError(f"a chunk has {len(sizes)} dimensions, its tensor {dimensions}")
    return ChunkStorageMetadata(offsets=offsets, sizes=sizes)


def _path(path: Any) -> tuple[str | int, ...]:
    for part in _typed(path, tuple):
        if not isinstance(part, str) and not 0 <= _typed(part, int) < _MAX_LIST:
            raise ValueError(f"an element's position is {part}")
    if not path:
        raise ValueError("a state has no name")
    return tuple(path)


def _storage(item: tuple[Any, Any]) -> tuple[MetadataIndex, _StorageInfo]:
    index, info = _fields(item[0], "MetadataIndex"), _fields(item[1], "_StorageInfo")
    place, file = index.get("offset"), _typed(info["relative_path"], str)
    offset, length = _typed(info["offset"], int), _typed(info["length"], int)
    if Path(file).name != file:
        raise ValueError("names a file outside of the checkpoint's folder")
    if min(offset, length) < 0:
        raise ValueError(f"an entry has {length} bytes at byte {offset} of {file}")
    if info.get("transform_descriptors"):
        raise ValueError("its tensors are compressed, which is not supported")
    at = None if place is None else _typed(place, torch.Size)
    hint = index.get("index")
    return (
        MetadataIndex(_typed(index["fqn"], str), at, None if hint is None else _typed(hint, int)),
        _StorageInfo(relative_path=file, offset=offset, length=length),
    )


def why_incomplete(folder: Path, sizes: Mapping[str, int]) -> str | None:
    """Return which tensor or state is not whole or not within its files, as ``"name: reason"``; None if all are.

    The chunks of a tensor must have each of its elements once. ``sizes`` are the bytes of each file. Takes some seconds
    for 370,000 chunks. Raises a CheckpointError if ``.metadata`` can't be read.
    """
    metadata = read_metadata(folder)
    expected = 0
    for name, stored in metadata.state_dict_metadata.items():
        places: Mapping[torch.Size | None, int] = {None: 1}
        if isinstance(stored, TensorStorageMetadata):
            if reason := _why_not_whole(stored):
                return f"{name}: {reason}"
            places = _chunk_bytes(stored)
        expected += len(places)
        if reason := _why_not_in_files(metadata, name, places, sizes):
            return f"{name}: {reason}"
    if len(metadata.storage_data) > expected:
        return f"{METADATA}: has {len(metadata.storage_data)} entries, expected {expected}"
    return _overlap(metadata.storage_data)


def _chunk_bytes(stored: TensorStorageMetadata) -> dict[torch.Size | None, int]:
    """Return the bytes of each chunk by its offset. Processes without elements may share an offset, and so an entry."""
    chunks = sorted(stored.chunks, key=lambda chunk: math.prod(chunk.sizes))
    return {chunk.offsets: math.prod(chunk.sizes) * stored.properties.dtype.itemsize for chunk in chunks}


def _why_not_in_files(
    metadata: Metadata, name: str, places: Mapping[torch.Size | None, int], sizes: Mapping[str, int]
) -> str | None:
    """Return why the files don't have a tensor's chunks, or a state; ``places`` has their least bytes by offset."""
    for offset, least in places.items():
        info = metadata.storage_data.get(MetadataIndex(name, offset))
        if info is None:
            return "a chunk is in no file"
        if info.length < least:
            return f"{info.length} bytes in {info.relative_path}, expected at least {least}"
        if info.offset + info.length > sizes.get(info.relative_path, -1):
            return f"ends at byte {info.offset + info.length} of {info.relative_path}, which is shorter"
    return None


def _why_not_whole(stored: TensorStorageMetadata) -> str | None:
    """Return why chunks don't have each element of a tensor exactly once; None if they do."""
    shape, chunks = stored.size, [chunk for chunk in stored.chunks if math.prod(chunk.sizes)]
    for chunk in stored.chunks:
        places = zip(chunk.offsets, chunk.sizes, shape, strict=True)
        if any(at < 0 or size < 0 or at + size > whole for at, size, whole in places):
            return "a chunk lies outside of the tensor"
    missing = math.prod(shape) - sum(math.prod(chunk.sizes) for chunk in chunks)
    if missing > 0:
        return f"{missing} elements are in no chunk"
    if missing < 0:
        return "elements are in two chunks"
    return _why_overlapping(chunks) if len(chunks) > 1 else None


def _why_overlapping(chunks: Sequence[ChunkStorageMetadata]) -> str | None:
    """The bounds of all chunks divide the tensor into cells. Each cell may be in one chunk."""
    dimensions = range(len(chunks[0].offsets))
    ends = [{at for c in chunks for at in (c.offsets[d], c.offsets[d] + c.sizes[d])} for d in dimensions]
    numbers = [{at: number for number, at in enumerate(sorted(bounds))} for bounds in ends]
    seen: set[tuple[int, ...]] = set()
    for c in chunks:
        spans = [range(numbers[d][c.offsets[d]], numbers[d][c.offsets[d] + c.sizes[d]]) for d in dimensions]
        if len(seen) + math.prod(map(len, spans)) > _MAX_CELLS:
            return "its chunks are too irregular to be checked"
        for cell in itertools.product(*spans):
            if cell in seen:
                return "elements are in two chunks"
            seen.add(cell)
    return None


def _overlap(storage: Mapping[MetadataIndex, _StorageInfo]) -> str | None:
    by_file: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for index, info in storage.items():
        by_file[info.relative_path].append((info.offset, info.length, index.fqn))
    for file, entries in by_file.items():
        end = 0
        for offset, length, name in sorted(entries):
            if offset < end:
                return f"{name}: begins at byte {offset} of {file}, within another entry"
            end = offset + length
    return None


class SafeReader(FileSystemReader):
    """Reads a checkpoint's folder for ``torch.distributed.checkpoint.load``, without a full unpickler.

    Use it with a :class:`SafeLoadPlanner`. Raises a CheckpointError if ``.metadata`` can't be read.

    Args:
        folder: folder of the checkpoint.
        metadata: its metadata, if it was read before.
    """

    def __init__(self, folder: Path, metadata: Metadata | None = None) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return the metadata from :func:`read_metadata`."""
        metadata = self._metadata or read_metadata(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class SafeLoadPlanner(DefaultLoadPlanner):
    """Loads states that are no tensors by torch's restricted unpickler; other states raise a CheckpointError.

    Args:
        optional: prefixes of names that the checkpoint may lack; their values in the state dict stay.
    """

    def __init__(self, optional: tuple[str, ...] = OPTIONAL) -> None:
        super().__init__(allow_partial_load=True)
        self._optional = optional

    def create_local_plan(self) -> LoadPlan:
        """Return what to read; raises a CheckpointError if the checkpoint lacks something."""
        assert self.metadata is not None
        present = self.metadata.state_dict_metadata
        missing = [name for name in self.state_dict if name not in present and not name.startswith(self._optional)]
        if missing:
            more = f", and {len(missing) - 1} more are" if missing[1:] else " is"
            raise CheckpointError(f"{missing[0]}{more} not in the checkpoint")
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a state into the state dict."""
        # The base class reads with a full unpickler. What it gets was written here, from plain values.
        content = io.BytesIO()
        torch.save(_load(value, read_item.dest_index.fqn), content)
        content.seek(0)
        super().load_bytes(read_item, content)


def load(
    state: dict[str, Any],
    folder: Path,
    *,
    optional: tuple[str, ...] = OPTIONAL,
    process_group: Any = None,
    metadata: Metadata | None = None,
) -> None:
    """Load a checkpoint into a state dict in place; all processes of the group call this together.

    Args:
        state: what to read: tensors and nested states by DCP's names.
        optional: prefixes of names that the checkpoint may lack; their values in ``state`` stay.
        process_group: default: all processes. Without process groups, this process loads alone.
        metadata: the checkpoint's metadata, if it was read before.

    Raises:
        CheckpointError: a part is missing, has another shape, can't be read, or could run code.
    """
    reader, planner = SafeReader(folder, metadata), SafeLoadPlanner(optional)
    try:
        with _alone_is_fine():
            state_dict_loader.load(state, storage_reader=reader, planner=planner, process_group=process_group)
    except CheckpointException as error:
        text = first_line(_first_of(error))
        raise CheckpointError(text if os.fspath(folder) in text else f"{folder}: {text}") from None
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, *DAMAGED) as error:
        raise CheckpointError(f"{folder}: can't be loaded ({why(error)})") from None


def save(
    state: dict[str, Any], folder: Path, *, process_group: Any = None, planner: DefaultSavePlanner | None = None
) -> None:
    """Write a state dict durably into a folder that has no checkpoint; all processes of the group call this together.

    Without process groups, this process writes alone. Raises a StorageError if it can't be written.
    """
    try:
        with _alone_is_fine(), torch.no_grad():
            writer = FileSystemWriter(folder, overwrite=False)
            state_dict_saver.save(state, storage_writer=writer, planner=planner, process_group=process_group)
    except CheckpointException as error:
        first = _first_of(error)
        text = f"{folder}: {type(first).__name__}: {first_line(first)}"
        raise StorageError(text, hint=hint_of(first), code=code_of(first)) from None
    except (OSError, RuntimeError) as error:
        text = f"{folder}: {type(error).__name__}: {first_line(error)}"
        raise StorageError(text, hint=hint_of(error), code=code_of(error)) from None


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    if torch.distributed.is_initialized():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _first_of(error: CheckpointException) -> Exception:
    """Return the error of the first rank that failed. DCP's own is a BaseException, which threads don't catch."""
    first = next(iter(error.failures.values()))[0]
    return first if isinstance(first, Exception) else RuntimeError(str(first))


class Block(NamedTuple):
    """A block of a tensor to write.

    Args:
        name: the tensor's name.
        whole: the tensor's shape and dtype, without values.
        offsets: position of the block's first element.
        sizes: size in each dimension.
        values: returns the block; it is called when the block is written.
    """

    name: str
    whole: torch.Tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: Callable[[], torch.Tensor]


class _BlockPlanner(DefaultSavePlanner):
    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__(flatten_state_dict=False)
        self._blocks = {(block.name, block.offsets): block for block in blocks}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = SavePlan([*plan.items, *map(_write_item, self._blocks.values())])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        block = None if index.offset is None else self._blocks.get((index.fqn, tuple(index.offset)))
        return super().lookup_object(index) if block is None else block.values()


def _write_item(block: Block) -> WriteItem:
    offsets = torch.Size(block.offsets)
    place = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(block.sizes))
    properties = TensorProperties(dtype=block.whole.dtype)
    data = TensorWriteData(chunk=place, properties=properties, size=block.whole.shape)
    return WriteItem(index=MetadataIndex(block.name, offsets), type=WriteItemType.SHARD, tensor_data=data)


def save_blocks(blocks: Sequence[Block], objects: dict[str, Any], folder: Path) -> None:
    """Write blocks of tensors, one after the other, and plain objects by name; this process has one block in memory.

    Raises as :func:`save`.
    """
    save(objects, folder, planner=_BlockPlanner(blocks))


class DcpFiles:
    """DCP's files as a :class:`trainer.checkpoint.writer.Storage`.

    Args:
        rank: this process's rank.
        device: its device.
        group: connects the hosts for DCP's collectives, and nothing else: neither training nor ``Together``.
    """

    def __init__(self, rank: int, device: torch.device, group: Any) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._rank, self._device, self._group = rank, device, group
        pins = DEVICES[device.type].pins_host_memory
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=pins,
                use_shared_memory=False,
                use_async_staging=False,  # the next update may follow immediately
                use_non_blocking_copy=pins,
            )
        )

    def shard(self) -> str:
        """Return the name that DCP gives this process's file."""
        return f"__{self._rank}_0.distcp"

    def reserve(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Reserve nothing: reading the optimizer's state before its first update would count as an update."""
        return {}

    def to_host(self, tensors: dict[str, Any], into: dict[str, Any]) -> dict[str, Any]:
        """Copy the states; later calls use the memory of the first one."""
        states = _plain(tensors)
        # The stager copies whole storages; torchtitan's views of a fused projection are parts of one.
        own = {name: value.clone() for name, value in states.items() if _is_part(value)}
        return cast(dict[str, Any], self._stager.stage({**states, **own}))

    def for_writing(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return the states' tensors and numbers."""
        return _plain(tensors)

    def write(self, tensors: dict[str, Any], folder: Path, together: Together) -> list[dict[str, Any]]:
        """Write one file for each process, and DCP's metadata on rank 0."""

        def write() -> dict[str, Any] | None:
            self._use_own_device()
            save(tensors, folder, process_group=self._group)
            path = folder / self.shard()
            return files.describe(folder, path) if path.exists() else None

        return [entry for entry in together.everywhere(write) if entry]

    def _use_own_device(self) -> None:
        """Make this process's device the calling thread's: a new thread has the first one, whose copies DCP awaits."""
        if self._device.index is not None:
            torch.get_device_module(self._device).set_device(self._device.index)

    def finish(self, folder: Path) -> list[str]:
        """Return the name of DCP's metadata, which is written."""
        return [METADATA]

    def read(self, tensors: dict[str, Any], folder: Path, together: Together) -> None:
        """Read the states in place, into any layout; see :func:`load`."""

        def read() -> None:
            self._use_own_device()
            with torch.no_grad():
                load(tensors, folder, process_group=self._group)

        together.everywhere(read)

    def weights(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return the model's weights."""
        return {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}


def _is_part(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    tensor = value.to_local() if isinstance(value, DTensor) else value
    return tensor.untyped_storage().nbytes() != tensor.nbytes


def _plain(states: dict[str, Any]) -> dict[str, Any]:
    """Return states with their own dictionaries instead of the objects that have them."""
    return {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in states.items()}


def describe_tensors(metadata: Metadata) -> dict[str, tuple[torch.Tensor, list[tuple[str, int, int, torch.Size]]]]:
    """Return every tensor by name, without values, and where its chunks are: file, first byte, bytes, offsets."""
    places: dict[str, list[tuple[str, int, int, torch.Size]]] = defaultdict(list)
    for index, info in metadata.storage_data.items():
        if index.offset is not None:
            places[index.fqn].append((info.relative_path, info.offset, info.length, index.offset))
    return {
        name: (torch.empty(stored.size, dtype=stored.properties.dtype, device="meta"), sorted(places[name]))
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }


def read_tensor(folder: Path, metadata: Metadata, name: str) -> torch.Tensor:
    """Return a whole tensor. Raises a CheckpointError if it can't be read."""
    stored = metadata.state_dict_metadata[name]
    assert isinstance(stored, TensorStorageMetadata)
    tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
    load({name: tensor}, folder, metadata=metadata)
    return tensor


class BlockReader:
    """Reads blocks of a checkpoint's tensors; of each file only the chunks that a block needs.

    ``tensors`` has each tensor by name, without values.
    """

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self._folder, self._metadata = folder, metadata
        self.tensors = {name: tensor for name, (tensor, _) in describe_tensors(metadata).items()}
        self._sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
        #: By tensor, the last chunk that was read, if it is larger than the block: the next block is often in it too.
        self._last: dict[str, tuple[tuple[int, ...], torch.Tensor]] = {}
        self._whole: set[str] = set()

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return a block of a tensor. Raises a CheckpointError if the tensor isn't whole, or can't be read."""
        stored = self._metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        if name not in self._whole:  # before memory is allocated for it
            reason = _why_not_whole(stored) or _why_not_in_files(
                self._metadata, name, _chunk_bytes(stored), self._sizes
            )
            if reason:
                raise CheckpointError(f"{self._folder}: {name}: {reason}", hint="copy the checkpoint again")
        self._whole.add(name)
        block = torch.empty(tuple(sizes), dtype=stored.properties.dtype)
        for chunk in stored.chunks:
            spans = [
                (max(first, at), min(first + size, at + length))
                for first, size, at, length in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
            ]
            if all(low < high for low, high in spans):
                theirs = tuple(slice(low - at, high - at) for (low, high), at in zip(spans, chunk.offsets, strict=True))
                ours = tuple(slice(low - at, high - at) for (low, high), at in zip(spans, offsets, strict=True))
                block[ours] = self._chunk(name, chunk)[theirs]
                if math.prod(chunk.sizes) <= block.numel():
                    del self._last[name]
        return block

    def _chunk(self, name: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        offsets = tuple(chunk.offsets)
        if (last := self._last.get(name)) and last[0] == offsets:
            return last[1]
        info = self._metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        path = self._folder / info.relative_path
        values = _load(_bytes_at(path, info), f"{self._folder}: {name}")
        if not isinstance(values, torch.Tensor) or values.shape != chunk.sizes:
            raise CheckpointError(f"{path}: {name} isn't what {METADATA} describes", hint="copy the checkpoint again")
        self._last[name] = (offsets, values)
        return values


def _bytes_at(path: Path, info: _StorageInfo) -> io.BytesIO:
    try:
        with open(path, "rb", opener=open_regular) as file:
            if info.offset + info.length > os.fstat(file.fileno()).st_size:  # or memory is allocated for all of them
                raise ValueError(f"has no {info.length} bytes at byte {info.offset}")
            file.seek(info.offset)
            return io.BytesIO(file.read(info.length))
    except (OSError, *DAMAGED) as error:
        raise CheckpointError(f"{path}: can't be read ({why(error)})", hint="copy the checkpoint again") from None


class _Inert(_Record):
    """An object of any class, without its code: it takes what a pickle puts into it, and drops items."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> _Inert:
        return _Inert()

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Inert

    def persistent_load(self, pid: Any) -> Any:
        return None


def read_objects(folder: Path, entry: tuple[str, Metadata] | str) -> Any:
    """Return what ``torch.save`` wrote to a file, or as the state of this name in a checkpoint. No code of it is run.

    Objects are stand-ins, whose attributes :func:`attributes` returns. Tensors are None.

    Raises:
        CheckpointError: it can't be read.
        FileNotFoundError: there is no such file, or state.
    """
    path = folder / (entry if isinstance(entry, str) else METADATA)
    try:
        if isinstance(entry, str):
            content = io.BytesIO(read_bytes(path, _MAX_OBJECTS_BYTES))
        else:
            info = entry[1].storage_data.get(MetadataIndex(entry[0]))
            if info is None or info.length > _MAX_OBJECTS_BYTES:
                raise FileNotFoundError(f"{path}: {entry[0]}")
            path = folder / info.relative_path
            content = _bytes_at(path, info)
        with zipfile.ZipFile(content) as archive:
            (pickled,) = [each for each in archive.infolist() if each.filename.endswith("/data.pkl")]
            if pickled.file_size > _MAX_OBJECTS_BYTES:
                raise ValueError(f"its pickle has {pickled.file_size} bytes")
            if pickled.compress_type != zipfile.ZIP_STORED or pickled.flag_bits & 1:
                raise ValueError("its pickle is compressed or encrypted, which torch.save never does")
            return _InertUnpickler(io.BytesIO(archive.read(pickled))).load()
    except FileNotFoundError:
        raise
    except (
        OSError,
        EOFError,
        MemoryError,
        RuntimeError,
        zipfile.BadZipFile,
        pickle.UnpicklingError,
        *DAMAGED,
    ) as error:
        text = f"{path}: can't be read ({why(error) or type(error).__name__})"
        raise CheckpointError(text, hint="copy the checkpoint again") from None


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object from :func:`read_objects`; empty for other values."""
    state = value.state if isinstance(value, _Inert) else None
    return {name: each for name, each in state.items() if isinstance(name, str)} if isinstance(state, dict) else {}


def _load(content: io.BytesIO, name: str) -> Any:
    try:
        return torch.load(content, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, *DAMAGED) as error:
        raise CheckpointError(f"{name}: is neither tensors nor plain values, or is damaged ({why(error)})") from None
