"""What drafting costs a worker: the seconds before a verification, and the memory that the KV cache does not get.

    draft_s(b, levels) = round_s(b) + levels × step_s(b)

A round drafts for all b sequences of a pass; a level is one token further for each of them, and with a model the levels come
one after another. Invariant: times are not negative, and neither falls where the batch grows; a drafter of text works on the
CPU, and takes no memory of the GPU.

A small model's time is its layers' as much as its bytes': each layer waits for its kernels to be launched and joined, however
little they do. `LAYER_S` is what that comes to, in CUDA graphs, in measured kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from simrl.errors import InputError
from simrl.hardware import Gpu, ModelShape, require_dense
from simrl.profile import TableProfile

Floats = NDArray[np.float64]
Kind = Literal["measured", "derived", "assumed"]

# The time of a layer beside its bytes and multiply-adds. Derived: decode steps of Qwen2.5-0.5B (24 layers) and 1.5B (28) on one
# H100 by aiconfigurator 0.12 (kernels measured by NVIDIA, vLLM) take 1188 and 2097 µs at one sequence of 1k tokens. What 80 %
# of the data sheet's bandwidth leaves of that is 34 µs a layer for both. Layers of wider models take no longer: the same number
# gives the step of a one-layer model as wide as Qwen2.5-32B within 7 % at tp 1, 2, 4 and 8 (916, 487, 264, 162 µs).
LAYER_S = 34e-6
# Of the CPU, for each request and round, in a batch of 64. Measured on one core of an AMD EPYC: this project's history
# proposes in 1.4 to 2.5 µs (1 to 64 stores of 100k tokens) and observes in less than 2 µs, its n-gram proposes in 1.6 to 2.9
# µs.
TEXT_REQUEST_S = 5e-6
# The same of arctic-inference 0.3.0's suffix cache over a store of 1 M tokens: 12 µs to propose, median.
SUFFIX_CACHE_REQUEST_S = 12e-6
WEIGHT_BYTES = 2  # bfloat16
MOST_SEQUENCES = 1024


@dataclass(frozen=True)
class DraftTimes:
    """Seconds of drafting on a grid of batches, and where they come from.

    `sequences`, `round_s` and `step_s` have one shape; between the batches of the grid all is linear, none may exceed the last.
    The bytes are those on each GPU of a worker: the drafter's own weights, and the KV cache of one token in its layers.
    """

    sequences: Floats
    round_s: Floats
    step_s: Floats
    weight_bytes_per_gpu: float
    kv_bytes_per_token_per_gpu: float
    kind: Kind
    source: str

    def __post_init__(self) -> None:
        grids = (self.sequences, self.round_s, self.step_s)
        if len({grid.shape for grid in grids}) != 1 or self.sequences.ndim != 1 or self.sequences.size == 0:
            raise InputError(
                f"draft times ({self.source}): sequences, round_s and step_s need one entry for each batch"
            )
        if (
            not all(np.isfinite(grid).all() and (grid >= 0).all() for grid in grids)
            or (np.diff(self.sequences) <= 0).any()
        ):
            raise InputError(f"draft times ({self.source}): batches must rise, seconds be finite and zero or more")
        if (np.diff(self.round_s) < -1e-12).any() or (np.diff(self.step_s) < -1e-12).any():
            raise InputError(f"draft times ({self.source}): a larger batch takes less time; smooth the measurement")
        if not (0 <= self.weight_bytes_per_gpu < np.inf and 0 <= self.kv_bytes_per_token_per_gpu < np.inf):
            raise InputError(f"draft times ({self.source}): bytes must be finite and zero or more")

    def draft_s(self, sequences: float, levels: float) -> float:
        """Seconds of one round for so many sequences, `levels` tokens deep. Raises `InputError` beyond the grid."""
        if sequences > self.sequences[-1]:
            raise InputError(
                f"draft times ({self.source}): given up to {self.sequences[-1]:.0f} sequences, asked for {sequences:g}"
            )
        round_s = np.interp(sequences, self.sequences, self.round_s)
        return float(round_s + levels * np.interp(sequences, self.sequences, self.step_s))


def text_drafts(
    request_s: float = TEXT_REQUEST_S,
    round_s: float = 0.0,
    kind: Kind = "measured",
    source: str = "simrl's history and n-gram drafters, batch of 64, one core of an AMD EPYC",
) -> DraftTimes:
    """A drafter that looks text up on the CPU (history, n-gram, siblings): `request_s` for each request, one after another, and
    `round_s` a round. How many tokens it drafts does not matter."""
    sequences = np.array([0.0, 65536.0])
    return DraftTimes(sequences, round_s + request_s * sequences, np.zeros(2), 0.0, 0.0, kind, source)


def model_drafts(
    shape: ModelShape,
    gpu: Gpu,
    tp: int = 1,
    kv_tokens: float = 2048,
    branches: int = 1,
    round_s: float = 0.0,
    layer_s: float = LAYER_S,
    compute_efficiency: float = 0.7,
    memory_efficiency: float = 0.8,
) -> DraftTimes:
    """A small model of the family, split over `tp` GPUs of the worker, by a roofline and `layer_s` a layer.

    `kv_tokens` is the typical length of a sequence, whose cache the drafter reads at each level; `branches` is the top-k of a
    tree: so many tokens a sequence work at each level, and each reads the cache for itself (as the public code of TLT has it).
    The level that catches up on the tokens which the last verification accepted counts as the first of the round. `round_s` is
    host time and the building of a tree, unknown and so 0 by default.
    Raises `InputError` for efficiencies outside (0, 1] and a `tp` that the heads do not share.
    """
    require_dense(shape, "drafter")
    own_bytes = WEIGHT_BYTES * shape.parameters
    return _roofline(
        shape, 0, own_bytes, gpu, tp, kv_tokens, branches, round_s, layer_s, compute_efficiency, memory_efficiency
    )


def eagle_drafts(
    target: ModelShape,
    gpu: Gpu,
    tp: int = 1,
    kv_tokens: float = 2048,
    branches: int = 1,
    round_s: float = 0.0,
    layer_s: float = LAYER_S,
    compute_efficiency: float = 0.7,
    memory_efficiency: float = 0.8,
    level_s: float = 0.0,
) -> DraftTimes:
    """A drafter of EAGLE's type: one layer like the target's, before it a projection that joins the target's hidden state with
    the token's embedding (2 hidden → hidden), after it the target's output head, which is read at each level but held once.
    `level_s` is host time of each level: picking its branches, preparing its pass. What the other arguments mean,
    `model_drafts` says. TLT §4.1; shapes as in its public code.

    How much a `round_s` of 0 leaves out: 8.67 tokens a pass at 3.64 times the speed (TLT Table 1), if that is Qwen2.5-32B on
    H100, leave about 7 ms a round at tp 4 and 11 ms at tp 2 beside these kernels: host time, sampling, building and masking
    the tree."""
    shape = eagle_shape(target)
    projection = 2 * target.hidden * target.hidden
    own_bytes = WEIGHT_BYTES * (shape.layer_parameters + projection)
    return _roofline(
        shape,
        projection,
        own_bytes,
        gpu,
        tp,
        kv_tokens,
        branches,
        round_s,
        layer_s,
        compute_efficiency,
        memory_efficiency,
        level_s,
    )


def eagle_shape(target: ModelShape) -> ModelShape:
    """The one layer of an EAGLE-type drafter of `target`, with the embedding and the output head that are the target's."""
    return target.model_copy(update={"name": f"eagle of {target.name}", "layers": 1})


