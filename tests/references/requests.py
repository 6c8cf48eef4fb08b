"""Requests of the slow reference engine, and how it drafts."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from simrl.speculation.choices import Strategy
from simrl.speculation.siblings import SiblingIndex
from tests.references.bandit import BegMabSelector


@dataclass(eq=False)
class Request:
    prompt: int
    response: int
    generated: int = 0
    computed: int = 0
    first_token_s: float = float("nan")
    stop_at: int | None = None
    watch_at: int | None = None
    table: list[int] = field(default_factory=list)  # its blocks
    windows: list[list[int | None]] = field(
        default_factory=list
    )  # of each window group; None: given back
    states: list[int] = field(default_factory=list)
    in_flight: int = 0  # tokens of the pass in flight
    named: int = 0  # of its first blocks have a name
    prompt_key: int = -1
    salt: int | None = None  # its prompt is found by requests of an equal one
    sample_key: int = -1
    shared: int = 0  # tokens that have the text of the prompt key
    seen_at: int = 0  # passes that are over when an asynchronous scheduler sees it waiting
    over: bool = False  # ended or aborted
    skipped: bool = False  # over, and the scheduler knew that it would be
    delivered: int = 0  # tokens that an asynchronous scheduler knows …
    unsure: int = 0  # … and drafts of the last pass that were rejected, which it does not know
    sampled: bool = False  # in the last pass that it was in
    padding: int = 0  # of the present pass: drafts that nobody drafted
    # Drafts: (drafted, accepted) at every position, the key and hardness of a model's acceptance, or a row of the trace.
    runs: list[tuple[int, int]] | None = None
    key: int | None = None
    row: int | None = None
    hardness: float = 1.0
    window: int = 0
    proposal: tuple[int, int] | None = None  # of the present pass
    old_tokens: int = 0
    old_accepted: int = 0
    drafted_total: int = 0
    accepted_total: int = 0
    verified_total: int = 0
    stood: int = 0  # in the present pass
    gained: int = 0
    verifications: int = 0

    @property
    def known(self) -> int:
        return self.prompt + self.generated + self.old_tokens

    @property
    def sure(self) -> bool:
        """Whether a scheduler knew how many tokens it gained."""
        return self.gained == 1 or self.proposal is None

    @property
    def blocks(self) -> int:
        return len(self.table) + len(self.beside)

    @property
    def beside(self) -> list[int]:
        """Its blocks of windows and states."""
        return [
            block for window in self.windows for block in window if block is not None
        ] + self.states

    def name(self, block: int, size: int) -> Hashable:
        """Return the name of a full block of its text."""
        if self.prompt_key >= 0 and (block + 1) * size <= self.shared:
            return "prompt", self.prompt_key, self.salt, block
        return "sample", self if self.sample_key < 0 else self.sample_key, block


@dataclass
class Arm:
    """One way in which a model drafts: chains as long as the window, or trees of a strategy."""

    log_acceptances: list[float]
    round_s: float = 0.0
    step_s: float = 0.0
    tree: Strategy | None = None


@dataclass
class Rules:
    """How the reference drafts. `window` is a function (window, drafted, accepted) -> window."""

    start: int
    window: Callable[[int, int, int], int]
    arms: list[Arm]
    bandit: BegMabSelector | None = None
    gate: Callable[[float, int], bool] | None = None  # (acceptance rate of late, batch) -> open
    elastic: tuple[int, int] | None = None  # threshold, patience
    siblings: SiblingIndex | None = None
    own_text: bool = False
    # drafts with which vLLM pads an admitted request that has one token to compute
    padding: int = 0
