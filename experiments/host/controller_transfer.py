"""Measures the rate at which one controller process hands a batch to its workers through Ray, and takes results back.

    python3 experiments/host/controller_transfer.py --out controller_transfer.json

Needs torch and ray. The controller does what verl's does with a batch: it cuts the tensors in one part a worker, saves each
part with `torch.save`, and puts it into Ray's object store; a worker loads its part. Back, a worker saves and the controller
loads and concatenates. One part is in work at a time, as in the controller. Rates are bytes of the tensors over seconds, the
medians of `REPEATS`.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import ray
import torch

REPEATS, WORKERS = 5, 8
COLUMNS = 4  # int64: input_ids, attention_mask, position_ids, responses


def saved(part: dict[str, torch.Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save(part, buffer)
    return buffer.getvalue()


def loaded(data: bytes) -> dict[str, torch.Tensor]:
    return torch.load(io.BytesIO(data))


def seconds(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def rates(sequences: int, width: int) -> dict[str, float]:
    """Return the rates of each way for a batch of sequences padded to `width` tokens."""
    batch = {str(i): torch.randint(1000, (sequences, width)) for i in range(COLUMNS)}
    size = sum(tensor.nbytes for tensor in batch.values())

    def parts() -> list[dict[str, torch.Tensor]]:
        cut = {key: tensor.chunk(WORKERS) for key, tensor in batch.items()}
        return [{key: cut[key][i].clone() for key in cut} for i in range(WORKERS)]

    def out() -> list[ray.ObjectRef]:
        return [ray.put(saved(part)) for part in parts()]

    there = out()

    def arrive() -> None:
        for reference in there:
            loaded(ray.get(reference))

    def back() -> dict[str, torch.Tensor]:
        arrived = [loaded(ray.get(reference)) for reference in there]
        return {key: torch.cat([part[key] for part in arrived]) for key in batch}

    times = {"out": seconds(out), "loaded by one worker": seconds(arrive), "back": seconds(back)}
    return {f"{name}, bytes_per_s": size / taken for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=4 * 2**30)
    found = {
        f"{n} x {width}": rates(n, width) for n, width in ((2048, 1536), (512, 8192), (512, 28672))
    }
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
