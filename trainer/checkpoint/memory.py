"""Copies of a run's newest steps in the memory of its nodes, from which an attempt restarts without storage.

After every so many steps, each process copies its share of a checkpoint into a file in its node's /dev/shm while
training waits; each byte of a checkpoint is copied once. Meanwhile a thread hashes the copy and sends it to a process
of the next node, which keeps it too. So after the loss of one node, all shares of that step still exist.

``ATTEMPT-RANK-SLOT.shard`` is a shard in the format of ``trainer.checkpoint.shards``. Its record, ``.json``, is written
when the shard is complete, and removed before the shard is overwritten. The slots alternate, and no process overwrites
the older one before all have the newer one. So a step of which every share exists survives a death at any moment. The
names have the attempt's number: what is left of an earlier attempt writes to other files.

At the start, all processes learn which copies the nodes have, and make the same plan: the newest step that may be used
(``hlatctl.run.memory.usable``), and which node has each share. Shares whose processes are on other nodes now are sent
there. Each process verifies its share; if one is damaged, another copy of it is taken, or else an older step.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import Config
from hlatctl.cache.trust import require_own
from hlatctl.run import files, memory
from hlatctl.run.errors import CheckpointError, HlatctlError
from hlatctl.run.files import DAMAGED
from hlatctl.run.paths import RunPaths
from hlatctl.units import size
from trainer import rendezvous
from trainer.backends.base import Member, gather_json
from trainer.checkpoint.shards import StoredChunk, chunks_to_write, header_of, writers
from trainer.optim.adamw import local

_HOST = torch.device("cpu")
_SLOTS = 2
#: Size of one message between two nodes.
_PIECE_BYTES = 64 << 20
_RULE = "only this user's processes may write the copies of its runs"


@dataclass(frozen=True, kw_only=True)
class Copy:
    """The record of a share.

    Args:
        rank: the process that made it.
        digest: SHA-256 of the share, as hex.
        layout: identifies what each process has.
        state: what all processes share; JSON, as the next one.
        own: what this process has besides.
    """

    step: int
    attempt: int
    rank: int
    slot: int
    bytes: int
    digest: str
    layout: str
    state: dict[str, Any]
    own: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of its files, without their endings."""
        return _name(self.attempt, self.rank, self.slot)


def _name(attempt: int, rank: int, slot: int) -> str:
    return f"{attempt:06d}-{rank:06d}-{slot}"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Which copies may be used: newer ones than ``after``, up to a step of each attempt.

    Args:
        up_to: pairs of an attempt's number and a step.
    """

    after: int
    up_to: list[tuple[int, int]]


class _Files:
    """The files in this node's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self) -> None:
        """Create the folder, for this user alone. Raises an HlatctlError or an OSError if that is impossible."""
        for path in (self.folder.parent.parent, self.folder.parent, self.folder):
            path.mkdir(mode=0o700, exist_ok=True)
        require_own(self.folder, _RULE, f"remove it, or have its owner do so: `ls -ld {self.folder}`")

    def copies(self) -> list[Copy]:
        """Return the records; those that can't be read don't count."""
        found = []
        for path in sorted(self.folder.glob("*.json")):
            with suppress(OSError, *DAMAGED):
                found.append(Copy(**files.read_sealed_json(path)))
        return found

    def write(self, copy: Copy) -> None:
        """Write the record of a complete share."""
        files.write_sealed_json(self.folder / f"{copy.name}.json", asdict(copy), private=True)

    def drop(self, name: str) -> None:
        """Remove the record of a share that is overwritten."""
        (self.folder / f"{name}.json").unlink(missing_ok=True)

    def room(self, name: str, size_bytes: int) -> Tensor:
        """Return a share's bytes, which have memory.

        Raises an OSError if there is too little. Writing to a file without memory would kill the process.
        """
        descriptor = os.open(
            self.folder / f"{name}.shard", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            os.ftruncate(descriptor, size_bytes)
            os.posix_fallocate(descriptor, 0, size_bytes)
            return torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)
        finally:
            os.close(descriptor)

    def keep(self, wanted: Callable[[int, int], bool]) -> None:
        """Remove all files but those of some attempts and slots."""
        for path in list(self.folder.iterdir()):
            attempt, _, slot = path.name.partition(".")[0].split("-")
            if not wanted(int(attempt), int(slot)):
                path.unlink(missing_ok=True)


