"""Evaluation of a policy: the share of prompts it solves, and the lengths of its responses.

Invariant: an evaluation is a pure function of weights, prompts and seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simrl_replay.grpo.policy import generate
from simrl_replay.grpo.tasks import Countdown, Problem


@dataclass(frozen=True)
class Evaluation:
    """Result over one response per prompt. Lengths are in tokens; `capped` is the share of
    responses that reached the cap."""

    prompts: int
    solved: float
    mean_tokens: float
    p50_tokens: float
    p90_tokens: float
    p99_tokens: float
    max_tokens: int
    capped: float

    def __str__(self) -> str:
        return (
            f"solved {self.solved:.3f} of {self.prompts}; tokens p50 {self.p50_tokens:.0f}, p90 {self.p90_tokens:.0f}, "
            f"p99 {self.p99_tokens:.0f}, max {self.max_tokens}, mean {self.mean_tokens:.1f}; at the cap {self.capped:.3f}"
        )


def evaluate(model: Any, task: Countdown, problems: Sequence[Problem], seed: int) -> Evaluation:
    """Sample a response to each problem and score it."""
    responses = generate(
        model, [p.prompt_ids for p in problems], task.most_tokens, task.eos, seed=seed
    )
    lengths = [len(response) for response in responses]
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99]).tolist()
    return Evaluation(
        prompts=len(problems),
        solved=float(
            np.mean([task.reward(p, r) for p, r in zip(problems, responses, strict=True)])
        ),
        mean_tokens=float(np.mean(lengths)),
        p50_tokens=p50,
        p90_tokens=p90,
        p99_tokens=p99,
        max_tokens=max(lengths),
        capped=float(np.mean([response[-1] != task.eos for response in responses])),
    )
