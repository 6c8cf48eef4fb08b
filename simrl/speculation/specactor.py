"""SpecActor's plan of decoupled drafting: how many GPUs draft, how many verify, how far ahead (arXiv 2511.16193, §4.1).

Invariant: pure functions of profiled seconds and an acceptance rate p, the probability that a drafted token is right if all
before it are. Every rate is in tokens per second of one request; times the requests, it is the worker's.

Decoupled, drafter and verifier run at once: while a window of w tokens is verified, the next one is drafted, so that windows
that are accepted follow each other every IL = max(w·D, V_w) seconds. A miss throws away what was drafted ahead. Coupled, they
take turns. The published objective of the planner is TGS; it averages tokens over IL whatever happens. `renewal_rate` is what
two such loops yield: a miss costs w·D + V_w, as the next window is drafted from the correction on. The verification
of a decoupled window has w query tokens a request; a coupled one w + 1, for the token that the pass yields besides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simrl.errors import InputError
from simrl.profile import TableProfile

Ints = NDArray[np.int64]
Objective = Literal["tgs", "renewal"]
DECOUPLED, COUPLED = 0, 1


class Affine(NamedTuple):
    """Seconds of a pass over b requests: b · slope_s + fixed_s, and no less than `least_s`."""

    slope_s: float
    fixed_s: float
    least_s: float = 0.0

    def __call__(self, requests: float) -> float:
        return max(requests * self.slope_s + self.fixed_s, self.least_s)


def fit_affine(requests: Sequence[float], seconds: Sequence[float], what: str = "pass") -> Affine:
    """The affine function without negative parts that is nearest to `seconds` in relative error (least squares).

    Raises `InputError` where fewer than two batch sizes or times that are not positive are given; `what` names the pass.
    """
    b, s = np.asarray(requests, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if np.unique(b).size < 2:
        raise InputError(f"fit of the {what}: {np.unique(b).size} batch sizes; give two or more different ones")
    if not (np.isfinite(s).all() and (s > 0).all()):
        bad = int(np.flatnonzero(~(np.isfinite(s) & (s > 0)))[0])
        raise InputError(f"fit of the {what}: {s[bad]} s at batch {b[bad]:g}; seconds must be positive")
    from scipy.optimize import nnls  # takes 0.3 s to import

    (slope_s, fixed_s), _ = nnls(np.column_stack([b / s, 1.0 / s]), np.ones_like(s))
    return Affine(float(slope_s), float(fixed_s))


def fit_draft(draft_s: Callable[[int], float], requests: Sequence[int]) -> Affine:
    """D(b) = b·D' + α of one drafter GPU, from the seconds in which it drafts one token for each of b requests (§4.1)."""
    return fit_affine(requests, [draft_s(b) for b in requests], "draft pass")


def fit_verify(profile: TableProfile, most_query_tokens: int, requests: Sequence[int], kv_tokens: int) -> list[Affine]:
    """V_q(b) = b·V'_q + β_q for q = 1 … `most_query_tokens` query tokens a request, at index q - 1 (§4.1).

    From the profile: the dense part and the output head at b·q tokens, attention at b sequences, `kv_tokens` long each. q = 1
    is plain decoding. Batches of more tokens than the profile covers are left out of a fit. What no pass is shorter than
    (`least_pass_s`) makes a kink that no line has: it is left out of the fit, too, and holds for what the fit gives.
    Raises `InputError` where that leaves fewer than two batch sizes.
    """
    t = profile.tables
    dense, sequences = t.dense_tokens[-1], t.decode_sequences[-1]
    least_s = t.least_pass_s + t.between_passes_s if t.least_pass_s else 0.0
    free = TableProfile(t._replace(least_pass_s=0.0), profile.metadata)
    fits = []
    for q in range(1, most_query_tokens + 1):
        fitting = [b for b in requests if b * q <= dense and b <= sequences]
        seconds = [verification_s(free, b, b * q, b * kv_tokens) for b in fitting]
        fit = fit_affine(fitting, seconds, f"verification of {q} tokens a request")
        fits.append(fit._replace(least_s=least_s))
    return fits


