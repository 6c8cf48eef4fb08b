"""Measurement plan of an engine: which scenes it runs until its tables are known well enough.

First a coarse grid, several times over (a slow minute of the machine then affects one repeat of
every point, not all repeats of one). Then, while there is time, the least certain part: the
interval with the largest expected interpolation error is halved, or the point whose repeats differ
most is measured again. Last, held-out passes: their difference from the tables is the reported
error.

Invariant: the next scene is a function of the measurements so far. A journal of them is therefore
enough to continue a killed measurement without measuring a scene again.
"""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from simrl.errors import InputError
from simrl.files import write_whole_file
from simrl.profile.metadata import DraftRounds
from simrl.profile.profile import Tables
from simrl_replay.bench import (
    LEAD_TURNS,
    Facts,
    Loads,
    Prompts,
    Scene,
    Seen,
    Shape,
    Stairs,
    Timed,
    prefill_passes,
)
from simrl_replay.profile_fit import MeasuredPass, Reach, draft_rounds, fit, predicted_s

SHORT_TOKENS = 16  # of a prompt whose length does not matter
STAIR_TURNS = 12
HELD_OUT = 8

Run = Callable[[Scene], Seen]


class MeasurePlan(NamedTuple):
    """Limits and precision of a measurement. `kv_cache_tokens` is the engine's KV cache,
    `graph_tokens` the largest pass that it has a CUDA graph of (0: none): beyond, a pass may take
    several times as long. Refinement ends when every interval and point is expected to be within
    `tolerance`, or after `budget_s` of measuring; `weights` is a folder to load from, None with
    dummy weights."""

    reach: Reach
    kv_cache_tokens: int
    draft_tokens: int = 0
    weights: str | None = None
    repeats: int = 5
    tolerance: float = 0.02
    budget_s: float = 60.0
    graph_tokens: int = 0


class HeldOut(NamedTuple):
    """A pass that the tables are not fitted to."""

    shape: Shape
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


class MeasuredEngine(NamedTuple):
    """The tables, and the measurements behind them."""

    tables: Tables
    points: list[MeasuredPass]
    held_out: list[HeldOut]
    drafts: DraftRounds | None
    request_s: float
    load_s: float | None
    measuring_s: float

    @property
    def spread(self) -> float:
        return float(np.median([point.spread for point in self.points]))

    @property
    def largest_spread(self) -> float:
        return max(point.spread for point in self.points)

    @property
    def held_out_error(self) -> float:
        return float(np.median([abs(held.error) for held in self.held_out]))


class Journal:
    """Measurements, one line per scene, written at once. `carry_out` runs only for scenes that are
    not in it."""

    def __init__(self, path: Path, settings: dict[str, Any], carry_out: Run) -> None:
        self._path = path
        self._carry_out = carry_out
        self._known: dict[str, deque[tuple[float, Seen]]] = defaultdict(deque)
        self.measuring_s = 0.0
        lines = _whole_lines(path)
        if lines and json.loads(lines[-1]) == {"finished": True}:
            lines = []  # of a finished measurement
        if lines:
            found = json.loads(lines[0])
            other = [name for name in settings if found.get(name) != settings[name]]
            if other:
                name = other[0]
                raise InputError(
                    f"{path}: points of a measurement with {name} {found.get(name)!r}, this one has {settings[name]!r}; finish "
                    "that one, delete the file, or name another --output"
                )
        else:
            lines = [json.dumps(settings)]
        with write_whole_file(path) as temporary:  # without a line that was cut off
            temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        for line in lines[1:]:
            entry = json.loads(line)
            self._known[entry["scene"]].append((entry["took_s"], _seen(entry)))

    def __call__(self, scene: Scene) -> Seen:
        name = f"{type(scene).__name__} {json.dumps(scene)}"
        if self._known[name]:
            took_s, seen = self._known[name].popleft()
        else:
            started_s = time.monotonic()
            seen = self._carry_out(scene)
            took_s = time.monotonic() - started_s
            self._append({"scene": name, "took_s": took_s, **seen._asdict()})
        if not isinstance(scene, Facts):  # a scene that starts the engines
            self.measuring_s += took_s
        return seen

    def finish(self) -> None:
        """Mark the measurement as finished: the next one starts anew."""
        self._append({"finished": True})

    def _append(self, entry: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _whole_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[
            :-1
        ]  # what follows the last line end was cut off
        for line in lines:
            if not isinstance(json.loads(line), dict):
                raise ValueError(line[:40])
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: not the points of a measurement ({error}); delete it or name another --output"
        ) from error
    return lines


