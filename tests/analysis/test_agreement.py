"""Predicted against measured: errors that follow from the times, and differences of decisions told from near-ties."""

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from rich.console import Console

from simrl.analysis.agreement import Agreement, Share, agree, finished_on_clock, repeat_spread
from simrl.analysis.run_view import rollout_clock, short_name
from simrl.errors import InputError
from simrl.result.result import Lane, Result, Step
from simrl.runtime.recorder import Recorder
from simrl.runtime.rollout import Rollout, Segment
from simrl.show.figures.agree import VERSION_COLORS, agreement_figure
from simrl.show.style import save
from simrl.show.tables.agree import print_agreement, repeats_line
from simrl.simulate.run import simulate
from tests.command_line import SCENARIO, CommandLine
from tests.helpers import LINEAR, on_gpus, rows, sample

Stay = tuple[int, int, int, float, float]  # a segment: worker, version, tokens, seconds from and to


def a_run(
    samples: Mapping[int, Sequence[Stay]],
    loads: Iterable[tuple[int, int, float, float]] = (),
    updates: Iterable[tuple[float, Sequence[int]]] = (),
    workers: int = 2,
    end_s: float | None = None,
    unfinished: Sequence[int] = (),
    drafts: Mapping[int, tuple[int, int, int, int]] | None = None,
    system: str = "areal",
) -> Result:
    """A result from what its tables say: samples by uid as segments; (worker, version, from, to) of loads; (end, uids) of
    updates. A worker rolls out while a sample is there."""
    record = Recorder([*(Lane(f"rollout-{i:03d}", 1) for i in range(workers)), Lane("train", 1)])
    rollouts = {}
    for uid, stays in samples.items():
        drafted, accepted, verifications, verified = (drafts or {}).get(uid, (0, 0, 0, 0))
        rollouts[uid] = Rollout(
            sample(uid),
            tuple(Segment(*stay) for stay in stays),
            done=uid not in unfinished,
            drafted_tokens=drafted,
            accepted_tokens=accepted,
            verifications=verifications,
            verified_tokens=verified,
        )
        record.request_ended(rollouts[uid])
    for worker in range(workers):
        edges = sorted(
            {t for stays in samples.values() for s in stays if s[0] == worker for t in s[3:]}
        )
        for a, b in pairwise(edges):
            if any(
                s[0] == worker and s[3] <= a and b <= s[4]
                for stays in samples.values()
                for s in stays
            ):
                record.span(worker, "rollout", a, b, 0)
    for worker, version, a, b in loads:
        record.span(worker, "load_weights", a, b, version)
    last_s = max((s[4] for stays in samples.values() for s in stays), default=1.0)
    for i, (at_s, uids) in enumerate(updates):
        tokens = sum(rollouts[uid].tokens for uid in uids)
        record.trained(
            Step(i, i, at_s, at_s, len(uids), 0, tokens, 0.0, 0), [rollouts[uid] for uid in uids]
        )
        last_s = max(last_s, at_s)
    return record.result(end_s or last_s, {"system": system, "label": system})


@cache
def simulated(
    name: str, correction: float = 1.0, workers: int = 2, steps: int = 3, **parameters: Any
) -> Result:
    """Forward passes that take `correction` times as long, and nothing between them."""
    profile = {"roofline": {"between_passes_s": 0.0}, "forward_correction": correction}
    scenario = on_gpus(name, parameters, workers, profile=profile, steps=steps)
    return simulate(scenario.with_fields("training", **LINEAR))  # updates shorter than responses


def cut(result: Result, at_s: float) -> Result:
    """What is known of a run that was interrupted then."""
    samples = result.samples
    late = pc.greater(samples.column("finished_s"), at_s)
    finished = pc.if_else(late, pa.scalar(None, pa.float64()), samples.column("finished_s"))
    samples = samples.set_column(
        samples.schema.get_field_index("finished_s"), "finished_s", finished
    )
    begun = pc.less(samples.column("started_s"), at_s)
    steps = result.steps.filter(pc.less_equal(result.steps.column("finished_s"), at_s))
    trained = samples.column("trained_step")
    known = pc.if_else(pc.less(trained, steps.num_rows), trained, pa.scalar(None, pa.int64()))
    samples = samples.set_column(
        samples.schema.get_field_index("trained_step"), "trained_step", known
    )

    def clipped(table: pa.Table) -> pa.Table:
        table = table.filter(pc.less(table.column("started_s"), at_s))
        place = table.schema.get_field_index("ended_s")
        return table.set_column(
            place, "ended_s", pc.min_element_wise(table.column("ended_s"), at_s)
        )

    return Result(
        clipped(result.spans),
        steps,
        samples.filter(begun),
        clipped(result.segments),
        {**result.metadata, "end_s": at_s},
    )


