"""Read the packed sequences of one data-parallel rank in advance, and send them to the processes that share them.

The state counts batches that were taken, never prefetched ones, so a checkpoint resumes at the next token.

One process reads for the other processes of its replica on its node, and sends them the batches over Unix sockets. The
sockets are in the job's private folder, so no other user can connect. A message is a header, then the tokens or an
error as JSON. If a process dies, its connection closes, and the others get an error instead of waiting.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf.data_changes import skipped_batches
from conf.schema import Config
from hlatctl.run.errors import STORAGE_AWAY, CheckpointError, HlatctlError, LaunchError, from_record, to_record
from hlatctl.run.journal import Event
from trainer.data.documents import deal_of, sources_of
from trainer.data.packing import PackedRow, Position, Span
from trainer.data.remote import ReadAhead
from trainer.data.tokenizer import Tokens, make_encoder, tokenizer_of

#: How often a waiting thread checks whether to stop.
_STOP_POLL_S = 0.1

#: For each row of the global batch: the number of batches drawn, then its position's numbers; JSON.
State = list[list[int]]


@dataclass(frozen=True)
class Batch:
    """Tokens (rows, seq_len + 1) and the batch's number.

    The reading process also has the rows' spans, and their positions after the batch.
    """

    tokens: Tokens
    number: int
    spans: list[list[Span]] = field(default_factory=list)
    after: list[Position] = field(default_factory=list)


class Batches:
    """A process's share of each step's sequences, after a batch; a thread prepares up to ``ahead`` batches."""

    def __init__(self, *, batch: int, ahead: int) -> None:
        self.batch = batch
        """Number of the last batch taken, 1-based, including skipped ones."""
        self.spans: list[list[Span]] = []
        """For each sequence of the last batch, its spans; only in the process that reads the documents."""
        self.wait_s = 0.0
        """Seconds that :meth:`next` has waited since this was last set to 0."""
        self._taken: list[Position] = []
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=ahead)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> State:
        """The positions of this process's rows after the last batch taken; empty if another process reads them."""
        return [[self.batch, *position.to_json()] for position in self._taken]

    def next(self) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) of the next step, each (sequences, seq_len) int64 on the CPU; may wait.

        Raises:
            HlatctlError: the corpus can't be read, here or in the process that reads it.
            ConnectionError: the process that reads it has ended.
        """
        started = time.perf_counter()
        item = self._queue.get()
        self.wait_s += time.perf_counter() - started
        if isinstance(item, BaseException):
            raise item
        self._taken, self.spans, self.batch = item.after, item.spans, item.number
        tokens = torch.from_numpy(item.tokens).long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def close(self) -> None:
        """Stop the background thread."""
        self._stopping.set()
        with suppress(queue.Empty):  # make room, so that a waiting thread ends before its timeout
            self._queue.get_nowait()
        if self._thread:
            self._thread.join()

    def _start(self, produce: Callable[[], None]) -> None:
        """Call ``produce`` in the thread until it returns; :meth:`next` raises its error."""

        def work() -> None:
            try:
                produce()
            except BaseException as error:  # the thread that waits for batches raises it
                self._put(error)

        self._thread = threading.Thread(target=work, name="loader", daemon=True)
        self._thread.start()

    def _put(self, item: Batch | BaseException) -> None:
        """Wait for room in the queue, unless the thread has to stop."""
        while not self._stopping.is_set():
            try:
                return self._queue.put(item, timeout=_STOP_POLL_S)
            except queue.Full:
                continue


class NoBatches(Batches):
    """The batches of a pipeline stage that needs no tokens: zeros (sequences, seq_len)."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__(batch=0, ahead=1)
        self._zeros = torch.zeros(shape, dtype=torch.int64)

    def next(self) -> tuple[Tensor, Tensor]:
        """Return the zeros twice."""
        return self._zeros, self._zeros


#: A batch's number, or `_ERROR`, and the length of the rest in bytes.
_HEADER = struct.Struct("<qq")
_ERROR = -1
_RETRY_S = 0.05
#: Longest socket path on every system: `sun_path` has 104 bytes on macOS and 108 on Linux, with a zero at the end.
_PATH_BYTES = 103


