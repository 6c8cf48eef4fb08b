"""SpecActor's plan of decoupled drafting: how many GPUs draft, how many verify, how far ahead
(arXiv 2511.16193, §4.1); and its draft ladder: the speed-up of each drafter at each acceptance
rate, and its best window (§4.2).

Invariant: pure functions of profiled seconds and an acceptance rate p, the probability that a
drafted token is right if all tokens before it are, known before the run. Every rate is in tokens
per second of one request; multiplied by the requests, it is the worker's.

Decoupled, drafter and verifier run at once: while a window of w tokens is verified, the next one is
drafted, so that accepted windows follow each other every IL = max(w·D, V_w) seconds. A miss
discards the tokens drafted ahead. Coupled, they take turns. The published objective of the planner
is TGS, which divides the tokens by IL whether or not there was a miss. `renewal_rate` is the rate
of two such loops: a miss costs w·D + V_w, as the next window is drafted from the correction on. The
verification of a decoupled window has w query tokens a request; of a coupled one w + 1, for the
token that the pass itself yields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from simrl.errors import InputError
from simrl.profile.compiled import kernel
from simrl.profile.profile import TableProfile
from simrl.speculation.matching import Floats, Ints

Objective = Literal["tgs", "renewal"]
DECOUPLED, COUPLED = 0, 1
MOST_WINDOW = 15  # as far as the planner of decoupled drafting looks: verifications of 16 tokens
RATES = 101  # acceptance rates of a table of reconfigurations: 0, 1, … 100 %


class Affine(NamedTuple):
    """Seconds of a pass over b requests: max(b · slope_s + fixed_s, least_s)."""

    slope_s: float
    fixed_s: float
    least_s: float = 0.0

    def __call__(self, requests: float) -> float:
        return max(requests * self.slope_s + self.fixed_s, self.least_s)


def fit_affine(requests: Sequence[float], seconds: Sequence[float], what: str = "pass") -> Affine:
    """Fit the affine function without negative parts that is nearest to `seconds` in relative error
    (least squares). Raise `InputError` for fewer than two batch sizes and for times that are not
    positive; `what` names the pass."""
    b, s = np.asarray(requests, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if np.unique(b).size < 2:
        raise InputError(
            f"fit of the {what}: {np.unique(b).size} batch sizes; give two or more different ones"
        )
    wrong = ~(np.isfinite(s) & (s > 0))
    if wrong.any():
        bad = int(np.argmax(wrong))
        raise InputError(
            f"fit of the {what}: {s[bad]} s at batch {b[bad]:g}; seconds must be positive"
        )
    from scipy.optimize import nnls  # takes 0.3 s to import

    (slope_s, fixed_s), _ = nnls(np.column_stack([b / s, 1.0 / s]), np.ones_like(s))
    return Affine(float(slope_s), float(fixed_s))


def fit_draft(draft_s: Callable[[int], float], requests: Sequence[int]) -> Affine:
    """Fit D(b) = b·D' + α of one drafter GPU to the seconds in which it drafts one token for each
    of b requests (§4.1)."""
    return fit_affine(requests, [draft_s(b) for b in requests], "draft pass")


def fit_verify(
    profile: TableProfile, most_query_tokens: int, requests: Sequence[int], kv_tokens: int
) -> list[Affine]:
    """Fit V_q(b) = b·V'_q + β_q for q = 1 … `most_query_tokens` query tokens a request, at index q
    - 1 (§4.1).

    From the profile: the dense part and the output head at b·q tokens, attention at b sequences of
    `kv_tokens` each. q = 1 is plain decoding. Batches of more tokens than the profile covers are
    left out of a fit; beyond its sampled sequences the output head's time stays at the last value
    (a percent of such a pass). The lower bound of a pass (`least_pass_s`) makes a kink that no line
    has: the fit ignores it, and its values are then bounded by it, at one sequence. Raise `InputError` where that
    leaves fewer than two batch sizes.
    """
    t = profile.even
    dense, sequences = t.dense_tokens[-1], t.decode_sequences[-1]
    least_s = t.least_pass_s + t.least_sequence_s
    least_s += t.between_passes_s if least_s else 0.0
    free = TableProfile(t._replace(least_pass_s=0.0, least_sequence_s=0.0), profile.metadata)
    fits = []
    for q in range(1, most_query_tokens + 1):
        fitting = [b for b in requests if b * q <= dense and b <= sequences]
        seconds = [free.verify_s(b, q - 1, kv_tokens) for b in fitting]
        fits.append(
            fit_affine(fitting, seconds, f"verification of {q} tokens a request")._replace(
                least_s=least_s
            )
        )
    return fits


def decoupled_tgs(acceptance: float, window: int, draft_s: float, verify_s: float) -> float:
    """Return the published token generation speed of decoupled drafting, TGS = τ_w / IL (§4.1), in
    tokens/s of a request.

    τ_w = Σ_{a<w} pᵃ(1−p)(a+1)/2 + w·pʷ, IL = max(w·D, V_w); `draft_s` is D, `verify_s` is V_w, both
    of the whole batch. The half stands for the time that a miss costs."""
    tokens = _tokens_of_a_miss(acceptance, window) / 2 + window * acceptance**window
    return tokens / max(window * draft_s, verify_s)


def renewal_rate(acceptance: float, window: int, draft_s: float, verify_s: float) -> float:
    """Return the rate of decoupled drafting as executed, in tokens/s of a request: the tokens of an
    attempt over its time.

    Tokens: Σ_{a<w} pᵃ(1−p)(a+1) + w·pʷ. Time: pʷ·IL + (1−pʷ)(w·D + V_w), since after a miss a
    window is drafted before the next can be verified. Exact for one request (renewal-reward
    theorem); in a batch, requests with a miss also wait for a verifier.
    """
    whole = acceptance**window
    tokens = _tokens_of_a_miss(acceptance, window) + window * whole
    pipelined_s, serial_s = max(window * draft_s, verify_s), window * draft_s + verify_s
    return tokens / (whole * pipelined_s + (1 - whole) * serial_s)


def coupled_tgs(acceptance: float, window: int, draft_s: float, verify_s: float) -> float:
    """Return the rate of drafting and verifying in turn: (Σ_{a<w} pᵃ(1−p)(a+1) + (w+1)pʷ) / (w·D +
    V), tokens/s of a request.

    SpecActor's paper does not state this model; this is the usual one (Leviathan et al.,
    2211.17192, §3), exact, as all attempts take equally long. `verify_s` is of a pass with w + 1
    query tokens a request."""
    tokens = _tokens_of_a_miss(acceptance, window) + (window + 1) * acceptance**window
    return tokens / (window * draft_s + verify_s)


def _tokens_of_a_miss(p: float, window: int) -> float:
    """Return Σ_{a<w} pᵃ(1−p)(a+1): a right tokens and the correction, weighted by their
    probability."""
    return sum(p**a * (1 - p) * (a + 1) for a in range(window))


@dataclass(frozen=True)
class DecoupledPlan:
    """The choice of `plan_decoupled` and its predicted rates, in tokens/s of one request."""

    draft_gpus: int
    verify_gpus: int
    window: int
    requests: int  # of one verifier and its drafters
    tgs: float
    renewal: float
    draft: Affine  # of one drafter GPU
    verify: tuple[Affine, ...]  # by query tokens a request, from 1 on
    round_s: float = 0.0  # of the host, once a window

    def draft_s(self, requests: float) -> float:
        """Return the seconds of a draft pass for `requests` of this verifier."""
        return _shared_draft_s(self.draft, self.draft_gpus, requests)

    def token_s(self, requests: float, window: int) -> float:
        """Return the seconds of a drafted token for `requests` of this verifier: a pass, and its
        part of a window's round."""
        return self.draft_s(requests) + self.round_s / window