def printed(agreement: Agreement, width: int = 80, **more: Any) -> str:
    screen = StringIO()
    print_agreement(
        agreement, Console(file=screen, width=width, highlight=False, markup=False), **more
    )
    return screen.getvalue()


def kinds(agreement: Agreement) -> list[tuple[str, bool]]:
    """Each difference, and whether it is a near-tie."""
    return [(d.kind, d.near_tie_ms is not None) for d in agreement.differences]


TWO = {0: [(0, 0, 10, 0.0, 4.0)], 1: [(1, 0, 10, 0.0, 6.0)]}


# Errors.


@pytest.mark.parametrize("system", ["verl_colocated", "one_step_off", "areal", "rhymerl"])
def test_a_run_agrees_with_itself(system: str):
    run = simulated(system)
    found = agree(run, run)
    assert set(vars(found.errors).values()) <= {0.0, None}
    assert found.errors.makespan_err == 0.0 and found.errors.sample_mape == 0.0
    assert not found.differences
    assert found.finished_in_one.predicted == found.finished_in_one.measured == 0
    assert all(part.predicted == part.measured for part in found.parts)


def test_passes_that_take_five_percent_longer_are_an_error_of_five_percent_on_the_rollout_clock():
    found = agree(simulated("verl_colocated"), simulated("verl_colocated", correction=1.05))
    # the sampler's pause between passes takes no longer
    assert found.errors.makespan_err == pytest.approx(1 / 1.05 - 1, abs=3e-4)
    assert found.errors.sample_mape == pytest.approx(1 - 1 / 1.05, abs=3e-4)
    assert found.errors.latency_mape == pytest.approx(1 - 1 / 1.05, abs=3e-4)
    assert found.errors.wall_err is not None and found.errors.makespan_err is not None
    assert abs(found.errors.wall_err) < 0.5 * abs(found.errors.makespan_err), (
        "training is held: it dilutes the wall's error"
    )
    assert not found.differences


def test_times_of_training_do_not_move_the_rollout_clock_of_a_schedule_that_waits_for_it():
    fast, slow = a_run(TWO, updates=[(8.0, [0, 1])]), a_run(TWO, updates=[(20.0, [0, 1])])
    found = agree(slow, fast)
    assert found.errors.makespan_err == 0.0 and found.errors.sample_mape == 0.0
    assert found.errors.wall_err == pytest.approx(1.5)
    assert found.figures.rollout_s.measured == 6.0


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.floats(0, 10), st.floats(0.01, 5)), min_size=1, max_size=12
    )
)
def test_the_rollout_clock_is_the_measure_of_the_time_with_a_sample_somewhere(
    stays: list[tuple[int, float, float]],
):
    run = a_run({i: [(w, 0, 1, s, s + d)] for i, (w, s, d) in enumerate(stays)}, workers=4)
    clock, edges = rollout_clock(run), np.unique([t for _, s, d in stays for t in (s, s + d)])
    expected = 0.0
    for a, b in pairwise(edges):
        assert clock(a) == pytest.approx(expected, abs=1e-9)
        rolls = any(s <= a and b <= s + d for _, s, d in stays)
        assert clock((a + b) / 2) == pytest.approx(expected + rolls * (b - a) / 2, abs=1e-9)
        expected += rolls * (b - a)
    assert clock(1e9) == pytest.approx(expected)


def test_a_bubble_is_counted_between_the_first_rollout_and_the_last():
    later = {0: [(0, 0, 10, 1.0, 5.0)], 1: [(1, 0, 10, 1.0, 7.0)]}
    found = agree(a_run(TWO, updates=[(6.0, [0, 1])]), a_run(later, updates=[(30.0, [0, 1])]))
    assert found.figures.bubble.predicted == pytest.approx(2 / 12)
    assert found.errors.bubble_err == pytest.approx(0.0)


