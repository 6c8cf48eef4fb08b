"""The cost of drafting for a worker: seconds before a verification, and memory that the KV cache
does not get.

    draft_s(b, levels) = round_s(b) + levels × step_s(b)

A round drafts for all b sequences of a pass; a level is one token further for each of them, and the
levels of a model come one after another. A model also computes, in `prefill_s` a token, what its
target prefills. Invariant: times are not negative, and neither falls where the batch grows.

A small model's time is as much its layers' as its bytes': each layer waits for its kernels to be
launched and joined, however little they do. `LAYER_S` is that time, in CUDA graphs, in measured
kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from simrl.errors import InputError, refuse
from simrl.profile.derived_layouts import in_layout
from simrl.profile.extension import covering
from simrl.profile.hardware import Gpu
from simrl.profile.model_shape import ModelShape
from simrl.profile.precision import WEIGHT_BYTES as PRECISION_BYTES
from simrl.profile.profile import TableProfile
from simrl.speculation.choices import Capture, Strategy
from simrl.speculation.drafter_training import Pace
from simrl.speculation.matching import Floats
from simrl.training.operations import COLLECTIVE_S
from simrl.training.weight_sync import FULL_BYTES, copied_bytes_per_s

Kind = Literal["measured", "derived", "assumed"]

# Time of a layer in addition to its bytes and multiply-adds. Derived: decode steps of Qwen2.5-0.5B
# (24 layers) and 1.5B (28) on one H100 by aiconfigurator 0.12 (kernels measured by NVIDIA, vLLM)
# take 1188 and 2097 µs at one sequence of 1k tokens. 80 % of the data sheet's bandwidth leaves 34
# µs a layer of both. Layers of wider models take no longer: the same number gives the step of a
# one-layer model as wide as Qwen2.5-32B within 7 % at tp 1, 2, 4 and 8 (916, 487, 264, 162 µs).
LAYER_S = 34e-6
COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY = 0.7, 0.8  # of the data sheet's rates
# CPU time for each request and round, in a batch of 64. Measured on one core of an AMD EPYC: this
# project's history drafter proposes in 1.4 to 2.5 µs (1 to 64 stores of 100k tokens) and observes
# in less than 2 µs, its n-gram drafter proposes in 1.6 to 2.9 µs. (The suffix cache of
# arctic-inference 0.3.0 over a store of 1 M tokens: 12 µs to propose, median.)
TEXT_REQUEST_S = 5e-6
WEIGHT_BYTES = 2  # bfloat16
MESSAGE_TOKEN_BYTES = 4  # of a token's number in a message between drafter and verifier
# Of a checkpoint, by trained parameter: weight and Adam's moments in float32; of a buffered token
# beside its hidden state: id and loss mask.
STORED_BYTES, TOKEN_BYTES = 12, 12
MOST_SEQUENCES = 1024
PREFILLED_TOKENS = 4096  # of a profiled pass that computes nothing else


class Overheads(NamedTuple):
    """Time of a model drafter that no roofline has: host time of a round (sampling, building and
    masking a tree) and of each level (picking branches, preparing its pass), both unknown and so 0
    by default; the launch of a layer's kernels."""

    round_s: float = 0.0
    level_s: float = 0.0
    layer_s: float = LAYER_S


