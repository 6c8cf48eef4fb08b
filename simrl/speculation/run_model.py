"""What a drafter from texts would do on responses whose tokens are not known: a model of its runs.

A response is a stretch that the drafter does not know (a gap), one that it does (a hit), a gap, and so on; the lengths of both
are drawn. Within a hit, the draft from each position is right to the end of the hit; within a gap, any draft is
wrong. So windows and gates meet long hits as long, which one acceptance rate could not tell them.

Responses differ, by more than luck: there are a few classes of them, from those whose drafts are mostly right to those whose
drafts never are, and long responses (over `typical_tokens`) may fall into other classes than short ones.

Invariant: what is drawn for a response belongs to its key, so systems that are compared meet the same drafts. Not modelled:
how the lengths of successive gaps and hits depend on each other, or on the place in the response.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from simrl.errors import InputError
from simrl.speculation.drafter import MOST_DRAFT_TOKENS, AcceptRuns
from simrl.speculation.draws import mixed, uniform
from simrl.speculation.matching import Ints
from simrl.speculation.passes import Stretches, stretches
from simrl.trace import Trace

Floats = NDArray[np.float64]
Share = Annotated[float, Field(ge=0, le=1)]

CLASSES = 4
FEWEST_RESPONSES = 25  # of a class that is fitted
SMALLEST_BUCKET = 0.01  # share of the lengths
_CLASS = -1  # the place of a response's draw of its class; those of its lengths are 0, 1, 2 …


class Bucket(BaseModel):
    """Lengths from one more than the bucket before reaches, up to `up_to_tokens`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    up_to_tokens: int = Field(ge=1, le=2**24, description="the longest length in the bucket")
    share: Share = Field(description="of the number of hits, or gaps, that are so long")
    mean_tokens: float = Field(ge=1, description="of these")


Buckets = Annotated[tuple[Bucket, ...], Field(min_length=1)]


class ResponseClass(BaseModel):
    """Responses that drafts serve equally well."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    share: Share = Field(description="of the responses up to typical_tokens")
    share_of_long: Share = Field(description="of the longer ones")
    wrong_drafts: Share = Field(
        default=1.0, description="share of a gap's positions, but for the first after a hit, with a (wrong) draft"
    )
    gaps: Buckets = Field(description="lengths of the stretches that no draft has right")
    hits: Buckets = Field(description="lengths of the stretches that drafts have right")

    @model_validator(mode="after")
    def _rises(self) -> ResponseClass:
        for name, buckets in (("gaps", self.gaps), ("hits", self.hits)):
            low = 1
            for bucket in buckets:
                if not low <= bucket.mean_tokens <= bucket.up_to_tokens:
                    raise ValueError(
                        f"{name}: a bucket has mean_tokens {bucket.mean_tokens:g}; it must be from {low} to its up_to_tokens "
                        f"{bucket.up_to_tokens}"
                    )
                low = bucket.up_to_tokens + 1
            _check_sum([b.share for b in buckets], f"{name}: the buckets' shares")
        return self


class RunModel(BaseModel):
    """The runs of a drafter from texts (history, siblings, n-grams), for traces without token ids."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    classes: tuple[ResponseClass, ...] = Field(min_length=1, description="kinds of responses, their shares sum to 1")
    typical_tokens: float = Field(default=2000.0, gt=0, description="longer responses count as long")
    beyond_tokens: int = Field(
        default=MOST_DRAFT_TOKENS, ge=1, le=255, description="tokens that a draft has beyond those that are right"
    )
    most_tokens: int = Field(default=MOST_DRAFT_TOKENS, ge=1, le=255, description="longest draft")
    first_epoch: bool = Field(
        default=False, description="whether there are drafts in the first epoch (siblings, n-grams: yes; history: no)"
    )
    kind: Literal["measured", "digitised", "assumed"] = Field(
        default="assumed", description="how the numbers are known"
    )
    source: str = Field(default="the scenario", description="where the numbers come from")

    @model_validator(mode="after")
    def _whole(self) -> RunModel:
        _check_sum([c.share for c in self.classes], "the classes' share")
        _check_sum([c.share_of_long for c in self.classes], "the classes' share_of_long")
        return self


def _check_sum(shares: list[float], what: str) -> None:
    if abs(sum(shares) - 1) > 0.01:
        raise ValueError(f"{what} sum to {sum(shares):g}; they must sum to 1")


