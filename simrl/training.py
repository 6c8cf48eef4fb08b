"""What a training step costs: seconds of its phases from the sequences in the batch, and the memory it needs.

Invariant: time follows from work that is carried out, not from a mean: sequences are dealt to data-parallel ranks, packed
into micro-batches on each, and a phase ends when its slowest rank does. Efficiencies are inputs (`TrainingConfig`), each
with its source; they can be measured and are never fitted to the outcome of a schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from simrl.hardware import Gpu, ModelShape

Ints = NDArray[np.int64]

BYTES_PER_PARAMETER = 2 + 4 + 4 + 8  # bf16 weights, fp32 gradients, fp32 master weights, two fp32 Adam moments
WEIGHT_BYTES = 2  # of those, where only adapters are trained
MOST_SECONDS = 1e6  # of one phase: eleven days; more is a mistake, and would drown the rest in rounding


class TrainingConfig(BaseModel):
    """Inputs of the training model. The defaults are assumptions until they are measured on the user's cluster."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    mfu: float = Field(
        default=0.35,
        ge=0.001,
        le=1,
        description="model FLOPs (6 a parameter and token, attention as it is) over the data sheet's, micro-batches full; "
        "assumed: a verl run on 4 GPUs logs 0.37, published RL benchmarks span 0.14-0.5",
    )
    log_prob_mfu: float = Field(default=0.35, ge=0.001, le=1, description="the same for a forward pass alone; assumed")
    sequence_parallel: int = Field(default=1, gt=0, description="GPUs that share one sequence (Ulysses, Megatron TP)")
    tokens_per_microbatch: int = Field(
        default=32768, gt=0, description="of one data-parallel rank; AReaL §7.5 uses 32,768"
    )
    microbatching: Literal["dynamic", "fixed"] = Field(
        default="dynamic",
        description="dynamic: first-fit-decreasing by tokens (AReaL Alg. 1); fixed: so many sequences that the longest fit",
    )
    extra_log_probs: int = Field(
        default=0,
        ge=0,
        description="forward passes besides the system's own, in passes of the policy: a reference, a teacher",
    )
    minibatch_overhead_s: float = Field(
        default=0.0,
        ge=0,
        le=MOST_SECONDS,
        description="of each mini-batch's update, besides its arithmetic: the optimizer's step, states that come from the host",
    )
    log_prob_overhead_s: float = Field(
        default=0.0, ge=0, le=MOST_SECONDS, description="of each forward pass over a batch, besides its arithmetic"
    )
    ppo_epochs: int = Field(default=1, ge=1, le=100, description="passes over the batch in one update")
    attention_mfu: float | None = Field(
        default=None,
        ge=0.001,
        le=1,
        description="mfu of attention alone, mfu being that of all else; not set: as mfu",
    )
    recompute: bool = Field(
        default=False,
        description="activation checkpointing: the matrix products of each layer once more in the backward pass; mfu then is "
        "that of all FLOPs that are carried out",
    )
    lora: bool = Field(
        default=False,
        description="adapters are trained: no gradients, no optimizer states of the weights; merged ones are published",
    )
    activation_passes: float = Field(
        default=0.0,
        ge=0,
        le=1000,
        description="times that a forward pass moves what its matrix products read and write through memory, besides them "
        "(norms, positions, adapters); the backward pass as much twice over. 0: mfu has it in",
    )
    logit_passes: float = Field(
        default=0.0, ge=0, le=1000, description="the same of the logits in fp32 (log-probs, entropy)"
    )
    controller_bytes_per_token: float = Field(
        default=64.0,
        ge=0,
        description="of a batch, padded to its longest sequence, that a single controller gathers and hands on: ids, masks, "
        "positions, log-probs, advantages (verl's DataProto); systems without a central hop do not pay it",
    )
    controller_bytes_per_s: float = Field(default=2e9, gt=0, description="through the controller; assumed")
    checkpoint_every: int = Field(default=0, ge=0, description="updates from checkpoint to checkpoint; 0: none")
    checkpoint_s: float = Field(
        default=0.0, ge=0, le=MOST_SECONDS, description="for which training stands still at a checkpoint"
    )
    evaluate_every: int = Field(default=0, ge=0, description="updates from evaluation to evaluation; 0: none")
    evaluate_s: float = Field(
        default=0.0,
        ge=0,
        le=MOST_SECONDS,
        description="for which every rollout worker generates the evaluation set, after it has loaded the version to evaluate",
    )
    reward_s: float = Field(
        default=0.2, ge=0, le=MOST_SECONDS, description="from the end of a response to its reward; assumed"
    )
    publish_s: float = Field(
        default=0.5,
        ge=0,
        le=MOST_SECONDS,
        description="of publishing new weights, besides gathering the shards over the network; assumed",
    )
    load_overhead_s: float = Field(
        default=1.0,
        ge=0,
        le=MOST_SECONDS,
        description="of a change of weights, besides the transfer: pause, bucket set-up, resume; assumed",
    )
    load_s: float | None = Field(
        default=None,
        ge=0,
        le=MOST_SECONDS,
        description="of a change of weights, where that is known; replaces the transfer and load_overhead_s",
    )
    switch_s: float = Field(
        default=2.0,
        ge=0,
        le=MOST_SECONDS,
        description="colocated, each way: of changing between rollout and training, besides moving weights, gradients and "
        "optimizer states to or from the host; assumed",
    )


