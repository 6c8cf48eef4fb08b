"""Run model: the drafts of a text drafter on responses whose tokens are not known.

A response alternates between stretches that the drafter does not know (gaps) and stretches that it
does (hits); the lengths of both are drawn. Within a hit, the draft from each position is right to
the end of the hit; within a gap, any draft is wrong. So windows and gates see long hits, which a
single acceptance rate would not give them. Responses are of a few classes, from mostly right drafts
to never right ones; long responses (over `typical_tokens`) may fall into other classes than short
ones.

Invariant: the draws of a response depend on its key alone, so compared systems see equal drafts.
Not modelled: how the lengths of successive gaps and hits depend on each other, or on the place in
the response.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from simrl.errors import InputError
from simrl.profile.compiled import kernel, part
from simrl.speculation.acceptance import InputKind
from simrl.speculation.drafter import MOST_DRAFT_TOKENS, AcceptRuns
from simrl.speculation.draws import uniform
from simrl.speculation.matching import Floats, Ints, epoch_keys
from simrl.speculation.passes import run_passes, stretches
from simrl.speculation.windows import Fixed
from simrl.trace.draws import mixed
from simrl.trace.trace import Trace
from simrl.validation import Model

Share = Annotated[float, Field(ge=0, le=1)]

CLASSES = 4
FEWEST_RESPONSES = 25  # in a fitted class
WHOLE_DRAFTS = Fixed(tokens=255).rule  # the longest that `AcceptRuns` hold
SMALLEST_BUCKET = 0.01  # share of the lengths
_CLASS = -1  # the place of a response's draw of its class; its lengths are drawn at 0, 1, 2 …


class Bucket(Model):
    """Lengths above the bucket before, up to `up_to_tokens`."""

    up_to_tokens: int = Field(ge=1, le=2**24, description="the longest length in the bucket")
    share: Share = Field(description="share of all hits (or gaps) that lie in this bucket")
    mean_tokens: float = Field(ge=1, description="mean length in this bucket")


Buckets = Annotated[tuple[Bucket, ...], Field(min_length=1)]


class ResponseClass(Model):
    """A class of responses that drafts serve equally well."""

    share: Share = Field(description="share of the responses up to typical_tokens")
    share_of_long: Share = Field(description="share of the longer responses")
    wrong_drafts: Share = Field(
        default=1.0,
        description="share of a gap's positions with a (wrong) draft, without the first position after a hit",
    )
    gaps: Buckets = Field(description="lengths of the stretches without right drafts")
    hits: Buckets = Field(description="lengths of the stretches with right drafts")

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


class RunModel(Model):
    """The runs of a text drafter (history, siblings, n-grams), for traces without token ids."""

    classes: tuple[ResponseClass, ...] = Field(
        min_length=1, description="classes of responses, their shares sum to 1"
    )
    typical_tokens: float = Field(
        default=2000.0, gt=0, description="longer responses count as long"
    )
    length_exponent: float = Field(
        default=0.0,
        ge=0,
        le=10,
        description="gaps of longer responses grow with (response tokens / typical_tokens) to this power",
    )
    beyond_tokens: int = Field(
        default=MOST_DRAFT_TOKENS,
        ge=1,
        le=255,
        description="wrong tokens of a draft after its right ones",
    )
    most_tokens: int = Field(default=MOST_DRAFT_TOKENS, ge=1, le=255, description="longest draft")
    first_epoch: bool = Field(
        default=False,
        description="whether there are drafts in the first epoch (siblings, n-grams: yes; history: no)",
    )
    kind: InputKind = Field(default="assumed", description="how the numbers are known")
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
    first_epoch: bool = False,
    source: str = "fitted to recorded tokens",
) -> RunModel:
    """Fit the model to recorded runs: `draw_runs` on their lengths gives similar runs.

    Responses with drafts are sorted by the share of their tokens that is hit, and cut into
    `CLASSES` of equal number, fewer where a class would have fewer than 25. Raise `InputError`
    where no response has drafts."""
    tokens = response_tokens.astype(np.int64)
    served = np.flatnonzero((runs.first >= 0) & (tokens > 1))
    if not served.size:
        raise InputError(
            "no response has drafts, so there is nothing to fit; history needs a second epoch"
        )
    parts, passes = stretches(runs, tokens), run_passes(runs, tokens, WHOLE_DRAFTS)
    hit_tokens = np.bincount(parts.row, weights=parts.hit, minlength=len(tokens))
    ranked = served[np.argsort(hit_tokens[served] / tokens[served], kind="stable")[::-1]]
    number = max(1, min(CLASSES, len(ranked) // FEWEST_RESPONSES))
    typical = float(np.median(tokens[served]))
    short, long = served[tokens[served] <= typical], served[tokens[served] > typical]
    wrong, wrong_tokens = int(passes.wrong.sum()), int(passes.wrong_tokens.sum())
    classes = []
    for rows in np.array_split(ranked, number):
        inside = np.isin(parts.row, rows)
        gaps, hits = parts.gap[inside], parts.hit[inside]
        with_draft = int(passes.wrong[rows].sum())
        visited = with_draft + int((passes.passes - passes.verifications)[rows].sum())
        classes.append(
            ResponseClass(
                share=_rounded(np.isin(short, rows).mean()),
                share_of_long=_rounded(
                    np.isin(long, rows).mean() if long.size else len(rows) / len(served)
                ),
                wrong_drafts=_rounded(with_draft / visited if visited else 0.0),
                gaps=_buckets(gaps[gaps > 0]),
                hits=_buckets(hits[hits > 0]),
            )
        )
    return RunModel(
        classes=tuple(classes),
        typical_tokens=typical,
        beyond_tokens=min(max(round(wrong_tokens / wrong), 1), 255) if wrong else 1,
        first_epoch=first_epoch,
        kind="measured",
        source=source,
    )


def _rounded(value: float | np.floating) -> float:
    return round(float(value), 4)


def _buckets(lengths: Ints) -> tuple[Bucket, ...]:
    """Return the lengths in buckets between powers of two, joined from the top down until each has
    a share of at least `SMALLEST_BUCKET`; without lengths, one bucket of one token."""
    if not lengths.size:
        return (Bucket(up_to_tokens=1, share=1.0, mean_tokens=1.0),)
    edge = np.ceil(np.log2(lengths)).astype(np.int64)
    buckets: list[Bucket] = []
    top = edge.max()
    for power in range(int(top), -1, -1):
        inside = (edge >= power) & (edge <= top)
        if inside.mean() >= SMALLEST_BUCKET or (power == 0 and inside.any()):
            low = 2 ** (power - 1) + 1 if power else 1
            mean = float(np.clip(round(lengths[inside].mean(), 2), low, 2**top))
            buckets.append(
                Bucket(up_to_tokens=int(2**top), share=_rounded(inside.mean()), mean_tokens=mean)
            )
            top = power - 1
    return tuple(reversed(buckets))


def draw_runs(
    model: RunModel, response_tokens: Ints, keys: Ints, has_history: NDArray[np.bool_] | None = None
) -> AcceptRuns:
    """Draw runs for responses of these lengths, shape (rows,), each from its key
    (`acceptance.sample_key`).

    Rows without `has_history` get no drafts: rows of the first epoch, for drafters that need an
    earlier one.
    """
    tokens = response_tokens.astype(np.int64)
    served = np.ones(len(tokens), dtype=bool) if has_history is None else has_history
    lengths = np.where(served, tokens, 0)
    drafted, accepted = np.zeros((2, int(lengths.sum())), dtype=np.uint8)
    runs = AcceptRuns(np.where(served, np.cumsum(lengths) - lengths, -1), drafted, accepted)
    _draw(runs, tokens, keys.astype(np.int64), tokens > model.typical_tokens, compiled_model(model))
    return runs


def draw_trace_runs(model: RunModel, trace: Trace, seed: int, epochs_back: int = 1) -> AcceptRuns:
    """Draw runs for the rows of a trace. Unless the model drafts in the first epoch, a row has
    drafts if its prompt has responses in one of the `epochs_back` epochs before its own."""
    served = rows_with_drafts(model, trace, epochs_back)
    return draw_runs(model, trace.column("response_tokens"), sample_keys(trace, seed), served)


def rows_with_drafts(model: RunModel, trace: Trace, epochs_back: int = 1) -> NDArray[np.bool_]:
    """Return which rows of a trace have drafts, as `draw_trace_runs` draws them."""
    if model.first_epoch:
        return np.ones(len(trace), dtype=np.bool_)
    keys, epochs = epoch_keys(trace)
    known = np.unique(keys)
    oldest = np.searchsorted(known, keys - np.minimum(keys % epochs, epochs_back))
    return np.asarray(oldest < np.searchsorted(known, keys))


def sample_keys(trace: Trace, seed: int) -> Ints:
    """Return the key of each row's draws (`simrl.speculation.acceptance.sample_key`)."""
    return mixed(seed, *(trace.column(name) for name in ("prompt_id", "epoch", "sample"))).view(
        np.int64
    )