def test_acceptance_is_compared_over_samples_that_finished_in_both():
    drafts = {0: (10, 5, 5, 10), 1: (100, 0, 50, 50)}
    found = agree(
        a_run(TWO, drafts={0: (10, 7, 5, 12)}),
        a_run(TWO, drafts=drafts, unfinished=[1]),
        near_tie_s=0.0,
    )
    assert found.figures.acceptance.predicted == 0.7 and found.figures.acceptance.measured == 0.5
    assert found.errors.acceptance_err == pytest.approx(0.2)
    assert found.errors.accept_length_err == pytest.approx(12 / 10 - 1)
    plain = agree(a_run(TWO), a_run(TWO))
    assert plain.errors.acceptance_err is None and plain.figures.accept_length.predicted is None
    assert "draft" not in printed(plain)


def test_a_part_is_what_a_worker_did_for_the_samples_of_an_update():
    samples = {
        0: [
            (0, 0, 4, 0.0, 4.0),
            (0, 1, 2, 4.0, 7.0),
        ],  # the load, from 4 to 5, is in its second segment
        1: [(0, 0, 4, 0.0, 4.0)],
        2: [(1, 0, 3, 1.0, 9.0)],
    }
    run = a_run(samples, updates=[(9.0, [0, 1, 2])])
    spans = rows(run.spans)
    assert (
        sum(
            s["ended_s"] - s["started_s"]
            for s in spans
            if s["lane"] == "rollout-000" and s["kind"] == "rollout"
        )
        == 7
    )
    (first, second), (both,) = agree(run, run).parts, agree(run, run).steps
    assert first.predicted == Share(0.0, 7.0, 10, pytest.approx((4 + 4 + 3) / 7), None, (0, 1))
    assert second.predicted == Share(1.0, 9.0, 3, 1.0, None, (0,))
    assert both.predicted == Share(0.0, 9.0, 13, pytest.approx((11 + 8) / (7 + 8)), None, (0, 1))


def test_parts_hold_every_trained_token():
    run = simulated("areal", eta=2)
    parts = [part.predicted for part in agree(run, run).parts if part.predicted]
    assert sum(part.tokens for part in parts) == sum(
        rows(run.steps)[i]["response_tokens"] for i in range(3)
    )


# Decisions.


def test_a_sample_at_another_worker_is_a_real_difference():
    found = agree(a_run(TWO), a_run({**TWO, 1: [(0, 0, 10, 0.0, 6.0)]}), near_tie_s=0.1)
    assert kinds(found) == [("worker", False)]
    assert found.differences[0].text == "sample 1/0/0: worker 1 (predicted), 0 (measured)"


def finishing(first_s: float, second_s: float, lag_s: float = 0.0) -> dict[int, list[Stay]]:
    """Samples 2 and 3 wait, and start where 0 and 1 end, in this order and so much later."""
    ends = {0: first_s, 1: second_s}
    earlier, later = sorted(ends, key=ends.__getitem__)
    return {
        **{w: [(w, 0, 10, 0.0, ends[w])] for w in ends},
        2: [(earlier, 0, 10, ends[earlier] + lag_s, 9.0)],
        3: [(later, 0, 10, ends[later] + lag_s, 9.5)],
    }


@pytest.mark.parametrize("lag_s", [0.0, 0.006])
def test_two_completions_that_changed_places_are_named_as_the_near_tie_behind_another_worker(
    lag_s: float,
):
    found = agree(
        a_run(finishing(4.0, 4.003, lag_s)), a_run(finishing(4.3, 4.2, lag_s)), near_tie_s=0.01
    )
    assert kinds(found) == [("worker", True), ("worker", True)]
    assert [d.near_tie_ms for d in found.differences] == pytest.approx([3.0, 3.0])
    assert re.search(
        r"near-tie: the (start|end) of \d/0/0 and .* are 3 ms apart", found.differences[0].text
    )
    assert not found.real_differences