def verification_s(profile: TableProfile, requests: int, query_tokens: int, kv_tokens: int) -> float:
    """Seconds of a pass that verifies `query_tokens` in sum in `requests` that hold `kv_tokens` in sum.

    The output head works on all query tokens. Where these are more than the profile has sampled sequences, it is held at its
    last time, as in every pass (a percent of such a pass).
    """
    return profile.pass_s(query_tokens, query_tokens, decode_sequences=requests, decode_kv_tokens=kv_tokens)


def decoupled_tgs(acceptance: float, window: int, draft_s: float, verify_s: float) -> float:
    """The published token generation speed of decoupled drafting, TGS = τ_w / IL (§4.1), tokens/s of a request.

    τ_w = Σ_{a<w} pᵃ(1−p)(a+1)/2 + w·pʷ, IL = max(w·D, V_w); `draft_s` is D, `verify_s` is V_w, both of the whole batch.
    The half stands for the time that a miss costs. Raises `InputError` for numbers that none can be.
    """
    _check(acceptance, window, draft_s, verify_s)
    tokens = _tokens_of_a_miss(acceptance, window) / 2 + window * acceptance**window
    return tokens / max(window * draft_s, verify_s)


def renewal_rate(acceptance: float, window: int, draft_s: float, verify_s: float) -> float:
    """What decoupled drafting yields when it is executed, tokens/s of a request: the tokens of an attempt over its time.

    Tokens: Σ_{a<w} pᵃ(1−p)(a+1) + w·pʷ. Time: pʷ·IL + (1−pʷ)(w·D + V_w), since after a miss a window is drafted before the next
    can be verified. Exact for one request (renewal-reward theorem); in a batch, the missed wait for a verifier, too.
    """
    _check(acceptance, window, draft_s, verify_s)
    whole = acceptance**window
    tokens = _tokens_of_a_miss(acceptance, window) + window * whole
    pipelined_s, serial_s = max(window * draft_s, verify_s), window * draft_s + verify_s
    return tokens / (whole * pipelined_s + (1 - whole) * serial_s)


def coupled_tgs(acceptance: float, window: int, draft_s: float, verify_s: float) -> float:
    """Drafting and verifying in turn: (Σ_{a<w} pᵃ(1−p)(a+1) + (w+1)pʷ) / (w·D + V), tokens/s of a request.

    SpecActor leaves this model out of the paper; this is the usual one (Leviathan et al., 2211.17192, §3). It is exact, as
    every attempt takes the same time. `verify_s` is of a pass with w + 1 query tokens a request.
    """
    _check(acceptance, window, draft_s, verify_s)
    tokens = _tokens_of_a_miss(acceptance, window) + (window + 1) * acceptance**window
    return tokens / (window * draft_s + verify_s)


_DECOUPLED_RATES = {"tgs": decoupled_tgs, "renewal": renewal_rate}


def _tokens_of_a_miss(p: float, window: int) -> float:
    """Σ_{a<w} pᵃ(1−p)(a+1): a right ones and the correction, weighted by how likely they are."""
    return sum(p**a * (1 - p) * (a + 1) for a in range(window))


def _check(acceptance: float, window: int, draft_s: float, verify_s: float) -> None:
    if not 0 <= acceptance <= 1:
        raise InputError(f"rate of drafting: acceptance is {acceptance}; it is a probability, 0 to 1")
    if window < 1:
        raise InputError(f"rate of drafting: window is {window}; it must be 1 or more")
    if not (0 <= draft_s < math.inf and 0 < verify_s < math.inf):
        raise InputError(
            f"rate of drafting: a draft pass takes {draft_s} s and a verification {verify_s} s; "
            "they must be finite, the first not negative, the second positive"
        )