def _shared_draft_s(draft: Affine, draft_gpus: int, requests: float) -> float:
    return draft(max(requests / draft_gpus, 1.0))


def plan_decoupled(
    draft: Affine,
    verifiers: Mapping[int, Sequence[Affine]],
    gpus: int,
    requests: int,
    acceptance: float,
    objective: Objective = "tgs",
    draft_gpus: int | None = None,
    window: int | None = None,
    in_turns: bool = False,
    round_s: float = 0.0,
) -> DecoupledPlan:
    """Choose the drafter GPUs, the verifier and the window with the largest objective (Algorithm
    1); of equals, the first. A given `draft_gpus` or `window` is not chosen, and neither its bound
    nor the number of GPUs limits it. A window takes `round_s` of the host in addition to its w·D.

    `verifiers` gives V by the GPUs that a verifier can have (the set 𝔾), as `fit_verify` makes it;
    `requests` (B) are rolled out on `gpus` (G) in total. For every verifier and 1 … g_v drafter
    GPUs, which share b = ceil((g_d + g_v)·B / G) requests, windows are tried up to max(ceil(V'_w /
    D'), ceil(β_w / α)): beyond, drafting is slower than verifying at any batch. (β_w is the lower
    bound of V_w, where that is larger.)

    The paper leaves three things open. The drafters, one GPU each, draft for b / g_d requests each
    (at least one). Each window is compared with its own bound, and none exceeds the fits of the
    verifier. A verifier that leaves no GPU to a drafter is skipped. With `in_turns`, drafters on
    GPUs of their own wait for each verification (§3, disaggregated but not decoupled): both rates
    are `coupled_tgs` then. Raise `InputError` where nothing is left to choose from.
    """
    plans = []
    for verify_gpus, verify in verifiers.items():
        for g_d in (
            [draft_gpus] if draft_gpus else range(1, min(verify_gpus, gpus - verify_gpus) + 1)
        ):
            b = math.ceil((g_d + verify_gpus) * requests / gpus)
            draft_s = _shared_draft_s(draft, g_d, b)
            for w in (
                [window] if window else _windows(Affine(draft.slope_s / g_d, draft.fixed_s), verify)
            ):
                if in_turns and w == len(verify):
                    continue
                loop = acceptance, w, draft_s + round_s / w, verify[w if in_turns else w - 1](b)
                rates = (
                    (coupled_tgs(*loop),) * 2
                    if in_turns
                    else (decoupled_tgs(*loop), renewal_rate(*loop))
                )
                plans.append(
                    DecoupledPlan(g_d, verify_gpus, w, b, *rates, draft, tuple(verify), round_s)
                )
    if not plans:
        raise InputError(
            f"plan of decoupled drafting: no verifier of {sorted(verifiers)} GPUs leaves a drafter one of {gpus}; "
            "give more GPUs or a smaller verifier"
        )
    return max(plans, key=lambda plan: plan.tgs if objective == "tgs" else plan.renewal)