class Sender:
    """Sends batches to other processes, from one thread.

    An old socket at the path is removed. The socket's name is removed once all receivers have connected.
    """

    def __init__(self, path: Path, receivers: int) -> None:
        self._path, self._receivers, address = path, receivers, _address(path)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(_STOP_POLL_S)
        path.unlink(missing_ok=True)
        self._listener.bind(address)
        self._listener.listen(receivers)
        self._connections: list[socket.socket] = []
        self._stopping = threading.Event()

    def send(self, batch: Batch) -> None:
        """Send a batch to all receivers that still accept batches; wait until the slowest has room for it."""
        self._send(batch.number, np.ascontiguousarray(batch.tokens).tobytes())

    def fail(self, error: HlatctlError) -> None:
        """Send an error, which the receivers raise instead of returning the next batch."""
        self._send(_ERROR, json.dumps(to_record(error)).encode())

    def stop(self) -> None:
        """Make a :meth:`send` in another thread return."""
        self._stopping.set()
        for connection in self._connections:
            with suppress(OSError):  # the receiver is gone
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections; call this after the sending thread has ended."""
        self.stop()
        for end in (self._listener, *self._connections):
            end.close()
        self._path.unlink(missing_ok=True)

    def _send(self, number: int, content: bytes) -> None:
        self._accept()
        message = _HEADER.pack(number, len(content)) + content
        for connection in self._connections:
            if self._stopping.is_set():
                return
            with suppress(OSError):  # a receiver that has closed needs no more, or has failed
                connection.sendall(message)

    def _accept(self) -> None:
        while len(self._connections) < self._receivers and not self._stopping.is_set():
            with suppress(TimeoutError):
                connection, _ = self._listener.accept()
                connection.setblocking(True)
                self._connections.append(connection)
                if len(self._connections) == self._receivers:
                    self._path.unlink(missing_ok=True)


class ReceivedBatches(Batches):
    """The batches that another process on this node reads and sends; its socket may appear later.

    Their tokens have the shape (sequences, seq_len + 1).
    """

    def __init__(self, path: Path, shape: tuple[int, int], *, ahead: int) -> None:
        super().__init__(batch=0, ahead=ahead)
        self._address, self._shape = _address(path), shape
        self._connection = socket.socket(socket.AF_UNIX)
        self._start(self._produce)

    def close(self) -> None:
        """Stop the background thread, which may be waiting for a batch."""
        self._stopping.set()
        with suppress(OSError):  # not connected
            self._connection.shutdown(socket.SHUT_RDWR)
        super().close()
        self._connection.close()

    def _produce(self) -> None:
        self._connect()
        while not self._stopping.is_set():
            self._put(self._receive())

    def _connect(self) -> None:
        while not self._stopping.is_set():
            try:
                return self._connection.connect(self._address)
            except (FileNotFoundError, ConnectionRefusedError):  # the sender has not started, or an earlier one died
                time.sleep(_RETRY_S)

    def _receive(self) -> Batch:
        number, size = _HEADER.unpack(self._read(_HEADER.size))
        content = self._read(size)
        if number == _ERROR:
            raise from_record(json.loads(content))
        tokens: Tokens = np.frombuffer(content, dtype=np.int32).reshape(self._shape)
        return Batch(tokens, number)

    def _read(self, size: int) -> bytearray:
        content = bytearray(size)
        view = memoryview(content)
        while view:
            count = self._connection.recv_into(view)
            if not count:
                # Recovery recognizes by the first words that another process has failed before (flows.recovery).
                raise ConnectionError("Connection closed by peer: the process that reads this replica's data has ended")
            view = view[count:]
        return content


def _address(path: Path) -> str:
    if len(os.fsencode(path)) > _PATH_BYTES:
        raise LaunchError(
            f"{path}: a socket's path has at most {_PATH_BYTES} bytes, this one has {len(os.fsencode(path))}",
            hint="set TMPDIR to a folder with a shorter path on every node, such as /tmp",
        )
    return os.fspath(path)


#: Time for the other processes to receive an error before the connections to them end.
_TELLS_S = 5.0


class Loader(Batches):
    """Reads a data-parallel rank's share of each step's sequences.

    A step takes a sequence of each row. In a stage with a smaller batch than the first stage's, every k-th row has its
    turn in a step; with a larger one, each row gives several sequences in succession.

    Args:
        state: the concatenated :attr:`state` lists of all ranks, in order, for any number of ranks.
        events: the journal's events, equal on all ranks; ``data_changed`` events add batches to skip.
        sender: sends to the processes that need the same batches; None: there are none.

    Raises:
        DataError: the corpus can't be read, or is empty.
        CheckpointError: the state belongs to another global batch size.
    """

    def __init__(
        self,
        config: Config,
        dataset: dict[str, Any],
        *,
        rank: int,
        size: int,
        state: State | None = None,
        events: Iterable[Event] = (),
        sender: Sender | None = None,
    ) -> None:
        # One thread per rank: the other cores are needed for the computation.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.sources = sources_of(dataset)
        rows, sequences = config.data_rows, config.train.global_batch_size
        self._turns, self._each = max(1, rows // sequences), max(1, sequences // rows)
        first, positions = _positions(state, rows, len(self.sources))
        super().__init__(batch=first, ahead=config.data.prefetch_batches)
        self._seq_len, self._skip, self._sender = config.train.seq_len, skipped_batches(config, events), sender
        deal, encode = deal_of(config, self.sources), make_encoder(tokenizer_of(dataset))
        mine = range(rows // size * rank, rows // size * (rank + 1))
        readers = len(mine) * len(self.sources)
        documents = [
            ReadAhead(source.documents, readers) if source.documents.is_remote else source.documents
            for source in self.sources
        ]
        self._ahead = [each for each in documents if isinstance(each, ReadAhead)]
        eos_id = int(dataset["tokenizer"]["eos_id"])
        own = [PackedRow(documents, deal, encode, eos_id=eos_id, row=i, start=positions[i]) for i in mine]
        self._taken = [row.position for row in own]
        self._failing = False
        self._start(lambda: self._produce(own, first))

    def close(self) -> None:
        """Stop the background thread, its requests, and the connections to the other processes."""
        if self._sender and self._failing and self._thread:
            self._thread.join(_TELLS_S)
        self._stopping.set()
        for documents in self._ahead:
            documents.close()
        if self._sender:
            self._sender.stop()  # the thread may be waiting for a slow receiver
        super().close()
        if self._sender:
            self._sender.close()

    def _produce(self, rows: list[PackedRow], number: int) -> None:
        try:
            while not self._stopping.is_set():
                number += 1
                taken = [
                    (row.take(self._seq_len), row.spans)
                    for row in rows[(number - 1) % self._turns :: self._turns]
                    for _ in range(self._each)
                ]
                if number not in self._skip:
                    tokens, spans = np.stack([tokens for tokens, _ in taken]), [spans for _, spans in taken]
                    self._hand_out(Batch(tokens, number, spans, [row.position for row in rows]))
        except HlatctlError as error:
            if self._stopping.is_set():
                return
            if error.code == STORAGE_AWAY:
                step = number - sum(skipped <= number for skipped in self._skip)
                error = type(error)(f"step {step}: {error.message}", hint=error.hint, code=error.code)
            self._failing = True
            self._put(error)  # first here: the others may wait for this process instead of their next batch
            if self._sender:
                self._sender.fail(error)

    def _hand_out(self, batch: Batch) -> None:
        """Queue a batch here, then send it. In this order, no training process waits for one that sends."""
        self._put(batch)
        if self._sender:
            self._sender.send(batch)


def mixed_anew(config: Config, step: int, state: State) -> State:
    """Return the state with which the step after a checkpoint begins.

    If a stage with other weights of the sources begins there, the tokens of each source are counted from 0: the weights
    are shares of the stage's tokens. The numbers of documents stay, so each source goes on where it was, and so does a
    document that is open.

    Raises:
        CheckpointError: the state is invalid.
    """
    weights = config.during(step).data.source_weights
    if weights == config.during(step + 1).data.source_weights:
        return state
    batch, positions = _positions(state, config.data_rows, len(weights))
    anew = []
    for position in positions:
        finished = tuple((documents, 0) for documents, _ in position.finished)
        anew.append([batch, *replace(position, finished=finished).to_json()])
    return anew


def _positions(state: State | None, rows: int, sources: int) -> tuple[int, list[Position]]:
    """Return the number of batches drawn, and each row's position."""
    if state is None:
        return 0, [Position.start(sources)] * rows
    try:
        entries = [[int(number) for number in entry] for entry in state]
        batches = {entry[0] for entry in entries}
        positions = [Position.from_json(entry[1:], sources) for entry in entries]
    except (TypeError, ValueError, IndexError):
        raise CheckpointError(f"the data loader's state is invalid: {str(state)[:200]}") from None
    if len(positions) != rows:
        raise CheckpointError(
            f"the checkpoint's global batch has {len(positions)} sequences, train.global_batch_size={rows}",
            hint=f"a run keeps its batch size: set train.global_batch_size={len(positions)} again",
        )
    if len(batches) != 1:
        raise CheckpointError(f"the checkpoint's ranks have drawn different numbers of batches: {sorted(batches)}")
    return batches.pop(), positions