@dataclass(frozen=True)
class Plan:
    """What `plan_decoupled` chose, and what it expects of it: rates in tokens/s of one request."""

    draft_gpus: int
    verify_gpus: int
    window: int
    requests: int  # of one verifier and its drafters
    tgs: float
    renewal: float
    draft: Affine  # of one drafter GPU
    verify: tuple[Affine, ...]  # by query tokens a request, from 1 on

    def draft_s(self, requests: float) -> float:
        """Seconds of a draft pass for so many requests of this verifier."""
        return _shared_draft_s(self.draft, self.draft_gpus, requests)


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
) -> Plan:
    """Algorithm 1: the drafter GPUs, the verifier and the window with the largest objective; of equals, the first found. Where
    `draft_gpus` or the `window` is given, it is not chosen, and neither its bound nor the GPUs that there are limit it.

    `verifiers` gives V by the GPUs that a verifier can have (the set 𝔾), as `fit_verify` makes it; `requests` (B) are rolled
    out on `gpus` (G) in all. For every verifier and 1 … g_v drafter GPUs, which then share b = ceil((g_d + g_v)·B / G)
    requests, windows are tried up to max(ceil(V'_w / D'), ceil(β_w / α)): beyond, drafting is slower than verifying at any
    batch. (β_w is what V_w is at the least, where that is more.)

    The paper is silent on three things. The drafters, one GPU each, draft for b / g_d requests each (no fewer than one). The
    bound has V_w in it, so each window is held against its own, and none exceeds the entries of the verifier. A verifier
    that leaves no GPU to a drafter is passed over. Raises `InputError` where nothing is left to choose from, and for a
    `window` that a verifier has no fit for.
    """
    if objective not in _DECOUPLED_RATES:
        raise InputError(f"plan of decoupled drafting: objective is {objective!r}; it is 'tgs' or 'renewal'")
    if gpus < 2 or requests < 1:
        raise InputError(
            f"plan of decoupled drafting: {requests} requests on {gpus} GPUs; give a request or more, and two GPUs or more"
        )
    best, most = None, -math.inf
    for verify_gpus, verify in verifiers.items():
        if verify_gpus < 1 or not verify:
            raise InputError(
                f"plan of decoupled drafting: the verifier of {verify_gpus} GPUs has {len(verify)} fits; "
                "a verifier has a GPU or more, and a fit for each window"
            )
        if window is not None and not 1 <= window <= len(verify):
            raise InputError(
                f"plan of decoupled drafting: the window is {window}, and the verifier of {verify_gpus} GPUs has fits for "
                f"1 to {len(verify)}; give one of these"
            )
        for g_d in [draft_gpus] if draft_gpus else range(1, min(verify_gpus, gpus - verify_gpus) + 1):
            b = math.ceil((g_d + verify_gpus) * requests / gpus)
            draft_s = _shared_draft_s(draft, g_d, b)
            for w in [window] if window else _windows(Affine(draft.slope_s / g_d, draft.fixed_s), verify):
                seconds = draft_s, verify[w - 1](b)
                tgs, renewal = decoupled_tgs(acceptance, w, *seconds), renewal_rate(acceptance, w, *seconds)
                value = tgs if objective == "tgs" else renewal
                if value > most:
                    most = value
                    best = Plan(g_d, verify_gpus, w, b, tgs, renewal, draft, tuple(verify))
    if best is None:
        raise InputError(
            f"plan of decoupled drafting: no verifier of {sorted(verifiers)} GPUs leaves a drafter one of {gpus}; "
            "give more GPUs or a smaller verifier"
        )
    return best


def _windows(draft: Affine, verify: Sequence[Affine]) -> Iterable[int]:
    """The windows that Algorithm 1 tries."""
    for window, v in enumerate(verify, start=1):
        slopes, fixed = _ratio(v.slope_s, draft.slope_s), _ratio(max(v.fixed_s, v.least_s), draft.fixed_s)
        if window <= max(slopes, fixed):
            yield window


def _ratio(verify: float, draft: float) -> float:
    """Rounded up; without bound where drafting takes nothing, nothing where verifying does neither."""
    if draft == 0:
        return math.inf if verify > 0 else 0
    return math.ceil(verify / draft)