def _windows(draft: Affine, verify: Sequence[Affine]) -> Iterable[int]:
    """Yield the windows that Algorithm 1 tries."""
    for window, v in enumerate(verify, start=1):
        pairs = (v.slope_s, draft.slope_s), (max(v.fixed_s, v.least_s), draft.fixed_s)
        # Where only drafting takes no time, there is no bound.
        if any(
            window <= math.ceil(verify_s / draft_s) if draft_s else verify_s > 0
            for verify_s, draft_s in pairs
        ):
            yield window


def best_window(
    acceptance: float,
    draft_s: float,
    verify_s: Sequence[float],
    objective: Objective = "tgs",
    round_s: float = 0.0,
) -> tuple[int, int]:
    """Return (window, `DECOUPLED` or `COUPLED`), the fastest at this acceptance: lines 3 to 5 of
    Algorithm 2.

    `verify_s` are the seconds of a verification of 1, 2, … query tokens a request. Of equals, the
    smaller window, and coupled, which wastes less. The objective applies to decoupled drafting;
    coupled drafting is always rated by `coupled_tgs`."""
    rate = decoupled_tgs if objective == "tgs" else renewal_rate
    rated = []
    for window, seconds in enumerate(verify_s, start=1):
        token_s = draft_s + round_s / window
        if window < len(verify_s):
            rated.append(
                (coupled_tgs(acceptance, window, token_s, verify_s[window]), (window, COUPLED))
            )
        rated.append((rate(acceptance, window, token_s, seconds), (window, DECOUPLED)))
    return max(rated, key=lambda rate_of_choice: rate_of_choice[0])[1]