@pytest.mark.parametrize("lag_s", [0.0, 0.006])
def test_completions_that_changed_places_by_more_are_no_near_tie_though_starts_follow_them_closely(
    lag_s: float,
):
    found = agree(
        a_run(finishing(4.0, 4.1, lag_s)), a_run(finishing(4.3, 4.2, lag_s)), near_tie_s=0.01
    )
    assert kinds(found) == [("worker", False), ("worker", False)]


def test_samples_that_start_together_explain_nothing():
    """Many start at one instant, and end far from there: whoever goes elsewhere does so by a rule."""
    here = {i: [(i % 2, 0, 10, 0.0, 4.0 + i)] for i in range(6)}
    there = {
        i: [((i + 1) % 2 if i in (2, 3) else i % 2, 0, 10, 1e-5 * i, 4.0 + i)] for i in range(6)
    }
    found = agree(a_run(here), a_run(there), near_tie_s=0.01)
    assert kinds(found) == [("worker", False), ("worker", False)]


def at_one_worker(*starts_s: float) -> Result:
    return a_run({i: [(0, 0, 1, at_s, 9.0 + i)] for i, at_s in enumerate(starts_s)}, workers=1)


@pytest.mark.parametrize(
    ("predicted", "measured", "expected"),
    [
        ((0.0, 0.001), (0.001, 0.0), []),  # one instant in both
        ((0.0, 1.0), (0.0, 2.0), []),
        ((0.0, 1.0), (0.003, 0.0), [("order", True)]),
        ((0.0, 0.003), (1.0, 0.0), [("order", True)]),
        ((0.0, 1.0), (1.0, 0.0), [("order", False)]),
        (
            (0.0, 1.0, 2.0, 3.0),
            (3.5, 1.0, 2.0, 3.0),
            [("order", False)],
        ),  # one that fell behind, not three
        ((0.0, 0.0, 0.0), (0.2, 0.1, 0.0), []),  # handed over together: there is no order
    ],
)
def test_the_order_of_starts_counts_where_both_runs_have_one(
    predicted: tuple[float, ...], measured: tuple[float, ...], expected: list[tuple[str, bool]]
):
    assert (
        kinds(agree(at_one_worker(*predicted), at_one_worker(*measured), near_tie_s=0.01))
        == expected
    )


def test_an_order_says_who_came_first_and_by_how_much():
    found = agree(at_one_worker(0.0, 1.0), at_one_worker(0.004, 0.0), near_tie_s=0.01)
    assert found.differences[0].text == (
        "worker 0: sample 0/0/0 starts before 1/0/0 (predicted), after (measured); a near-tie: they start 4 ms apart"
    )


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=9))
def test_an_order_differs_exactly_where_some_pair_changed_places(starts: list[tuple[int, int]]):
    """Seconds are whole, ties are less: a pair is in one order, in the other, or together."""
    found = agree(
        at_one_worker(*(float(p) for p, _ in starts)),
        at_one_worker(*(float(m) for _, m in starts)),
        0.5,
    )
    inverted = any(p < q and m > n for p, m in starts for q, n in starts)
    assert bool(found.differences) == inverted
    assert len(found.differences) < len(starts) and all(
        kind == ("order", False) for kind in kinds(found)
    )


def migrated(at_s: float | None, other_end_s: float = 4.0) -> Result:
    end_s = 8.0
    stays = (
        [(1, 0, 10, 0.0, end_s)] if at_s is None else [(1, 0, 6, 0.0, at_s), (0, 0, 4, at_s, end_s)]
    )
    return a_run({0: [(0, 0, 10, 0.0, other_end_s)], 1: stays}, updates=[(9.0, [0, 1])])


def test_a_migration_that_only_one_run_makes_is_told():
    found = agree(migrated(5.0), migrated(None), near_tie_s=0.01)
    assert kinds(found) == [("migration", False)]
    assert found.differences[0].text == "sample 1/0/0: worker 1, then 0 (predicted), 1 (measured)"
    assert found.differences[0].at_s == 5.0
    assert not agree(migrated(5.0), migrated(6.0), near_tie_s=0.01).differences, (
        "when it moves is no decision"
    )


