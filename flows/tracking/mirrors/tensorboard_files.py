"""A run for TensorBoard: event files in the run directory, written by TensorBoard's own classes without TensorFlow.

    tensorboard/            configuration, labels, outcome, hyperparameters; scores by step and by tokens
    tensorboard/by_step/    training by step
    tensorboard/by_tokens/  training by tokens
    tensorboard/SIMULATED/  replaces ``tensorboard/`` if nothing was trained

Training has files of its own because a restart from step k removes all later points of a file: a ``SessionLog`` records
where training starts again, and TensorBoard drops what it read from there on. A file is continued at the size that the
cursor has. Everything written after the cursor is cut off, so no point is there twice.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2, summary_v2
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from flows.tracking.mirrors.base import About, Labels, Mirror, Outcome, Point, Scores, Service
from hlatctl.run.labels import MARK, REPORT

#: TensorBoard reads files with ``tfevents`` in their names.
FILE = "events.out.tfevents.hlatctl"
ABOUT, BY_STEP, BY_TOKENS = "", "by_step", "by_tokens"
#: TensorBoard uses ``SessionLog`` only with files of this version.
_VERSION = "brain.Event:2"
_STATUS = {
    "running": api_pb2.STATUS_RUNNING,
    "finished": api_pb2.STATUS_SUCCESS,
    "failed": api_pb2.STATUS_FAILURE,
    "stopped": api_pb2.STATUS_UNKNOWN,
}


class EventFiles(Mirror):
    """The event files of one run; see :class:`Mirror`.

    Args:
        kept: size of each file.
        last_step: newest step in the files, if they have these sizes.
    """

    def __init__(self, about: About, kept: Mapping[str, Any], last_step: int) -> None:
        top = about.root / "tensorboard"
        folder = top / MARK if about.simulated else top
        names = (ABOUT, BY_STEP, BY_TOKENS)
        if not all(name in kept and _size(folder / name / FILE) >= kept[name] for name in names):
            kept, last_step, self.is_new = {}, 0, True
            shutil.rmtree(top, ignore_errors=True)
        self.last_step = last_step
        self._files = {
            name: _EventFile(folder / name / FILE, kept.get(name, 0), about.created_unix_s) for name in names
        }
        self._run_id, self._time_unix_s = about.run_id, about.created_unix_s
        if not kept:
            self._begin(about)

    def steps(self, points: Sequence[Point]) -> None:
        """Write each step by its number and by its tokens."""
        by_step, by_tokens = self._files[BY_STEP], self._files[BY_TOKENS]
        for point in points:
            values = point.values.items()
            by_step.write(point.step, point.time_unix_s, *(_scalar(f"train/{name}", value) for name, value in values))
            by_tokens.write(
                point.tokens, point.time_unix_s, *(_scalar(f"train_by_tokens/{name}", value) for name, value in values)
            )
        self._reached(points[-1].step, points[-1].time_unix_s)

    def rewind(self, step: int, tokens: int) -> bool:
        """Let TensorBoard drop what was trained after this step."""
        self._files[BY_STEP].restart(step + 1, self._time_unix_s)
        self._files[BY_TOKENS].restart(tokens + 1, self._time_unix_s)
        self.last_step = step
        return False

    def scores(self, scores: Scores) -> None:
        """Write the scores by step and by tokens."""
        file, values = self._files[ABOUT], scores.values.items()
        file.write(scores.step, scores.time_unix_s, *(_scalar(f"{scores.group}/{task}", v) for task, v in values))
        by_tokens = (_scalar(f"{scores.group}_by_tokens/{task}", value) for task, value in values)
        file.write(scores.tokens, scores.time_unix_s, *by_tokens)

    def labels(self, labels: Labels) -> None:
        """Write the labels as a text; TensorBoard shows the newest one."""
        tables = [_table(values) for values in (labels.tags, labels.facts, labels.amended) if values]
        text = "\n\n".join([f"**{labels.name}**", *tables, *labels.notes])
        self._files[ABOUT].write(self.last_step, self._time_unix_s, _text("labels", text))

    def outcome(self, outcome: Outcome) -> None:
        """Write the outcome as a text, and as the status of the hyperparameters' session."""
        words = f"{outcome.status} at step {outcome.step}"
        text = f"{words}: {outcome.message}" if outcome.message else words
        self._reached(self.last_step, outcome.time_unix_s)
        file = self._files[ABOUT]
        file.write(self.last_step, outcome.time_unix_s, _text("outcome", text))
        if outcome.status != "running":
            end = plugin_data_pb2.SessionEndInfo(
                status=_STATUS.get(outcome.status, api_pb2.STATUS_UNKNOWN), end_time_secs=outcome.time_unix_s
            )
            data = plugin_data_pb2.HParamsPluginData(session_end_info=end)
            file.write(0, outcome.time_unix_s, _hyperparameters(metadata.SESSION_END_INFO_TAG, data))

    def flush(self) -> dict[str, Any]:
        """Write buffered events; return the size of each file."""
        return {name: file.flush() for name, file in self._files.items()}

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _begin(self, about: About) -> None:
        file, time_unix_s = self._files[ABOUT], about.created_unix_s
        note = [_text("simulated", f"{MARK}: {REPORT}")] if about.simulated else []
        file.write(0, time_unix_s, _text("config", _table(about.config)), *note)
        start = summary_v2.hparams_pb(dict(about.config), trial_id=about.run_id, start_time_secs=time_unix_s)
        file.write(0, time_unix_s, *start.value)

    def _reached(self, step: int, time_unix_s: float) -> None:
        self.last_step, self._time_unix_s = step, time_unix_s


