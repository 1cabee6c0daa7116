"""Weights of a model whose folder links to a checkpoint: a process of the trainer reads them, tensor by tensor.

Only the trainer knows a checkpoint's format, and it isn't imported here: ``trainer.convert.serve`` sends each tensor
through a pipe when transformers wants it. A process of a tensor-parallel copy gets only its part.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import EllipsisType
from typing import Any

from hlatctl.run import child
from hlatctl.run.errors import EvaluationError, HlatctlError, from_record
from hlatctl.run.model_link import Link

#: Linux's default is 64 KiB, and its limit for users 1 MiB.
_PIPE_BYTES = 1 << 20
_Index = EllipsisType | tuple[slice, ...]


class Tensor:
    """A tensor that is read when it is indexed, like safetensors' slices, which transformers takes as well.

    Args:
        source: reads it.
        name: Hugging Face's.
        dtype: torch's name.
        shape: of the whole.
    """

    def __init__(self, source: _Source, name: str, *, dtype: str, shape: list[int]) -> None:
        self._source, self._name, self._dtype, self._shape = source, name, dtype, shape

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return self._shape

    def __getitem__(self, index: _Index) -> Any:
        """Return the values (a torch tensor on the CPU) of the whole, or of a block.

        Raises:
            HlatctlError: they can't be read.
        """
        slices = [] if isinstance(index, EllipsisType) else [[cut.start, cut.stop, cut.step] for cut in index]
        return self._source.read(self._name, self._dtype, slices)


class _Source:
    """The process that reads; several threads may ask it.

    Args:
        failure: the first error. transformers logs some errors of tensors and continues.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self._turn = process, threading.Lock()
        self.failure: HlatctlError | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name; the first answer."""
        return {name: Tensor(self, name, **about) for name, about in self._answer()["tensors"].items()}

    def read(self, name: str, dtype: str, slices: list[list[int | None]]) -> Any:
        """Return a tensor's values."""
        import torch

        with self._turn:
            with suppress(BrokenPipeError):  # it has ended, which the answer says
                child.pipe_in(self._process).write(json.dumps({"name": name, "slices": slices}).encode() + b"\n")
                child.pipe_in(self._process).flush()
            values = torch.empty(self._answer()["shape"], dtype=getattr(torch, dtype))
            memory = values.reshape(-1).view(torch.uint8).numpy().data
            if child.pipe_out(self._process).readinto(memory) != len(memory):  # type: ignore[attr-defined] # a buffered reader
                raise self._failed(self._lost())
        return values

    def _answer(self) -> dict[str, Any]:
        line = child.pipe_out(self._process).readline()
        if not line.endswith(b"\n"):
            raise self._failed(self._lost())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._failed(from_record(answer["error"]))
        return answer

    def _failed(self, error: HlatctlError) -> HlatctlError:
        self.failure = self.failure or error
        return self.failure

    def _lost(self) -> HlatctlError:
        return EvaluationError(
            f"process {self._process.pid}, which reads the checkpoint, has ended", hint="the same command continues"
        )


@contextmanager
def opened(link: Link) -> Iterator[_Source]:
    """Start the process that reads a checkpoint's weights, and end it at the end of the block.

    It begins while the caller imports its packages; :meth:`_Source.tensors` waits for it.

    Raises:
        CheckpointError: the checkpoint can't be read; also in place of what transformers makes of it.
        EvaluationError: the process has ended.
    """
    argv = ["--run-dir", link.run_dir, "--step", str(link.step), "--manifest", link.manifest_sha256]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "trainer.convert.serve", *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pipesize=_PIPE_BYTES,
        env=child.environment(),
    )
    source = _Source(process)
    try:
        yield source
    except Exception as error:
        if source.failure and error is not source.failure:
            raise source.failure from error
        raise
    finally:
        process.kill()
        child.wait_and_close(process)
    if source.failure:
        raise source.failure


def load(folder: Path, source: _Source, **settings: Any) -> Any:
    """Return the model of a folder with weights of a source.

    Args:
        folder: has the configuration.
        source: from :func:`opened`.
        settings: of transformers' ``from_pretrained``.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if (folder / "generation_config.json").is_file():
        settings["generation_config"] = GenerationConfig.from_pretrained(folder, local_files_only=True)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = model_class.from_pretrained(None, config=config, state_dict=source.tensors(), **settings)
    model.config.name_or_path = os.fspath(folder)
    return model