def test_a_worker_that_loads_other_weights_is_told():
    loads = [(0, 1, 4.0, 4.5), (0, 2, 8.0, 8.5)]
    late = {0: [(0, 0, 10, 0.0, 4.0), (0, 1, 5, 5.0, 7.0)], 1: [(1, 0, 10, 0.0, 6.0)]}
    otherwise = [(0, 1, 4.0, 4.5), (0, 3, 8.0, 8.5)]
    found = agree(a_run(late, loads, end_s=9.0), a_run(late, otherwise, end_s=9.0), near_tie_s=0.01)
    assert kinds(found) == [("loads", False)]
    assert (
        found.differences[0].text
        == "worker 0: its load 2 of weights is version 2 (predicted), version 3 (measured)"
    )
    missing = agree(
        a_run(late, loads, end_s=9.0), a_run(late, loads[:1], end_s=9.0), near_tie_s=0.01
    )
    assert (
        "load 2 of weights is version 2 (predicted), none (measured)" in missing.differences[0].text
    )


def around_a_load(end_s: float, load_s: float) -> Result:
    """A sample ends before the weights change, or has its last tokens from the new ones."""
    stays = (
        [(0, 0, 10, 0.0, end_s)]
        if end_s <= load_s
        else [(0, 0, 9, 0.0, load_s), (0, 1, 1, load_s + 1, end_s)]
    )
    return a_run(
        {0: stays, 1: [(1, 0, 10, 0.0, 9.0)]}, [(0, 1, load_s, load_s + 1)], [(9.0, [0, 1])]
    )


@pytest.mark.parametrize(
    ("measured_end_s", "measured_load_s", "tie"),
    [(5.005, 4.0, True), (6.0, 4.0, False), (5.0, 3.6, False)],
)
def test_a_sample_that_ends_about_when_weights_change_is_a_near_tie(
    measured_end_s: float, measured_load_s: float, tie: bool
):
    found = agree(
        around_a_load(3.9, 4.0), around_a_load(measured_end_s, measured_load_s), near_tie_s=0.01
    )
    assert kinds(found) == [("versions", tie)]
    assert "made by weights 0 (predicted), 0, then 1 (measured)" in found.differences[0].text


def test_a_sample_that_ends_at_the_boundary_of_a_load_ended_before_it():
    found = agree(around_a_load(4.0, 4.0), around_a_load(5.3, 4.0), near_tie_s=0.01)
    assert kinds(found) == [("versions", True)] and found.differences[0].near_tie_ms == 0.0


def test_rules_that_migrate_and_weights_in_flight_are_followed_in_simulated_runs():
    migrating = simulated("rhymerl", workers=3, steps=3)
    places = {}
    for segment in rows(migrating.segments):
        places.setdefault(segment["uid"], set()).add(segment["worker"])
    slow = simulated("rhymerl", correction=1.002, workers=3, steps=3)
    assert not agree(migrating, slow).real_differences
    in_flight = simulated("areal", workers=2, eta=2)
    assert any(
        len(part.predicted.policy_versions) > 1
        for part in agree(in_flight, in_flight).parts
        if part.predicted
    )
    assert not agree(
        in_flight, simulated("areal", correction=1.0005, workers=2, eta=2)
    ).real_differences


def test_what_is_close_is_two_passes_unless_it_is_said():
    run = a_run({0: [(0, 0, 10, 0.0, 4.0)], 1: [(1, 0, 10, 0.0, 4.0)]})
    assert agree(run, run).near_tie_s == pytest.approx(0.8)
    assert agree(run, run, near_tie_s=0.25).near_tie_s == 0.25


# Runs that are incomplete, or do not belong together.


@pytest.mark.parametrize("share", [0.0, 0.05, 0.4, 0.7, 0.95])
def test_of_an_interrupted_run_what_finished_is_compared(share: float):
    predicted = simulated("areal", workers=2, steps=3, eta=2)
    whole = simulated("areal", correction=1.0005, workers=2, steps=3, eta=2)
    part = cut(whole, share * whole.metadata["end_s"])
    found = agree(predicted, part)
    finished = len([row for row in rows(part.samples) if row["finished_s"] is not None])
    assert found.samples == finished
    assert found.finished_in_one.predicted > 0 and found.finished_in_one.measured == 0
    assert found.updates.measured == part.steps.num_rows < found.updates.predicted
    for error in (found.errors.makespan_err, found.errors.wall_err, found.errors.sample_mape):
        assert (error is None) == (finished == 0) and abs(error or 0.0) < 0.001
    assert not found.real_differences
    text = printed(found)
    assert f"{found.finished_in_one.predicted} finished only in" in " ".join(text.split())
    assert f"Updates: 3 predicted, {part.steps.num_rows} measured" in text
    timeline = agreement_figure(predicted, part, found).axes[0]
    assert timeline.get_xlim()[1] >= part.metadata["end_s"]


