"""Weight sync: the seconds in which new weights leave the trainer and reach a rollout worker, by
the method that moves them.

Invariant: a method's seconds follow from bytes, tensors, buckets, placement and data-sheet rates,
and from constants that one measured row each sets, which `SOURCES` names;
`experiments/weight_sync.py` tests the other rows. Publication and load follow one another, and add
up to the measured time of a sync. With LoRA, merged weights are moved.

A broadcast is a pipeline of buckets (verl's checkpoint engine has two of each end): the trainer
fills one, the network carries another, and engines load a third, tensor by tensor, by name. The
slowest of the three decides; of the two others there is one bucket. Without overlap they add up.

A constant counts as measured where a scenario is like the rows that measured it, and as assumed
elsewhere (`extrapolated`): the cost of a tensor is measured for dense models, of a few hundred
tensors, and the rate of a host for nodes of H100.
"""

from __future__ import annotations

from math import ceil

from simrl.profile.hardware import GIB, Gpu
from simrl.profile.model_shape import ModelShape
from simrl.training.config import TrainingConfig

# Each is set by one row of experiments/weight_sync.md, in brackets: verl's delta_weight_sync.md,
# NeMo-RL's for a tensor.
# a tensor, at the host of an engine that loads it or of a GPU that reshards it (qwen3-4b: 0.21 to
# 0.34 s; 8 GPUs to 8, tp 1, are assumed)
TENSOR_S = 0.29e-3
# broadcast and delta: engines stop, buffers are made, engines go on (qwen3-0.6b, one A100 node: 0.61 s)
PAUSE_S = 0.26
HOST_BYTES_PER_S = {
    "broadcast": 4.85e9,  # into buckets on the rank that sends (qwen2.5-32b, 2+2 H100 nodes: 14.2 s)
    "delta": 0.7e9,  # a GPU's shard is compared with the one it sent last (the same, 2 % changed: 6.2 s)
}
BUCKET_BYTES = 2 * GIB  # verl's update_weights_bucket_megabytes
# offload: to all GPUs of a node, not pinned (the same, on less off: 3.7 s)
PAGEABLE_NODE_BYTES_PER_S = 17.6e9
# PCIe 6, x16: a faster link is coherent (NVLink-C2C), and reaches pageable memory as any other
PCIE_BYTES_PER_S = 128e9
# Pinned copies of Adam's moments, by all GPUs of a node at once: 34.6 % of the link (verl's pull
# request 7347, PCIe 5).
PINNED_SHARE = 0.346
POSITION_BYTES = 4  # delta: of a changed parameter, beside its value
FULL_BYTES = 4  # of a trained parameter as FSDP shards it

_TENSORS = "tensors by NeMo-RL's qwen3-4b, whose placement is assumed"
SOURCES = {
    "broadcast": f"bytes by verl's qwen2.5-32b on 2+2 H100 nodes, pause by qwen3-0.6b, {_TENSORS}",
    "gather_broadcast": "link rates of the data sheet alone",
    "reshard": f"link rates, and {_TENSORS}",
    "delta": "comparison by verl's qwen2.5-32b on 2+2 H100 nodes, 2 % changed",
    "file": "training.weight_sync_storage_bytes_per_s, assumed if not given",
}
OFFLOAD_SOURCE = "offload by verl's qwen2.5-32b on 2+2 H100 nodes, on less off"


def synced_by(config: TrainingConfig, model: ModelShape, gpu: Gpu) -> str:
    """Return the method of a weight sync, whose constants it has, and which of them are
    extrapolated."""
    assert config.weight_sync is not None
    offload = f"; {OFFLOAD_SOURCE}" if config.weight_sync_offload else ""
    outside = [
        key.removeprefix("training.") for key in extrapolated(config, model, gpu, colocated=False)
    ]
    added = f"; extrapolated: {', '.join(outside)}" if outside else ""
    return f"{config.weight_sync} ({SOURCES[config.weight_sync]}{offload}{added})"


def tensor_s(config: TrainingConfig) -> float:
    """Return the seconds of a tensor at a host of speed 1."""
    return TENSOR_S if config.weight_sync_tensor_s is None else config.weight_sync_tensor_s


def extrapolated(
    config: TrainingConfig, model: ModelShape, gpu: Gpu, colocated: bool
) -> dict[str, float]:
    """Return the constants that a scenario uses where no row measured them, by the field that
    replaces each: the cost of a tensor for a mixture of experts and in a reshard, whose row states
    no placement; the rate of a host for other nodes."""
    method = None if colocated else config.weight_sync
    tensors = model.experts > 0 if method in (None, "broadcast") else method == "reshard"
    used = {
        "weight_sync_tensor_s": (
            tensors and not (colocated and config.switch_transfer_s is not None),
            tensor_s(config),
        ),
        "weight_sync_host_bytes_per_s": (
            gpu.name != "h100",
            HOST_BYTES_PER_S.get(method or "", 0.0),
        ),
    }
    return {
        f"training.{key}": value
        for key, (outside, value) in used.items()
        if outside and value and getattr(config, key) is None
    }