class TensorBoard(Service):
    """TensorBoard's event files in the run directory."""

    target = "files"

    def open(self, about: About, kept: dict[str, Any], last_step: int) -> EventFiles:
        """Continue the files."""
        return EventFiles(about, kept, last_step)


class _EventFile:
    """One event file, continued at a size; the rest of an existing file is cut off.

    Args:
        size: size in bytes.
        time_unix_s: time of its first event.
    """

    def __init__(self, path: Path, size: int, time_unix_s: float) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("r+b" if size else "wb")
        self._file.truncate(size)
        self._file.seek(0, os.SEEK_END)
        self._records = RecordWriter(self._file)
        if not size:
            self._write(Event(wall_time=time_unix_s, file_version=_VERSION))
            self.restart(0, time_unix_s)  # the first one is no restart; only later ones let TensorBoard drop values

    def write(self, step: int, time_unix_s: float, *values: Summary.Value) -> None:
        self._write(Event(wall_time=time_unix_s, step=step, summary=Summary(value=values)))

    def restart(self, step: int, time_unix_s: float) -> None:
        """Let TensorBoard drop the values of this step and later ones that are already written."""
        self._write(Event(wall_time=time_unix_s, step=step, session_log=SessionLog(status=SessionLog.START)))

    def flush(self) -> int:
        self._file.flush()
        return self._file.tell()

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _scalar(tag: str, value: float) -> Summary.Value:
    return Summary.Value(tag=tag, simple_value=value)


def _text(tag: str, text: str) -> Summary.Value:
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, tensor_shape=shape, string_val=[text.encode()])
    return Summary.Value(tag=tag, tensor=tensor, metadata=create_summary_metadata(tag, ""))


def _hyperparameters(tag: str, data: plugin_data_pb2.HParamsPluginData) -> Summary.Value:
    return Summary.Value(tag=tag, tensor=metadata.NULL_TENSOR, metadata=metadata.create_summary_metadata(data))


def _table(values: Mapping[str, object]) -> str:
    rows = (f"| {key} | {str(value).replace('|', '&#124;')} |" for key, value in values.items())
    return "\n".join(["| key | value |", "|---|---|", *rows])
