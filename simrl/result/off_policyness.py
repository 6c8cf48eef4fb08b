"""Off-policyness, the one definition: the version of the update that trains a token minus the
version that generated it.

Tokens that an earlier step generated and carried over into the next are counted separately, because
no rule bounds them; `off_policyness` without "carried" leaves them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from simrl.result.result import Result

Ints = NDArray[np.int64]
OLDEST = 9  # updates; older tokens count as this old


class OffPolicyness(NamedTuple):
    """Off-policyness of an update: of its `tokens`, and of the tokens that were carried over."""

    mean: float
    most: int
    tokens: int
    carried_most: int
    carried_tokens: int


def of_update(version: int, parts: Sequence[tuple[int, int, int]]) -> OffPolicyness:
    """Return the off-policyness of the update of `version`, trained on parts of responses:
    (generating version, tokens, tokens of these that were carried over)."""
    generated, tokens, carried = np.array(parts, np.int64).reshape(-1, 3).T
    age, fresh = version - generated, tokens - carried
    return OffPolicyness(
        mean=float((age * fresh).sum()) / max(int(fresh.sum()), 1),
        most=int(age.max(where=fresh > 0, initial=0)),
        tokens=int(fresh.sum()),
        carried_most=int(age.max(where=carried > 0, initial=0)),
        carried_tokens=int(carried.sum()),
    )


def ages(result: Result, warmup_steps: int) -> tuple[Ints, Ints, Ints]:
    """Return off-policyness, tokens and sample's row of the segments that were trained after the
    warm-up. Carried tokens are included: the tables do not tell them apart by sample."""
    samples, segments, steps = result.samples, result.segments, result.steps
    trained = pc.fill_null(samples.column("trained_step"), -1).to_numpy()
    row = np.searchsorted(samples.column("uid").to_numpy(), segments.column("uid").to_numpy())
    tokens, step = segments.column("tokens").to_numpy(), trained[row]
    counted = (step >= warmup_steps) & (tokens > 0)
    return (
        steps.column("policy_version").to_numpy()[step[counted]]
        - segments.column("policy_version").to_numpy()[counted],
        tokens[counted],
        row[counted],
    )


def age_shares(age: Ints, weight: NDArray[Any]) -> NDArray[np.float64]:
    """Return the shares by age, from 0 to `OLDEST` and older."""
    counts = np.bincount(np.clip(age, 0, OLDEST), weight, OLDEST + 1)
    return np.asarray(counts / max(counts.sum(), 1), np.float64)


def largest_off_policyness(row: Mapping[str, Any]) -> int:
    """Return the largest off-policyness in the row of a comparison, carried tokens included."""
    return max(int(row["off_policyness_max"]), int(row["carried_off_policyness_max"]))
