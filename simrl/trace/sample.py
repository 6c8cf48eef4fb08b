"""Samples, as schedules handle them, and the facts of their responses that only workers and
rewarders know."""

from __future__ import annotations

from typing import NamedTuple

EVALUATION = 10**9  # samples of evaluations have uids, prompts and epochs from here on


class Sample(NamedTuple):
    """One response to generate, as schedules see it: without its length and its reward.

    `uid` is unique in a simulation, also when a trace is repeated; `epoch` counts on over the
    repetitions.
    """

    uid: int
    step: int
    epoch: int
    prompt_id: int
    sample: int
    prompt_tokens: int

    @property
    def is_evaluation(self) -> bool:
        """True if it measures the policy and is never trained."""
        return self.uid >= EVALUATION


class Turn(NamedTuple):
    """A turn that the environment answers: the response has `end_tokens` at its end; the answer
    takes `environment_s` and adds `observation_tokens` to the context."""

    end_tokens: int
    environment_s: float
    observation_tokens: int


class Response(NamedTuple):
    """The outcome of a sample, known to workers and rewarders, not to schedules. `turns` are all
    but the last; `row` is the trace's row, which has its tokens."""

    tokens: int
    reward: float
    turns: tuple[Turn, ...] = ()
    row: int = -1


Group = list[Sample]