def profiled_drafts(
    profile: TableProfile, shape: ModelShape, kv_tokens: float = 2048, round_s: float = 0.0
) -> DraftTimes:
    """A model drafter whose passes are profiled like any engine's: a level is a decode step at sequences of `kv_tokens`."""
    t = profile.tables
    most = min(t.decode_sequences[-1], t.dense_tokens[-1], t.sampled_sequences[-1])
    profile.require_covers(int(most), int(most), int(kv_tokens))
    sequences = _batches(most)
    step_s = np.array([profile.decode_s(int(b), kv_tokens) for b in sequences])
    tp = profile.metadata.tp
    return DraftTimes(
        sequences,
        np.full(sequences.size, round_s),
        step_s,
        shape.weight_bytes / tp,
        shape.kv_bytes_per_token / min(tp, shape.kv_heads),
        _kind(profile.metadata.kind),
        f"{profile.metadata.model} on {tp} {profile.metadata.gpu}: {profile.metadata.source}; "
        f"{kv_tokens:g} tokens a sequence, {round_s * 1e3:g} ms a round",
    )


def text_drafts_of(profile: TableProfile) -> DraftTimes:
    """A drafter of text in the engine of a profile: `text_drafts`, and what drafts take there besides, where that was measured.

    It was measured with drafts of one length; a simulated round counts that of the longest draft in its batch as the length
    of all, so `step_s` is an upper bound where lengths differ."""
    text, drafts = text_drafts(), profile.metadata.drafts
    if drafts is None:
        return text
    sequences, round_s, step_s = map(np.array, (drafts.sequences, drafts.round_s, drafts.step_s))
    source = f"{drafts.source}; and {TEXT_REQUEST_S * 1e6:g} µs a request to look text up: {text.source}"
    return DraftTimes(sequences, round_s + TEXT_REQUEST_S * sequences, step_s, 0.0, 0.0, "measured", source)