@dataclass(frozen=True)
class DraftTimes:
    """Seconds of drafting on a grid of batches, linear between them, and their source. The bytes
    are per GPU of a worker: the drafter's own weights, and the KV cache of one token in its
    layers."""

    sequences: Floats
    round_s: Floats
    step_s: Floats
    weight_bytes_per_gpu: float
    kv_bytes_per_token_per_gpu: float
    kind: Kind
    source: str
    prefill_s: float = 0.0

    def __post_init__(self) -> None:
        seconds = (self.round_s, self.step_s)
        rise = all(
            np.isfinite(s).all() and (s >= 0).all() and (np.diff(s) >= -1e-12).all()
            for s in seconds
        )
        refuse(
            (
                not self.sequences.size or any(s.shape != self.sequences.shape for s in seconds),
                f"draft times ({self.source}): sequences, round_s and step_s need one entry for each batch",
            ),
            (
                not rise or not (np.diff(self.sequences) > 0).all(),
                f"draft times ({self.source}): batches must rise, and seconds be finite, 0 or more, and not fall where the "
                "batch grows; smooth the measurement",
            ),
        )

    def draft_s(self, sequences: float, levels: float) -> float:
        """Return the seconds of one round for `sequences`, `levels` tokens deep. Raise `InputError`
        beyond the grid."""
        if sequences > self.sequences[-1]:
            raise InputError(
                f"draft times ({self.source}): given up to {self.sequences[-1]:.0f} sequences, asked for {sequences:g}"
            )
        round_s = np.interp(sequences, self.sequences, self.round_s)
        return float(round_s + levels * np.interp(sequences, self.sequences, self.step_s))


def text_drafts(profile: TableProfile | None = None) -> DraftTimes:
    """Return the times of a drafter that looks text up on the CPU (history, n-gram, siblings):
    `TEXT_REQUEST_S` a request, one after another, however many tokens it drafts; plus the time that
    drafts take in the engine of a profile, if measured.

    Engines are measured with drafts of one length; a simulated round counts the longest draft in
    its batch for all, so `step_s` is an upper bound where lengths differ."""
    source = "simrl's history and n-gram drafters, batch of 64, one core of an AMD EPYC"
    sequences, round_s, step_s = np.array([0.0, 65536.0]), np.zeros(2), np.zeros(2)
    if profile is not None and (drafts := profile.metadata.drafts):
        sequences, round_s, step_s = map(
            np.array, (drafts.sequences, drafts.round_s, drafts.step_s)
        )
        source = (
            f"{drafts.source}; and {TEXT_REQUEST_S * 1e6:g} µs a request to look text up: {source}"
        )
    return DraftTimes(
        sequences, round_s + TEXT_REQUEST_S * sequences, step_s, 0.0, 0.0, "measured", source
    )


def model_drafts(
    shape: ModelShape,
    gpu: Gpu,
    tp: int = 1,
    kv_tokens: float = 2048,
    branches: int = 1,
    overheads: Overheads = Overheads(),  # noqa: B008 (a constant)
    eagle: bool = False,
) -> DraftTimes:
    """Return the times of a small model of the family, split over `tp` GPUs of the worker, by a
    roofline and the overheads.

    `kv_tokens` is the typical length of a sequence, whose cache the drafter reads at each level;
    `branches` is the top-k of a tree: the tokens of a sequence at each level, each of which reads
    the cache for itself (as in TLT's public code). The level that catches up on the tokens accepted
    by the last verification counts as the first of the round.

    `eagle`: of an EAGLE-type drafter of the target `shape`, one layer like the target's, before it
    a projection that joins the target's hidden state with the token's embedding (2 hidden →
    hidden), after it the target's output head, which is read at each level but held once. TLT §4.1;
    shapes as in its public code. What a `round_s` of 0 leaves out: 8.67 tokens a pass at 3.64 times
    the speed (TLT Table 1), if that is Qwen2.5-32B on H100, leave about 7 ms a round at tp 4 and 11
    ms at tp 2 to host time, sampling, building and masking the tree.
    """
    if eagle:
        shape, projection = eagle_shape(shape), 2 * shape.hidden * shape.hidden
        held = shape.layer_parameters + projection
    else:
        refuse(
            (
                shape.experts,
                f"drafter: {shape.name} is a mixture of experts, whose draft times are not modelled; give its profile "
                "(draft_profile, by `simrl profile derive`), or name a dense drafter",
            )
        )
        projection, held = 0, shape.parameters
    round_s, level_s, layer_s = overheads
    flops_per_s = COMPUTE_EFFICIENCY * gpu.bf16_flops
    bytes_per_s = MEMORY_EFFICIENCY * gpu.memory_bytes_per_s
    weights = (shape.layers * shape.layer_parameters + projection + shape.vocab * shape.hidden) / tp
    kv_bytes = shape.kv_bytes_per_token / min(tp, shape.kv_heads)

    sequences = _batches(MOST_SEQUENCES)
    tokens = branches * sequences
    matrices_s = np.maximum(
        2.0 * weights * tokens / flops_per_s, WEIGHT_BYTES * weights / bytes_per_s
    )
    step_s = (
        level_s
        + shape.layers * layer_s
        + matrices_s
        + tokens * (kv_tokens * kv_bytes + 2 * shape.state_bytes / tp) / bytes_per_s
    )
    source = (
        f"{shape.name} on {tp} {gpu.name}: {layer_s * 1e6:g} µs a layer (derived from measured kernels) and a roofline of "
        f"{gpu.source} at {COMPUTE_EFFICIENCY:.0%} of its flops, {MEMORY_EFFICIENCY:.0%} of its bandwidth; "
        f"{kv_tokens:g} tokens a sequence, {branches} branches, {round_s * 1e3:g} ms a round"
        + (f" and {level_s * 1e3:g} ms a level" if level_s else "")
    )
    times = np.full(sequences.size, round_s), step_s
    prefill_s = 2.0 * (shape.layers * shape.layer_parameters + projection) / tp / flops_per_s
    return DraftTimes(
        sequences, *times, WEIGHT_BYTES * held / tp, kv_bytes, "assumed", source, prefill_s
    )


