"""Groups at the workers, as pipelines see them: their events, made of the events of single samples.

Invariant: events and values equal the ones of `simrl.runtime.generation`, which generates groups
without following each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import simpy

from simrl.runtime.events import on_fire
from simrl.runtime.rollout import Rollout
from simrl.runtime.worker import GroupRun


def submit_and_follow(
    groups: Sequence[GroupRun],
    submit: Callable[..., list[simpy.Event]],
    cuts: Sequence[int | None],
    to: Sequence[int | None] | None = None,
) -> None:
    """Submit the samples of groups with a dispatcher's `submit`; `cuts` has the `max_tokens` of
    each sample, `to` its worker."""
    samples = [sample for group in groups for sample in group.samples]
    partials = [partial for group in groups for partial in group.partials]
    ends: dict[int, simpy.Event] = {}
    for cut, at in together(cuts):
        places = None if to is None else [to[i] for i in at]
        events = submit([samples[i] for i in at], [partials[i] for i in at], cut, places)
        ends.update(zip((samples[i].uid for i in at), events, strict=True))
    for group in groups:
        _follow(group, [ends[sample.uid] for sample in group.samples])


def together(cuts: Sequence[int | None]) -> list[tuple[int | None, list[int]]]:
    """Return the places of the samples that are cut at one number of tokens, which are submitted
    together."""
    places: dict[int | None, list[int]] = {}
    for i, cut in enumerate(cuts):
        places.setdefault(cut, []).append(i)
    return list(places.items())


def _follow(group: GroupRun, ends: Sequence[simpy.Event]) -> None:
    """Let the events of a group fire, given the dispatcher's events of its samples."""
    back: dict[int, Rollout] = {}  # by place in the group, in the order of the ends
    done: list[Rollout] = []

    def ended(place: int, end: Any) -> None:
        if not end.ok:
            end.defused = True
            if not group.over.triggered:
                group.over.fail(end.value)
            return
        back[place] = end.value
        if end.value.done:
            done.append(end.value)
        if len(done) == group.needed and not group.complete.triggered:
            group.complete.succeed(list(done))
        if len(back) == len(ends) and not group.over.triggered:
            group.over.succeed(
                [back[i] for i in sorted(back)] if group.needed is None else list(back.values())
            )

    for place, end in enumerate(ends):
        on_fire(end, partial(ended, place))