def _kind(kind: str) -> Kind:
    return "measured" if kind == "measured" else "derived" if kind == "derived" else "assumed"


def _roofline(
    shape: ModelShape,
    projection: int,
    own_bytes: int,
    gpu: Gpu,
    tp: int,
    kv_tokens: float,
    branches: int,
    round_s: float,
    layer_s: float,
    compute_efficiency: float,
    memory_efficiency: float,
    level_s: float = 0.0,
) -> DraftTimes:
    for name, efficiency in (("compute", compute_efficiency), ("memory", memory_efficiency)):
        if not 0 < efficiency <= 1:
            raise InputError(f"draft times: {name}_efficiency is {efficiency}; it must be above 0 and at most 1")
    if tp < 1 or shape.heads % tp:
        raise InputError(f"draft times: tp is {tp}; it must divide the {shape.heads} attention heads of {shape.name}")
    if branches < 1 or kv_tokens < 0:
        raise InputError(f"draft times: {branches} branches, {kv_tokens} tokens a sequence; give at least 1 and 0")
    flops_per_s = compute_efficiency * gpu.bf16_flops
    bytes_per_s = memory_efficiency * gpu.memory_bytes_per_s
    weights = (shape.layers * shape.layer_parameters + projection + shape.vocab * shape.hidden) / tp
    kv_bytes = shape.kv_bytes_per_token / min(tp, shape.kv_heads)

    sequences = _batches(MOST_SEQUENCES)
    tokens = branches * sequences
    matrices_s = np.maximum(2.0 * weights * tokens / flops_per_s, WEIGHT_BYTES * weights / bytes_per_s)
    step_s = level_s + shape.layers * layer_s + matrices_s + tokens * kv_tokens * kv_bytes / bytes_per_s
    return DraftTimes(
        sequences,
        np.full(sequences.size, round_s),
        step_s,
        own_bytes / tp,
        kv_bytes,
        "assumed",
        f"{shape.name} on {tp} {gpu.name}: {layer_s * 1e6:g} µs a layer (derived from measured kernels) and a roofline of "
        f"{gpu.source} at {compute_efficiency:.0%} of its flops, {memory_efficiency:.0%} of its bandwidth; "
        f"{kv_tokens:g} tokens a sequence, {branches} branches, {round_s * 1e3:g} ms a round"
        + (f" and {level_s * 1e3:g} ms a level" if level_s else ""),
    )


def _batches(most: float) -> Floats:
    """Whole numbers from 1 to `most`, four an octave."""
    return np.unique(np.minimum(np.round(2 ** np.arange(0, np.log2(most) + 0.25, 0.25)), most))
