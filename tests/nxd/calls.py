"""Every call of the Neuron libraries that our source makes, read from the source: name, arguments, line.

A name is resolved through the module's imports; ``**self._x`` and ``**function()`` through the dictionaries that the
source writes down for them. What else is spread fails: it could not be checked.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCES = (
    "trainer/backends/nxd.py",
    "trainer/backends/nxd_optim.py",
    "trainer/backends/nxd_parts.py",
    "trainer/convert/nxd_exchange.py",
)
GOLDEN = Path(__file__).with_name("signatures.json")
LIBRARIES = ("neuronx_distributed", "torch_xla")
#: Where our source keeps a library's module, and what the keys of a dictionary become arguments of.
_KEPT = {"self._nxd": "neuronx_distributed", "self._xla": "torch_xla"}
_SPREAD_LATER = dict.fromkeys(("pipeline_config", "pipeline_modules"), "neuronx_distributed.pipeline.NxDPPModel")


@dataclass(frozen=True)
class Call:
    """A call: of what, with how many positional arguments and which keywords, where."""

    name: str
    positional: int
    keywords: tuple[str, ...]
    where: str


def calls() -> list[Call]:
    """All of them."""
    return [call for source in SOURCES for call in _calls_of(source)]


def fits(call: Call, parameters: list[list[Any]]) -> str | None:
    """Why a call does not fit a signature, None if it does.

    Args:
        call: a call.
        parameters: ``[name, kind, required]`` each, without ``self``.
    """
    signature = inspect.Signature(
        [
            inspect.Parameter(
                name,
                inspect._ParameterKind[kind],
                default=inspect.Parameter.empty if required or kind.startswith("VAR_") else None,
            )
            for name, kind, required in parameters
        ]
    )
    try:
        signature.bind(*[None] * call.positional, **dict.fromkeys(call.keywords))
    except TypeError as error:
        return f"{call.where}: {call.name}{signature}: {error}"
    return None


def recorded(function: Any) -> list[list[Any]]:
    """A signature as it is kept: of a class what its constructor takes."""
    return [
        [parameter.name, parameter.kind.name, parameter.default is inspect.Parameter.empty]
        for parameter in inspect.signature(function).parameters.values()
    ]


def _calls_of(source: str) -> list[Call]:
    tree = ast.parse((ROOT / source).read_text(encoding="utf-8"))
    names, dictionaries = _imports(tree), _dictionaries(tree)
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = _resolve(ast.unparse(node.func), names)
        if name is None and ast.unparse(node.func) == "super().__init__":
            name = _base_of(tree, node, names)
        if name and name.startswith(LIBRARIES):
            keywords = [key for keyword in node.keywords for key in _keys(keyword, dictionaries)]
            found.append(Call(name, len(node.args), tuple(keywords), f"{source}:{node.lineno}"))
    for function, keys in dictionaries.items():
        if target := _SPREAD_LATER.get(function.lstrip("_")):
            found.append(Call(target, 1, keys, f"{source}:{function}"))
    return found


def _imports(tree: ast.Module) -> dict[str, str]:
    names = dict(_KEPT)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _resolve(written: str, names: dict[str, str]) -> str | None:
    for start, whole in names.items():
        if written == start or written.startswith(f"{start}."):
            return whole + written[len(start) :]
    return None


def _base_of(tree: ast.Module, call: ast.Call, names: dict[str, str]) -> str | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.bases and call in list(ast.walk(node)):
            return _resolve(ast.unparse(node.bases[0]), names)
    return None


def _dictionaries(tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """Keys of the dictionaries that ``self._x = {…}`` assigns or a function returns, by ``self._x`` or its name."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            value = node.value.body if isinstance(node.value, ast.IfExp) else node.value
            if isinstance(value, ast.Dict):
                found[ast.unparse(node.target)] = _literal(value)
        elif isinstance(node, ast.FunctionDef):
            for child in ast.walk(node):
                if isinstance(child, ast.Return) and isinstance(child.value, ast.Dict):
                    found[node.name] = _literal(child.value)
    return found


def _literal(value: ast.Dict) -> tuple[str, ...]:
    return tuple(str(key.value) for key in value.keys if isinstance(key, ast.Constant))


def _keys(keyword: ast.keyword, dictionaries: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    return (keyword.arg,) if keyword.arg else dictionaries[ast.unparse(keyword.value)]
