"""The `training` section of a scenario: inputs of the training model, each with its unit and
default."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from simrl.errors import broken
from simrl.validation import Section

# of one phase: eleven days; more is a mistake, and would drown the rest in rounding
MOST_SECONDS = 1e6
Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS)]
Share = Annotated[float, Field(ge=0.001, le=1)]
Rate = Annotated[float, Field(ge=1e6, le=1e15)]  # bytes a second


class TrainingConfig(Section):
    """Inputs of the training model. The defaults are assumptions until they are measured on the
    user's cluster."""

    mfu: Share | None = None
    """model FLOPs utilisation of an update: model FLOPs (6 per parameter and token, plus attention)
    over the data sheet's rate; if not given, an update's time is computed from its operations"""
    log_prob_mfu: Share | None = None
    """model FLOPs utilisation of a forward pass without gradients; computed if not given"""
    correction: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """factor on the seconds of updates and log-prob passes, overheads excluded; 1 = as computed"""
    kernels: Literal["eager", "fused"] = "eager"
    """element-wise kernels: eager (Hugging Face's layers in PyTorch: verl and others with FSDP) or
    fused (Transformer Engine: Megatron)"""
    logits: (
        Literal["log_softmax", "cross_entropy", "vocab_parallel", "by_sequence", "chunked"] | None
    ) = None
    """kernels from logits to log-probs. log_softmax: unfused, in fp32; cross_entropy: one kernel
    (FlashAttention's, which verl takes); vocab_parallel: Megatron's, in fp32; by_sequence: likewise,
    sequence by sequence (NeMo-RL); chunked: parts of the vocabulary, gradients in fp32 (TRL's
    asynchronous GRPO). If not given, log_softmax with eager kernels, and vocab_parallel with fused
    ones"""
    attention: Literal["fa2", "fa3"] = "fa2"
    """attention kernels: FlashAttention 2, or FlashAttention 3 or cuDNN's (Hopper)"""
    sharding: Literal["fsdp", "optimizer"] = "fsdp"
    """fsdp: weights are sharded over all GPUs and gathered for each micro-batch; optimizer: only
    gradients and optimizer states are sharded (Megatron's distributed optimizer), and are exchanged
    once for each mini-batch"""
    gather_overlap: bool = True
    """fsdp: gathering weights and reducing gradients go on beside the arithmetic. Where all streams
    share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1, which verl sets from 0.5 on), only what
    is asked for a layer ahead does: the weights of the backward pass"""
    tensor_parallel: PositiveInt = 1
    """GPUs that share each layer (Megatron TP with sequence parallelism)"""
    pipeline_parallel: PositiveInt = 1
    """stages of layers (1F1B)"""
    expert_parallel: PositiveInt = 1
    """GPUs among which the experts are divided (Megatron EP); all other layers are data-, tensor-
    or sequence-parallel"""
    expert_imbalance: Annotated[float, Field(ge=1, le=100)] = 1.0
    """tokens of the busiest GPU among the GPUs that divide the experts, over the mean; 1 (assumed):
    balanced"""
    grouped_experts: bool | None = None
    """experts in one grouped matrix product; if not, a loop of Python runs them one by one (Transformers
    4). If not given: grouped in Megatron (`sharding: optimizer`) and where PyTorch has the kernel,
    on compute capability 9 and 10 (H100, B200; 2.9 or newer); elsewhere PyTorch's product runs
    them one by one"""
    sequence_parallel: PositiveInt = 1
    """GPUs that share one sequence (Ulysses, Megatron CP)"""
    tokens_per_microbatch: PositiveInt = 32768
    """tokens of a micro-batch of one data-parallel rank; AReaL §7.5 uses 32,768"""
    log_prob_tokens_per_microbatch: PositiveInt | None = None
    """tokens of a micro-batch in log-prob passes; tokens_per_microbatch if not given"""
    microbatching: Literal["dynamic", "fixed", "padded"] = "dynamic"
    """dynamic: sequences packed first-fit-decreasing by tokens (AReaL Alg. 1; verl's
    use_dynamic_bsz); fixed: a fixed number of sequences, in the order of the batch: as many as fit
    if all had the batch's greatest length, or as the next two settings say; padded: as dynamic, but
    with pipeline stages each micro-batch is padded to the longest one (NeMo-RL)"""
    sequences_per_microbatch: PositiveInt | None = None
    """fixed: sequences of a micro-batch of a data-parallel rank, whatever their tokens (verl's
    ppo_micro_batch_size_per_gpu)"""
    log_prob_sequences_per_microbatch: PositiveInt | None = None
    """fixed: sequences of a micro-batch in log-prob passes (verl's log_prob_micro_batch_size_per_gpu); as in updates
    if not given"""
    microbatches: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """fixed: micro-batches of a mini-batch of a data-parallel rank, of equal numbers of sequences
    (AReaL's n_mbs)"""
    balance: Literal["minibatch", "batch", "none"] = "minibatch"
    """how sequences are dealt to data-parallel ranks. minibatch: mini-batch by mini-batch, so
    that ranks have equal tokens in each; batch: the whole batch at once, and each rank then cuts
    its part into mini-batches of unequal tokens (verl's balance_batch); none: in the order of the
    batch"""
    remove_padding: bool = False
    """fixed: sequences are packed (verl's use_remove_padding, AReaL); if not, each is padded to the
    longest of its micro-batch. The other settings of microbatching always pack"""
    padded_to: Literal["microbatch", "minibatch"] = "microbatch"
    """fixed, without remove_padding: whose longest sequence a rank pads its sequences to (minibatch:
    verl's pad_bshd_to_minibatch_max, its default with Megatron)"""
    extra_log_probs: NonNegativeInt = 0
    """log-prob passes in addition to the system's own (a reference, a teacher), each as long as the
    policy's unless `reference_model` is given"""
    reference_model: str | None = None
    """the model of these passes, a name or a folder with config.json; one pass if `extra_log_probs`
    is 0"""
    reference_weights: Literal["resident", "swapped", "streamed"] = "resident"
    """where the weights of these passes are. resident: on the GPUs; swapped: on the host, and
    swapped with the policy's weights for each pass (NeMo-RL with Megatron); streamed: on the host,
    and fetched for each micro-batch (verl's reference with FSDP's CPUOffload)"""
    minibatch_overhead_s: Seconds = 0.0
    """time of each mini-batch's update beyond its arithmetic, such as the optimizer step"""
    update_overhead_s: Seconds = 0.0
    """time of each update beyond its mini-batches: weights and optimizer states from the host and
    back (verl's offloading)"""
    log_prob_overhead_s: Seconds = 0.0
    """time of each log-prob pass over a batch beyond its arithmetic"""
    update_sequence_s: Annotated[float, Field(ge=0, le=10)] = 0.0
    """host time of each sequence in an update, at its data-parallel rank: losses that are computed
    one by one in Python"""
    log_prob_sequence_s: Annotated[float, Field(ge=0, le=10)] = 0.0
    """host time of each sequence in a log-prob pass, at its data-parallel rank"""
    ppo_epochs: Annotated[int, Field(ge=1, le=100)] = 1
    """passes over the batch in one update"""
    recompute: bool | None = None
    """activation checkpointing: each layer's forward pass is repeated in the backward pass. If not
    given: repeated where an update's time is computed from its operations, and not added where
    `mfu` is given"""
    lora: bool = False
    """LoRA: only adapters are trained, without gradients and optimizer states of the weights;
    merged weights are published"""
    controller_bytes_per_token: NonNegativeFloat = 64.0
    """bytes per token of a batch, padded to the longest prompt and the cap, that a single controller
    gathers and hands on: ids, masks, positions, log-probs, advantages (verl's DataProto); systems without a
    single controller have no such cost"""
    controller_bytes_per_s: PositiveFloat = 6e8
    """throughput of the controller, each time that it hands the batch on: from rollout, to each
    log-prob pass, and to the update; measured on one host (experiments/host)"""
    checkpoint_every: NonNegativeInt = 0
    """updates between checkpoints; 0: none"""
    checkpoint_s: Seconds = 0.0
    """time that training stops for a checkpoint"""
    evaluate_every: NonNegativeInt = 0
    """updates between evaluations; 0: none"""
    evaluate_s: Seconds = 0.0
    """time that every rollout worker spends on the evaluation set, after it has loaded the version
    to evaluate"""
    reward_s: Seconds = 0.2
    """time from the end of a response to its reward; assumed"""
    publish_s: Seconds = 0.5
    """time to publish new weights, in addition to gathering the shards over the network; assumed"""
    load_overhead_s: Seconds = 1.0
    """time of a weight sync at a worker beyond the transfer: pause, bucket set-up, resume;
    assumed"""
    load_s: Seconds | None = None
    """time of a weight sync at a worker, if measured; replaces the transfer and load_overhead_s"""
    weight_sync: Literal["broadcast", "gather_broadcast", "reshard", "delta", "file"] | None = None
    """method that moves new weights to rollout GPUs of their own. broadcast: from one rank, which
    gathers each tensor into buckets (verl's nccl); gather_broadcast: from one rank, gathered in one
    go; reshard: from all GPUs at once, shard to shard; delta: changed parameters only; file:
    through storage. A method replaces publish_s, load_overhead_s and their transfers; load_s
    replaces its part at the worker. Not used where rollout and training share GPUs; null: assumed
    seconds and link rates"""
    weight_sync_offload: bool = False
    """the trainer's weights are in host memory, and are moved to its GPUs before a weight sync"""
    weight_sync_delta_share: Annotated[float, Field(ge=1e-6, le=1)] = 0.02
    """delta: share of the parameters that an update changes (in bfloat16); verl's documentation
    reports 1 to 3 %"""
    weight_sync_precision: Literal["bf16", "fp32"] = "bf16"
    """broadcast: precision in which weights are sent. fp32 where the trainer sends its master weights
    (VeOmni; verl's FSDP from 27 July 2026 on), and engines convert them"""
    weight_sync_overlap: bool = True
    """broadcast: filling, sending and loading of buckets go on beside each other (verl, NeMo-RL); if not, a
    bucket is loaded before the next one is filled (slime)"""
    weight_sync_tensor_s: Annotated[float, Field(ge=0, le=1)] | None = None
    """time of each tensor in a weight sync, at the host of an engine that loads it by name, or of a GPU
    that reshards it; if not given, 0.29 ms: measured on a dense model; for experts extrapolated,
    thus assumed"""
    weight_sync_host_bytes_per_s: Rate | None = None
    """rate at which the sending host puts weights into buckets (broadcast) or a GPU's shard is
    compared (delta); if not given, 4.85 and 0.7 GB/s: measured on nodes of H100; for others
    extrapolated, thus assumed"""
    weight_sync_storage_bytes_per_s: Rate = 2e9
    """file: rate at which a node writes to storage or reads from it; assumed"""
    weight_sync_node_bytes_per_s: Rate | None = None
    """network rate of a whole node in weight syncs, where its GPUs share one network card (no
    RDMA); if not given, each GPU has the data sheet's"""
    offload: Literal["switch", "phases", "none"] = "switch"
    """the states that are moved to host memory. switch: weights and optimizer states of colocated
    training, before a rollout and back after it; phases: colocated, each phase fetches the states
    it needs and returns them (verl's param_offload and optimizer_offload); none: states stay on the
    GPUs. Gradients are never copied: an update has used them up"""
    offload_memory: Literal["pinned", "pageable"] = "pinned"
    """host memory of these states. pinned: each GPU copies at 35 % of its link (as verl's copies of
    optimizer states do);
    pageable: the GPUs of a node share 17.6 GB/s (measured on H100 nodes)"""
    rollout_offload: bool = False
    """colocated: the engine's weights go to pinned host memory before training and back after it
    (vLLM's sleep at level 1)"""
    switch_s: Seconds = 2.0
    """colocated, each way: time to change between rollout and training, in addition to moving
    weights and optimizer states to or from the host; assumed"""
    switch_transfer_s: Seconds | None = None
    """time to move these states, if measured; replaces the transfer. A calibrated run has 0 here
    and in `switch_s`: the phases of its log contain both"""

    @model_validator(mode="after")
    def _settings_agree(self) -> TrainingConfig:
        of_fixed = (
            "sequences_per_microbatch",
            "log_prob_sequences_per_microbatch",
            "microbatches",
            "remove_padding",
        )
        if wrong := broken(
            (
                self.lora and self.weight_sync == "delta",
                "weight_sync is delta with lora: merging adapters changes all weights; use another method",
            ),
            *(
                (
                    getattr(self, key) and self.microbatching != "fixed",
                    f"{key} is {str(getattr(self, key)).lower()}, and microbatching {self.microbatching}; use "
                    "microbatching: fixed",
                )
                for key in of_fixed
            ),
            (
                self.sequences_per_microbatch and self.microbatches,
                f"sequences_per_microbatch is {self.sequences_per_microbatch}, and microbatches {self.microbatches}; use one",
            ),
        ):
            raise ValueError(wrong)
        return self

    @property
    def gpus_per_rank(self) -> int:
        """The GPUs that share a micro-batch."""
        return self.sequence_parallel * self.tensor_parallel * self.pipeline_parallel

    @property
    def logits_by(self) -> str:
        """The kernels from logits to log-probs."""
        return self.logits or ("log_softmax" if self.kernels == "eager" else "vocab_parallel")

    @property
    def reference_passes(self) -> int:
        """The log-prob passes in addition to the system's own."""
        return max(self.extra_log_probs, int(self.reference_model is not None))


