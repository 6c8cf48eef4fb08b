"""Trials of an engine that no pass shows: the sampler's share, sleep and wake-up.

Invariant: a trial times what the engine itself does, with nothing else under way. Run as the work
of an engine's process.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from simrl_replay.host import Channel
from simrl_replay.vllm_adapter import VllmEngine

BATCHES = (1, 16, 64, 128)
STEPS, LEVELS = 24, (1, 1, 2)  # the first sleep of a process also pins memory


class Trial(NamedTuple):
    """A figure of an engine: what was timed, of which size, and its seconds."""

    what: str
    size: int
    seconds: float


def trials(engine: VllmEngine, channel: Channel) -> None:
    """Run the trials of an idle engine, and send them together."""
    figures = [*_sampler(engine), *(_sleeps(engine) if engine.settings.sleep else ())]
    channel.send(figures)


def _sampler(engine: VllmEngine) -> list[Trial]:
    """Return the median seconds of sampling in decode steps, the device idle before and after, by
    sequences."""
    engine.time_sampling()
    figures = []
    for sequences in BATCHES:
        if sequences <= engine.settings.max_num_seqs:
            for i in range(sequences):
                engine.add(f"sampler-{sequences}-{i}", [1, 2, 3, 4], STEPS)
            while engine.unfinished:
                engine.step()
            figures.append(
                Trial("sampler", sequences, float(np.median(engine.sampling_s(sequences))))
            )
    return figures


def _sleeps(engine: VllmEngine) -> list[Trial]:
    """Return the seconds of sleeping and waking up; by a level, which releases the weights to the
    host's memory, or drops them."""
    figures = []
    for level in LEVELS:
        began_s = time.monotonic()
        engine.sleep(level)
        asleep_s = time.monotonic()
        engine.wake()
        figures.append(Trial("sleep", level, asleep_s - began_s))
        figures.append(Trial("wake-up", level, time.monotonic() - asleep_s))
    return figures
