"""Rollout: the response to a sample, and which weights generated which of its tokens. Plain records
for both clocks."""

import math
from typing import NamedTuple

from simrl.trace.sample import Sample

NOTHING_TO_TRAIN = (
    "an update has no group to train: all rewards of each are equal, and such groups are dropped; use more prompts a step, or "
    "another trace"
)


class Segment(NamedTuple):
    """Consecutive response tokens that one worker generated under one policy version."""

    worker: int
    policy_version: int
    tokens: int
    started_s: float
    ended_s: float


class Rollout(NamedTuple):
    """A sample's response so far; `done` when it has all its tokens.

    `first_token_s` is NaN before the first token, `reward` before scoring. The first
    `carried_tokens` were generated for a step that then went on without the sample. In a rollout of
    several turns, `observation_tokens` came from the environment, whose last answer arrives at
    `environment_until_s`. With speculation, `drafted_tokens` were drafted. Of these, decoupled
    drafting dropped `unverified_tokens` before verification; `verifications` passes verified the
    others, accepted `accepted_tokens` and yielded `verified_tokens`. `token_ids` are set if tokens
    are real."""

    sample: Sample
    segments: tuple[Segment, ...]
    done: bool
    first_token_s: float = math.nan
    reward: float = math.nan
    carried_tokens: int = 0
    observation_tokens: int = 0
    environment_until_s: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verifications: int = 0
    verified_tokens: int = 0
    unverified_tokens: int = 0
    token_ids: tuple[int, ...] | None = None

    @property
    def tokens(self) -> int:
        if len(self.segments) > 1:
            return sum(s.tokens for s in self.segments)
        return (
            self.segments[0].tokens if self.segments else 0
        )  # the frequent case, a million times a simulation

    @property
    def context_tokens(self) -> int:
        """Tokens of the prompt, of the response so far and of the environment."""
        return self.sample.prompt_tokens + self.tokens + self.observation_tokens

    @property
    def started_s(self) -> float:
        return self.segments[0].started_s

    @property
    def finished_s(self) -> float:
        return self.segments[-1].ended_s


def scored(rollout: Rollout, reward: float) -> Rollout:
    """Return the rollout with its reward; faster than `_replace`, as each response needs it
    once."""
    return tuple.__new__(Rollout, (*rollout[:_REWARD], reward, *rollout[_REWARD + 1 :]))


def grown(
    rollout: Rollout, segments: tuple[Segment, ...], first_token_s: float, done: bool = False
) -> Rollout:
    """Return the rollout with these segments; faster than `_replace`."""
    return tuple.__new__(Rollout, (rollout[0], segments, done, first_token_s, *rollout[_REWARD:]))


_REWARD = Rollout._fields.index("reward")  # the first field that `grown` keeps


class WeightLoad(NamedTuple):
    """A worker's switch to `version`, during which it generated nothing."""

    version: int
    started_s: float
    finished_s: float