def reconfiguration_table(plan: DecoupledPlan, objective: Objective = "tgs") -> tuple[Ints, Ints]:
    """Return Algorithm 2 ahead of time: (window, 1 where coupled) at the acceptance rates 0, 1, …
    100 %; shapes (101,). A request is rated alone (b = 1), with the plan's drafter and verifier."""
    draft_s, seconds = plan.draft_s(1), [v(1) for v in plan.verify]
    chosen = [
        best_window(p, draft_s, seconds, objective, plan.round_s)
        for p in np.linspace(0.0, 1.0, RATES).tolist()
    ]
    windows, coupled = zip(*chosen, strict=True)
    return np.array(windows, dtype=np.int64), np.array(coupled, dtype=np.int64)


@kernel
def reconfigured(
    acceptance: float, mean: float, window: int, windows: Ints, coupled: Ints
) -> tuple[int, int]:
    """Return (window, 1 if coupled) of one request: from the table at its acceptance, rounded to
    the nearest step, if that is below the mean; otherwise, and where its acceptance is not known
    yet (nan), the plan's `window`, decoupled."""
    if not acceptance < mean:
        return window, 0
    step = int(acceptance * (windows.shape[0] - 1) + 0.5)
    return int(windows[step]), int(coupled[step])


@kernel
def token_acceptance(accepted: int, misses: int) -> float:
    """Return the estimate of p from verifications: the share of judged tokens that were right; nan
    if none was judged. (Tokens after a wrong one in a window never are.)"""
    return accepted / (accepted + misses) if accepted + misses else math.nan


class Ladder(NamedTuple):
    """The speed-up of each drafter over plain decoding at each acceptance rate, with its best
    window; shapes (drafters, acceptances)."""

    drafters: tuple[str, ...]
    acceptances: Floats
    speedups: Floats
    windows: Ints

    def speedup(self, drafter: str, acceptance: float) -> float:
        """Return a drafter's speed-up, linear between two rates of the ladder."""
        return float(
            np.interp(acceptance, self.acceptances, self.speedups[self.drafters.index(drafter)])
        )


def draft_ladder(
    drafters: Mapping[str, Callable[[int, int], float]],
    verify: Sequence[Callable[[int], float]],
    requests: int,
    windows: Sequence[int] | None = None,
) -> Ladder:
    """Return the ladder at a batch of `requests`, at the acceptance rates 0, 1, … 100 % (§4.2,
    Figure 10a).

    `drafters` give the seconds in which (b, n): n tokens are drafted for each of b requests;
    `verify` the seconds of verifications with 1, 2, … query tokens a request, the first of which is
    plain decoding. SpecActor runs drafter and target on random verdicts; here it is the long-run
    rate of such runs, `coupled_tgs`. Windows are as long as `verify` has them, or the given ones.
    """
    acceptances, windows = np.linspace(0.0, 1.0, RATES), windows or range(1, len(verify))
    verify_s = [v(requests) for v in verify]
    rates = []
    for draft in drafters.values():
        draft_s = {window: draft(requests, window) / window for window in windows}
        rates.append(
            [
                [coupled_tgs(p, w, draft_s[w], verify_s[w]) for w in windows]
                for p in acceptances.tolist()
            ]
        )
    best = np.array(rates)
    return Ladder(
        tuple(drafters),
        acceptances,
        best.max(axis=2) * verify_s[0],
        np.array(windows)[best.argmax(axis=2)],
    )
