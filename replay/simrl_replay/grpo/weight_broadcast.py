"""The weights of a model, broadcast from one process to all others of this machine: predicted, and
timed.

Invariant: nothing counts unless every process ends with the bytes of the first. The seconds of a
broadcast run from a barrier, after a warm-up, until the slowest process's device has finished.
Processes meet in a file and talk over the loopback and the links of their GPUs (NCCL; on a CPU
gloo): nothing reaches a network.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from simrl.errors import StoppedError
from simrl.files import temporary_folder
from simrl.profile.hardware import Gpu
from simrl.profile.model_shape import ModelShape
from simrl.training.config import TrainingConfig
from simrl.training.weight_sync import loading_s, publication_s, synced_by

METHODS = {
    "tensor by tensor": "gather_broadcast",
    "in buckets": "broadcast",
}  # simrl's, by the way of sending
UNLIKE = (
    "one GPU holds all weights: nothing is gathered from others first",
    "what arrives is kept: no engine pauses or loads it",
    "the receivers know names and shapes beforehand",
)


def predict(model: ModelShape, card: Gpu, ranks: int) -> dict[str, dict[str, Any]]:
    """Return the predicted seconds of either way, and what they rest on: a trainer of one GPU, a
    worker on each other one."""
    configs = {
        way: TrainingConfig.model_validate({"weight_sync": method})
        for way, method in METHODS.items()
    }
    return {
        way: {
            "predicted_s": publication_s(config, model, card, 1)
            + loading_s(config, model, card, 1, ranks - 1, 1),
            "rests_on": f"{synced_by(config, model, card)}; {card.source}",
        }
        for way, config in configs.items()
    }


def tensor_shapes(folder: Path) -> list[tuple[int, ...]]:
    """Return the shapes of a model's weights, from its config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder, local_files_only=True)
        )
    return [tuple(weights.shape) for weights in model.parameters()]


def broadcast(
    shapes: list[tuple[int, ...]],
    ranks: int,
    device: str,
    deadline_s: float = 120.0,
    bucket_bytes: int = 512 * 2**20,
) -> dict[str, float]:
    """Broadcast random bfloat16 weights of these shapes from the first of `ranks` processes, each
    on its GPU of the visible ones. Return the median seconds by the way of sending. Raise
    `StoppedError` if a process fails or waits longer than the deadline, or if other bytes arrive
    than were sent."""
    with temporary_folder() as folder:
        try:
            spawn(
                _rank, (ranks, shapes, device, folder, deadline_s, bucket_bytes), ranks, daemon=True
            )
        except ProcessException as error:
            raise StoppedError(
                f"rank {error.error_index}: {str(error).strip().splitlines()[-1]}"
            ) from None
        reports = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    if any(report["digests"] != reports[0]["digests"] for report in reports):
        raise StoppedError("weight sync: other bytes arrived than were sent")
    return {
        way: median(map(max, zip(*(report[way] for report in reports), strict=True)))
        for way in METHODS
    }


def _rank(
    rank: int,
    ranks: int,
    shapes: list[tuple[int, ...]],
    device: str,
    folder: Path,
    deadline_s: float,
    bucket_bytes: int,
) -> None:
    """Run a process of the group: broadcast both ways, and write its seconds and a digest of each
    tensor."""
    os.environ.update(NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=deadline_s),
    )
    report: dict[str, list[float]] = {"digests": []}
    for way in METHODS:
        weights = [
            (torch.zeros if rank else torch.randn)(shape, device=device, dtype=torch.bfloat16)
            for shape in shapes
        ]
        report[way] = [_timed(way, weights, bucket_bytes) for _ in range(4)][
            1:
        ]  # the first warms up
        report["digests"] += [zlib.crc32(each.cpu().view(torch.uint8).numpy()) for each in weights]
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()  # none leaves while another may still receive
    dist.destroy_process_group()


def _timed(way: str, weights: list[torch.Tensor], bucket_bytes: int) -> float:
    """Return the seconds of a broadcast at this process."""
    finish = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    dist.barrier()  # which waits for the device, too
    started_s = time.monotonic()
    if way == "in buckets":  # tensors are copied into a bucket, which is sent, and out of it
        dist._broadcast_coalesced(dist.group.WORLD, weights, bucket_bytes, 0)
    else:
        for each in weights:
            dist.broadcast(each, 0)
    finish()
    return time.monotonic() - started_s