class MemoryCopies:
    """This process's part of the copies. All ranks call each method together, from the training thread."""

    def __init__(self, config: Config, run: RunPaths, member: Member, attempt: int) -> None:
        self._run, self._member, self._rank, self._attempt = run, member, member.rank, attempt
        self._layout = _layout(config, member.world_size)
        self._files = _Files(memory.of_node(run))
        #: Ranks of a node follow each other.
        self._here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._is_first = self._rank % self._here == 0
        self._to, self._from = ((self._rank + by) % member.world_size for by in (self._here, -self._here))
        self._has_partner = member.world_size > self._here
        self._group: dist.ProcessGroup | None = None
        if member.world_size > 1:
            self._group = rendezvous.pairs_group(*([[self._to], [self._from]] if self._has_partner else [[], []]))
        self.chosen: Copy | None = None
        self.restored_from: Literal["memory", "partner"] = "memory"
        self._thread: threading.Thread | None = None
        self._rooms: list[dict[int, Tensor]] = []  # of each slot, by rank
        self._slot, self._sizes = 0, dict[int, int]()
        #: Why there are no copies; equal on all ranks. Empty: there are.
        self.problem = self._any(self._prepare())

    def _prepare(self) -> str:
        try:
            if self._is_first:
                memory.remove_forgotten()
                self._files.prepare()
        except (HlatctlError, OSError) as error:
            return _why(error, self._files.folder)
        return ""

    def choose(self, limits: Limits) -> int | None:
        """Return the newest step that can be restored from memory, whose shares are where they are needed; None: none.

        Args:
            limits: equal on all ranks.
        """
        if self.problem or not limits.up_to:
            return None
        listed = self._gather(
            [asdict(copy) | {"state": {}, "own": {}} for copy in self._files.copies()] * self._is_first
        )
        nodes = [[Copy(**copy) for copy in one] for one in listed[:: self._here]]
        bad: set[tuple[int, str]] = set()
        while plan := self._plan(nodes, limits, bad):
            step, holders = plan
            problem = self._fetch(holders)
            own = holders[self._rank][1]
            is_good = self._gather(not problem and self._is_valid(own))
            if problem:
                self.problem = problem
                return None
            if all(is_good):
                self.chosen = next(copy for copy in self._files.copies() if copy.name == own.name)
                moved = any(node != rank // self._here for rank, (node, _) in enumerate(holders))
                self.restored_from = "partner" if moved else "memory"
                return step
            bad |= {(holders[rank][0], holders[rank][1].name) for rank, good in enumerate(is_good) if not good}
        return None

    def _plan(
        self, nodes: list[list[Copy]], limits: Limits, bad: set[tuple[int, str]]
    ) -> tuple[int, list[tuple[int, Copy]]] | None:
        """Return the newest complete step, and for each rank the node that has its share; its own one, if possible."""
        up_to = dict(limits.up_to)
        found: dict[tuple[int, int], dict[int, tuple[int, Copy]]] = {}
        for node, copies in enumerate(nodes):
            for copy in copies:
                is_usable = limits.after < copy.step <= up_to.get(copy.attempt, -1) and copy.layout == self._layout
                if is_usable and (node, copy.name) not in bad:
                    ranks = found.setdefault((copy.step, copy.attempt), {})
                    if copy.rank not in ranks or node == copy.rank // self._here:
                        ranks[copy.rank] = (node, copy)
        complete = [key for key, ranks in found.items() if len(ranks) == self._member.world_size]
        if not complete:
            return None
        newest = max(complete)
        return newest[0], [found[newest][rank] for rank in range(self._member.world_size)]

    def _fetch(self, holders: list[tuple[int, Copy]]) -> str:
        """Send each share to its rank's node, if that doesn't have it; return why this is impossible, or nothing."""
        moves = [
            (node * self._here + rank % self._here, rank, copy)
            for rank, (node, copy) in enumerate(holders)
            if node != rank // self._here
        ]
        if not moves:
            return ""
        sends = [(to, copy) for by, to, copy in moves if by == self._rank]
        receives = [(by, copy) for by, to, copy in moves if to == self._rank]
        parts: list[tuple[Tensor, int]] = []
        try:
            for _, copy in receives:
                self._files.drop(copy.name)
            parts = [(self._files.room(copy.name, copy.bytes), peer) for peer, copy in (*sends, *receives)]
            problem = ""
        except OSError as error:
            problem = _why(error, self._files.folder)
        if problem := self._any(problem):
            return problem
        group = rendezvous.pairs_group({to for to, _ in sends}, {by for by, _ in receives})
        works = [_sent(part, peer, group) for part, peer in parts[: len(sends)]]
        works += [_received(part, peer, group) for part, peer in parts[len(sends) :]]
        for work in works:
            work()
        records = {copy.name: asdict(copy) for copy in self._files.copies()}
        told = [_told(records[copy.name], peer, group) for peer, copy in sends]
        for peer, _ in receives:
            self._files.write(Copy(**_heard(peer, group)))
        for work in told:
            work()
        dist.destroy_process_group(group)
        return ""

    def _is_valid(self, copy: Copy) -> bool:
        path = self._files.folder / f"{copy.name}.shard"
        entry = {"path": path.name, "bytes": copy.bytes, "sha256": copy.digest}
        return any(one.name == copy.name for one in self._files.copies()) and not files.first_difference(
            self._files.folder, [entry]
        )

    def load(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Read the chosen step into the tensors; return the own states of all ranks.

        Raises a CheckpointError if a process has other blocks than before.
        """
        assert self.chosen
        content = self._files.room(self.chosen.name, self.chosen.bytes)
        blocks = chunks_to_write(tensors)
        header, places = header_of(blocks)
        fits = len(content) == _end(header, places) and content[: len(header)].numpy().tobytes() == header
        if not all(self._gather(fits)):
            raise CheckpointError(
                f"{self._files.folder}: the copies in memory don't have the tensors of this layout",
                hint=f"remove the folder {self._files.folder} on each node, and resume the run",
            )
        for place in places:
            values = blocks[place.tensor].values
            values.copy_(_view(content, place, values))
        _spread(tensors)
        return self._gather(self.chosen.own)

    def begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Make room for copies of these tensors. Keep those of the chosen step, until there is a newer one."""
        header, places = header_of(chunks_to_write(tensors))
        sizes = self._gather(_end(header, places))
        self._sizes = {self._rank: sizes[self._rank]} | ({self._from: sizes[self._from]} if self._has_partner else {})
        if not self.problem:
            if self._is_first:
                step = (self.chosen.attempt, self.chosen.slot) if self.chosen else None
                self._files.keep(lambda attempt, slot: (attempt, slot) == step)
            self._gather(None)
            self.problem = self._make_room(0)

    def _make_room(self, slot: int) -> str:
        """Reserve memory for a slot on all nodes; return why this is impossible, or nothing."""
        try:
            rooms = {rank: self._files.room(_name(self._attempt, rank, slot), n) for rank, n in self._sizes.items()}
            self._rooms.append(rooms)
            return self._any("")
        except OSError as error:
            return self._any(_why(error, self._files.folder))

    def copy(self, tensors: Mapping[str, Tensor], step: int, state: dict[str, Any], own: dict[str, Any]) -> str:
        """Copy a step while training waits, and send it to the partner in a thread; return why it isn't, or nothing.

        It isn't while the previous copy is still being sent, and after a failure.
        """
        busy = self._thread is not None and self._thread.is_alive()
        why = self._member.from_rank0("the copy before it is still being sent" if busy else self.problem)
        if why:
            return str(why)
        self.wait()
        slot = self._slot
        for rank in self._sizes:
            self._files.drop(_name(self._attempt, rank, slot))
        blocks = chunks_to_write(tensors)
        header, places = header_of(blocks)
        content = self._rooms[slot][self._rank]
        content[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for place in places:
            values = blocks[place.tensor].values
            _view(content, place, values).copy_(values)
        self._slot = (slot + 1) % _SLOTS
        record = {"step": step, "attempt": self._attempt, "rank": self._rank, "slot": slot, "state": state, "own": own}
        # A daemon thread, so that a process can exit without waiting for a lost peer.
        work = threading.Thread(target=self._guarded, args=(record,), name="memory-copy", daemon=True)
        self._thread = work
        work.start()
        return ""

    def wait(self) -> None:
        """Wait until the newest copy is complete."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def _guarded(self, record: dict[str, Any]) -> None:
        try:
            self._complete(record)
        except Exception as error:  # usually a lost peer; the training thread meets it too
            self.problem = f"{type(error).__name__}: {error}"

    def _complete(self, record: dict[str, Any]) -> None:
        rooms, problem = self._rooms[record["slot"]], ""
        content = rooms[self._rank]
        digest = hashlib.sha256(content.numpy().data).hexdigest()
        copy = Copy(**record, bytes=len(content), digest=digest, layout=self._layout)
        try:
            self._files.write(copy)
        except OSError as error:
            problem = _why(error, self._files.folder)
        if self._has_partner:
            works = [_told(asdict(copy), self._to, self._group), _sent(content, self._to, self._group)]
            theirs = Copy(**_heard(self._from, self._group))
            works.append(_received(rooms[self._from], self._from, self._group))
            for work in works:
                work()
            try:
                self._files.write(theirs)
            except OSError as error:
                problem = _why(error, self._files.folder)
        problem = self._any(problem)
        if not problem and len(self._rooms) < _SLOTS:
            if self._is_first:  # those of earlier attempts, and what the partner of another order had
                self._files.keep(lambda attempt, _: attempt == self._attempt)
            problem = self._make_room(len(self._rooms))
        self.problem = problem

    def remove(self) -> None:
        """Remove the copies that this run has in the memory of its nodes."""
        self.wait()
        self._gather(None)  # all processes of this node have written theirs
        if self._is_first:
            memory.remove(self._run)

    def _gather(self, value: Any) -> list[Any]:
        return [value] if self._group is None else gather_json(value, _HOST, self._group)

    def _any(self, problem: str) -> str:
        """Return a problem of any rank, on all."""
        return str(next(filter(None, self._gather(problem)), ""))


def _layout(config: Config, world_size: int) -> str:
    """Return what identifies the blocks of all processes."""
    kept = {
        "model": asdict(config.model),
        "parallel": asdict(config.parallel),
        "optimizer": [config.optimizer.name, config.optimizer.ema_decay],
        "precision": config.precision.name,
        "world_size": world_size,
        "processes_per_node": config.cluster.processes_per_node,
    }
    return files.sha256_json(kept)


def _why(error: Exception, folder: Path) -> str:
    if isinstance(error, HlatctlError):
        return f"{error.message}; {error.hint}"
    assert isinstance(error, OSError)
    free = ""
    with suppress(OSError):
        free = f"; {size(shutil.disk_usage(folder).free)} are free"
    return f"{folder}: {error.strerror}{free}"


def _end(header: bytes, places: list[StoredChunk]) -> int:
    return len(header) + sum(place.nbytes for place in places)


def _view(content: Tensor, place: StoredChunk, values: Tensor) -> Tensor:
    """Return a block's values in the bytes of a share."""
    return content[place.begin : place.begin + place.nbytes].view(values.dtype).view(values.shape)


def _spread(tensors: Mapping[str, Tensor]) -> None:
    """Send each block from the process that has it in its share to its replicas, along one axis of a mesh at a time."""
    for name, writer in writers(tensors).items():
        tensor, part = tensors[name], local(tensors[name]).detach()
        if not hasattr(tensor, "device_mesh") or not part.numel():
            continue
        mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
        axes = [axis for axis, placement in enumerate(placements) if placement.is_replicate()]
        source = [int(at) for at in torch.unravel_index(torch.tensor(writer), [mesh.size(axis) for axis in axes])]
        here = [mesh.get_local_rank(axis) for axis in axes]
        for number, axis in enumerate(axes):
            if mesh.size(axis) > 1 and here[number + 1 :] == source[number + 1 :]:
                dist.broadcast(part, group=mesh.get_group(axis), group_src=source[number])


_Wait = Callable[[], object]


def _sent(content: Tensor, to: int, group: dist.ProcessGroup | None) -> _Wait:
    return _all([dist.isend(piece, to, group) for piece in torch.split(content, _PIECE_BYTES)])


def _received(content: Tensor, by: int, group: dist.ProcessGroup | None) -> _Wait:
    return _all([dist.irecv(piece, by, group) for piece in torch.split(content, _PIECE_BYTES)])


def _told(value: dict[str, Any], to: int, group: dist.ProcessGroup | None) -> _Wait:
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return _all([dist.isend(part, to, group) for part in (torch.tensor([len(text)]), text)])


def _heard(by: int, group: dist.ProcessGroup | None) -> dict[str, Any]:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, by, group)
    text = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(text, by, group)
    return dict(json.loads(text.numpy().tobytes()))


def _all(works: Iterable[dist.Work | None]) -> _Wait:
    return lambda: [work.wait() for work in works if work]
