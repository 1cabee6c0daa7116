"""Exchange of JSON values over a torch process group."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_json(value: Any, device: torch.device, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every process's JSON value: gather the lengths, then the padded texts."""
    world_size = dist.get_world_size(group)
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([len(mine)], device=device), group=group)
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8, device=device)
    padded[: len(mine)] = mine
    received = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(received, padded, group=group)
    pairs = zip(received, sizes, strict=True)
    return [json.loads(bytes(text[: int(size)].cpu().numpy())) for text, size in pairs]
