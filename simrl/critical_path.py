"""The critical path of a policy update: what it waited for last, and what that had waited for, back to the update before.

Invariant: every link is something recorded, a span of a lane or a segment of a response, that ended just as the next one began;
links touch, and cover the time between the two updates. Where nothing recorded ended then, the path says so (a link of kind
"unknown") and goes on with what had ended last before.

"Just as" is the same instant; at a busy worker, which reacts at its next boundary, within two passes before. The gap is then a
link of kind "boundary".
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from simrl.gpu_hours import SYNC, TRAINS
from simrl.result import Result
from simrl.timeline import spans

SAME_S = 1e-9  # of instants that rounding kept apart, times their size
MOST_LINKS = 100_000
HELD_UP = 10  # samples that are named


class Link(NamedTuple):
    """Something on the path. `kind` is that of a span, or generate, environment, reward, boundary, unknown; `where` its lane;
    `sample` is prompt/sample/epoch where it is a response."""

    kind: str
    where: str
    started_s: float
    ended_s: float
    sample: str = ""
    tokens: int = 0


@dataclass(frozen=True)
class Path:
    """The links of an update, in time, cut where the update before ended."""

    step: int
    started_s: float
    ended_s: float
    links: tuple[Link, ...]

    def seconds(self) -> dict[str, float]:
        """By kind, most first; their sum is the length of the path."""
        by_kind: dict[str, float] = defaultdict(float)
        for link in self.links:
            by_kind[link.kind] += link.ended_s - link.started_s
        return dict(sorted(by_kind.items(), key=lambda item: -item[1]))

    @property
    def sync_s(self) -> float:
        """What weights and batches on their way, and switches of phases, make of it."""
        return sum(seconds for kind, seconds in self.seconds().items() if kind in SYNC)


class HeldUp(NamedTuple):
    """A sample of an update's batch: seconds of its first start and its end, and for how long the batch then waited for it
    alone, those that came later left out and the trainer free."""

    sample: str
    worker: int
    prompt_tokens: int
    response_tokens: int
    started_s: float
    finished_s: float
    held_s: float


class _Event(NamedTuple):
    """Something that ended: a span of a lane, or a segment of a sample (its row), which `finishes` it or not."""

    link: Link
    lane: str
    row: int = -1
    segment: int = -1
    finishes: bool = False


class Paths:
    """The critical paths of a run."""

    def __init__(self, result: Result) -> None:
        found = spans(result)
        samples = {name: result.samples.column(name).to_pylist() for name in result.samples.column_names}
        self._samples = samples
        self._names = [
            f"{p}/{s}/{e}" for p, s, e in zip(samples["prompt_id"], samples["sample"], samples["epoch"], strict=True)
        ]
        self.finished_s: list[float] = result.steps.column("finished_s").to_pylist()
        self._reward_s = float(result.metadata["scenario"]["training"]["reward_s"])
        events: list[_Event] = []
        ends: dict[tuple[str, float], float] = {}  # by lane and start, of what is no rollout
        for lane, kind, started_s, ended_s in zip(
            found.lane.tolist(), found.kind.tolist(), found.started_s.tolist(), found.ended_s.tolist(), strict=True
        ):
            if found.kinds[kind] not in ("rollout", "idle", "train_drafter"):
                name = found.lanes[lane].name
                ends[name, started_s] = ended_s
                events.append(_Event(Link(found.kinds[kind], name, started_s, ended_s), name))
        row_of = {uid: row for row, uid in enumerate(samples["uid"])}
        columns = (result.segments.column(n).to_pylist() for n in ("uid", "worker", "started_s", "ended_s", "tokens"))
        self._segments: list[list[_Event]] = [[] for _ in samples["uid"]]
        for uid, worker, started_s, ended_s, tokens in zip(*columns, strict=True):
            row, lane_name, begun_s = row_of[uid], f"rollout-{worker:03d}", started_s
            while (until_s := ends.get((lane_name, begun_s), ended_s)) < ended_s:
                begun_s = until_s  # segments begin with the weights' load
            link = Link("generate", lane_name, begun_s, ended_s, self._names[row], tokens)
            last = ended_s == samples["finished_s"][row]
            self._segments[row].append(_Event(link, lane_name, row, len(self._segments[row]), last))
            events.append(self._segments[row][-1])
        self._events = sorted((e for e in events if e.link.ended_s > e.link.started_s), key=lambda e: e.link.ended_s)
        self._ended_s = [e.link.ended_s for e in self._events]
        token_s = [
            (e.link.ended_s - e.link.started_s) / max(e.link.tokens, 1)
            for e in self._events
            if e.link.kind == "generate"
        ]
        self._near_s = 2 * float(np.median(token_s)) if token_s else 0.0

    def of(self, step: int) -> Path:
        """The path of an update, by its number."""
        begin_s = self.finished_s[step - 1] if step else 0.0
        end_s = at_s = self.finished_s[step]
        links: list[Link] = []
        after: _Event | None = None  # what began at `at_s`
        while at_s > begin_s and len(links) < MOST_LINKS:
            event, gap = self._before(at_s, after, step)
            if event is None:
                links.append(Link("unknown", "", 0.0, at_s))
                break
            if gap and event.link.ended_s < at_s:
                links.append(Link(gap, event.lane, event.link.ended_s, at_s))
            if event.link.ended_s <= begin_s:
                break
            links.append(event.link)
            # A sample goes on behind what interrupted it.
            if event.row < 0 and after is not None and after.lane == event.lane and after.row >= 0:
                event = after._replace(link=event.link)
            after, at_s = event, event.link.started_s
        cut = [k._replace(started_s=max(k.started_s, begin_s)) for k in links if k.ended_s > begin_s]
        return Path(step, begin_s, end_s, tuple(reversed(cut)))

    def _before(self, at_s: float, after: _Event | None, step: int) -> tuple[_Event | None, str]:
        """What ended just as something began, and what the gap between the two is."""
        same_s = SAME_S * max(at_s, 1.0)
        ended = self._ending(at_s - same_s, at_s + same_s, at_s)
        reward_s = self._reward_s
        scored = [
            e
            for e in self._ending(at_s - reward_s - same_s, at_s - reward_s + same_s, at_s)
            if e.finishes and reward_s > 0
        ]
        if after is None:  # the update itself
            return _first(ended, lambda e: e.link.kind in TRAINS and e.row < 0), ""
        trains = after.row < 0 and after.link.kind in TRAINS
        # A response goes on where its last segment ended, whatever interrupted it there.
        if after.row >= 0 and after.segment > 0:
            part = self._segments[after.row][after.segment - 1]
            if abs(part.link.ended_s - at_s) <= same_s:
                return part, ""
        if here := _first(ended, lambda e: e.row < 0 and e.lane == after.lane):
            return here, ""
        if trains:
            mine = [e for e in scored if self._samples["trained_step"][e.row] == step]
            if mine:
                return mine[-1], "reward"
            if done := _first(ended, lambda e: e.finishes and self._samples["trained_step"][e.row] == step):
                return done, ""
        rules: tuple[Callable[[_Event], bool], ...] = (
            lambda e: e.row < 0 and e.link.kind in TRAINS,
            lambda e: e.finishes and e.lane == after.lane,
            lambda e: e.finishes,
            lambda e: True,
        )
        for rule in rules:
            if event := _first(ended, rule):
                return event, ""
        if scored:
            return scored[-1], "reward"
        if after.row >= 0 and after.segment > 0:
            part = self._segments[after.row][after.segment - 1]
            if part.lane == after.lane:
                return part, "environment"
        if near := self._ending(at_s - self._near_s, at_s, at_s):
            return near[-1], "boundary"
        near = self._ending(at_s - reward_s - self._near_s, at_s - reward_s, at_s)
        if done := _first(near[::-1], lambda e: e.finishes):
            return done, "reward"
        last = bisect_right(self._ended_s, at_s - same_s) - 1
        return (self._events[last] if last >= 0 else None), "unknown"

    def _ending(self, from_s: float, to_s: float, before_s: float) -> list[_Event]:
        """Events that ended between two instants, and began before a third, in time."""
        a, b = bisect_right(self._ended_s, np.nextafter(from_s, -np.inf)), bisect_right(self._ended_s, to_s)
        return [e for e in self._events[a:b] if e.link.started_s < before_s]

    def held_up(self, step: int) -> tuple[list[HeldUp], float]:
        """The samples that came last, the last first; and the seconds by which the batch had been complete without them."""
        begin_s = self.finished_s[step - 1] if step else 0.0
        rows = [row for row, trained in enumerate(self._samples["trained_step"]) if trained == step]
        ends = self._samples["finished_s"]
        rows.sort(key=lambda row: (-ends[row], row))
        found = []
        for i, row in enumerate(rows[:HELD_UP]):
            before_s = max(ends[rows[i + 1]] if i + 1 < len(rows) else begin_s, begin_s)
            found.append(
                HeldUp(
                    self._names[row],
                    self._samples["worker"][row],
                    self._samples["prompt_tokens"][row],
                    self._samples["generated_tokens"][row],
                    self._samples["started_s"][row],
                    ends[row],
                    max(ends[row] - before_s, 0.0),
                )
            )
        return found, sum(sample.held_s for sample in found)

    def typical_step(self, warmup_steps: int) -> int:
        """The update of median length after the warm-up."""
        lengths = np.diff([0.0, *self.finished_s])[warmup_steps:]
        return warmup_steps + int(np.argsort(lengths, kind="stable")[(len(lengths) - 1) // 2])


def _first(events: list[_Event], rule: Callable[[_Event], bool]) -> _Event | None:
    return next((e for e in events if rule(e)), None)