def _seen(entry: dict[str, Any]) -> Seen:
    passes = tuple(
        Timed(Shape(*shape), seconds, passes) for shape, seconds, passes in entry["passes"]
    )
    lists = ("begin_s", "end_s", "between_s", "load_s", "group_s", "accept_length")
    numbers = {name: tuple(entry.get(name, ())) for name in lists}
    return Seen(passes, **numbers, facts=tuple((name, value) for name, value in entry["facts"]))


class _Book:
    """Points, by their scene and their place in it."""

    def __init__(self, run: Journal) -> None:
        self._run = run
        self._seen: dict[Scene, list[Seen]] = defaultdict(list)

    def take(self, scene: Scene) -> None:
        self._seen[scene].append(self._run(scene))

    def points(self, scenes: Sequence[Scene] | None = None) -> list[MeasuredPass]:
        found = []
        for scene in self._seen if scenes is None else scenes:
            for passes in zip(*(seen.passes for seen in self._seen[scene]), strict=True):
                kv_tokens = float(np.mean([timed.shape.kv_tokens for timed in passes]))
                shape = passes[0].shape._replace(kv_tokens=kv_tokens)
                found.append(MeasuredPass(shape, tuple(timed.seconds for timed in passes)))
        return found

    def all(self, name: str) -> list[float]:
        return [
            value for each in self._seen.values() for seen in each for value in getattr(seen, name)
        ]

    @property
    def scenes(self) -> list[Scene]:
        return list(self._seen)

    def uncertainty(self, scene: Scene) -> float:
        spread = max(point.spread for point in self.points([scene]))
        return spread / float(np.sqrt(len(self._seen[scene])))


def measure(
    run: Journal, plan: MeasurePlan, tell: Callable[[str, int, int], None] = lambda *_: None
) -> MeasuredEngine:
    """Run scenes on an engine, through the journal, until its tables are known. `tell` is the
    progress callback: phase, done, total (0: unknown)."""
    check(plan)
    book = _Book(run)
    base = base_scenes(plan)
    for repeat in range(plan.repeats):
        for i, scene in enumerate(base):
            tell("coarse grid", repeat * len(base) + i, plan.repeats * len(base))
            book.take(scene)
    done = 0
    while run.measuring_s < plan.budget_s and (worst := worst_known(book, plan)) is not None:
        tell("refinement", done, 0)
        done += 1
        for _ in range(1 if worst in book.scenes else plan.repeats):
            book.take(worst)
    held_out = held_out_scenes(plan)
    checks = _Book(run)
    for i in range(2 * len(held_out)):
        tell("held-out passes", i, 2 * len(held_out))
        checks.take(held_out[i % len(held_out)])
    load_s = None
    if plan.weights is not None:
        tell("weight loads", 0, 1)
        load_s = float(np.median(run(Loads(plan.weights, plan.repeats)).load_s))

    points = book.points()
    tables, new_s = fit(points, float(np.median(book.all("between_s"))), plan.reach)
    return MeasuredEngine(
        tables=tables,
        points=points,
        held_out=[
            HeldOut(p.shape, p.seconds, predicted_s(tables, p.shape, new_s))
            for p in checks.points()
        ],
        drafts=draft_rounds(
            points, tables, "measured in the engine: drafts of tokens that nobody looked for"
        ),
        request_s=new_s
        + float(np.median(book.all("begin_s")) + max(np.median(book.all("end_s")), 0.0)),
        load_s=load_s,
        measuring_s=run.measuring_s,
    )


def check(plan: MeasurePlan) -> None:
    """Raise `InputError` for limits within which nothing can be measured."""
    reach = plan.reach
    if plan.kv_cache_tokens < reach.max_model_len:
        raise InputError(
            f"the KV cache holds {plan.kv_cache_tokens} tokens, one sequence may have {reach.max_model_len} (max_model_len); "
            "lower that, or give the cache more"
        )
    least = LEAD_TURNS + 24 + 2 * SHORT_TOKENS + 2 * (plan.draft_tokens + 1)
    if reach.max_model_len < 2 * least or reach.max_num_batched_tokens < 2 * reach.max_num_seqs:
        raise InputError(
            f"max_model_len {reach.max_model_len} and max_num_batched_tokens {reach.max_num_batched_tokens}: measuring needs "
            f"at least {2 * least} and twice max_num_seqs ({2 * reach.max_num_seqs})"
        )


