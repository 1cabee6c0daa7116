"""Load a model and its tokenizer from a Hugging Face folder: safetensors only, no code from the folder, no network.

The weights are in the folder, or in the checkpoint that it links to. Only the trainer knows a checkpoint's format, and
it isn't imported here: ``trainer.convert.serve`` runs as a process and sends each tensor through a pipe when
transformers needs it. A process of a tensor-parallel copy gets only its part.

Imports torch and transformers late.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

from conf.devices import DEVICES
from conf.registries import LAUNCHERS
from conf.schema import Config
from hlatctl.run import files, processes, startup
from hlatctl.run.errors import DependencyError, EvaluationError, HlatctlError, first_line, from_record, install
from hlatctl.run.files import why
from hlatctl.run.model_folder import WEIGHTS, Link, check_sizes, lacking, read_link
from hlatctl.run.processes import node_name

#: Linux's default is 64 KiB, and its limit for users 1 MiB.
_PIPE_BYTES = 1 << 20
_Index = EllipsisType | tuple[slice, ...]


class Tensor:
    """A tensor that is read when it is indexed, like safetensors' slices, which transformers also accepts."""

    def __init__(self, source: _Source, name: str, *, dtype: str, shape: list[int]) -> None:
        self._source, self._name, self._dtype, self._shape = source, name, dtype, shape

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return self._shape

    def __getitem__(self, index: _Index) -> Any:
        """Return the values of the whole, or of a block, as a torch tensor on the CPU."""
        slices = [] if isinstance(index, EllipsisType) else [[cut.start, cut.stop, cut.step] for cut in index]
        return self._source.read(self._name, self._dtype, slices)


class _Source:
    """The process that reads; several threads may use it.

    ``failure`` is the first error, because transformers only logs some.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self._turn = process, threading.Lock()
        self.failure: HlatctlError | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name; the first answer."""
        return {name: Tensor(self, name, **about) for name, about in self._answer()["tensors"].items()}

    def read(self, name: str, dtype: str, slices: list[list[int | None]]) -> Any:
        import torch

        with self._turn:
            with suppress(BrokenPipeError):  # it has ended, as its last answer shows
                processes.pipe_in(self._process).write(json.dumps({"name": name, "slices": slices}).encode() + b"\n")
                processes.pipe_in(self._process).flush()
            values = torch.empty(self._answer()["shape"], dtype=getattr(torch, dtype))
            memory = values.reshape(-1).view(torch.uint8).numpy().data
            if processes.pipe_out(self._process).readinto(memory) != len(memory):  # type: ignore[attr-defined] # a buffered reader
                raise self._failed(self._lost())
        return values

    def _answer(self) -> dict[str, Any]:
        line = processes.pipe_out(self._process).readline()
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
def opened_link(link: Link) -> Iterator[_Source]:
    """Start the process that reads a checkpoint's weights, and end it at the end of the block.

    The process starts while the caller imports its packages; :meth:`_Source.tensors` waits for it.

    Raises:
        CheckpointError: the checkpoint can't be read; replaces the error that transformers raises because of it.
        EvaluationError: the process has ended.
    """
    argv = ["--run-dir", link.run_dir, "--step", str(link.step), "--manifest", link.manifest_sha256]
    argv += ["--weights", link.weights]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "trainer.convert.serve", *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pipesize=_PIPE_BYTES,
        env=processes.child_environment(),
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
        processes.wait_and_close(process)
    if source.failure:
        raise source.failure


def load_linked(folder: Path, source: _Source, **settings: Any) -> Any:
    """Return the model of a folder with weights of a source."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if (folder / "generation_config.json").is_file():
        settings["generation_config"] = GenerationConfig.from_pretrained(folder, local_files_only=True)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = model_class.from_pretrained(None, config=config, state_dict=source.tensors(), **settings)
    model.config.name_or_path = os.fspath(folder)
    return model


#: Default number format in which a model is evaluated, regardless of its weights' format.
DTYPE = "float32"
_EXPORT_HINT = "python -m trainer.convert.export --run-dir RUN --step N --to DIR creates such a folder"


@dataclass(frozen=True)
class Loaded:
    """A causal language model in evaluation mode, and its tokenizer (transformers' own types)."""

    model: Any
    tokenizer: Any
    max_length: int


def settle_environment(scratch: Path, *, offline: bool) -> None:
    """Set the variables that Hugging Face's packages read when they are first imported: no progress bars, no threads.

    Offline they use neither the network nor the home folder, and ``scratch`` for their caches.
    """
    os.environ.update(TQDM_DISABLE="1", TOKENIZERS_PARALLELISM="false")
    if offline:
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(scratch / "huggingface"))


def check_folder(folder: Path) -> None:
    """Check that a folder is a Hugging Face model with safetensors weights and a tokenizer, else EvaluationError."""
    if not folder.is_dir():
        raise EvaluationError(f"--model={folder}: no such folder", hint=_EXPORT_HINT)
    if (what := lacking(folder)) and not (what == WEIGHTS and read_link(folder)):
        raise EvaluationError(f"--model={folder}: is not a Hugging Face model: it has no {what}", hint=_EXPORT_HINT)
    try:
        check_sizes(folder)
    except OSError as error:
        raise EvaluationError(f"{error.filename}: can't be loaded ({why(error)})", hint=_EXPORT_HINT) from None


