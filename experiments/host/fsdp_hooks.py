"""Measures what FSDP's hooks add to the host's time of a wrapped layer, in one process without a GPU.

    python3 experiments/host/fsdp_hooks.py --out fsdp_hooks.json

Needs torch alone. Layers of seven products of 8 x 8 numbers, so that nothing but the host's work is timed, on the processor's
clock; the slope from 8 to 24 layers, less that of layers without FSDP.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

FEW, MANY = 8, 24
REPEATS = 30


class Layer(nn.Module):
    """As many products as a dense layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.products = nn.ModuleList(nn.Linear(8, 8) for _ in range(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for product in self.products:
            x = product(x)
        return x


def layers(count: int, kind: str) -> nn.Module:
    """Return a stack of layers, plain or wrapped."""
    stack = nn.Sequential(*(Layer() for _ in range(count)))
    if kind == "FSDP 1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            stack, auto_wrap_policy=ModuleWrapPolicy({Layer}), device_id=torch.device("cpu")
        )
    if kind == "FSDP 2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (1,))
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*stack, stack):
            fully_shard(part, mesh=mesh, mp_policy=precision)
    return stack


def seconds(work: Callable[[], Any]) -> float:
    """Return the median seconds of the processor of a piece of work."""
    taken = []
    for repeat in range(REPEATS + 5):
        began = time.process_time()
        work()
        if repeat >= 5:
            taken.append(time.process_time() - began)
    return statistics.median(taken)


def passes(stack: nn.Module) -> dict[str, float]:
    """Return the seconds of a forward pass and of a training pass."""
    x = torch.randn(4, 8)

    def forward() -> None:
        with torch.no_grad():
            stack(x)

    def train() -> None:
        stack(x).float().sum().backward()
        for parameter in stack.parameters():
            parameter.grad = None

    return {"forward": seconds(forward), "training": seconds(train)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(alone)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    of_layer: dict[str, dict[str, float]] = {}
    for kind in ("plain", "FSDP 1", "FSDP 2"):
        few, many = (passes(layers(count, kind)) for count in (FEW, MANY))
        of_layer[kind] = {name: (many[name] - few[name]) / (MANY - FEW) for name in few}
    hooks = {
        kind: {name: times[name] - of_layer["plain"][name] for name in times}
        for kind, times in of_layer.items()
        if kind != "plain"
    }
    record = {"torch": torch.__version__, "layer_s": of_layer, "hooks_s": hooks}
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(hooks, indent=1))


if __name__ == "__main__":
    main()