# Fields of layers that a model has beside its plain ones.
_OTHER_LAYERS = ("dense_layers", "mlp_layers", "linear_layers", "window_layers")
eagle_drafts = partial(model_drafts, eagle=True)


def eagle_shape(target: ModelShape) -> ModelShape:
    """Return the shape of the one layer, with the target's embedding and output head: plain
    attention and one MLP, whatever experts, windows and states the target has."""
    plain = dict.fromkeys(("experts", "shared_intermediate", *_OTHER_LAYERS), 0)
    return target.model_copy(update={"name": f"eagle of {target.name}", "layers": 1, **plain})


def mtp_shape(target: ModelShape) -> ModelShape:
    """Return the shape of a model's head for multi-token prediction: a layer like its last, with
    attention to all tokens, whose projection (2 hidden → hidden) counts as part of its MLP."""
    mlp = "shared_intermediate" if target.experts else "intermediate"
    none = dict.fromkeys((*_OTHER_LAYERS, "linear_parameters", "state_bytes", "window_tokens"), 0)
    wider = {mlp: getattr(target, mlp) + 2 * target.hidden // target.mlp_matrices}
    return target.model_copy(update={"name": f"mtp of {target.name}", "layers": 1, **none, **wider})


def own_drafts(
    profile: TableProfile, target: ModelShape, gpu: Gpu, precision: str, kv_tokens: float
) -> DraftTimes:
    """Return the times of a drafter that is made of the target itself, from the target's profile.

    `precision`: of the whole target, which has no KV cache of its own then, and shares embeddings
    and output head; empty: its heads for multi-token prediction, of which a level is one layer and
    the output head. Raise `InputError` for a target without heads."""
    m, heads = profile.metadata, 1 if precision else target.mtp_layers
    refuse(
        (
            not heads,
            f"speculation mtp: {target.name} has no layers for multi-token prediction (num_nextn_predict_layers of its "
            "config.json); name a model with them, or draft with eagle3",
        )
    )
    shape, kind = (
        (target, "another precision") if precision else (mtp_shape(target), "another split")
    )
    layout = m.model_copy(update={"model": shape.name, "precision": precision or m.precision})
    passes = in_layout(profile.kernels, layout, shape, gpu, kind, target)
    times = profiled_drafts(passes, shape, kv_tokens)
    held = heads * PRECISION_BYTES[layout.precision] * shape.body_parameters / m.tp
    apart = not precision  # with a KV cache of its own
    return replace(
        times,
        weight_bytes_per_gpu=held,
        kv_bytes_per_token_per_gpu=apart * heads * times.kv_bytes_per_token_per_gpu,
        prefill_s=apart * times.prefill_s,
    )


def quantising_s(times: DraftTimes, precision: str, gpu: Gpu) -> float:
    """Return the seconds in which each GPU reads the drafter's weights in bfloat16 and writes them
    in another precision: a lower bound, by bytes."""
    moved = times.weight_bytes_per_gpu * (1 + WEIGHT_BYTES / PRECISION_BYTES[precision])
    return moved / (MEMORY_EFFICIENCY * gpu.memory_bytes_per_s)


def pace_of(target: ModelShape, gpu: Gpu, tp: int, efficiency: float) -> Pace:
    """Return the pace of an EAGLE-type drafter's training on workers of `tp` GPUs.

    Forward and backward through its layer, its projection and causal attention over each response;
    through the frozen output head without the gradient of its weights; and the head once more, for
    the target's probabilities (the cross-entropy of EAGLE, §4.1). A token has its hidden state in
    bfloat16, its id and its loss mask in the buffer, which is pageable memory. A checkpoint has the
    weights and both moments of Adam in float32, copied once by all GPUs of the worker, to memory
    that is not pinned (fastrl@bce3df7: fsdp_workers.py, eagle_background_trainer.py)."""
    shape, width = eagle_shape(target), 2.0 * target.hidden
    trained, head = shape.layer_parameters + width * shape.hidden, shape.vocab * shape.hidden
    flops_per_s = tp * efficiency * gpu.bf16_flops
    # The node's GPUs all read the buffer; a checkpoint is of one worker.
    loaded = tp * copied_bytes_per_s(gpu, gpu.gpus_per_node, "pageable")
    copied = tp * copied_bytes_per_s(gpu, tp, "pageable")
    return Pace(
        token_s=(6.0 * trained + 6.0 * head) / flops_per_s,
        pair_s=6.0 * shape.heads * shape.head_dim / flops_per_s,
        states_s=width / loaded,
        buffered_bytes=width + TOKEN_BYTES,
        trained_bytes=STORED_BYTES * trained,
        frozen_bytes=FULL_BYTES * 2 * head,
        host_bytes_per_s=copied,
    )


def profiled_drafts(
    profile: TableProfile, shape: ModelShape, kv_tokens: float = 2048, round_s: float = 0.0
) -> DraftTimes:
    """Return the times of a model drafter whose passes are profiled: a level is a decode step at
    sequences of `kv_tokens`."""
    t, m = profile.even, profile.metadata
    most = min(t.decode_sequences[-1], t.dense_tokens[-1], t.sampled_sequences[-1])
    profile = covering(profile, int(most), int(most), int(kv_tokens), shape=shape)
    sequences = _batches(most)
    return DraftTimes(
        sequences,
        np.full(sequences.size, round_s),
        np.array([profile.decode_s(int(b), kv_tokens) for b in sequences]),
        shape.weight_bytes / m.tp,
        shape.kv_bytes_per_token / min(m.tp, shape.kv_heads),
        "measured" if m.kind == "measured" else "derived" if m.kind == "derived" else "assumed",
        f"{m.model} on {m.tp} {m.gpu}: {m.source}; {kv_tokens:g} tokens a sequence, {round_s * 1e3:g} ms a round",
        profile.prefill_s(PREFILLED_TOKENS) / PREFILLED_TOKENS,
    )


def with_messages(times: DraftTimes, gpu: Gpu) -> DraftTimes:
    """Return the times of a drafter on GPUs of its own, with its messages (SpecActor §4.1): a
    window's tokens to the verifier, how many were right and the correction back.

    Verification is by exact match, so that a token's number is all that is sent. Each message takes
    `COLLECTIVE_S`, what two GPUs need for a small one, and its bytes the network's share of a GPU,
    as workers of a drafter and a verifier need not fill nodes. The drafter waits for both; in a
    window they are one after the other."""
    token_s = MESSAGE_TOKEN_BYTES * times.sequences / gpu.network_bytes_per_s
    round_s = times.round_s + 2 * COLLECTIVE_S + 2 * token_s
    return replace(times, round_s=round_s, step_s=times.step_s + token_s)


def _batches(most: float) -> Floats:
    """Return whole numbers from 1 to `most`, four an octave."""
    return np.unique(np.minimum(np.round(2 ** np.arange(0, np.log2(most) + 0.25, 0.25)), most))


# Bytes of CUDA graphs = FIXED_BYTES + BYTES_PER_LAYER × layers captured, a graph for each batch
# size that the engine captures. TLT states 7.81, 30.39 and 10.69 GB for one and for four
# strategies; not the model, the strategies, the batch sizes, nor whether that is one GPU's share
# (assumed). The constants are solved from the first two for the model of its case studies
# (Qwen2.5-32B, 64 layers) and the public code's depth (8); the third then follows as 10.59 GB (-0.9
# %) for four different drafters. With the models of 28 and 80 layers that it also uses, it would be
# off by +24 % and -6 %. If equal drafters were captured once, or each only for its own batch sizes
# (as in the public code), it would be 7.81 GB (-27 %). Buffers that grow with the tokens to verify
# (the public code keeps logits of the largest batch) are in `BYTES_PER_LAYER`, as if all strategies
# had equal ones. A graph holds launches, not weights, so bytes a layer are assumed not to depend on
# the model's width or its tensor-parallel size.
_SINGLE_BYTES, _VANILLA_BYTES = (
    7.81e9,
    30.39e9,
)  # TLT Table 3: one strategy, four captured one by one
_LAYERS, _DRAFT_LAYERS = 64, 8 + 1  # of Qwen2.5-32B; of a drafter of depth 8
_STRATEGY_BYTES = (_VANILLA_BYTES - _SINGLE_BYTES) / 3
FIXED_BYTES = _SINGLE_BYTES - _STRATEGY_BYTES  # however little is captured (0.28 GB)
BYTES_PER_LAYER = _STRATEGY_BYTES / (
    _LAYERS + _DRAFT_LAYERS
)  # in the graphs of all batch sizes (0.10 GB)


def graph_bytes(
    capture: Capture,
    target: ModelShape,
    strategies: Sequence[Strategy],
    drafter_layers: int = 1,
    bytes_per_layer: float = BYTES_PER_LAYER,
) -> float:
    """Return the bytes on each GPU that the graphs of tree speculation take, which the KV cache
    does not get; 0 without a strategy (TLT §5.1, Table 3).

    A strategy needs the target's graphs for its tokens to verify, and the drafter's for its depth
    and top-k: draft_depth levels and one pass that catches up on accepted tokens. "vanilla"
    captures target and drafter of each strategy; "bucketed" the target's once (each batch size
    belongs to one number of tokens to verify), the drafter's for each different (draft_depth,
    topk): never more."""
    if not strategies:
        return 0.0
    drafters = [(strategy.draft_depth, strategy.topk) for strategy in strategies]
    targets = len(strategies)
    if capture == "bucketed":
        drafters, targets = sorted(set(drafters)), 1
    layers = targets * target.layers + drafter_layers * sum(depth + 1 for depth, _ in drafters)
    return FIXED_BYTES + bytes_per_layer * layers


def pass_bytes(target: ModelShape, tp: int, tokens: int, positions: int) -> float:
    """Return the bytes that a pass over `tokens` holds on each GPU at its peak, beside weights and
    KV cache: the activations of a layer (residual, its norm, the output of the MLP, and the widths
    within it), or, if they are more, the logits of `positions` with their hidden states.

    Each GPU gathers the logits of the whole vocabulary, and holds three arrays of them in float32
    when it verifies: logits, probabilities, and the scratch of the sampling kernel (SGLang in
    fastrl@bce3df7, logits_processor.py and eagle_info.py)."""
    routed = target.experts_per_token * target.moe_intermediate + target.shared_intermediate
    width = max(target.intermediate, routed)
    layer_bytes = WEIGHT_BYTES * (3 * target.hidden + target.mlp_matrices * width / tp)
    logit_bytes = 3 * 4 * target.vocab + WEIGHT_BYTES * target.hidden
    return max(tokens * layer_bytes, float(positions * logit_bytes))
