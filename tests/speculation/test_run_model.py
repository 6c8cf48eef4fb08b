"""A model of the runs of drafters from texts."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from simrl.errors import InputError
from simrl.speculation.acceptance import sample_key
from simrl.speculation.decoding import packed
from simrl.speculation.drafter import AcceptRuns
from simrl.speculation.ngram import ngram_runs
from simrl.speculation.passes import run_passes
from simrl.speculation.run_model import (
    Bucket,
    ResponseClass,
    RunModel,
    draw_runs,
    draw_trace_runs,
    fit_run_model,
    rows_with_drafts,
)
from simrl.speculation.trace_runs import DrawnRuns, with_refusals
from simrl.speculation.windows import Aimd, Fixed, Mimd
from tests.token_traces import random_groups, trace_of

LENGTHS = np.random.default_rng(0).lognormal(6.5, 0.7, 3000).astype(np.int64) + 2
KEYS = np.arange(3000) * 7919


def one(up_to: int, mean: float) -> tuple[Bucket, ...]:
    return (Bucket(up_to_tokens=up_to, share=1.0, mean_tokens=mean),)


def a_class(gaps: tuple[Bucket, ...], hits: tuple[Bucket, ...], **more: Any) -> ResponseClass:
    return ResponseClass(**{"share": 1.0, "share_of_long": 1.0, **more}, gaps=gaps, hits=hits)


MIXED = RunModel(
    classes=(
        a_class(one(8, 3.0), one(64, 20.0), share=0.7, share_of_long=0.2, wrong_drafts=0.4),
        a_class(one(64, 30.0), one(8, 2.5), share=0.3, share_of_long=0.8, wrong_drafts=0.8),
    ),
    typical_tokens=700,
)


def test_gaps_and_hits_have_the_means_asked_for():
    runs = draw_runs(RunModel(classes=(a_class(one(9, 3.0), one(100, 17.0)),)), LENGTHS, KEYS)
    hit_tokens = (runs.accepted > 0).sum()
    assert hit_tokens / len(runs.accepted) == pytest.approx(17 / 20, rel=0.03)


def test_within_a_hit_a_draft_is_right_to_its_end_and_never_beyond_the_response():
    runs = draw_runs(MIXED, LENGTHS, KEYS)
    left = np.concatenate([np.arange(n, 0, -1) for n in LENGTHS])
    assert (
        (runs.accepted <= runs.drafted).all()
        and (runs.accepted <= left).all()
        and runs.drafted.max() <= 32
    )
    inside = runs.accepted[:-1] > 1
    following = runs.accepted[1:][inside]
    assert (
        (following == runs.accepted[:-1][inside] - 1) | (runs.accepted[:-1][inside] == 32)
    ).all()


@pytest.mark.parametrize("window", [Aimd(), Mimd(), Fixed(tokens=4), Fixed(tokens=32)])
def test_a_fitted_model_gives_the_passes_that_it_was_fitted_to(window: Any):
    runs = draw_runs(MIXED, LENGTHS, KEYS)
    fitted = fit_run_model(runs, LENGTHS)
    again = draw_runs(fitted, LENGTHS, KEYS + 1)
    found, expected = (
        run_passes(again, LENGTHS, window.rule),
        run_passes(runs, LENGTHS, window.rule),
    )
    assert found.accept_length == pytest.approx(expected.accept_length, rel=0.05)
    assert found.acceptance_rate == pytest.approx(expected.acceptance_rate, rel=0.07)
    long = LENGTHS > 700
    for some in (long, ~long):
        assert found.of(some).accept_length == pytest.approx(
            expected.of(some).accept_length, rel=0.15
        )


def test_a_model_of_a_real_drafter_tells_its_responses_apart():
    trace = random_groups(3, prompts=60, group=8)
    tokens = trace.column("response_tokens")
    runs = ngram_runs(trace)
    fitted = fit_run_model(runs, tokens, first_epoch=True)
    again = draw_runs(fitted, tokens, np.arange(len(tokens)))
    found, expected = (run_passes(r, tokens, Aimd().rule) for r in (again, runs))
    assert found.speculation_rate == pytest.approx(expected.speculation_rate, rel=0.15)
    worst, mostly = (
        [np.average(c.hits[0].mean_tokens) for c in fitted.classes][i] for i in (-1, 0)
    )
    assert len(fitted.classes) == 4 and worst <= mostly


def test_draws_belong_to_their_keys():
    """I23: the draws of a response depend on its key alone."""
    runs = draw_runs(MIXED, LENGTHS, KEYS)
    alone = draw_runs(MIXED, LENGTHS[5:6], KEYS[5:6])
    a, b = runs.first[5], runs.first[6]
    assert (
        runs.accepted[a:b].tolist() == alone.accepted.tolist()
        and runs.drafted[a:b].tolist() == alone.drafted.tolist()
    )


def test_responses_without_history_have_no_drafts():
    has_history = np.arange(3000) % 2 == 0
    runs = draw_runs(MIXED, LENGTHS, KEYS, has_history)
    assert ((runs.first == -1) == ~has_history).all()
    whole = draw_runs(MIXED, LENGTHS, KEYS)
    a, b = runs.first[2], whole.first[2]
    assert runs.accepted[a : a + LENGTHS[2]].tolist() == whole.accepted[b : b + LENGTHS[2]].tolist()


def test_rows_of_a_trace_have_drafts_where_their_prompts_have_a_history():
    trace = trace_of({(e, p): [[1, 2, 3]] * 2 for e, p in [(0, 0), (1, 0), (3, 0), (0, 1), (3, 2)]})
    epoch, prompt = trace.column("epoch").tolist(), trace.column("prompt_id").tolist()

    def served(epochs_back: int) -> set[tuple[int, int]]:
        first = draw_trace_runs(MIXED, trace, 0, epochs_back).first
        return {(e, p) for e, p, at in zip(epoch, prompt, first, strict=True) if at >= 0}

    assert served(1) == {(1, 0)} and served(2) == {(1, 0), (3, 0)}
    everywhere = MIXED.model_copy(update={"first_epoch": True})
    assert (draw_trace_runs(everywhere, trace, 0).first >= 0).all()


@pytest.mark.parametrize("factor", [1.0, 0.6])
def test_runs_drawn_when_a_response_begins_are_those_of_the_whole_trace(factor):
    random = np.random.default_rng(1)
    trace = trace_of(
        {
            (e, p): [[1] * int(n) for n in random.integers(1, 900, 3)]
            for e in range(2)
            for p in range(9)
        }
    )
    whole = with_refusals(draw_trace_runs(MIXED, trace, 4), trace, 4, factor)
    tokens, all_runs = trace.column("response_tokens").tolist(), packed(whole)
    runs = DrawnRuns(MIXED, trace, 4, factor, rows_with_drafts(MIXED, trace))
    held: list[int] = []
    for row in random.integers(0, len(trace), 300).tolist():
        if row in held:
            held.remove(row)
            runs.free(row)
        else:
            held.append(row)
            assert (runs.first(row, row) >= 0) == (whole.first[row] >= 0)
        for other in held:  # none is overwritten
            first, place, n = runs.first(other, other), whole.first[other], tokens[other]
            assert (
                first < 0 or (runs.packed[first : first + n] == all_runs[place : place + n]).all()
            )
    assert runs.packed.size < 4 * sum(tokens)


def test_a_row_of_a_trace_is_drawn_from_its_samples_key():
    trace = trace_of({(e, 5): [[1] * 400] * 2 for e in range(2)})
    runs = draw_trace_runs(MIXED, trace, 3)
    alone = draw_runs(MIXED, np.array([400]), np.array([sample_key(3, 5, 1, 1)]))
    assert runs.accepted[runs.first[3] :].tolist() == alone.accepted.tolist()


def test_a_model_comes_back_from_json():
    fitted = fit_run_model(draw_runs(MIXED, LENGTHS, KEYS), LENGTHS)
    assert (
        RunModel.model_validate_json(fitted.model_dump_json()) == fitted
        and fitted.kind == "measured"
    )


def test_nothing_to_fit_is_told():
    nothing = AcceptRuns(np.array([-1]), np.zeros(0, np.uint8), np.zeros(0, np.uint8))
    with pytest.raises(InputError, match="no response has drafts"):
        fit_run_model(nothing, np.array([5]))


def test_drafts_that_are_never_right_can_be_fitted():
    runs = AcceptRuns(np.array([0]), np.full(50, 3, np.uint8), np.zeros(50, np.uint8))
    fitted = fit_run_model(runs, np.array([50]))
    again = draw_runs(fitted, np.full(50, 50), np.arange(50))
    assert run_passes(again, np.full(50, 50), Fixed(tokens=3).rule).speculation_rate < 0.05
    assert fitted.beyond_tokens == 3 and fitted.classes[0].wrong_drafts == 1.0


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: a_class(one(4, 5.0), one(4, 2.0)), "mean_tokens 5"),
        (
            lambda: RunModel(classes=(a_class(one(4, 2.0), one(4, 2.0), share=0.5),)),
            "share sum to 0.5",
        ),
        (lambda: Bucket(up_to_tokens=0, share=1.0, mean_tokens=1.0), "greater than or equal to 1"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: Any, told: str):
    with pytest.raises(ValidationError, match=told):
        wrong()