def test_runs_without_a_rollout_have_no_errors_and_no_decisions(tmp_path: Path):
    nothing = a_run({})
    found = agree(nothing, nothing)
    assert set(vars(found.errors).values()) == {None} and not found.differences and not found.parts
    assert "no sample finished in both" in printed(found)
    save(agreement_figure(nothing, nothing, found), tmp_path / "nothing.png")
    assert (tmp_path / "nothing.png").stat().st_size > 1000


def test_runs_that_do_not_belong_together_are_refused():
    run = a_run(TWO)
    with pytest.raises(
        InputError,
        match="predicted has 2 rollout workers, measured 1; compare runs with equal numbers",
    ):
        agree(run, a_run({0: TWO[0]}, workers=1))
    with pytest.raises(
        InputError, match="predicted is areal, measured split; compare two runs of one system"
    ):
        agree(run, a_run(TWO, system="split"))
    renamed = replace(run, samples=run.samples.set_column(3, "prompt_id", pa.array([7, 8])))
    with pytest.raises(
        InputError,
        match=r"sample 0 is 0/0/0 .*predicted and 7/0/0 measured: runs of different traces",
    ):
        agree(run, renamed)
    with pytest.raises(
        InputError,
        match=r"sample 0/0/0 .*has 10 tokens predicted and 11 measured: runs of different",
    ):
        agree(run, a_run({**TWO, 0: [(0, 0, 11, 0.0, 4.0)]}))
    assert repeat_spread([run]) is None


def test_the_spread_of_repeats_is_over_all_pairs():
    runs = [
        a_run({0: [(0, 0, 10, 0.0, s)], 1: [(1, 0, 10, 0.0, s)]}, updates=[(s, [0, 1])])
        for s in (10.0, 8.0, 10.0)
    ]
    spread = repeat_spread(runs)
    assert spread is not None and spread.repeats == 3
    assert spread.largest.makespan_err == pytest.approx(0.25)  # 10 over 8, 8 under 10
    assert spread.mean.makespan_err == pytest.approx((0.25 + 0.25 + 0.2 + 0.2 + 0 + 0) / 6)
    assert spread.mean.acceptance_err is None
    text = printed(agree(runs[0], runs[1]), spread=spread)
    assert re.search(r"Rollout clock +10\.00 s +8\.000 s +\+25\.00% +15\.00% +25\.00%", text)
    several = [agree(runs[0], run) for run in runs]
    assert "Two replays differ by up to 25.0%" in repeats_line(several, None)
    assert "profile differed by 4.0%. One replay" in (line := repeats_line(several[:1], 0.04))
    assert line.endswith("add --repeats 3")


# On the screen, as a picture, as a command.


def test_samples_that_one_run_alone_had_rolled_out_ahead_are_told_from_those_it_trained_on():
    ahead = {**TWO, 2: [(0, 0, 5, 6.0, 8.0)], 3: [(0, 0, 5, 6.0, 8.0)]}
    less = {**TWO, 2: [(0, 0, 2, 6.0, 8.0)], 3: [(0, 0, 2, 6.0, 8.0)]}
    measured = a_run(less, updates=[(8.0, [0, 1])], unfinished=[2, 3])

    def told(trained: Sequence[int]) -> str:
        return " ".join(printed(agree(a_run(ahead, updates=[(8.0, trained)]), measured)).split())

    assert "2 finished only in the predicted one, 0 only in the measured one" in told([0, 1])
    assert "samples for later ones under way: those that only one run finished are such" in told(
        [0, 1]
    )
    assert "1 of those that only one run finished are such" in told([0, 1, 2])
    assert "only one run finished" not in told([0, 1, 2, 3])