def best_window(
    acceptance: float, draft_s: float, verify_s: Sequence[float], objective: Objective = "tgs"
) -> tuple[int, int]:
    """(window, `DECOUPLED` or `COUPLED`): the fastest at this acceptance, lines 3 to 5 of Algorithm 2.

    `verify_s` are the seconds of a verification of 1, 2, … query tokens a request. Of equals, the smaller window, and coupled,
    which wastes less. The objective is of decoupled drafting; for coupled drafting both are `coupled_tgs`.
    """
    rate = _DECOUPLED_RATES[objective]
    best, most = (1, DECOUPLED), -math.inf
    for window in range(1, len(verify_s) + 1):
        choices = [(rate(acceptance, window, draft_s, verify_s[window - 1]), DECOUPLED)]
        if window < len(verify_s):
            choices.insert(0, (coupled_tgs(acceptance, window, draft_s, verify_s[window]), COUPLED))
        for value, mode in choices:
            if value > most:
                best, most = (window, mode), value
    return best


def reconfiguration_table(plan: Plan, objective: Objective = "tgs", steps: int = 101) -> tuple[Ints, Ints]:
    """Algorithm 2 ahead of time: (window, 1 where coupled) at the acceptance rates 0 … 1 in `steps` steps; both (steps,).

    A request is judged alone (b = 1), with the plan's drafter and verifier. `reconfigured` looks it up.
    """
    if steps < 2:
        raise InputError(f"table of reconfigurations: {steps} steps; give two or more, for the rates 0 and 1")
    draft_s, seconds = plan.draft_s(1), [v(1) for v in plan.verify]
    chosen = [best_window(p, draft_s, seconds, objective) for p in np.linspace(0.0, 1.0, steps).tolist()]
    windows, coupled = zip(*chosen, strict=True)
    return np.array(windows, dtype=np.int64), np.array(coupled, dtype=np.int64)


@njit(cache=True)
def reconfigured(acceptance: float, mean: float, window: int, windows: Ints, coupled: Ints) -> tuple[int, int]:
    """(window, 1 if coupled) of one request: of the table at its acceptance, rounded to the nearest step, if it is below the
    mean; else the plan's `window`, decoupled. So is one whose acceptance is not known yet (nan)."""
    if not acceptance < mean:
        return window, 0
    step = int(acceptance * (windows.shape[0] - 1) + 0.5)
    return int(windows[step]), int(coupled[step])


def reconfigure(
    plan: Plan, acceptances: Sequence[float], objective: Objective = "tgs", mean: float | None = None
) -> list[tuple[int, int]]:
    """Algorithm 2: (window, `COUPLED` or `DECOUPLED`) of each request; anew for those below the mean acceptance, of the plan
    for the others.

    `mean` is that of the acceptances that are known (not nan) unless one is given. SpecActor does this every 1,000 generated
    tokens of a request; when is the caller's matter. Raises `InputError` for rates outside 0 to 1.
    """
    wrong = [p for p in acceptances if not (math.isnan(p) or 0 <= p <= 1)]
    if wrong:
        raise InputError(f"reconfiguration: acceptance is {wrong[0]}; it is a probability, 0 to 1")
    known = [p for p in acceptances if not math.isnan(p)]
    if mean is None:
        mean = sum(known) / len(known) if known else 0.0
    windows, coupled = reconfiguration_table(plan, objective)
    return [reconfigured(p, mean, plan.window, windows, coupled) for p in acceptances]


@njit(cache=True)
def token_acceptance(accepted: int, misses: int) -> float:
    """The estimate of p from what verifications showed: of the tokens that were judged, those that were right.

    What follows a wrong token in its window was judged by none, so accepted / drafted would be too low. nan if nothing was.
    """
    return accepted / (accepted + misses) if accepted + misses else math.nan


def counted_acceptance(drafted: int, accepted: int, verifications: int) -> float:
    """The same from what servers count of a request, where misses are not among it: the p at which a window as long as the mean
    of its drafts has as many tokens accepted as the mean of its verifications, Σ_{1<=j<=w} pʲ = accepted / verifications.

    So requests with windows of different lengths can be compared, which accepted / drafted cannot. nan without verifications.
    """
    if not verifications or not drafted:
        return math.nan
    if accepted in (0, drafted):
        return float(accepted > 0)
    window, tokens = drafted / verifications, accepted / verifications
    from scipy.optimize import brentq  # takes 0.3 s to import

    return float(brentq(lambda p: p * (1 - p**window) / (1 - p) - tokens, 0.0, 1.0 - 1e-12))
