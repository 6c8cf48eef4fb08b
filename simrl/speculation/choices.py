"""Choices of a method of speculation: a gate, draft trees and a bandit over them, the rule of a
history, CUDA graphs.

Invariant: nothing here is compiled, so methods and systems can be listed without a compiler. What
kernels do with it is in `gates`, `bandit`, `history_index` and `draft_times`.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from simrl.errors import refuse
from simrl.speculation.drafter import MOST_DRAFT_TOKENS, Tokens
from simrl.validation import Model, in_order

Capture = Literal["vanilla", "bucketed"]
RUN_TOKENS = 3  # that the directory of a history looks up
SORTED_TOKENS = 48  # by which the places of a history's text are sorted
LONGEST_MATCH_TOKENS = SORTED_TOKENS - MOST_DRAFT_TOKENS
LARGEST_TOKEN_ID = (1 << 21) - 2
TreeTokens = Annotated[int, Field(ge=1, le=4096)]


class Elastic(Model):
    """TLT's elastic threshold; see `next_elastic`."""

    threshold: int = Field(
        default=32, ge=1, description="running requests at most (paper §5.1, code bs_threshold)"
    )
    patience: int = Field(
        default=10,
        ge=1,
        description="consecutive decode passes with that few before it starts (code)",
    )


class Toggle(Model):
    """EfficientRollout's toggle and ladder; see `simrl.speculation.toggle`."""

    ramp: int | None = Field(
        default=32,
        ge=1,
        description="running requests above which it is armed (scripts); null: max_num_seqs / 2 (code)",
    )
    margin: float = Field(default=0.05, ge=0, le=10, description="gain that it asks for (code)")
    ladder: tuple[Annotated[int, Field(ge=1, le=255)], ...] = Field(
        default=(5, 7, 9, 11), min_length=1, description="draft tokens; of one, they are fixed"
    )
    raise_at: float = Field(
        default=0.94, gt=0, le=1, description="acceptance rate from which on it drafts more (code)"
    )
    lower_at: float = Field(
        default=0.85, ge=0, le=1, description="acceptance rate up to which it drafts less (code)"
    )
    persistence: int = Field(
        default=2, ge=1, description="consecutive rollouts after which the ladder moves (code)"
    )

    _checked = in_order("lower_at", "raise_at")


class Strategy(NamedTuple):
    """An arm: a draft tree of `draft_depth` levels, `topk` branches at each node, of which the most
    probable `tokens_to_verify` are verified."""

    draft_depth: TreeTokens
    topk: TreeTokens
    tokens_to_verify: TreeTokens

    @property
    def verified_tokens(self) -> int:
        """Tokens of a sequence in a pass: all of a tree that is smaller, and the last known one."""
        nodes = self.topk * (1 + (self.draft_depth - 1) * self.topk)
        return min(self.tokens_to_verify, nodes + 1)


class BegMab(Model):
    """Parameters of BEG-MAB. Strategies that verify equally many tokens are a group; the groups,
    from the most tokens to the fewest, are matched to the buckets of batch sizes, from the smallest
    to the largest."""

    strategies: tuple[Strategy, ...] = Field(
        min_length=1, description="(draft_depth, topk, tokens_to_verify) each"
    )
    batch_thresholds: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(1, 2, 5, 21),
        description="the smallest batch of each bucket; the default (code) is 1, 2-4, 5-20, >= 21",
    )
    epsilon: float = Field(
        default=0.1, ge=0, le=1, description="probability of a strategy at random (code)"
    )
    window: int = Field(
        default=300,
        ge=1,
        le=1_000_000,
        description="rewards of an arm that count, the latest (code)",
    )
    rule: Literal["code", "paper"] = Field(
        default="code",
        description="code: an arm has a window for each group of batch sizes, and its median accept "
        "length counts; paper: one window, and the accept length of the pass",
    )

    def most_tokens(self, sequences: int) -> int:
        """Return the most tokens that a pass over 1 to `sequences` verifies."""
        numbers = sorted({strategy.tokens_to_verify for strategy in self.strategies}, reverse=True)
        last = [first - 1 for first in self.batch_thresholds[1:]] + [sequences]
        buckets = zip(numbers, self.batch_thresholds, last, strict=True)
        return max(n * min(end, sequences) for n, first, end in buckets if first <= sequences)

    @model_validator(mode="after")
    def _every_bucket_has_its_group(self) -> BegMab:
        twice = next(
            (arm for i, arm in enumerate(self.strategies) if arm in self.strategies[:i]), ()
        )
        first, *more = self.batch_thresholds or (0,)
        groups = len({strategy.tokens_to_verify for strategy in self.strategies})
        refuse(
            (twice, f"strategy {tuple(twice)} is there twice; give each once"),
            (
                first != 1
                or any(a >= b for a, b in zip(self.batch_thresholds, more, strict=False)),
                f"batch_thresholds {self.batch_thresholds} must begin with 1 and rise",
            ),
            (
                groups != len(self.batch_thresholds),
                f"the strategies verify {groups} different numbers of tokens, and batch_thresholds makes "
                f"{len(self.batch_thresholds)} buckets; let there be one bucket for each number",
            ),
            error=ValueError,
        )
        return self


class HistoryRule(Model):
    """The rule by which HistoSpec finds a draft. The defaults are the paper's (RhymeRL
    §5.3-5.4)."""

    longest_match_tokens: int = Field(
        default=7, ge=RUN_TOKENS, le=LONGEST_MATCH_TOKENS, description="tried first"
    )
    shortest_match_tokens: int = Field(
        default=3, ge=RUN_TOKENS, le=LONGEST_MATCH_TOKENS, description="tried last"
    )
    branch: Literal["reward", "count"] = Field(
        default="reward",
        description="where responses part: reward follows the largest sum of rewards, and of equals the most frequent token; "
        "count follows the most frequent token. Of equals there, the smallest token id",
    )
    least_probability: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="the draft ends before its path's probability, the product of the branches' shares in count, is below",
    )
    prompt_tail_tokens: int = Field(
        default=0,
        ge=0,
        le=LONGEST_MATCH_TOKENS,
        description="last tokens of the prompt that stand before each response, old or new, and are matched with it",
    )

    _checked = in_order("shortest_match_tokens", "longest_match_tokens")

    @property
    def compiled(self) -> tuple[int, int, bool, float]:
        """Return the rule as the compiled functions take it."""
        return (
            self.longest_match_tokens,
            self.shortest_match_tokens,
            self.branch == "reward",
            self.least_probability,
        )

    @property
    def prompt_tail(self) -> Tokens:
        """Return placeholders for the prompt's last tokens, whose ids are not needed: ids that no
        vocabulary has. (Real tokens that also occur within a response are not matched.)"""
        return np.arange(
            LARGEST_TOKEN_ID + 1 - self.prompt_tail_tokens, LARGEST_TOKEN_ID + 1, dtype=np.int32
        )