def fit_run_model(
    runs: AcceptRuns,
    response_tokens: Ints,
    *,
    most_tokens: int = MOST_DRAFT_TOKENS,
    first_epoch: bool = False,
    source: str = "fitted to recorded tokens",
    classes: int = CLASSES,
) -> RunModel:
    """The model of recorded runs: `draw_runs` on the same lengths gives runs alike.

    Responses with drafts are sorted by the share of their tokens that is hit, and cut into `classes` of equal number, fewer
    where that would leave a class fewer than 25. `typical_tokens` is their median length. Raises `InputError` where no response
    has drafts.
    """
    tokens = response_tokens.astype(np.int64)
    served = np.flatnonzero((runs.first >= 0) & (tokens > 1))
    if not served.size:
        raise InputError("no response has drafts, so there is nothing to fit; history needs a second epoch")
    parts = stretches(runs, tokens)
    hit_tokens = np.bincount(parts.row, weights=parts.hit, minlength=len(tokens))
    ranked = served[np.argsort(hit_tokens[served] / tokens[served], kind="stable")[::-1]]
    number = max(1, min(classes, len(ranked) // FEWEST_RESPONSES))
    typical = float(np.median(tokens[served]))
    long = tokens > typical
    misses = _misses(*runs, tokens)
    _, wrong, wrong_tokens = misses.sum(axis=0).tolist()
    found = []
    for rows in np.array_split(ranked, number):
        member = np.zeros(len(tokens), dtype=bool)
        member[rows] = True
        inside = member[parts.row]
        mine = Stretches(*(column[inside] for column in parts))
        visited, with_draft = misses[rows, :2].sum(axis=0).tolist()
        found.append(
            ResponseClass(
                share=_rounded(np.mean(member[served[~long[served]]])),
                share_of_long=_rounded(
                    np.mean(member[served[long[served]]]) if long[served].any() else len(rows) / len(served)
                ),
                wrong_drafts=_rounded(with_draft / visited if visited else 0.0),
                gaps=_buckets(mine.gap[mine.gap > 0]),
                hits=_buckets(mine.hit[mine.hit > 0]),
            )
        )
    return RunModel(
        classes=tuple(found),
        typical_tokens=typical,
        beyond_tokens=min(max(round(wrong_tokens / wrong), 1), 255) if wrong else 1,
        most_tokens=most_tokens,
        first_epoch=first_epoch,
        kind="measured",
        source=source,
    )


def _rounded(value: float | np.floating) -> float:
    return round(float(value), 4)


def _buckets(lengths: Ints) -> tuple[Bucket, ...]:
    """Shares and means of the lengths between powers of two, from the top down until a bucket has at least
    `SMALLEST_BUCKET` of them; one bucket of one token where there are no lengths."""
    if not lengths.size:
        return (Bucket(up_to_tokens=1, share=1.0, mean_tokens=1.0),)
    edge = np.ceil(np.log2(lengths)).astype(np.int64)
    found: list[Bucket] = []
    top = edge.max()
    for power in range(int(top), -1, -1):
        inside = (edge >= power) & (edge <= top)
        if inside.mean() >= SMALLEST_BUCKET or power == 0:
            if not inside.any():
                continue
            low = 2 ** (power - 1) + 1 if power else 1
            mean = float(np.clip(round(lengths[inside].mean(), 2), low, 2**top))
            found.append(Bucket(up_to_tokens=int(2**top), share=_rounded(inside.mean()), mean_tokens=mean))
            top = power - 1
    return tuple(reversed(found))


@njit(cache=True)
def _misses(first: Ints, drafted: NDArray[np.uint8], accepted: NDArray[np.uint8], response_tokens: Ints) -> Ints:
    """For each row, of the positions that decoding with whole drafts comes to and that give nothing: how many, how many of them
    have a draft, and the tokens of these drafts."""
    out = np.zeros((response_tokens.shape[0], 3), dtype=np.int64)
    for row in range(response_tokens.shape[0]):
        at, p = first[row], 1
        while at >= 0 and p < response_tokens[row]:
            if accepted[at + p] == 0:
                out[row, 0] += 1
                out[row, 1] += drafted[at + p] > 0
                out[row, 2] += drafted[at + p]
            p += int(accepted[at + p]) + 1
    return out


def draw_runs(
    model: RunModel, response_tokens: Ints, keys: Ints, has_history: NDArray[np.bool_] | None = None
) -> AcceptRuns:
    """Runs for responses of these lengths, shape (rows,), each drawn from its key (`acceptance.sample_key`).

    Rows without `has_history` get no drafts: those of the first epoch, for drafters that need one before.
    """
    tokens = response_tokens.astype(np.int64)
    served = np.ones(len(tokens), dtype=bool) if has_history is None else has_history
    lengths = np.where(served, tokens, 0)
    first = np.where(served, np.cumsum(lengths) - lengths, -1).astype(np.int64)
    gaps, hits = (_table([getattr(c, name) for c in model.classes]) for name in ("gaps", "hits"))
    short_edges, long_edges = (
        np.cumsum([getattr(c, name) for c in model.classes]) for name in ("share", "share_of_long")
    )
    drafted, accepted = _draw(
        first,
        tokens,
        keys.astype(np.int64),
        tokens > model.typical_tokens,
        short_edges / short_edges[-1],
        long_edges / long_edges[-1],
        np.array([c.wrong_drafts for c in model.classes]),
        gaps,
        hits,
        model.beyond_tokens,
        model.most_tokens,
        int(lengths.sum()),
    )
    return AcceptRuns(first, drafted, accepted)


def draw_trace_runs(model: RunModel, trace: Trace, seed: int, epochs_back: int = 1) -> AcceptRuns:
    """`draw_runs` for the rows of a trace. Unless the model drafts in the first epoch, a row has drafts if its prompt has
    responses in one of the `epochs_back` epochs before its own."""
    prompt, epoch, sample = (trace.column(name).astype(np.int64) for name in ("prompt_id", "epoch", "sample"))
    has_history = np.ones(len(trace), dtype=bool)
    if not model.first_epoch:
        order = np.lexsort((epoch, prompt))
        latest = _latest_before(prompt[order], epoch[order])
        has_history[order] = (latest >= 0) & (epoch[order] - latest <= epochs_back)
    return draw_runs(model, trace.column("response_tokens"), sample_keys(seed, prompt, epoch, sample), has_history)


@njit(cache=True)
def _latest_before(prompt: Ints, epoch: Ints) -> Ints:
    """The latest epoch of the same prompt before each row's own, -1 for none; the rows are sorted by (prompt, epoch)."""
    latest = np.full(prompt.shape[0], -1, dtype=np.int64)
    for i in range(1, prompt.shape[0]):
        if prompt[i] == prompt[i - 1]:
            latest[i] = latest[i - 1] if epoch[i] == epoch[i - 1] else epoch[i - 1]
    return latest


@njit(cache=True)
def sample_keys(seed: int, prompt: Ints, epoch: Ints, sample: Ints) -> Ints:
    """`acceptance.sample_key` of each row."""
    keys = np.empty(prompt.shape[0], dtype=np.int64)
    for i in range(prompt.shape[0]):
        keys[i] = mixed(mixed(mixed(seed, prompt[i]), epoch[i]), sample[i])
    return keys


def _table(classes: list[tuple[Bucket, ...]]) -> Floats:
    """For each class and bucket: cumulative share, shortest length, number of lengths, and the exponent c for which
    `shortest + floor(number * u ** c)` has the bucket's mean."""
    table = np.zeros((len(classes), max(map(len, classes)), 4))
    for rows, buckets in zip(table, classes, strict=True):
        shares = np.cumsum([b.share for b in buckets])
        low = 1
        for i, bucket in enumerate(buckets):
            number = bucket.up_to_tokens - low + 1
            middle = min(max((bucket.mean_tokens - low + 0.5) / number, 1e-3), 1 - 1e-3)
            rows[i] = shares[i] / shares[-1], low, number, 1 / middle - 1
            low = bucket.up_to_tokens + 1
        rows[len(buckets) - 1 :, 0] = 1.0
    return table


@njit(cache=True)
def _length(buckets: Floats, u: float, v: float) -> int:
    i = 0
    while u > buckets[i, 0]:
        i += 1
    return int(buckets[i, 1]) + int(buckets[i, 2] * v ** buckets[i, 3])


@njit(cache=True)
def _draw(
    first: Ints,
    response_tokens: Ints,
    keys: Ints,
    long: NDArray[np.bool_],
    short_edges: Floats,
    long_edges: Floats,
    wrong_drafts: Floats,
    gaps: Floats,
    hits: Floats,
    beyond: int,
    most: int,
    positions: int,
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    drafted = np.zeros(positions, dtype=np.uint8)
    accepted = np.zeros(positions, dtype=np.uint8)
    for row in range(first.shape[0]):
        if first[row] < 0:
            continue
        at, end, key = first[row], response_tokens[row], keys[row]
        edges = long_edges if long[row] else short_edges
        kind = 0
        while uniform(key, _CLASS) > edges[kind]:
            kind += 1
        p, place = 1, 0
        while p < end:
            stop = min(p + _length(gaps[kind], uniform(key, place), uniform(key, place + 1)), end)
            hit = _length(hits[kind], uniform(key, place + 2), uniform(key, place + 3))
            place += 4
            while p < stop:
                after_hit = accepted[at + p - 1] > 0  # the draft goes on, and is wrong
                if after_hit or uniform(key, place) < wrong_drafts[kind]:
                    drafted[at + p] = min(beyond, most)
                place += 1
                p += 1
            stop = min(p + hit, end)
            while p < stop:
                a = min(stop - p, most)
                accepted[at + p] = a
                drafted[at + p] = min(a + beyond, most)
                p += 1
    return drafted, accepted