def trained_by(scenario: Mapping[str, Any]) -> str:
    """Return how an update's seconds are found."""
    training, precision = (
        scenario["training"],
        (scenario.get("precision") or {}).get("training") or "bf16",
    )
    if training.get("mfu") is not None:
        return f"mfu {training['mfu']}, from the scenario"
    attention = f"FlashAttention {'3' if training.get('attention') == 'fa3' else '2'}"
    if (training.get("expert_parallel") or 1) > 1:
        busiest = training.get("expert_imbalance") or 1
        attention += (
            ", experts balanced (assumed)"
            if busiest == 1
            else f", the busiest GPU's experts {busiest:g} × the mean"
        )
    attention += f", products in {precision}" if precision != "bf16" else ""
    recomputed = "" if training.get("recompute") is False else ", activations recomputed"
    return (
        f"computed from the operations ({training.get('kernels')} kernels, {attention}{recomputed})"
    )


def assumed_s(
    training: Mapping[str, Any], colocated: bool, known: Collection[str] = ()
) -> dict[str, float]:
    """Return the assumed seconds of a system that still have their defaults, by field
    (`training.switch_s`), and the assumed rate of a storage that stands for seconds; without those
    that are `known` by the framework."""
    keys = [
        "switch_s" if colocated else "publish_s",
        *([] if training["load_s"] is not None else ["load_overhead_s"]),
    ]
    if (method := training.get("weight_sync")) and not colocated:
        keys = ["weight_sync_storage_bytes_per_s"] if method == "file" else []
    defaults = TrainingConfig().model_dump()
    return {
        f"training.{key}": defaults[key]
        for key in (*keys, "reward_s")
        if 0 < defaults[key] == training[key] and key not in known
    }


def assumption(assumed: Iterable[tuple[str, float]]) -> str:
    """Return the line that names the assumed seconds, as settings; runs may differ in one."""
    values: dict[str, list[str]] = {}
    for key, value in assumed:
        values.setdefault(key, []).append(f"{value:g}")
    settings = " ".join(
        f"{key}={' or '.join(alternatives)}" for key, alternatives in values.items()
    )
    return f"Assumed seconds (set your own if known): {settings}"