def publication_s(config: TrainingConfig, model: ModelShape, gpu: Gpu, gpus: int) -> float:
    """Return the seconds of a publication at a trainer of `gpus`: weights from the host if they are
    offloaded, then what the method does before the last bytes are sent."""
    trained = config.sharding == "fsdp" and not config.lora
    stored = FULL_BYTES * model.parameters if trained else model.weight_bytes
    host_s = (
        stored / gpus / copied_bytes_per_s(gpu, gpus, "pageable")
        if config.weight_sync_offload
        else 0.0
    )
    rate = gpu.bytes_per_s_among(gpus)
    if gpus > gpu.nvlink_domain:
        rate = min(rate, config.weight_sync_node_bytes_per_s or rate)
    gather_s = stored * (1 - 1 / gpus) / rate
    match config.weight_sync:
        case "reshard":
            return host_s + tensor_s(config) / gpu.host_speed * tensors_held(config, model)
        case "delta":
            return (
                host_s
                + model.weight_bytes / gpus / host_bytes_per_s(config)
                + gather_s * moved_bytes(config, model) / stored
            )
        case "file":
            return host_s + gather_s + model.weight_bytes / config.weight_sync_storage_bytes_per_s
        case "broadcast":
            return host_s + gather_s + moved_bytes(config, model) / host_bytes_per_s(config)
    return host_s + gather_s


def host_bytes_per_s(config: TrainingConfig) -> float:
    """Return the rate at which the sending host fills buckets or compares shards."""
    return config.weight_sync_host_bytes_per_s or HOST_BYTES_PER_S[config.weight_sync or ""]


def handing_s(config: TrainingConfig, model: ModelShape, gpu: Gpu) -> float:
    """Return the seconds in which a trainer hands the experts' tensors to an engine on its GPUs,
    one by one. The few hundred other tensors are in the measured constants of frameworks."""
    each_s = tensor_s(config) / gpu.host_speed
    return each_s * model.mlp_matrices * model.expert_layers * model.experts


def copied_bytes_per_s(gpu: Gpu, gpus: int, memory: str = "pinned") -> float:
    """Return the rate at which each of `gpus` copies from or to host memory, all at once: pinned
    memory, and any behind a coherent link (NVLink-C2C), over its own link; pageable memory at its
    share of what the host of a node copies."""
    pinned = PINNED_SHARE * gpu.host_bytes_per_s
    return (
        pinned
        if memory == "pinned" or gpu.host_bytes_per_s > PCIE_BYTES_PER_S
        else min(pinned, PAGEABLE_NODE_BYTES_PER_S / min(gpus, gpu.gpus_per_node))
    )


def loading_s(
    config: TrainingConfig,
    model: ModelShape,
    gpu: Gpu,
    gpus: int,
    workers: int,
    unit: int,
    parts: float = 0,
    trainer: Gpu | None = None,
) -> float:
    """Return the seconds of a load at a worker of `unit` GPUs, which hold 1 / `parts` of the
    weights each (0: 1 / `unit`; data-parallel ranks hold some weights each), one of `workers` that
    load at once from a trainer of `gpus` (of the kind `trainer` if it is a pool of its own, which
    the network reaches): one rank sends all tensors to everybody (NCCL's ring), or every GPU its
    shards, or the worker reads a file. Of a broadcast, what is not over when the trainer has filled
    its last bucket. Every rank gets every tensor, with divided experts, too."""
    one_domain = trainer is None and gpus + workers * unit <= gpu.nvlink_domain
    trainer = trainer or gpu
    network = config.weight_sync_node_bytes_per_s or min(
        gpu.network_bytes_per_s, trainer.network_bytes_per_s
    )
    one_rank = gpu.link_bytes_per_s if one_domain else network
    moved, parts = moved_bytes(config, model), parts or unit
    if config.weight_sync == "file":
        return moved / config.weight_sync_storage_bytes_per_s + moved / parts / gpu.host_bytes_per_s
    sent_s, loaded_s = moved / one_rank, tensor_s(config) / gpu.host_speed * model.tensors
    match config.weight_sync:
        case "broadcast":
            ends = moved / host_bytes_per_s(config), sent_s, loaded_s
            beside = ceil(moved / BUCKET_BYTES) if config.weight_sync_overlap else 1
            rest_s = (sum(ends) - max(ends)) / beside
            return PAUSE_S / gpu.host_speed + max(ends) - ends[0] + rest_s
        case "delta":
            return PAUSE_S / gpu.host_speed + sent_s
        case "gather_broadcast":
            return sent_s
    rate = one_rank
    if config.weight_sync_node_bytes_per_s and not one_domain:
        # The GPUs of a node share its card.
        rate /= min(trainer.gpus_per_node, gpu.gpus_per_node, gpus, workers * unit)
    return max(moved / parts, moved * (unit / parts) * workers / gpus) / rate


def moved_bytes(config: TrainingConfig, model: ModelShape) -> float:
    """Return the bytes that reach a worker: all weights, or the changed parameters with their
    positions."""
    if config.weight_sync == "broadcast" and config.weight_sync_precision == "fp32":
        return FULL_BYTES * model.parameters
    if config.weight_sync != "delta":
        return model.weight_bytes
    return config.weight_sync_delta_share * (model.weight_bytes + POSITION_BYTES * model.parameters)


def tensors_held(config: TrainingConfig, model: ModelShape) -> float:
    """Return the number of tensors of which a GPU of the trainer has a part: of its pipeline stage
    and its experts. NeMo-RL calls for a stack of experts at once, whose pieces are one by one."""
    experts = model.mlp_matrices * model.expert_layers * model.experts
    return (model.tensors - experts + experts / config.expert_parallel) / config.pipeline_parallel