def test_a_method_that_drafts_and_drafted_nothing_is_told_with_what_it_needs():
    once, again = (simulated("verl_colocated", speculation=name) for name in ("histospec", "ngram"))
    assert "histospec drafted nothing: a history needs prompts that repeat" in " ".join(
        printed(agree(once, once)).split()
    )
    assert "drafted nothing" not in printed(agree(again, again))
    assert "drafted nothing" not in printed(
        agree(simulated("verl_colocated"), simulated("verl_colocated"))
    )


def test_the_title_of_a_picture_names_system_and_model_without_paths_and_settings():
    run = simulated("verl_colocated")
    system = {
        "name": "verl_colocated",
        "speculation": {"name": "ngram", "window": {"kind": "fixed", "tokens": 4}},
    }
    nested = {"system": system, "model": "/a/long/path/to/qwen/config.json"}
    assert short_name({"scenario": nested}) == "verl_colocated(speculation=ngram) on qwen"
    assert (
        short_name({"scenario": {"system": {"name": "areal", "eta": 2}, "model": "/b/qwen"}})
        == "areal(eta=2) on qwen"
    )
    assert short_name({"label": "areal"}) == "areal"
    long = {
        "system": {"name": "areal", **{f"parameter_{i}": i for i in range(9)}},
        "model": "/b/qwen",
    }
    of_long = replace(
        run, metadata={**run.metadata, "scenario": {**run.metadata["scenario"], **long}}
    )
    figure = agreement_figure(of_long, of_long, agree(of_long, of_long))
    title = figure.texts[0]
    assert title.get_text().endswith("…")
    assert title.get_window_extent(FigureCanvasAgg(figure).get_renderer()).x1 < figure.bbox.x1


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_the_screen(width: int):
    found = agree(simulated("areal", eta=2), simulated("areal", correction=1.05, eta=2))
    text = printed(found, width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text and "update" in text and "MAPE" in text
    narrow = printed(found, 48)
    assert "Left out for want of room" in narrow


def test_of_a_long_run_the_table_shows_updates_and_says_so():
    many = {i: [(i % 2, 0, 5, float(i), i + 1.0)] for i in range(80)}
    run = a_run(many, updates=[(2.0 * i + 2, [2 * i, 2 * i + 1]) for i in range(40)])
    text = " ".join(printed(agree(run, run)).split())
    assert "all workers together" in text
    assert "Shown are the 32 of 40 updates whose ends are furthest apart" in text


def test_at_most_ten_differences_are_printed_real_ones_first():
    other = {i: [(1, 0, 5, 3.0 * i, 3.0 * i + 1)] for i in range(14)}
    found = agree(
        a_run({i: [(0, *stay[0][1:])] for i, stay in other.items()}), a_run(other), near_tie_s=0.01
    )
    assert len(found.real_differences) == 14
    text = printed(found, 120)
    assert (
        text.count("worker 0 (predicted), 1 (measured)") == 10
        and "… and 4 more, in agreement.json" in text
    )
    assert "14 real differences, 0 near-ties" in text


def test_an_agreement_is_json():
    found = agree(simulated("areal", eta=2), simulated("areal", correction=1.05, eta=2))
    data = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert set(data["errors"]) >= {
        "makespan_err",
        "wall_err",
        "sample_mape",
        "latency_mape",
        "bubble_err",
    }
    assert (
        data["parts"][0]["predicted"]["policy_versions"]
        and data["figures"]["rollout_s"]["measured"] > 0
    )


@pytest.mark.parametrize("workers", [2, 16])
def test_the_picture_has_a_point_a_sample_and_both_runs_of_each_worker(
    workers: int, tmp_path: Path
):
    runs = [simulated("one_step_off", correction=c, workers=workers) for c in (1.0, 1.05)]
    found = agree(*runs)
    timeline, points, apart = agreement_figure(*runs, found).axes
    assert timeline.get_ylim() == (workers, 0)
    uids, p_s, m_s = finished_on_clock(*runs)
    assert sum(len(c.get_offsets()) for c in points.collections) == len(uids) == found.samples
    np.testing.assert_allclose(points.collections[0].get_offsets(), np.stack([m_s, p_s], axis=1))
    assert apart.get_xlim() == points.get_xlim()
    save(agreement_figure(*runs, found), tmp_path / "a.png")
    save(agreement_figure(*runs, found), tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_the_timeline_shows_the_rollout_time_of_both_runs():
    runs = [simulated("one_step_off", correction=c) for c in (1.0, 1.05)]
    timeline = agreement_figure(*runs, agree(*runs)).axes[0]
    area = 0.0
    for patch in timeline.artists + timeline.patches:
        if patch.get_facecolor()[:3] in [to_rgb(color) for color in VERSION_COLORS]:
            corners = patch.get_path().vertices.reshape(-1, 5, 2)[:, :4]
            area += float(
                (np.ptp(corners[:, :, 0], axis=1) * np.ptp(corners[:, :, 1], axis=1)).sum()
            )
    rolled = sum(
        s["ended_s"] - s["started_s"]
        for run in runs
        for s in rows(run.spans)
        if s["kind"] == "rollout"
    )
    assert area == pytest.approx(0.43 * rolled)


@pytest.fixture
def measured(simrl: CommandLine) -> Path:
    """The result of a run with slower passes."""
    (simrl.folder / "one.yaml").write_text(
        SCENARIO.replace("[verl_colocated, {name: areal, eta: 2}]", "[verl_colocated]")
    )
    ended = simrl("run", "one.yaml", "profile.forward_correction=1.05", "-o", "slow")
    assert ended.code == 0, ended.err
    return Path("slow/verl-colocated")


def test_a_scenario_is_simulated_and_compared_with_what_was_measured(
    simrl: CommandLine, measured: Path
):
    code, out, err = simrl("compare", "one.yaml", "--measured", str(measured), "-o", "agreement")
    assert code == 0, err
    assert "Rollout clock" in out and "Decisions: equal" in out and "Written to agreement" in out
    files = {path.name for path in (simrl.folder / "agreement").iterdir()}
    assert files == {"agreement.json", "agreement.png", "files.txt", "predicted"}
    data = json.loads((simrl.folder / "agreement" / "agreement.json").read_text())
    predicted = simrl.folder / "agreement" / "predicted" / "verl-colocated"
    code, out, err = simrl(
        "compare", str(predicted), "--measured", str(measured), "--json", "-o", "again"
    )
    assert code == 0, err
    assert json.loads(out) == data
    assert -0.05 < data["errors"]["makespan_err"] < 0


def test_what_cannot_be_compared_is_told_in_a_line(simrl: CommandLine, measured: Path):
    name = str(measured)
    assert "2 runs (verl_colocated, areal), but one was measured" in simrl.refuses(
        "compare", "scenario.yaml", "--measured", name
    )
    assert "not a result folder" in simrl.refuses("compare", "one.yaml", "--measured", "nowhere")
    assert "is the result of a run" in simrl.refuses("compare", name, "seed=4", "--measured", name)
    assert "runs of different traces" in simrl.refuses(
        "compare", "one.yaml", "seed=4", "--measured", name
    )
    told = simrl.refuses("compare", "one.yaml", "cluster.gpus=2", "--measured", name)
    assert "one.yaml, slow/verl-colocated: predicted has 2 rollout workers, measured 4" in told


def test_comparisons_of_two_replays_leave_each_others_results_and_one_that_replaces_says_so(
    simrl: CommandLine, measured: Path
):
    for name in ("first", "second"):
        for run in ("predicted", "measured"):
            shutil.copytree(simrl.folder / measured, simrl.folder / name / run)
        code, out, err = simrl("compare", f"{name}/predicted", "--measured", f"{name}/measured")
        assert code == 0, err
        assert f"Written to results/{name}-agreement" in out and "replaced" not in out
    code, out, err = simrl("compare", "first/predicted", "--measured", "second/measured")
    assert (
        code == 0
        and "It replaced an earlier comparison there; --output names another folder" in out
    ), err


def test_the_folder_of_a_replay_stands_for_the_result_in_it_that_is_meant(
    simrl: CommandLine, measured: Path
):
    for run in ("predicted", "measured"):
        shutil.copytree(simrl.folder / measured, simrl.folder / "replay" / run)
    code, out, err = simrl("compare", "replay", "--measured", "replay", "--json")
    assert code == 0, err
    assert json.loads(out)["errors"]["makespan_err"] == 0
