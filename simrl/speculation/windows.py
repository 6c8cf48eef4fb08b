"""How many tokens to draft next for one response, from how the last draft fared.

Invariant: start_tokens <= window <= most_tokens, at every step. A response's window is one integer and all there is to
remember: a compiled kernel holds the windows of a batch as an array, an engine one number a request.

Two rules of HistoSpec, which differ in more than their names: the paper's (RhymeRL, arXiv 2508.18588, §5.4) and the public
code's (verl recipe specRL/histoSpec and its suffix cache). Both speak of `drafted` tokens, of which `accepted` were right; the
token that a pass yields besides is in neither.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from numba import njit
from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST_TOKENS = 1024  # far beyond what a verification pass is worth; keeps sums and products small
_AIMD, _MIMD, _FIXED = 0, 1, 2


class WindowRule(NamedTuple):
    """A rule as compiled code takes it; made by `Aimd.rule`, `Mimd.rule` or `Fixed.rule`, which validate."""

    code: int
    start_tokens: int
    step: int
    most_tokens: int


@njit(cache=True)
def next_window_aimd(window: int, drafted: int, accepted: int, start: int, increase: int, most: int) -> int:
    """Additive increase, reset on a rejection (RhymeRL §5.4). All in tokens, 0 <= accepted <= drafted <= window.

    A draft that was accepted whole counts as success however short it was: the paper asks for all speculated tokens. It does
    not say what a pass without a draft does (nothing matched, or speculation was off). Nothing was accepted then and nothing
    rejected, so the window stays.
    """
    if drafted == 0:
        return window
    if accepted < drafted:
        return start
    return min(window + increase, most)


@njit(cache=True)
def next_window_mimd(window: int, drafted: int, accepted: int, start: int, factor: int, most: int) -> int:
    """Multiplicative increase and decrease (HistoSpec's public code). All in tokens, 0 <= accepted <= drafted <= window.

    The code compares what a pass yielded with the window, and does not look at the draft: the window grows only if a whole
    window was accepted. A rejection, a draft shorter than the window (the tree ended, or its path became improbable) even if
    all of it was accepted, and a pass without a draft all shrink it.
    """
    if accepted < window:
        return max(window // factor, start)
    return min(window * factor, most)


@njit(cache=True)
def next_window(rule: WindowRule, window: int, drafted: int, accepted: int) -> int:
    """The window after a pass that verified `drafted` tokens and accepted the first `accepted`, by any rule."""
    if rule.code == _AIMD:
        return next_window_aimd(window, drafted, accepted, rule.start_tokens, rule.step, rule.most_tokens)
    if rule.code == _MIMD:
        return next_window_mimd(window, drafted, accepted, rule.start_tokens, rule.step, rule.most_tokens)
    return window


class Aimd(BaseModel):
    """HistoSpec's window as the paper has it (RhymeRL §5.4); see `next_window_aimd`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["aimd"] = "aimd"
    start_tokens: int = Field(default=2, ge=1, le=MOST_TOKENS, description="at first, and after a rejection")
    increase_tokens: int = Field(default=2, ge=1, le=MOST_TOKENS, description="added when all drafted were accepted")
    most_tokens: int = Field(default=32, ge=1, le=MOST_TOKENS)

    @model_validator(mode="after")
    def _in_order(self) -> Aimd:
        _check_order(self.start_tokens, self.most_tokens)
        return self

    @property
    def rule(self) -> WindowRule:
        return WindowRule(_AIMD, self.start_tokens, self.increase_tokens, self.most_tokens)


class Mimd(BaseModel):
    """HistoSpec's window as the public code has it; see `next_window_mimd`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["mimd"] = "mimd"
    start_tokens: int = Field(default=2, ge=1, le=MOST_TOKENS, description="at first, and the least")
    factor: int = Field(default=2, ge=2, le=MOST_TOKENS, description="grows by it, or shrinks by it")
    most_tokens: int = Field(default=16, ge=1, le=MOST_TOKENS)

    @model_validator(mode="after")
    def _in_order(self) -> Mimd:
        _check_order(self.start_tokens, self.most_tokens)
        return self

    @property
    def rule(self) -> WindowRule:
        return WindowRule(_MIMD, self.start_tokens, self.factor, self.most_tokens)


class Fixed(BaseModel):
    """Always the same number of tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["fixed"] = "fixed"
    tokens: int = Field(ge=1, le=MOST_TOKENS)

    @property
    def rule(self) -> WindowRule:
        return WindowRule(_FIXED, self.tokens, 0, self.tokens)


Window = Annotated[Aimd | Mimd | Fixed, Field(discriminator="kind")]


def _check_order(start_tokens: int, most_tokens: int) -> None:
    if start_tokens > most_tokens:
        raise ValueError(f"start_tokens {start_tokens} is more than most_tokens {most_tokens}; let it be at most that")
