"""Windows: how many tokens to draft next for one response, from the outcome of its last draft.

Invariant: start_tokens <= window <= most_tokens, at every step. A response's window is one integer
and the whole state.

Two rules of HistoSpec differ: the paper's (RhymeRL, arXiv 2508.18588, §5.4) and the public code's
(verl recipe specRL/histoSpec and its suffix cache). The token that a pass itself yields counts
neither as drafted nor as accepted.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from simrl.validation import Model, in_order

MOST_TOKENS = 1024  # far beyond what a verification pass is worth; keeps sums and products small
AIMD, MIMD, FIXED = 0, 1, 2


class WindowRule(NamedTuple):
    """A rule for compiled code, made by `Aimd.rule`, `Mimd.rule` or `Fixed.rule`, which
    validate."""

    code: int
    start_tokens: int
    step: int
    most_tokens: int


class Aimd(Model):
    """HistoSpec's window of the paper (RhymeRL §5.4); see
    `simrl.speculation.passes.next_window`."""

    kind: Literal["aimd"] = "aimd"
    start_tokens: int = Field(
        default=2, ge=1, le=MOST_TOKENS, description="at first, and after a rejection"
    )
    increase_tokens: int = Field(
        default=2, ge=1, le=MOST_TOKENS, description="added when all drafted tokens were accepted"
    )
    most_tokens: int = Field(default=32, ge=1, le=MOST_TOKENS)

    _checked = in_order("start_tokens", "most_tokens")

    @property
    def rule(self) -> WindowRule:
        return WindowRule(AIMD, self.start_tokens, self.increase_tokens, self.most_tokens)


class Mimd(Model):
    """HistoSpec's window of the public code; see `simrl.speculation.passes.next_window`."""

    kind: Literal["mimd"] = "mimd"
    start_tokens: int = Field(
        default=2, ge=1, le=MOST_TOKENS, description="at first, and the least"
    )
    factor: int = Field(
        default=2, ge=2, le=MOST_TOKENS, description="multiplies or divides the window"
    )
    most_tokens: int = Field(default=16, ge=1, le=MOST_TOKENS)

    _checked = in_order("start_tokens", "most_tokens")

    @property
    def rule(self) -> WindowRule:
        return WindowRule(MIMD, self.start_tokens, self.factor, self.most_tokens)


class Fixed(Model):
    """A constant number of tokens."""

    kind: Literal["fixed"] = "fixed"
    tokens: int = Field(ge=1, le=MOST_TOKENS)

    @property
    def rule(self) -> WindowRule:
        return WindowRule(FIXED, self.tokens, 0, self.tokens)


Window = Annotated[Aimd | Mimd | Fixed, Field(discriminator="kind")]
