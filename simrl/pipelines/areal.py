"""AReaL (arXiv 2505.24298): generation never waits for training; staleness is bounded where groups
are admitted.

Admission (§5.1, and the code's capacity): with B groups a step, i the current version and N_r the
groups submitted so far and not dropped, floor((N_r - 1) / B) ≤ i + η, and no more than
`max_concurrent` groups at once. Of the finished groups, those submitted first train first, each
once (§5.1; the code sorts by the time of submission). On an update, running requests are
interrupted, load the weights, recompute their KV cache and go on, so a response may carry segments
of several versions (§4.1). Without interruption, the controller waits for the longest response
(§7.4): no group begins while any response of any worker is unfinished, and then all workers load.
(The code's manager holds a lock on all servers until none of them runs a request.)

Invariant: up to version i, no more than (i + η + 1) · B groups were submitted. So a trainer that
takes them in the order of their submission never trains a token older than η; one that goes on
without a straggler may train it staler. The paper leaves open what happens then: the straggler is
trained, dropped, or waited for (`in_time`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from simrl.pipelines.streaming import Finished, GroupStream
from simrl.pipelines.words import submitted_first


def capacity(
    eta: int, version: int, batch: int, max_concurrent: int, running: int, accepted: int
) -> tuple[int, int]:
    """Return how many more groups may be submitted now by the bound on running ones, and by η; the
    smaller counts, and if it is not positive, none (AReaL's `StalenessManager`)."""
    return max(1, max_concurrent) - running, (eta + version + 1) * batch - (accepted + running)


# that run at once: 512 prompts, of 128 a batch, in the launch files of 4 June 2025 (inclusionAI/AReaL@d56df51,
# examples/configs/qwen3-code), which release v0.3.0 does not have: its default is one batch
CONCURRENT_BATCHES = 4


@dataclass
class Admission:
    """The bound that holds back the next group (None: neither) since `since_s`, and for how many
    seconds each did so far: the one on running groups, or η."""

    seconds: dict[str, float] = field(default_factory=lambda: {"concurrency": 0.0, "eta": 0.0})
    bound: Literal["concurrency", "eta"] | None = None
    since_s: float = 0.0

    def note(self, bound: Literal["concurrency", "eta"] | None, time_s: float) -> None:
        """Note the bound that holds groups back from `time_s` on."""
        if self.bound is not None:
            self.seconds[self.bound] += time_s - self.since_s
        self.bound, self.since_s = bound, time_s


def in_time(left: Iterable[int], version: int, eta: int, batch: int) -> bool:
    """Return whether the groups that the update of `version` leaves untrained can be trained at
    most η updates after their submission. `left` has the version under which each was submitted. No
    deadline may have more groups due than the updates until then can train."""
    due = sorted(submitted + eta for submitted in left)
    return all(
        number <= (deadline - version) * batch for number, deadline in enumerate(due, start=1)
    )


def budget(stream: GroupStream, *, eta: int, most: int | None) -> int:
    """Return the room under both bounds of `capacity`; `most` groups run at once (None: four
    batches). The run notes which bound holds groups back."""
    admission: Admission = stream.facts.setdefault("admission", Admission())
    running = len(stream.running)
    by_running, by_eta = capacity(
        eta,
        stream.version,
        stream.batch,
        most or CONCURRENT_BATCHES * stream.batch,
        running,
        stream.kept - running,
    )
    admission.note("concurrency" if by_running < by_eta else "eta", stream.now_s)
    return min(by_running, by_eta)


@dataclass
class Supply:
    """The groups supplied to an executor that is asked for a batch: `before` the update that waits
    for one since `began_s`, and in total."""

    update: int = -1
    began_s: float = 0.0
    before: int = 0
    total: int = 0


def supplied(stream: GroupStream, *, eta: int, most: int | None) -> int:
    """Return the room of `budget` among the groups that were supplied: a batch when an update asks
    for its groups, and another one each second until it has them, if no more than η + 1 wait; none while it trains
    (inclusionAI/AReaL 1.0.4, `active_submit_and_wait`)."""
    supply: Supply = stream.facts.setdefault("supply", Supply())
    if stream.updates == stream.version == stream.noted_version:
        if supply.update != stream.updates:
            supply.update, supply.began_s = stream.updates, stream.now_s
            supply.before = supply.total
        seconds = math.floor(stream.now_s - supply.began_s + 1e-9) + 1
        batches = supply.before + seconds * stream.batch
        limit = stream.kept + (eta + 1) * stream.batch  # what may be supplied and not begun
        supply.total = max(supply.total, min(batches, limit))
        if supply.total < limit:
            stream.again(supply.began_s + seconds)
    return min(budget(stream, eta=eta, most=most), supply.total - stream.kept)


def batch_in_time(stream: GroupStream, *, eta: int) -> list[Finished] | None:
    """Return a batch of the groups submitted first, if no missing one has to train before."""
    groups = submitted_first(stream)
    if groups is None:
        return None
    taken = {group.number for group in groups}
    left = [group.version for group in stream.buffer if group.number not in taken]
    left += stream.running.values()
    return groups if in_time(left, stream.version, eta, stream.batch) else None
