"""Seconds of tensor-parallel collectives over one link, as ring algorithms move them.

Invariant: the times are latency plus bytes over bandwidth, so they rise with the bytes; one rank needs no time.
"""

from __future__ import annotations

from dataclasses import dataclass

from simrl.errors import InputError
from simrl.profile.model_shape import ModelShape
from simrl.profile.profilers.smoothing import Floats

BYTES_PER_VALUE = 2  # activations and logits travel in bfloat16


@dataclass(frozen=True)
class Link:
    """The connection between the GPUs of a tensor-parallel group: one direction, as one GPU sees it.

    `latency_s` is paid by every step of a ring (2 (tp - 1) of an all-reduce, tp - 1 of an all-gather), or once a
    collective where `latency_each_step` is false.
    """

    bytes_per_s: float
    latency_s: float
    latency_each_step: bool = True

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and self.latency_s >= 0):
            raise InputError(
                f"link: {self.bytes_per_s} bytes/s and {self.latency_s} s latency; it needs a bandwidth above zero "
                "and a latency of zero or more"
            )

    def all_reduce_s(self, size_bytes: Floats, ranks: int) -> Floats:
        """Return the seconds in which `ranks` GPUs sum a tensor of `size_bytes` that each of them holds."""
        return self._ring_s(size_bytes, ranks, steps=2 * (ranks - 1))

    def all_gather_s(self, size_bytes: Floats, ranks: int) -> Floats:
        """Return the seconds in which `ranks` GPUs collect a tensor of `size_bytes`, of which each holds an equal part."""
        return self._ring_s(size_bytes, ranks, steps=ranks - 1)

    def _ring_s(self, size_bytes: Floats, ranks: int, steps: int) -> Floats:
        latencies = steps if self.latency_each_step else min(steps, 1)
        return latencies * self.latency_s + steps * size_bytes / ranks / self.bytes_per_s


def pass_all_reduces_s(shape: ModelShape, tokens: Floats, tp: int, link: Link) -> Floats:
    """Return the seconds of the all-reduces of one pass over `tokens`: after the attention output and the down projection of
    every layer, and one for the embedding, whose vocabulary is split over the ranks."""
    return (2 * shape.layers + 1) * link.all_reduce_s(tokens * shape.hidden * BYTES_PER_VALUE, tp)


def logits_gather_s(shape: ModelShape, sequences: Floats, tp: int, link: Link) -> Floats:
    """Return the seconds in which the logits of `sequences` are collected from the ranks of a split vocabulary."""
    return link.all_gather_s(sequences * shape.vocab * BYTES_PER_VALUE, tp)
