"""Efficiency of this machine's updates, measured apart from any run, as simrl's training model takes
it.

Invariant: the efficiency is the one at which `simrl.training` predicts the measured seconds; no
update of a run is measured for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from simrl.profile.hardware import Gpu
from simrl.profile.model_shape import ModelShape
from simrl.training.config import TrainingConfig
from simrl.training.costs import TrainingCosts
from simrl_replay.grpo.update import Trajectory, UpdateConfig, update


class Efficiency(NamedTuple):
    """Efficiencies of training and of log-probs (1: the data sheet's rate), the seconds to write a
    version, and the spread of the training repeats (IQR / median)."""

    mfu: float
    log_prob_mfu: float
    publish_s: float
    spread: float

    def as_training(self) -> dict[str, float]:
        """Return the efficiency as fields of `TrainingConfig`, whose `mfu` is at most 1: a machine
        faster than its round figures has a `correction`."""
        over = max(self.mfu, self.log_prob_mfu, 1.0)
        return {
            "mfu": self.mfu / over,
            "log_prob_mfu": self.log_prob_mfu / over,
            "correction": 1 / over,
            "publish_s": self.publish_s,
        }


def measure_efficiency(
    model: Any,
    optimizer: Any,
    config: UpdateConfig,
    shape: ModelShape,
    card: Gpu,
    batches: Iterable[Sequence[Trajectory]],
    publish: Callable[[], object],
) -> Efficiency:
    """Measure an update of each batch, all of version 0, and its publication; the first of them
    warms up. The model is trained by it."""
    ideal = TrainingCosts(
        model=shape,
        gpu=card,
        gpus=1,
        config=TrainingConfig(
            mfu=1,
            log_prob_mfu=1,
            tokens_per_microbatch=config.micro_batch_tokens,
            ppo_epochs=config.ppo_epochs,
        ),
        minibatches=config.minibatches,
        log_probs=1,
        switch=False,
    )
    rows = []
    for batch in batches:
        lengths = np.array([len(t.ids.prompt) + len(t.ids.response) for t in batch])
        stats = update(model, optimizer, batch, 0, {}, config)
        started_s = time.perf_counter()
        publish()
        published_s = time.perf_counter() - started_s
        train_s = stats.train_s / sum(s for _, s in ideal.update(lengths, config.minibatches))
        log_prob_s = stats.log_prob_s / sum(s for _, s in ideal.inference(lengths))
        rows.append((train_s, log_prob_s, published_s))
    train, log_prob, publish_s = np.median(rows[1:], axis=0).tolist()
    low, high = np.quantile([row[0] for row in rows[1:]], (0.25, 0.75))
    return Efficiency(1 / train, 1 / log_prob, publish_s, float((high - low) / train))