class CompiledModel(NamedTuple):
    """A run model for compiled code. `edges` are the cumulative shares of the classes, of short and
    of long responses, shape (2, classes); `gaps` and `hits` are `_table`s."""

    edges: Floats
    wrong_drafts: Floats
    gaps: Floats
    hits: Floats
    beyond: int
    most: int
    typical_tokens: float
    length_exponent: float


def compiled_model(model: RunModel) -> CompiledModel:
    """Return a model for compiled code."""
    classes = model.classes
    edges = np.cumsum([[c.share for c in classes], [c.share_of_long for c in classes]], axis=1)
    wrong_drafts = np.array([c.wrong_drafts for c in classes])
    gaps, hits = _table([c.gaps for c in classes]), _table([c.hits for c in classes])
    drafts = model.beyond_tokens, model.most_tokens
    lengths = model.typical_tokens, model.length_exponent
    return CompiledModel(edges / edges[:, -1:], wrong_drafts, gaps, hits, *drafts, *lengths)


def _table(classes: list[tuple[Bucket, ...]]) -> Floats:
    """Return for each class and bucket: cumulative share, shortest length, number of lengths, and
    the exponent c for which `shortest + floor(number * u ** c)` has the bucket's mean."""
    table = np.ones((len(classes), max(map(len, classes)), 4))
    for rows, buckets in zip(table, classes, strict=True):
        shares = np.cumsum([b.share for b in buckets])
        low = 1
        for i, bucket in enumerate(buckets):
            number = bucket.up_to_tokens - low + 1
            middle = min(max((bucket.mean_tokens - low + 0.5) / number, 1e-3), 1 - 1e-3)
            rows[i] = shares[i] / shares[-1], low, number, 1 / middle - 1
            low = bucket.up_to_tokens + 1
        rows[len(buckets) - 1, 0] = 1.0
    return table