def load(
    folder: Path,
    *,
    seq_len: int,
    device: str,
    dtype: str = DTYPE,
    index: int | None = None,
    tensor_parallel_size: int = 1,
) -> Loaded:
    """Load a model for evaluation.

    Args:
        seq_len: tokens per sequence in training; the context is never longer.
        index: index of the device, if there are several; None: PyTorch's current one.
        tensor_parallel_size: processes of this process's group that share the model, by transformers' own plan.
    """
    check_folder(folder)
    link = None if any(folder.glob("*.safetensors")) else read_link(folder)
    with opened_link(link) if link else nullcontext() as source:
        with importing():
            import torch
            from transformers import AutoModelForCausalLM
            from transformers.distributed.configuration_utils import DistributedConfig
        settings: dict[str, Any] = {"trust_remote_code": False, "dtype": getattr(torch, dtype)}
        if tensor_parallel_size > 1:
            settings["distributed_config"] = DistributedConfig(tp_size=tensor_parallel_size)
        with _reading(folder):
            tokenizer = _tokenizer(folder)
            if source:
                model = load_linked(folder, source, **settings)
            else:
                model = AutoModelForCausalLM.from_pretrained(
                    folder, local_files_only=True, use_safetensors=True, **settings
                )
    if tensor_parallel_size == 1:
        own = index is not None and DEVICES[device].own_for_each_process
        model = model.to(f"{device}:{index}" if own else device)
    startup.imported()
    return Loaded(model.eval(), tokenizer, _context(model.config, seq_len))


def describe(folder: Path, *, seq_len: int) -> Loaded:
    """Return a model without weights, for a process that only tokenizes and lets others compute."""
    check_folder(folder)
    with importing():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    with _reading(folder):
        tokenizer = _tokenizer(folder)
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    startup.imported()
    return Loaded(model.eval(), tokenizer, _context(config, seq_len))


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except HlatctlError:
        raise
    except ImportError as error:  # transformers imports a model's class when it is first used
        cause: Exception = error
        while isinstance(cause.__cause__, Exception):
            cause = cause.__cause__
        raise DependencyError(
            f"--model={folder}: transformers can't import the model's class ({first_line(cause)})",
            hint="install what is missing. Text models need no torchvision, torchaudio or torchcodec: if one of them "
            "doesn't fit torch, `pip uninstall torchvision torchaudio torchcodec`",
        ) from error
    except Exception as error:  # transformers and safetensors raise all kinds of errors for damaged files
        raise EvaluationError(f"--model={folder}: can't be loaded ({first_line(error)})", hint=_EXPORT_HINT) from error


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _context(config: Any, seq_len: int) -> int:
    return min(seq_len, int(getattr(config, "max_position_embeddings", None) or seq_len))


def is_there(device: str) -> bool:
    """Return whether PyTorch has such a device on this machine."""
    import torch

    package = DEVICES[device].package
    if package is not None and importlib.util.find_spec(package) is None:
        return False
    if package is not None:
        importlib.import_module(package)
    try:
        return bool(torch.get_device_module(device).is_available())
    except RuntimeError:  # a device that this PyTorch doesn't know
        return False


def check_devices(config: Config, device: str) -> None:
    """Check that PyTorch has enough devices for an evaluation, so that it never falls back to the CPU."""
    if not is_there(device):
        key = "eval.device" if config.eval.device else "backend.device"
        ask = LAUNCHERS[config.cluster.launcher].device_hint
        raise EvaluationError(
            f"{key}={device}: PyTorch finds no such device on {node_name()}, where the evaluation runs",
            hint=f"{ask and ask + '; '}eval.device=cpu evaluates on the CPU",
        )
    import torch

    count = config.eval.replicas * config.eval.tensor_parallel_size
    if DEVICES[device].own_for_each_process and (found := torch.get_device_module(device).device_count()) < count:
        raise EvaluationError(
            f"eval.replicas x eval.tensor_parallel_size = {count}: there are only {found} devices {device} here",
            hint=f"choose both so that their product is at most {found}",
        )


def check_heads(folder: Path, tensor_parallel_size: int) -> None:
    """Check that this many processes can share a model's heads, or raise an EvaluationError."""
    config = files.read_json(folder / "config.json")
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads") or 1
    if heads % tensor_parallel_size:
        raise EvaluationError(
            f"eval.tensor_parallel_size={tensor_parallel_size}: does not divide the model's {heads} key-value heads",
            hint=f"use a divisor of {heads}",
        )


def device_name(device: str) -> str:
    """Return a device with the name of its model, such as ``cuda: NVIDIA H200``; only its kind if it isn't here."""
    if device == "cpu" or not is_there(device):
        return device
    import torch

    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return f"{device}: {name()}" if name else device


@contextmanager
def importing() -> Iterator[None]:
    """Import packages that the evaluation needs."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing_package(error.name) from None


def missing_package(name: str | None) -> DependencyError:
    """Return the error for a package that the evaluation needs."""
    return DependencyError(f"the package {name} is not installed", hint=install("eval"))


def package_folder(name: str, distribution: str) -> Path:
    """Return the folder of an installed package without importing it; DependencyError if it is not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise missing_package(distribution)
    return Path(spec.origin).parent