def base_scenes(plan: MeasurePlan) -> list[Scene]:
    """Return the coarse grid."""
    most, budget = plan.reach.max_num_seqs, plan.reach.max_num_batched_tokens
    batches = _octaves(most, 4)
    scenes: list[Scene] = [Stairs((n,), _short(plan)) for n in batches]
    cliff = {plan.graph_tokens, plan.graph_tokens + 1} if 0 < plan.graph_tokens < budget else set()
    scenes += [Prompts(1, tokens) for tokens in sorted({*_octaves(budget, 4), *cliff})]
    # All in graphs, or all without: else what the launches take would be taken for the sampler's
    # time.
    together = min(budget // 2, plan.graph_tokens or budget)
    scenes += [Prompts(m, max(together // m, 1)) for m in _octaves(min(most, together), 4)[1:]]
    scenes += [_stairs(plan, tokens) for tokens in _longest_prompts(plan)]
    longest = plan.reach.max_model_len - 4
    if longest > 2 * budget:
        scenes += [
            Prompts(1, longest // budget * budget + rest - budget, times=2)
            for rest in (budget, budget // 8)
        ]
    if plan.draft_tokens:
        tokens = [k for k in (1, plan.draft_tokens // 2, plan.draft_tokens) if k]
        for k in dict.fromkeys(tokens):
            fitting = [n for n in batches if n * (k + 1) <= budget]
            scenes += [Stairs((n,), _short(plan), k) for n in fitting]
    return scenes


def worst_known(book: _Book, plan: MeasurePlan) -> Scene | None:
    """Return the scene with the largest expected error, the middle of an interval or a point; None
    if all are within tolerance."""
    known = book.scenes
    error, middle = worst_interval(book.points(), plan)
    candidates = [(error, middle)] if middle not in known else []
    candidates += [(book.uncertainty(scene), scene) for scene in known]
    error, worst = max(candidates, key=lambda candidate: candidate[0])
    return worst if error > plan.tolerance else None


def worst_interval(points: Sequence[MeasuredPass], plan: MeasurePlan) -> tuple[float, Scene]:
    """Return the expected error in the middle of the worst interval, and the scene that measures
    it."""
    short = _short(plan)
    decodes = [
        p for p in points if p.shape.sequences and not p.shape.draft_tokens and not p.shape.prompts
    ]
    least = min(p.shape.kv_tokens for p in decodes)
    prompts = [
        p
        for p in points
        if p.shape.prompts == 1 and not p.shape.sequences and not p.shape.context_tokens
    ]
    longest = [p for p in decodes if p.shape.sequences == plan.reach.max_num_seqs]
    curves: list[tuple[list[tuple[float, float, float]], Callable[[int], Scene]]] = [
        (
            [
                (p.shape.sequences, p.seconds, p.spread)
                for p in decodes
                if p.shape.kv_tokens < least + SHORT_TOKENS
            ],
            lambda n: Stairs((n,), short),
        ),
        ([(p.shape.chunk_tokens, p.seconds, p.spread) for p in prompts], lambda n: Prompts(1, n)),
        (
            [(p.shape.kv_tokens, p.seconds, p.spread) for p in longest],
            lambda kv: _stairs_of(plan, kv),
        ),
    ]
    error, middle, scene = max(
        ((*expected_error(curve), scene) for curve, scene in curves), key=lambda found: found[0]
    )
    return error, scene(max(middle, 1))


def expected_error(curve: Sequence[tuple[float, float, float]]) -> tuple[float, int]:
    """Return the largest expected relative distance of a straight line from a curve of (tick,
    seconds, spread), and the middle of its interval. The three nearest points give the bend; a bend
    within their spread counts as 0."""
    by_tick = {tick: (seconds, spread) for tick, seconds, spread in sorted(curve)}
    ticks = list(by_tick)
    bends = []
    for a, b, c in zip(ticks, ticks[1:], ticks[2:], strict=False):
        (ya, sa), (yb, sb), (yc, sc) = by_tick[a], by_tick[b], by_tick[c]
        line = ya + (yc - ya) * (b - a) / (c - a)
        noise = max(sa * ya, sb * yb, sc * yc)
        bends.append(max(abs(yb - line) - noise, 0.0) / ((b - a) * (c - b)))
    worst = (0.0, 0)
    for i, (a, b) in enumerate(pairwise(ticks)):
        if b - a < 2 or not bends:
            continue
        bend = max(bends[max(i - 1, 0) : i + 1])
        error = bend * (b - a) ** 2 / 4 / ((by_tick[a][0] + by_tick[b][0]) / 2)
        worst = max(worst, (error, round((a * b) ** 0.5) if b > 4 * a > 0 else round((a + b) / 2)))
    return worst


def held_out_scenes(plan: MeasurePlan) -> list[Scene]:
    """Return decode steps and mixes of prompts and decode steps, drawn within the limits."""
    draw, reach = random.Random(1), plan.reach
    scenes: list[Scene] = []
    for i in range(HELD_OUT):
        n = round(reach.max_num_seqs ** draw.uniform(0.2, 0.98))
        if i % 2:
            kv_tokens = draw.randint(
                SHORT_TOKENS, max(_longest_prompt(plan, n, 1) // 3, SHORT_TOKENS)
            )
            scenes.append(Stairs((n,), kv_tokens, 0, STAIR_TURNS))
            continue
        room = reach.max_num_batched_tokens - n
        m = draw.choice((1, 2, 4))
        tokens = draw.randint(1, max(min(room // m, reach.max_model_len // 2), 1))
        most = min(
            _longest_prompt(plan, n, 1) // 3, max((plan.kv_cache_tokens - m * tokens) // n // 2, 1)
        )
        m = min(m, reach.max_num_seqs - n) or 1
        n = min(n, reach.max_num_seqs - m)
        scenes.append(Prompts(m, tokens, n, draw.randint(1, max(most, 1))))
    return scenes


def _short(plan: MeasurePlan) -> int:
    """Return a prompt length at which a whole batch of prompts is computed in one pass."""
    return max(min(SHORT_TOKENS, plan.reach.max_num_batched_tokens // plan.reach.max_num_seqs), 1)


def _stairs(plan: MeasurePlan, tokens: int) -> Stairs:
    """Return stairs over the batch sizes of the coarse grid, as far as the KV cache holds."""
    batches = [
        n
        for n in reversed(_octaves(plan.reach.max_num_seqs, 4))
        if tokens <= _longest_prompt(plan, n, 0)
    ]
    return Stairs(tuple(batches), tokens, 0, STAIR_TURNS)


def _stairs_of(plan: MeasurePlan, kv_tokens: int) -> Stairs:
    """Return stairs whose mean length at the largest batch is about `kv_tokens`."""
    most = plan.reach.max_num_seqs
    ahead = prefill_passes(most, kv_tokens, plan.reach.max_num_batched_tokens) / 2 + STAIR_TURNS / 2
    return _stairs(plan, max(round(kv_tokens - ahead), SHORT_TOKENS))


def _longest_prompts(plan: MeasurePlan) -> list[int]:
    """Return prompt lengths of the coarse grid: the longest for each batch size, and a quarter of
    the last. Of lengths that are nearly equal the smaller one serves both: what is measured at one
    batch size alone is extrapolated at the others."""
    longest = sorted(
        _longest_prompt(plan, batch, 0) for batch in _octaves(plan.reach.max_num_seqs, 4)
    )
    lengths = [longest[0] // 4]
    for tokens in longest:
        if tokens > 1.25 * lengths[-1]:
            lengths.append(tokens)
    return [tokens for tokens in lengths if tokens > 2 * SHORT_TOKENS]


def _longest_prompt(plan: MeasurePlan, sequences: int, stairs: int) -> int:
    """Return the longest prompts of `sequences` sequences that fit: those with a computed prompt
    decode while the others wait."""
    turns = (LEAD_TURNS + STAIR_TURNS) * (stairs or len(_octaves(plan.reach.max_num_seqs, 4))) + 2
    most = (
        min(plan.reach.max_model_len - 2 * plan.draft_tokens, plan.kv_cache_tokens // sequences)
        - turns
        - 2
    )
    room = max(plan.reach.max_num_batched_tokens - sequences, 1)
    return max(int(most / (1 + sequences / room)), 1)


def _octaves(most: int, factor: int) -> list[int]:
    """Return 1, 4, 16 … (by `factor`) up to `most`, which is included."""
    ticks = [1]
    while ticks[-1] * factor * 1.5 < most:
        ticks.append(ticks[-1] * factor)
    return ticks if most == ticks[-1] else [*ticks, most]
