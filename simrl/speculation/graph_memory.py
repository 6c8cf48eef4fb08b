"""The memory of the CUDA graphs that tree speculation needs, which the KV cache does not get (TLT §5.1, Table 3).

    bytes = fixed + bytes_per_layer × layers captured

A graph holds one pass for one batch size. A strategy needs the target's graphs for its tokens to verify, and the drafter's
for its depth and top-k: draft_depth levels and one pass that catches up on accepted tokens. Layers captured, counted over all
batch sizes that the engine captures:

    single      one strategy's target and drafter
    vanilla     those of each strategy
    bucketed    the target's once (each batch size belongs to one number of tokens to verify), the drafter's for each
                (draft_depth, topk) that differs

Invariant: bucketed <= vanilla, and all three are the same for one strategy.

TLT states 7.81, 30.39 and 10.69 GB for one and for four strategies; not the model, the strategies, the batch sizes, nor whether
that is one GPU's share (assumed). `fixed` and `bytes_per_layer` are solved from the first two for the model of its case studies
(Qwen2.5-32B, 64 layers) and the public code's depth (8); the third then follows as 10.59 GB (-0.9 %) for four drafters that all
differ. With the models of 28 and 80 layers that it also uses, it would be off by +24 % and -6 %. Were drafters that agree
captured once, or each only for its own batch sizes (as the public code does), it would be 7.81 GB (-27 %). Buffers that grow
with the tokens to verify (the public code keeps logits of the largest batch) are in `bytes_per_layer`, as if all strategies
had the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from simrl.hardware import ModelShape
from simrl.speculation.bandit import Strategy

Capture = Literal["vanilla", "bucketed"]

_SINGLE_BYTES, _VANILLA_BYTES = 7.81e9, 30.39e9  # TLT Table 3: one strategy, four captured one by one
_LAYERS, _DRAFT_LAYERS = 64, 8 + 1  # of Qwen2.5-32B; of a drafter of depth 8
_STRATEGY_BYTES = (_VANILLA_BYTES - _SINGLE_BYTES) / 3


class GraphMemory(BaseModel):
    """Bytes on each GPU. The defaults are solved from TLT's Table 3 and an assumption (above); a graph holds launches, not
    weights, so bytes a layer are assumed to be the same for wider models and for any tensor-parallel size."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    fixed_bytes: float = Field(
        default=_SINGLE_BYTES - _STRATEGY_BYTES, ge=0, description="whatever is captured (0.28 GB)"
    )
    bytes_per_layer: float = Field(
        default=_STRATEGY_BYTES / (_LAYERS + _DRAFT_LAYERS),
        ge=0,
        description="one layer in the graphs of all batch sizes (0.10 GB)",
    )
    capture: Capture = Field(default="bucketed", description="vanilla: every strategy has all its graphs for itself")


def graph_bytes(
    memory: GraphMemory, target: ModelShape, strategies: Sequence[Strategy], drafter_layers: int = 1
) -> float:
    """Bytes on each GPU that the graphs of these strategies take; they come out of the KV budget. 0 without a strategy."""
    if not strategies:
        return 0.0
    drafters = [(strategy.draft_depth, strategy.topk) for strategy in strategies]
    targets = len(strategies)
    if memory.capture == "bucketed":
        drafters, targets = sorted(set(drafters)), 1
    layers = targets * target.layers + drafter_layers * sum(depth + 1 for depth, _ in drafters)
    return memory.fixed_bytes + memory.bytes_per_layer * layers
