"""A deployment: the model, the GPUs of a worker, the durations of its passes, and the trace that it
generates."""

from __future__ import annotations

from dataclasses import dataclass

from simrl.profile.hardware import Gpu
from simrl.profile.model_shape import ModelShape
from simrl.profile.profile import TableProfile
from simrl.trace.trace import Trace


@dataclass(frozen=True)
class Deployment:
    """A model on GPUs of one kind, `tp` of them a worker, in passes of at most
    `max_num_batched_tokens`; the profile belongs to this model, GPU and tp."""

    model: ModelShape
    gpu: Gpu
    tp: int
    profile: TableProfile
    trace: Trace
    max_num_batched_tokens: int


def typical_context_tokens(trace: Trace) -> int:
    """Return the tokens of a half-finished sequence, mean prompt and half the mean response: what a
    profiling run before the training would take."""
    return round(
        float(trace.column("prompt_tokens").mean())
        + float(trace.column("response_tokens").mean()) / 2
    )
