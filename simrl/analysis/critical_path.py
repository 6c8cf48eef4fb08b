"""The critical path of a policy update: its last cause, the last cause of that, and so on, back to
the previous update.

Invariant: every link is a record, a span of a lane or a segment of a response, that ended just as
the next link began; links touch, and cover the time between the two updates. Where no record ended
just then, the path has a link of kind "unknown" and goes on with the record that ended last.

"Just as" is one instant; at a busy worker, which reacts at its next boundary, within two passes
before. The gap is then a link of kind "boundary".
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from simrl.analysis.gpu_hours import SYNC, TRAINS
from simrl.result.result import Result
from simrl.result.timeline import rolls_out, spans

SAME_S = 1e-9  # relative: instants that differ only by rounding
MOST_LINKS = 100_000
HELD_UP = 10  # samples in a list


class PathLink(NamedTuple):
    """A link of the path. `kind` is the kind of a span, or generate, environment, reward, boundary,
    unknown; `where` is its lane; `sample` is prompt/sample/epoch for a response."""

    kind: str
    where: str
    started_s: float
    ended_s: float
    sample: str = ""
    tokens: int = 0


@dataclass(frozen=True)
class CriticalPath:
    """The links of an update in time, cut at the end of the update before."""

    step: int
    started_s: float
    ended_s: float
    links: tuple[PathLink, ...]

    def seconds(self) -> dict[str, float]:
        """Return the seconds by kind, most first; their sum is the length of the path."""
        return _summed((link.kind, link.ended_s - link.started_s) for link in self.links)

    @property
    def sync_s(self) -> float:
        """Return the seconds of weight sync, batch transfers and switches of phases."""
        return sum(seconds for kind, seconds in self.seconds().items() if kind in SYNC)


class HeldUp(NamedTuple):
    """A sample of an update's batch: its first start and its end. `held_s` are the seconds for
    which the batch waited for it with the trainer free, after all samples that ended before it."""

    sample: str
    worker: int
    prompt_tokens: int
    response_tokens: int
    started_s: float
    finished_s: float
    held_s: float


def seconds_of(paths: Iterable[CriticalPath]) -> dict[str, float]:
    """Return the seconds by kind on several paths, most first."""
    return _summed(part for path in paths for part in path.seconds().items())


def _summed(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    by_kind: dict[str, float] = defaultdict(float)
    for kind, seconds in parts:
        by_kind[kind] += seconds
    return dict(sorted(by_kind.items(), key=lambda item: -item[1]))


class _Event(NamedTuple):
    """The end of a span of a lane, or of a segment of a sample (its row), which `finishes` the
    sample or not."""

    link: PathLink
    lane: str
    row: int = -1
    segment: int = -1
    finishes: bool = False


class Paths:
    """The critical paths of a run."""

    def __init__(self, result: Result) -> None:
        timeline = spans(result)
        self._samples = samples = result.samples.to_pydict()
        names = (map(str, samples[key]) for key in ("prompt_id", "sample", "epoch"))
        self._names = list(map("/".join, zip(*names, strict=True)))
        self.finished_s: list[float] = result.steps.column("finished_s").to_pylist()
        self._reward_s = float(result.metadata["scenario"]["training"]["reward_s"])
        # The most events between the end of a response and its judge's score.
        self._most_judged = 10_000 if result.metadata["scenario"].get("judge") else 0
        shown = timeline.where(~timeline.of_kind("rollout", "idle", "train_drafter"))
        columns = (
            shown.lane.tolist(),
            shown.kind.tolist(),
            shown.started_s.tolist(),
            shown.ended_s.tolist(),
        )
        links = [
            PathLink(timeline.kinds[kind], timeline.lanes[lane].name, *at_s)
            for lane, kind, *at_s in zip(*columns, strict=True)
        ]
        events = [_Event(link, link.where) for link in links]
        ends = {(link.where, link.started_s): link.ended_s for link in links}
        row_of = {uid: row for row, uid in enumerate(samples["uid"])}
        of_number = {
            lane.name.rpartition("-")[2]: lane.name for lane in timeline.lanes if rolls_out(lane)
        }
        parts = (
            result.segments.column(n).to_pylist()
            for n in ("uid", "worker", "started_s", "ended_s", "tokens")
        )
        self._segments: list[list[_Event]] = [[] for _ in samples["uid"]]
        for uid, worker, started_s, ended_s, tokens in zip(*parts, strict=True):
            row, lane_name = row_of[uid], of_number.get(f"{worker:03d}", f"rollout-{worker:03d}")
            while (until_s := ends.get((lane_name, started_s), ended_s)) < ended_s:
                started_s = until_s  # segments begin with the weights' load
            link = PathLink("generate", lane_name, started_s, ended_s, self._names[row], tokens)
            last = ended_s == samples["finished_s"][row]
            self._segments[row].append(_Event(link, lane_name, row, len(self._segments[row]), last))
            events.append(self._segments[row][-1])
        self._events = sorted(
            (e for e in events if e.link.ended_s > e.link.started_s), key=lambda e: e.link.ended_s
        )
        self._ended_s = [e.link.ended_s for e in self._events]
        token_s = [
            (e.link.ended_s - e.link.started_s) / max(e.link.tokens, 1)
            for e in self._events
            if e.link.kind == "generate"
        ]
        self._near_s = 2 * float(np.median(token_s)) if token_s else 0.0

    def of(self, step: int) -> CriticalPath:
        """Return the critical path of an update."""
        begin_s = self.finished_s[step - 1] if step else 0.0
        end_s = at_s = self.finished_s[step]
        links: list[PathLink] = []
        after: _Event | None = None  # the event that began at `at_s`
        while at_s > begin_s and len(links) < MOST_LINKS:
            event, gap = self._before(at_s, after, step)
            if event is None:
                links.append(PathLink("unknown", "", 0.0, at_s))
                break
            if gap == "judge" and self._reward_s:  # after the judge's score, which it reads
                links.append(PathLink("reward", event.lane, at_s - self._reward_s, at_s))
                at_s -= self._reward_s
            if gap and event.link.ended_s < at_s:
                links.append(PathLink(gap, event.lane, event.link.ended_s, at_s))
            if event.link.ended_s <= begin_s:
                break
            links.append(event.link)
            # A sample goes on behind its interruption.
            if event.row < 0 and after is not None and after.lane == event.lane and after.row >= 0:
                event = after._replace(link=event.link)
            after, at_s = event, event.link.started_s
        cut = [
            k._replace(started_s=max(k.started_s, begin_s)) for k in links if k.ended_s > begin_s
        ]
        return CriticalPath(step, begin_s, end_s, tuple(reversed(cut)))

    def _before(self, at_s: float, after: _Event | None, step: int) -> tuple[_Event | None, str]:
        """Return the event that ended just as another began, and the kind of the gap between the
        two."""
        same_s, reward_s, near_s = SAME_S * max(at_s, 1.0), self._reward_s, self._near_s
        ended = self._ending(at_s - same_s, at_s + same_s, at_s)
        if after is None:  # the update itself
            return next((e for e in ended if e.row < 0 and e.link.kind in TRAINS), None), ""
        scored = (
            self._ending(at_s - reward_s - same_s, at_s - reward_s + same_s, at_s)[::-1]
            if reward_s > 0
            else []
        )
        trains = after.row < 0 and after.link.kind in TRAINS
        part = (
            [self._segments[after.row][after.segment - 1]]
            if after.row >= 0 and after.segment > 0
            else []
        )
        last = bisect_right(self._ended_s, at_s - same_s)

        def is_trained(e: _Event) -> bool:
            return trains and e.finishes and self._samples["trained_step"][e.row] == step

        # In order: candidates, which of them count, and the kind of the gap.
        rules: tuple[tuple[Sequence[_Event], Callable[[_Event], bool], str], ...] = (
            (
                part,
                lambda e: abs(e.link.ended_s - at_s) <= same_s,
                "",
            ),  # its own segment before an interruption
            (ended, lambda e: e.row < 0 and e.lane == after.lane, ""),
            (
                self._events[max(last - self._most_judged, 0) : last][::-1],
                is_trained,
                "judge",
            ),
            (scored, is_trained, "reward"),
            (ended, is_trained, ""),
            (ended, lambda e: e.row < 0 and e.link.kind in TRAINS, ""),
            (ended, lambda e: e.finishes and e.lane == after.lane, ""),
            (ended, lambda e: e.finishes, ""),
            (ended, lambda e: True, ""),
            (scored, lambda e: e.finishes, "reward"),
            (part, lambda e: e.lane == after.lane, "environment"),
            (self._ending(at_s - near_s, at_s, at_s)[::-1], lambda e: True, "boundary"),
            (
                self._ending(at_s - reward_s - near_s, at_s - reward_s, at_s)[::-1],
                lambda e: e.finishes,
                "reward",
            ),
            (self._events[max(last - 1, 0) : last], lambda e: True, "unknown"),
        )
        return next(
            ((e, gap) for events, counts, gap in rules for e in events if counts(e)),
            (None, "unknown"),
        )

    def _ending(self, from_s: float, to_s: float, before_s: float) -> list[_Event]:
        """Return the events that ended between two instants and began before a third, in time."""
        a, b = (
            bisect_right(self._ended_s, np.nextafter(from_s, -np.inf)),
            bisect_right(self._ended_s, to_s),
        )
        return [e for e in self._events[a:b] if e.link.started_s < before_s]

    def held_up(self, step: int) -> tuple[list[HeldUp], float]:
        """Return the samples that ended last, the last first, and the seconds from the batch
        without them to the whole batch."""
        begin_s = self.finished_s[step - 1] if step else 0.0
        samples, ends = self._samples, self._samples["finished_s"]
        rows = [row for row, trained in enumerate(samples["trained_step"]) if trained == step]
        rows.sort(key=lambda row: (-ends[row], row))
        before_s = [max(ends[row], begin_s) for row in rows[1:]] + [begin_s]
        columns = ("worker", "prompt_tokens", "generated_tokens", "started_s", "finished_s")
        last_ones = [
            HeldUp._make(
                [
                    self._names[row],
                    *(samples[name][row] for name in columns),
                    max(ends[row] - free_s, 0.0),
                ]
            )
            for row, free_s in zip(rows[:HELD_UP], before_s, strict=False)
        ]
        return last_ones, sum(sample.held_s for sample in last_ones)

    def typical_step(self, warmup_steps: int) -> int:
        """Return the update of median length after the warm-up."""
        lengths = np.diff([0.0, *self.finished_s])[warmup_steps:]
        return warmup_steps + int(np.argsort(lengths, kind="stable")[(len(lengths) - 1) // 2])
