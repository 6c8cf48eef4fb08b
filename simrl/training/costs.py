"""The cost of a training step: seconds of its phases from the sequences in the batch, and the
memory it needs.

Invariant: time follows from work that is carried out, not from a mean: sequences are dealt to
data-parallel ranks, packed into micro-batches on each, and a phase ends when its slowest rank does.
A micro-batch's time is computed from its operations (`operations`), or from a model FLOPs
utilisation that was measured; neither is fitted to the outcome of a schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from simrl.profile.compiled import kernel
from simrl.profile.hardware import Gpu
from simrl.profile.model_shape import ModelShape
from simrl.training.config import TrainingConfig
from simrl.training.operations import (
    MEMORY_SHARE,
    Floats,
    MicroBatch,
    host_s,
    microbatches_s,
)
from simrl.training.stages import pipelines_s, stages_s
from simrl.training.weight_sync import FULL_BYTES, copied_bytes_per_s, handing_s, publication_s

Ints = NDArray[np.int64]

BYTES_PER_PARAMETER = (
    2 + 4 + 4 + 8
)  # bf16 weights, fp32 gradients, fp32 master weights, two fp32 Adam moments
WEIGHT_BYTES = 2  # if only adapters are trained
GRADIENT_BYTES = 4
COPY_BYTES = 2  # in 8 bits, of a parameter: as it is and transposed, kept through an update (Transformer Engine)
MOMENT_BYTES = 8
OPTIMIZER_BYTES = 42  # of a parameter: Adam reads and writes 30, clipping the gradients 12


Phase = tuple[str, float]  # kind of span, seconds


@dataclass(frozen=True)
class TrainingCosts:
    """The phases of one policy update on `gpus` GPUs. `minibatches` PPO updates an epoch;
    `log_probs` forward passes before them (old policy, reference, AReaL's proximal policy), the
    config's `reference_passes` among them, by `reference` if it is another model. `switch`: rollout
    runs on these GPUs, too; `lends`: between updates, and on others. `controller`: the batch goes
    through one process on its way, each sequence padded to `padded_tokens`, or to the longest if
    that is longer. `pauses`: workers are paused while weights are published. `critic`: a critic of the model's shape is
    trained, too, after the policy or fused with it (`stages`). `streams`: each micro-batch fetches
    the weights from the host. `precision`: of the layers' matrix products. `head`: shape
    of the model's layers for multi-token prediction, if they are trained with it."""

    model: ModelShape
    gpu: Gpu
    gpus: int
    config: TrainingConfig
    minibatches: int
    log_probs: int
    switch: bool
    controller: bool = False
    padded_tokens: int = 0
    reference: ModelShape | None = None
    pauses: bool = False
    streams: bool = False
    precision: str = "bf16"
    critic: Literal["serial", "fused"] | None = None
    lends: bool = False
    head: ModelShape | None = None

    @property
    def ranks(self) -> int:
        return self.gpus // self.config.gpus_per_rank

    def transfer(self, lengths: Ints) -> list[Phase]:
        """Return the batch's way to the controller, before the switch from rollout to training."""
        return [("transfer", self._handed_s(lengths))] if self.controller else []

    def _handed_s(self, lengths: Ints) -> float:
        """Return the seconds in which a batch goes through the controller, once: from the rollout
        workers, and to the trainer for each log-prob pass and for the update."""
        if not self.controller or not lengths.size:
            return 0.0
        padded = float(lengths.size * max(self.padded_tokens, int(lengths.max())))
        return padded * self.config.controller_bytes_per_token / self.config.controller_bytes_per_s

    def inference(self, lengths: Ints) -> list[Phase]:
        """Return the log-prob phase of some sequences."""
        if not self.log_probs or not lengths.size:
            return []
        references = self.config.reference_passes
        passes_s = self._own_passes * (self.sweep_s(lengths, 1) + self._fetched_s(FULL_BYTES))
        if references:
            passes_s += references * self.reference_s(lengths)
        each_s = self.config.log_prob_overhead_s + self._handed_s(lengths)
        return [("log_prob", self.log_probs * each_s + passes_s)]

    def verification(self, lengths: Ints) -> list[Phase]:
        """Return the log-prob phase in which the policy verifies old responses (SPEC-RL)."""
        alone = self.config.model_copy(update={"reference_passes": 0})
        return replace(self, log_probs=1, critic=None, config=alone).inference(lengths)

    def reference_s(self, lengths: Ints) -> float:
        """Return the seconds of one pass by the reference, overheads excluded. Swapping copies the
        policy's weights to the host, the reference's to the GPUs, and the policy's back; streamed
        weights come with the gathering of each micro-batch."""
        model, weights = self.reference or self.model, self.config.reference_weights
        sweep_s = replace(self, model=model, streams=weights == "streamed").sweep_s(lengths, 1)
        if weights != "swapped":
            return sweep_s
        copied = WEIGHT_BYTES * (2 * self._held(self.model) + self._held(model))
        return sweep_s + copied / self.gpu.host_bytes_per_s

    def _held(self, model: ModelShape) -> float:
        """Return the parameters of one copy of a model that a GPU holds: all GPUs divide them
        (FSDP), or the GPUs of a copy do; with expert parallelism, more GPUs divide the routed
        experts."""
        config = self.config
        if config.sharding == "fsdp":
            return model.parameters / self.gpus
        tp, routed = config.tensor_parallel, model.routed_parameters
        divided = config.expert_parallel if config.expert_parallel > 1 else tp
        return ((model.parameters - routed) / tp + routed / divided) / config.pipeline_parallel

    @property
    def _own_passes(self) -> int:
        """The log-prob passes by models that are trained."""
        return self.log_probs - self.config.reference_passes + (self.critic is not None)

    @property
    def _update_bytes(self) -> int:
        """The bytes of a parameter that an update fetches: weights, and Adam's moments."""
        return WEIGHT_BYTES if self.config.lora else FULL_BYTES + MOMENT_BYTES

    def _fetched_s(self, bytes_per_parameter: int) -> float:
        """Return the seconds in which a phase fetches its states from the host and returns them; 0
        unless phases offload states because rollout runs on these GPUs, too."""
        if self.config.offload != "phases" or not (self.switch or self.lends):
            return 0.0
        return 2 * bytes_per_parameter * self.model.parameters / self.gpus / self.copied_bytes_per_s

    @property
    def copied_bytes_per_s(self) -> float:
        """Rate at which a GPU copies states from or to the host."""
        return copied_bytes_per_s(self.gpu, self.gpus, self.config.offload_memory)

    @property
    def offloaded_bytes(self) -> float:
        """Bytes of states that a GPU copies from and to the host for an update: with `phases` in
        each log-prob pass, in the update and in the weight sync, with `switch` before and after
        rollout."""
        fetched = FULL_BYTES * (self._own_passes + 1) + self._update_bytes
        copied = {
            "switch": self._kept_bytes,
            "phases": fetched * self.model.parameters / self.gpus,
            "none": 0.0,
        }
        return 2 * copied[self.config.offload]

    def update(self, lengths: Ints, minibatches: int, begins: bool = True) -> list[Phase]:
        """Return the training phase: gradients and optimizer steps on some sequences, in
        `minibatches`, `ppo_epochs` times. Costs that occur once an update are in the part that
        begins it."""
        parts = self._minibatches(lengths, minibatches)
        minibatch_s = (
            self.config.minibatch_overhead_s + (2 if self.critic else 1) * self.optimizer_s
        )
        passes_s = self.config.ppo_epochs * minibatch_s * max(len(parts), 1)
        for part, rank_of in parts:
            passes_s += sum(seconds for _, seconds in self.gradients(part, rank_of))
        once_s = (
            self.config.update_overhead_s + self._fetched_s(self._update_bytes) if begins else 0.0
        )
        return [("train", once_s + self._handed_s(lengths) + passes_s)]

    def _minibatches(self, lengths: Ints, count: int) -> list[tuple[Ints, Ints]]:
        """Return the mini-batches of an update: the lengths of each, and the ranks that have them.
        Where ranks are dealt the batch as a whole, each cuts its own part into mini-batches, whose
        tokens differ from rank to rank."""
        if self.config.balance == "minibatch":
            parts = [part for part in np.array_split(lengths, count) if part.size]
            return [(part, self._dealt(part)) for part in parts]
        rank_of = self._dealt(lengths)
        places, held = _places(rank_of), np.bincount(rank_of, minlength=self.ranks)
        count = min(count, int(held.max(initial=1)))
        of_minibatch = places * count // held[rank_of]
        chosen = [np.flatnonzero(of_minibatch == i) for i in range(count)]
        return [(lengths[of], rank_of[of]) for of in chosen if of.size]

    def _dealt(self, lengths: Ints) -> Ints:
        """Return the data-parallel rank of each sequence: by tokens, or in the order of the
        batch."""
        if self.config.balance == "none":
            return np.arange(lengths.size) * self.ranks // max(lengths.size, 1)
        return deal(lengths, longest_first(lengths), self.ranks)

    def gradients(self, lengths: Ints, rank_of: Ints | None = None) -> list[Phase]:
        """Return the forward and backward passes over some sequences, by the policy and the critic,
        in all PPO epochs; `rank_of` as in `sweep_s`."""
        models = 2 if self.critic == "serial" else 1
        return [("train", self.config.ppo_epochs * models * self.sweep_s(lengths, 3, rank_of))]

    def after(self, version: int, publish: bool = True) -> list[Phase]:
        """Return the phases after the work: the weights go to the rollout workers (if published),
        and at times to disk."""
        handed_s = (
            handing_s(self.config, self.model, self.gpu)
            if self.config.switch_transfer_s is None
            else 0.0
        )
        phases = (
            [("switch", self.switch_s + handed_s)]
            if self.switch
            else [("publish", self.publish_s)]
            if publish
            else []
        )
        if self.config.checkpoint_every and (version + 1) % self.config.checkpoint_every == 0:
            phases.append(("checkpoint", self.config.checkpoint_s))
        return phases

    @property
    def publish_s(self) -> float:
        """Seconds of a publication, on GPUs of the trainer's own."""
        if self.config.weight_sync:
            return publication_s(self.config, self.model, self.gpu, self.gpus)
        gathered_s = self.model.weight_bytes / self.gpu.bytes_per_s_among(self.gpus)
        handed_s = handing_s(self.config, self.model, self.gpu)
        return self.config.publish_s + handed_s + gathered_s

    @property
    def switch_s(self) -> float:
        """Seconds of a switch (colocated), one way: weights and optimizer states to or from the
        host."""
        transfer_s = self.config.switch_transfer_s
        if (
            transfer_s is None
        ):  # if phases fetch their states, the sync fetches the weights: half each way
            states_s = self._kept_bytes / self.copied_bytes_per_s
            transfer_s = (
                states_s if self.config.offload == "switch" else self._fetched_s(FULL_BYTES) / 2
            )
        return self.config.switch_s + transfer_s

    @property
    def reshard_s(self) -> float:
        """Seconds to move all states over the network to where another number of GPUs needs
        them."""
        return self.config.switch_s + self.state_bytes / self.gpu.network_bytes_per_s

    def sweep_s(self, lengths: Ints, passes: int, rank_of: Ints | None = None) -> float:
        """Return the seconds of one sweep over the sequences: `passes` is 1 for a forward pass, 3
        with the backward pass; `rank_of` has the rank of each sequence if they are dealt already.

        A fixed number of sequences is padded to the longest of the micro-batch, for all but
        attention, unless padding is removed.

        A micro-batch takes its work, or (FSDP) the gathering of the sharded weights, once for each
        of forward and backward, and the reduction of the gradients, whichever is longer. These
        bring the ranks together, so all wait for the slowest in each micro-batch, as ranks that
        divide experts do for each other; otherwise they wait at the end alone. Pipeline stages are
        executed pass by pass (`stages`); the last one has the output head, and no fewer layers than
        others.
        """
        config = self.config
        most_tokens = (
            config.log_prob_tokens_per_microbatch if passes == 1 else None
        ) or config.tokens_per_microbatch
        budget = max(most_tokens, int(lengths.max()))
        order = longest_first(lengths)
        rank_of = self._dealt(lengths) if rank_of is None else rank_of
        if config.microbatching == "fixed":
            parts = [
                self.fixed_microbatches(lengths[rank_of == rank], budget, passes)
                for rank in range(self.ranks)
            ]
            ranks = np.repeat(np.arange(self.ranks), list(map(len, parts)))
            sums = [
                (self._padded(part, of_rank), (part**2).sum(), part.size)
                for of_rank in parts
                for part in of_rank
            ]
            tokens, squares, sequences = np.array(sums, np.float64).T
        else:
            bin_of, ranks = pack(lengths, order, rank_of, budget)
            sequences = np.bincount(bin_of)
            tokens, squares = np.bincount(bin_of, lengths), np.bincount(bin_of, lengths**2)
            if config.microbatching == "padded" and config.pipeline_parallel > 1:
                tokens[:] = tokens.max()
        work = self._work_s(tokens, squares / 2, sequences, passes)
        if self.head and passes > 1:  # on the last stage, as in Megatron
            more = replace(self, model=self.head)._work_s(tokens, squares / 2, sequences, passes)
            heads = self.model.mtp_layers
            work = replace(work, head_s=work.head_s + heads * (more.layers_s + more.head_s))
        stages = config.pipeline_parallel
        stage_s = (
            config.correction * work.layers_s * ceil(self.model.layers / stages) / self.model.layers
        )
        if (
            config.log_prob_mfu if passes == 1 else config.mfu
        ) is None:  # which were measured with it
            # A GPU that is done sooner waits for the host that launches its layers. The output
            # head's few kernels come last, and are added.
            launched_s = host_s(self.model, config, self.gpu, passes > 1) / self.gpu.host_speed
            stage_s = np.maximum(stage_s, launched_s / stages)
        of_sequences_s = sequences * (
            config.log_prob_sequence_s if passes == 1 else config.update_sequence_s
        )
        serial_s, beside_s = self._gather_s(passes)
        computed_s = stage_s + config.correction * work.head_s + of_sequences_s
        each_s = serial_s + np.maximum(computed_s, beside_s)
        groups, places = ranks // self._together, _places(ranks)
        slowest_s = np.zeros((groups.max() + 1, places.max() + 1))
        np.maximum.at(slowest_s, (groups, places), each_s)
        if self.critic == "fused" and passes > 1:
            return max(
                pipelines_s(row[row > 0], stages, self._forward_share, 2) for row in slowest_s
            )
        if stages == 1:
            return float(slowest_s.sum(axis=1).max())
        others_s = np.zeros_like(slowest_s)
        np.maximum.at(others_s, (groups, places), stage_s)
        each_stage_s = np.repeat(others_s[:, :, None], stages, axis=2)
        each_stage_s[:, :, -1] = slowest_s
        forward = self._forward_share if passes > 1 else 1.0
        return max(
            stages_s(of_group[of_group[:, -1] > 0], forward, passes > 1)
            for of_group in each_stage_s
        )

    def _padded(self, part: Ints, parts: Sequence[Ints]) -> int:
        """Return the tokens of a micro-batch of a fixed number of sequences, one of a rank's
        `parts` of the mini-batch, padding included."""
        if self.config.remove_padding:
            return int(part.sum())
        among = parts if self.config.padded_to == "minibatch" else [part]
        return part.size * max(int(one.max()) for one in among)

    @property
    def _forward_share(self) -> float:
        """Part of an update's seconds that is forward: one sweep of three, or of four where
        activations are recomputed."""
        return 1 / (3 + (self.config.recompute is not False))

    @property
    def _together(self) -> int:
        """The data-parallel ranks that wait for each other in each micro-batch."""
        config = self.config
        dividing = config.expert_parallel // (config.tensor_parallel * config.sequence_parallel)
        return self.ranks if config.sharding == "fsdp" else max(dividing, 1)

    def _gather_s(self, passes: int) -> tuple[float, float]:
        """Return the seconds in which FSDP gathers the weights for a micro-batch, twice if there is
        a backward pass, and reduces their gradients, which are twice as many bytes: those that
        hold the arithmetic up, and those beside it. Streamed weights come from the host. Without
        `gather_overlap`, only the backward pass's weights, which are asked for a layer ahead, come
        beside it."""
        model = self.model
        fetched_s = self.streams * WEIGHT_BYTES * self._held(model) / self.gpu.host_bytes_per_s
        if self.config.sharding != "fsdp":
            return 0.0, fetched_s
        gathers = 4 - 2 * self.config.lora if passes > 1 else 1
        alone = model.routed_parameters * (
            1 - 1 / self.config.expert_parallel
        )  # that other GPUs gather
        gathered = WEIGHT_BYTES * (model.parameters - alone)
        rate = self.gpu.bytes_per_s_among(self.gpus)
        once_s = gathered * (1.0 - 1.0 / self.gpus) / rate
        beside = gathers if self.config.gather_overlap else int(passes > 1)
        return (gathers - beside) * once_s, fetched_s + beside * once_s

    def _work_s(
        self, tokens: Floats, attended: Floats, sequences: Floats, passes: int
    ) -> MicroBatch:
        """Return the seconds of the arithmetic of micro-batches and of its memory traffic."""
        config, model = self.config, self.model
        mfu = config.log_prob_mfu if passes == 1 else config.mfu
        if mfu is None:
            return microbatches_s(
                model,
                self.gpu,
                config,
                tokens,
                attended,
                passes > 1,
                self.precision,
                sequences,
            )
        nothing = np.zeros_like(tokens)
        flops = passes * model.forward_flops(tokens, attended)
        if passes > 1:  # what is repeated; the gradients of the weights, spared
            flops += (bool(config.recompute) - config.lora) * model.forward_flops(tokens, nothing)
        rate = self.gpu.bf16_flops * mfu * config.sequence_parallel * config.tensor_parallel
        return MicroBatch(flops / rate, nothing)

    @property
    def optimizer_s(self) -> float:
        """Seconds of an optimizer step: gradients, moments and master weights of a GPU are read and
        written, the norm of the gradients is found before; with sharded states alone, gradients and
        weights move between the GPUs. `mfu` includes it."""
        config = self.config
        if config.mfu is not None or config.lora:
            return 0.0
        moved = (
            OPTIMIZER_BYTES
            * self.model.parameters
            / self.gpus
            / (self.gpu.memory_bytes_per_s * MEMORY_SHARE)
        )
        if config.sharding == "fsdp" or self.ranks == 1:
            return moved
        return moved + (4 + 2) * self._held(self.model) * (
            1 - 1 / self.ranks
        ) / self.gpu.bytes_per_s_among(self.gpus)

    def fixed_microbatches(self, lengths: Ints, budget_tokens: int, passes: int = 3) -> list[Ints]:
        """Return the micro-batches of one rank with fixed numbers of sequences, none above the
        budget if padded, in an update, or in a log-prob pass (one of `passes`)."""
        config = self.config
        size = config.log_prob_sequences_per_microbatch if passes == 1 else None
        if config.microbatches and size is None:
            return [part for part in np.array_split(lengths, config.microbatches) if part.size]
        size = size or config.sequences_per_microbatch
        size = size or max(1, budget_tokens // int(lengths.max(initial=1)))
        return [lengths[i : i + size] for i in range(0, lengths.size, size)]

    @property
    def state_bytes(self) -> float:
        """Bytes per GPU of weights, gradients and optimizer states. With `sharding` optimizer,
        every rank has all weights and gradients of the layers and experts that its GPUs divide; the
        optimizer states, and with FSDP everything, all GPUs divide. Products in 8 bits keep copies
        of their weights."""
        config, held = self.config, self._held(self.model)
        copies = 0 if self.precision == "bf16" else COPY_BYTES * held
        parameter = WEIGHT_BYTES if config.lora else BYTES_PER_PARAMETER
        whole = min(parameter, WEIGHT_BYTES + GRADIENT_BYTES)
        of_model = copies + whole * held + (parameter - whole) * self.model.parameters / self.gpus
        return of_model if self.critic is None else 2 * of_model

    @property
    def _kept_bytes(self) -> float:
        """Bytes per GPU of the states that outlast an update: all but gradients."""
        gradients = 0.0 if self.config.lora else GRADIENT_BYTES * self._held(self.model)
        return self.state_bytes - gradients * (1 if self.critic is None else 2)

    def most_tokens(self, longest_tokens: int, batch: int = 1) -> int:
        """Return the tokens of a micro-batch for which there has to be memory, of an update of
        `batch` sequences."""
        if count := self.config.microbatches:
            return ceil(batch / (self.minibatches * self.ranks * count)) * longest_tokens
        if sequences := self.config.sequences_per_microbatch:
            return sequences * longest_tokens
        return max(self.config.tokens_per_microbatch, longest_tokens)

    def memory_bytes(self, longest_tokens: int, batch: int = 1) -> float:
        """Return the bytes per GPU: sharded states, a resident reference, gathered weights of one
        layer, checkpointed activations of one micro-batch (a sequence of `longest_tokens` has to
        fit), the working set of one layer, or of all layers if nothing is recomputed, logits in
        chunks of 4,096 tokens (as the frameworks' fused log-prob kernels keep them)."""
        m, config = self.model, self.config
        tokens = self.most_tokens(longest_tokens, batch) / config.sequence_parallel
        tp = config.tensor_parallel
        away = (
            m.experts * m.expert_parameters * (1 - 1 / config.expert_parallel) if m.experts else 0.0
        )
        layer = 2 * 2 * (m.layer_parameters - away) / tp if config.sharding == "fsdp" else 0.0
        checkpoints = (
            2 * m.layers * m.hidden * tokens / tp
        )  # as many micro-batches under way as pipeline stages
        mlp = 3 * (m.intermediate if m.expert_layers < m.layers else m.shared_intermediate)
        routed = (
            m.experts_per_token
            * config.expert_imbalance
            * (2 * (m.expert_hidden or m.hidden) + 3 * m.moe_intermediate)
        )
        working = (
            2
            * tokens
            * (6 * m.hidden + max(mlp, routed))
            / tp
            * (m.layers if config.recompute is False else 1)
        )
        logits = 6 * m.vocab * min(tokens, 4096) / tp
        resident = config.reference_passes and config.reference_weights == "resident"
        reference = WEIGHT_BYTES * self._held(self.reference or m) if resident else 0.0
        return self.state_bytes + reference + layer + checkpoints + working + logits


def _places(ranks: Ints) -> Ints:
    """Return the place of each micro-batch among the micro-batches of its rank."""
    order = np.argsort(ranks, kind="stable")
    first = np.searchsorted(ranks[order], ranks[order])
    places = np.empty_like(order)
    places[order] = np.arange(order.size) - first
    return places


def longest_first(lengths: Ints) -> Ints:
    """Return indices by falling length; equal lengths keep their order."""
    return np.argsort(-lengths, kind="stable")


@kernel
def deal(lengths: Ints, order: Ints, ranks: int) -> Ints:
    """Return the rank of each sequence: in `order`, each goes to the rank with the fewest tokens so
    far."""
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


@kernel
def pack(lengths: Ints, order: Ints, rank_of: Ints, budget_tokens: int) -> tuple[Ints, Ints]:
    """Return the micro-batch of each sequence, and the rank of each micro-batch (AReaL Algorithm
    1): in `order`, each sequence goes into the micro-batch of its rank with room that has the
    fewest sequences, of these the fewest tokens, and of these the first, or into a new one."""
    n = lengths.size
    bin_of, rank = np.empty(n, np.int64), np.empty(n, np.int64)
    tokens, count = np.zeros(n, np.int64), np.zeros(n, np.int64)
    ranks = rank_of.max() + 1 if rank_of.size else 0
    latest = np.full(ranks, -1)  # of each rank, and of each micro-batch the one before on its rank
    before = np.empty(n, np.int64)
    bins = 0
    for i in order:
        best, b = -1, latest[rank_of[i]]
        while b >= 0:
            if tokens[b] + lengths[i] <= budget_tokens and (
                best < 0 or (count[b], tokens[b]) <= (count[best], tokens[best])
            ):
                best = b
            b = before[b]
        if best < 0:
            best = bins
            rank[best], before[best], latest[rank_of[i]] = rank_of[i], latest[rank_of[i]], best
            bins += 1
        bin_of[i] = best
        tokens[best] += lengths[i]
        count[best] += 1
    return bin_of, rank[:bins]