@part
def _length(buckets: Floats, u: float, v: float) -> int:
    i = 0
    while u > buckets[i, 0]:
        i += 1
    return int(buckets[i, 1]) + int(buckets[i, 2] * v ** buckets[i, 3])


@kernel
def _draw(
    runs: AcceptRuns,
    response_tokens: Ints,
    keys: Ints,
    long: NDArray[np.bool_],
    model: CompiledModel,
) -> None:
    """Fill `drafted` and `accepted`, which are 0."""
    for row in np.flatnonzero(runs.first >= 0):
        at = runs.first[row]
        draw_response(
            runs.drafted[at:], runs.accepted[at:], response_tokens[row], keys[row], long[row], model
        )


@part
def draw_response(
    drafted: NDArray[np.uint8],
    accepted: NDArray[np.uint8],
    end: int,
    key: int,
    long: bool,
    model: CompiledModel,
) -> None:
    """Fill the runs of a response of `end` tokens, which are 0."""
    kind = 0
    while uniform(key, _CLASS) > model.edges[int(long), kind]:
        kind += 1
    p, place = 1, 0
    longer = max(end / model.typical_tokens, 1.0) ** model.length_exponent
    while p < end:
        gap = longer * _length(model.gaps[kind], uniform(key, place), uniform(key, place + 1))
        stop = min(p + max(int(gap + 0.5), 1), end)
        hit = _length(model.hits[kind], uniform(key, place + 2), uniform(key, place + 3))
        place += 4
        while p < stop:
            after_hit = accepted[p - 1] > 0  # the draft goes on, and is wrong
            if after_hit or uniform(key, place) < model.wrong_drafts[kind]:
                drafted[p] = min(model.beyond, model.most)
            place += 1
            p += 1
        stop = min(p + hit, end)
        while p < stop:
            a = min(stop - p, model.most)
            accepted[p] = a
            drafted[p] = min(a + model.beyond, model.most)
            p += 1