def assumed_s(training: Mapping[str, Any], colocated: bool) -> list[str]:
    """The seconds of a system that nobody measured and that stand as they are by default, as `training.switch_s=2`."""
    asked = ["switch_s" if colocated else "publish_s", *([] if training["load_s"] is not None else ["load_overhead_s"])]
    defaults = TrainingConfig().model_dump()
    return [f"training.{key}={defaults[key]:g}" for key in (*asked, "reward_s") if 0 < defaults[key] == training[key]]


Phase = tuple[str, float]  # kind of span, seconds


@dataclass(frozen=True)
class TrainingCosts:
    """The phases of one policy update on `gpus` GPUs. `minibatches` PPO updates an epoch; `log_probs` forward passes before
    them (old policy, reference, AReaL's proximal policy). `switch` says that rollout runs on the same GPUs, `controller` that
    the batch goes through one process on its way."""

    model: ModelShape
    gpu: Gpu
    gpus: int
    config: TrainingConfig
    minibatches: int
    log_probs: int
    switch: bool
    controller: bool = False

    @property
    def ranks(self) -> int:
        return self.gpus // self.config.sequence_parallel

    def phases(self, lengths: Ints, version: int = 0, publish: bool = True) -> list[Phase]:
        """All of them in order, for a batch of sequences with so many tokens each; the update makes `version` + 1."""
        return (
            self.before(lengths)
            + self.inference(lengths)
            + self.update(lengths, self.minibatches)
            + self.after(version, publish)
        )

    def before(self, lengths: Ints) -> list[Phase]:
        """What precedes the work: the batch's way through the controller, the switch from rollout to training."""
        config = self.config
        batch_bytes = float(lengths.size * lengths.max(initial=0)) * config.controller_bytes_per_token
        transfer = [("transfer", batch_bytes / config.controller_bytes_per_s)] if self.controller else []
        return transfer + ([("switch", self.switch_s)] if self.switch else [])

    def inference(self, lengths: Ints) -> list[Phase]:
        """The log-probs of some sequences."""
        if not self.log_probs or not lengths.size:
            return []
        pass_s = self.config.log_prob_overhead_s + self.pass_s(lengths, 1, self.config.log_prob_mfu)
        return [("log_prob", self.log_probs * pass_s)]

    def update(self, lengths: Ints, minibatches: int) -> list[Phase]:
        """Gradients and optimizer steps on some sequences, in so many mini-batches, `ppo_epochs` times over."""
        parts = [part for part in np.array_split(lengths, minibatches) if part.size]
        train_s = sum(self.config.minibatch_overhead_s + self.pass_s(part, 3, self.config.mfu) for part in parts)
        return [("train", self.config.ppo_epochs * train_s)]

    def after(self, version: int, publish: bool = True) -> list[Phase]:
        """What follows the work: the weights go to the rollout workers (unless nothing is published), and at times to disk."""
        publish_s = self.config.publish_s + self.model.weight_bytes / self.gpu.bytes_per_s_among(self.gpus)
        phases = [("switch", self.switch_s)] if self.switch else [("publish", publish_s)] if publish else []
        if self.config.checkpoint_every and (version + 1) % self.config.checkpoint_every == 0:
            phases.append(("checkpoint", self.config.checkpoint_s))
        return phases

    @property
    def switch_s(self) -> float:
        """Colocated, one way: weights, gradients and optimizer states to or from the host."""
        return self.config.switch_s + self.state_bytes / self.gpu.host_bytes_per_s

    @property
    def reshard_s(self) -> float:
        """Of moving all states to where another number of GPUs needs them, over the network."""
        return self.config.switch_s + self.state_bytes / self.gpu.network_bytes_per_s

    def pass_s(self, lengths: Ints, passes: int, mfu: float) -> float:
        """Seconds of one sweep over the sequences: `passes` is 1 for a forward pass, 3 with the backward one.

        A micro-batch takes its arithmetic or the gathering of the sharded weights (FSDP: once for each of forward and
        backward, and the gradients reduced once), whichever is longer.
        """
        sharded = 1.0 - 1.0 / self.gpus
        gather_s = (
            passes * self.model.weight_bytes * sharded / self.gpu.bytes_per_s_among(self.gpus) if self.gpus > 1 else 0.0
        )
        budget = max(self.config.tokens_per_microbatch, int(lengths.max()))
        busy_s = np.zeros(self.ranks)
        rank_of = deal(lengths, longest_first(lengths), self.ranks)
        for rank in range(self.ranks):
            for microbatch in self.microbatches(lengths[rank_of == rank], budget):
                busy_s[rank] += max(self._work_s(microbatch, passes, mfu), gather_s)
        return float(busy_s.max())

    def _work_s(self, microbatch: Ints, passes: int, mfu: float) -> float:
        """Seconds of a micro-batch's arithmetic, and of what moves through memory beside it."""
        config, model = self.config, self.model
        tokens, attended = float(microbatch.sum()), float((microbatch**2).sum()) / 2
        again = int(config.recompute and passes > 1)
        spared = int(config.lora and passes > 1)  # the gradients of the weights
        flops = passes * model.forward_flops(tokens, attended) + (again - spared) * model.forward_flops(tokens, 0.0)
        rate = self.gpu.bf16_flops * mfu * config.sequence_parallel
        seconds = flops / rate
        if config.attention_mfu is not None:
            seconds += passes * model.forward_flops(0.0, attended) / rate * (mfu / config.attention_mfu - 1)
        moved = config.activation_passes * (passes + again) * model.activation_bytes(tokens)
        moved += config.logit_passes * passes * 4.0 * model.vocab * tokens
        return seconds + moved / self.gpu.memory_bytes_per_s / config.sequence_parallel

    def microbatches(self, lengths: Ints, budget_tokens: int) -> list[Ints]:
        """The sequences of one rank, packed so that no micro-batch exceeds the budget."""
        if self.config.microbatching == "fixed":
            each = max(1, budget_tokens // int(lengths.max())) if lengths.size else 1
            return [lengths[i : i + each] for i in range(0, lengths.size, each)]
        bins = pack(lengths, longest_first(lengths), budget_tokens)
        return [lengths[bins == b] for b in range(int(bins.max()) + 1)] if lengths.size else []

    @property
    def state_bytes(self) -> float:
        """Per GPU: weights, gradients and optimizer states, sharded over all."""
        each = WEIGHT_BYTES if self.config.lora else BYTES_PER_PARAMETER
        return each * self.model.parameters / self.gpus

    def memory_bytes(self, longest_tokens: int) -> float:
        """Per GPU: sharded states, gathered weights of one layer, checkpointed activations of one micro-batch (a sequence of
        `longest_tokens` has to fit), one layer's working set, logits in chunks of 4,096 tokens (as the frameworks' fused
        log-prob kernels keep them)."""
        m = self.model
        tokens = max(self.config.tokens_per_microbatch, longest_tokens) / self.config.sequence_parallel
        layer = 2 * 2 * m.layer_parameters
        checkpoints = 2 * m.layers * m.hidden * tokens
        working = 2 * tokens * (6 * m.hidden + 3 * m.intermediate)
        logits = 6 * m.vocab * min(tokens, 4096)
        return self.state_bytes + layer + checkpoints + working + logits


def longest_first(lengths: Ints) -> Ints:
    """Indices by falling length; equal ones keep their order."""
    return np.argsort(-lengths, kind="stable")


@njit(cache=True)
def deal(lengths: Ints, order: Ints, ranks: int) -> Ints:
    """The rank of each sequence: in `order`, each to the rank with the fewest tokens so far."""
    rank_of = np.empty(lengths.size, dtype=np.int64)
    load = np.zeros(ranks, dtype=np.int64)
    for i in order:
        rank = 0
        for other in range(1, ranks):
            if load[other] < load[rank]:
                rank = other
        rank_of[i] = rank
        load[rank] += lengths[i]
    return rank_of


@njit(cache=True)
def pack(lengths: Ints, order: Ints, budget_tokens: int) -> Ints:
    """The micro-batch of each sequence (AReaL Algorithm 1): in `order`, into the fitting one with the fewest sequences;
    a new one where none fits."""
    bin_of = np.empty(lengths.size, dtype=np.int64)
    tokens = np.zeros(lengths.size, dtype=np.int64)
    count = np.zeros(lengths.size, dtype=np.int64)
    bins = 0
    for i in order:
        best = -1
        for b in range(bins):
            if tokens[b] + lengths[i] <= budget_tokens and (best < 0 or count[b] < count[best]):
                best = b
        if best < 0:
            best = bins
            bins += 1
        bin_of[i] = best
        tokens[best] += lengths[i]
        count[best] += 1
    return bin_of
