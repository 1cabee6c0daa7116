"""Writes this folder's schemas from a wheel of kubernetes-validate. README.md gives the commands."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
#: The first version whose servers keep ``podReplacementPolicy`` by default, one of 2025, and the newest of the package.
VERSIONS = ("1.29", "1.33", "1.37")
_RBAC = "rbac.authorization.k8s.io"
#: Groups and names.
KINDS = {
    ("", "Namespace"),
    ("", "Service"),
    ("", "ServiceAccount"),
    ("batch", "Job"),
    (_RBAC, "ClusterRole"),
    (_RBAC, "ClusterRoleBinding"),
    (_RBAC, "Role"),
    (_RBAC, "RoleBinding"),
}
KIND = "x-kubernetes-group-version-kind"
_PREFIX = "/api/_definitions.json"


def collected(definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the definitions of our kinds, and of everything in them."""
    found: dict[str, Any] = {}
    left = [name for name, one in definitions.items() if _is_ours(one)]
    while left:
        name = left.pop()
        if name not in found:
            found[name] = _bare(definitions[name])
            left += _named(found[name])
    return dict(sorted(found.items()))


def _is_ours(definition: Any) -> bool:
    return any((one["group"], one["kind"]) in KINDS for one in definition.get(KIND, []) if one["version"] == "v1")


def _bare(value: Any) -> Any:
    """Return a schema without its descriptions. A property may have that name too."""
    if isinstance(value, list):
        return [_bare(one) for one in value]
    if not isinstance(value, dict):
        return value.removeprefix(_PREFIX) if isinstance(value, str) else value
    return {key: _bare(one) for key, one in value.items() if not (key == "description" and isinstance(one, str))}


def _named(value: Any) -> list[str]:
    """Return the definitions that a schema refers to."""
    if isinstance(value, list):
        return [name for one in value for name in _named(one)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"].removeprefix("#/$defs/")] if isinstance(value.get("$ref"), str) else []
    return own + [name for one in value.values() for name in _named(one)]


def main() -> None:
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        for version in VERSIONS:
            path = f"kubernetes_validate/kubernetes-json-schema/v{version}.0-local-strict/_definitions.json"
            definitions = collected(json.loads(wheel.read(path))["$defs"])
            lines = (f'"{name}":{json.dumps(one, separators=(",", ":"))}' for name, one in definitions.items())
            text = '{"$defs":{\n' + ",\n".join(lines) + "\n}}\n"
            (FOLDER / f"{version}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
