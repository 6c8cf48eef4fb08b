"""Asynchronous systems do what their publications say: decisions and sequences worked out by hand from the rules' own words.

AReaL: arXiv 2505.24298 §4.1, §5.1 and its public code (`StalenessManager`, `WorkflowExecutor.wait`). verl: the recipe
fully_async_policy, its README and `FullyAsyncRollouter`. NeMo-RL: its `ReplayBuffer` and `AsyncTrajectoryCollector`. What the
simulator does is read off its tables, not off its pipelines.
"""

from itertools import groupby
from math import ceil

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from simrl.pipelines import verl_fully_async as verl
from simrl.pipelines.areal import capacity, in_time
from simrl.result.metrics import summary
from simrl.systems.recipes import RECIPES
from tests.helpers import ROOMY, counted, examples, on_gpus, prepared, rows, trace, watch

length = st.integers(1, 40)
traces = st.lists(
    st.lists(st.lists(st.tuples(length, length), min_size=1, max_size=2), min_size=1, max_size=4),
    min_size=1,
    max_size=3,
).map(trace)


def singles(batch, *lengths):
    """A trace of so many groups a step, each one response (of a prompt of four tokens)."""
    return trace(
        [[[(4, n)] for n in lengths[i : i + batch]] for i in range(0, len(lengths), batch)]
    )


def submissions(watched):
    """(second, the trainer's version, groups) of what was submitted at one instant."""
    instants = groupby(watched.submissions, key=lambda s: (round(s.time_s), s.version))
    return [(time_s, version, len(list(together))) for (time_s, version), together in instants]


def finished_at(watched):
    return [round(u["finished_s"], 1) for u in rows(watched.result.steps)]


def oldest(watched):
    return [u["off_policyness_max"] for u in rows(watched.result.steps)]


def stays(watched, uid):
    """(worker, version, tokens, from, to) of a sample's segments."""
    return [
        (s["worker"], s["policy_version"], s["tokens"], s["started_s"], s["ended_s"])
        for s in rows(watched.result.segments)
        if s["uid"] == uid
    ]


# AReaL.


@pytest.mark.parametrize(
    "eta, version, batch, submitted, allowed",
    [
        # floor((N_r - 1) / B) <= i + eta for N_r = submitted + 1
        (0, 0, 4, 0, True),
        (0, 0, 4, 3, True),  # the fourth: floor(3 / 4) = 0 <= 0
        (0, 0, 4, 4, False),  # the fifth: floor(4 / 4) = 1 > 0
        (0, 1, 4, 7, True),
        (0, 1, 4, 8, False),
        (4, 0, 512, 2559, True),  # floor(2559 / 512) = 4
        (4, 0, 512, 2560, False),
        (8, 10, 512, 9727, True),
        (8, 10, 512, 9728, False),
        (1, 3, 1, 4, True),
        (1, 3, 1, 5, False),
    ],
)
def test_areal_admits_a_group_exactly_if_its_inequality_holds(
    eta, version, batch, submitted, allowed
):
    assert ((submitted + 1 - 1) // batch <= version + eta) == allowed  # the table is right
    for running in (0, submitted // 2, submitted):
        room = min(capacity(eta, version, batch, 10**9, running, submitted - running))
        assert (room > 0) == allowed


def test_areal_submits_a_batch_more_with_every_version_and_eta_of_them_ahead():
    """B = 2, η = 1, ten tokens each, twenty seconds an update: four groups at once, then two with every update."""
    run = counted(
        "areal",
        {"eta": 1, "max_concurrent": 99, "pause": False},
        singles(2, *[10] * 2),
        3,
        load_s=0.0,
        publish_s=20.0,
    )
    assert finished_at(run) == [30, 50, 70]
    assert submissions(run) == [(0, 0, 4), (30, 1, 2), (50, 2, 2)]


def test_areal_submits_no_more_than_may_run_at_once():
    run = counted(
        "areal",
        {"eta": 1, "max_concurrent": 3, "pause": False},
        singles(2, *[10] * 2),
        3,
        load_s=0.0,
        publish_s=20.0,
    )
    assert submissions(run) == [(0, 0, 3), (10, 0, 1), (30, 1, 2), (50, 2, 2)]
    by_default = counted(
        "areal", {"eta": 9, "pause": False}, singles(2, *[10] * 2), 2, load_s=0.0, publish_s=20.0
    )
    assert submissions(by_default)[:2] == [(0, 0, 8), (10, 0, 8)]  # four batches at once


def test_areal_says_which_bound_held_groups_back():
    """B = 2, ten tokens each, twenty seconds an update: three at once fill the six groups of η = 2 by 10 s."""

    def seconds(eta):
        parameters = {"eta": eta, "max_concurrent": 3, "pause": False}
        return counted(
            "areal", parameters, singles(2, *[10] * 2), 3, load_s=0.0, publish_s=20.0
        ).result.metadata["admission"]

    tight, loose = seconds(2), seconds(100)
    assert tight["concurrency"] == pytest.approx(10) and tight["eta"] > 30
    assert loose["eta"] == 0 and loose["concurrency"] > 40


def test_areal_pauses_generation_while_weights_are_published_and_loaded():
    """The first group is trained at 10. The second has 11 tokens when its pass ends; publication and load take 20 + 10 s. The
    third, submitted at 10, has its ten tokens at 51, and a pass ends later the next load begins. The trainer has its GPUs
    until 30."""
    run = counted(
        "areal", {"eta": 5, "max_concurrent": 2}, singles(1, 10, 40, 10), 2, publish_s=20.0
    )
    assert finished_at(run) == [10, 51]
    assert stays(run, 1)[:2] == [
        (0, 0, 11, 0.0, 11.0),
        (0, 1, 11, 11.0, pytest.approx(52, abs=0.1)),
    ]
    published = [
        (s["started_s"], s["ended_s"]) for s in rows(run.result.spans) if s["kind"] == "publish"
    ]
    assert published == [(pytest.approx(10, abs=0.1), pytest.approx(30, abs=0.1))]


def test_areal_may_keep_the_cache_of_what_runs():
    """The prompt and 11 tokens take two passes of ten tokens; if the cache is kept, the first pass gives the next token."""
    ends = []
    for anew in (True, False):
        parameters = {"eta": 5, "max_concurrent": 2, "recompute_kv": anew}
        run = counted(
            "areal",
            parameters,
            singles(1, 10, 40),
            2,
            limits=ROOMY._replace(max_num_batched_tokens=10),
        )
        ends.append(stays(run, 1)[-1][-1])
    assert ends[1] == ends[0] - 1


def test_areal_without_staleness_waits_for_the_update_before_it_submits_again():
    run = counted(
        "areal",
        {"eta": 0, "max_concurrent": 99, "pause": False},
        singles(2, 10, 30),
        3,
        publish_s=20.0,
    )
    assert finished_at(run) == [50, 110, 170]  # 30 generated, 20 published, 10 loaded
    assert submissions(run) == [(0, 0, 2), (50, 1, 2), (110, 2, 2)]
    assert oldest(run) == [0, 0, 0]


def test_areal_interrupts_loads_prefills_anew_and_goes_on():
    """The first group is published at 30. The second has 30 tokens then, and one more when the pass ends that runs. The load
    takes until 41; a pass prefills its prompt and 31 tokens and gives the 32nd; the last comes 9 passes later."""
    run = counted(
        "areal",
        {"eta": 5, "max_concurrent": 2, "pause": False},
        singles(1, 10, 40),
        2,
        publish_s=20.0,
    )
    assert finished_at(run)[0] == 30
    assert stays(run, 1) == [(0, 0, 31, 0.0, 31.0), (0, 1, 9, 31.0, 50.0)]


def test_areal_takes_what_was_submitted_first_of_what_is_finished():
    """At 35 the second (of 30 tokens) and the third (of 20) are both finished; the code sorts by when they were submitted."""
    run = counted(
        "areal",
        {"eta": 2, "max_concurrent": 3, "pause": False},
        singles(1, 10, 30, 20, 10),
        3,
        load_s=0.0,
        publish_s=25.0,
    )
    assert finished_at(run) == [35, 60, 85]
    assert [row["trained_step"] for row in rows(run.result.samples)][:3] == [0, 1, 2]


STRAGGLER = singles(1, 5, 30, 5, 5)


@pytest.mark.parametrize(
    "on_stale, updates, ages, trained_steps",
    [
        # The third is trained at 31, published at 41; the straggler, there at 40, waits for the loads of 41 to 51.
        ("train", [15, 41, 61], [0, 0, 2], [0, 2, 1]),
        # Version 2 is not made before the straggler is there, at 40; the third goes into version 3, after loads to 60.
        ("wait", [15, 50, 70], [0, 1, 1], [0, 1, 2]),
    ],
)
def test_areal_goes_on_without_a_straggler_or_waits_for_it(on_stale, updates, ages, trained_steps):
    """η = 1, a group an update, two at once. Version 1 is published at 15 and loaded from 16, when the straggler has 16 tokens,
    to 26. Then it goes on, and the third begins: that has its five tokens at 31, the straggler all at 40."""
    parameters = {
        "eta": 1,
        "max_concurrent": 2,
        "on_stale": on_stale,
        "log_probs": 0,
        "pause": False,
    }
    run = counted("areal", parameters, STRAGGLER, 3, publish_s=10.0)
    assert stays(run, 1)[0] == (0, 0, 16, 0.0, 16.0)
    assert stays(run, 2)[0] == (0, 1, 5, 26.0, 31.0)
    assert finished_at(run) == updates
    assert oldest(run) == ages
    assert [row["trained_step"] for row in rows(run.result.samples)][:3] == trained_steps


@pytest.mark.parametrize(
    ("left", "version", "eta", "batch", "possible"),
    [
        ([], 0, 0, 2, True),
        ([0], 0, 0, 2, False),  # due now, and left
        ([0], 0, 1, 2, True),  # due at update 1, which has room for two
        ([0, 0, 0], 0, 1, 2, False),  # three due at update 1
        ([0, 0, 0, 0], 0, 2, 2, True),  # four due at update 2: 1 and 2 have room for them
        (
            [0, 0, 0],
            1,
            2,
            2,
            False,
        ),  # ... but if update 1 leaves all three, update 2 has room for two
        ([0, 0, 1, 1, 1], 1, 2, 2, False),  # five due by update 3
        ([0, 0, 1, 1], 1, 2, 2, True),
    ],
)
def test_an_update_leaves_no_more_than_later_ones_have_room_for_in_time(
    left, version, eta, batch, possible
):
    assert in_time(left, version, eta, batch) == possible


@examples(40)
@given(traces, st.integers(1, 3), st.integers(0, 3), st.sampled_from([1, 2, 5, 100]), st.booleans())
@example(trace([[[(1, 1)], [(1, 6)]]]), 2, 2, 5, True)
def test_areal_that_waits_never_trains_a_token_older_than_eta(
    trace, workers, eta, concurrent, interruptible
):
    parameters = {
        "eta": eta,
        "on_stale": "wait",
        "max_concurrent": concurrent,
        "interruptible": interruptible,
    }
    run = watch(prepared(on_gpus("areal", parameters, workers, steps=6), trace, limits=ROOMY))
    assert max(oldest(run)) <= eta
    assert not any(row["status"] == "dropped" for row in rows(run.result.samples))


# NeMo-RL, asynchronous GRPO.


def test_nemo_submits_a_batch_for_each_update_it_may_serve_and_max_age_batches_run_at_once():
    """B = 2, at most one version ahead, ten tokens each, twenty seconds an update: the batch of update 0, and when its groups
    end the batch of update 1; after these a batch with every version."""
    run = counted(
        "nemo_rl_async", {"max_age": 1}, singles(2, *[10] * 2), 3, load_s=0.0, publish_s=20.0
    )
    assert finished_at(run) == [30, 50, 70]
    assert submissions(run) == [(0, 0, 2), (10, 0, 2), (30, 1, 2), (50, 2, 2)]
    ahead = counted(
        "nemo_rl_async", {"max_age": 2}, singles(2, *[10] * 2), 3, load_s=0.0, publish_s=20.0
    )
    assert submissions(ahead) == [(0, 0, 4), (10, 0, 2), (30, 1, 2), (50, 2, 2)]


def test_a_nemo_update_waits_for_its_own_groups_and_leaves_those_of_later_updates():
    """The first of a batch of one takes 30 s: later ones have ended at 10 and 20, and train after it. The load at 40 waits for
    the end of a pass."""
    run = counted(
        "nemo_rl_async", {"max_age": 2}, singles(1, 30, 10, 10), 3, load_s=0.0, publish_s=5.0
    )
    assert finished_at(run) == [35, 40, 46]
    assert [row["trained_step"] for row in rows(run.result.samples)][:3] == [0, 1, 2]


@pytest.mark.parametrize(
    ("parameters", "versions"),
    [({}, [0, 1]), ({"recompute_kv": True}, [0, 1]), ({"in_flight": False}, [0])],
)
def test_responses_that_run_while_nemo_loads_go_on_or_end_before(parameters, versions):
    run = counted(
        "nemo_rl_async", {"max_age": 2, **parameters}, singles(1, 10, 40), 2, publish_s=20.0
    )
    assert finished_at(run)[0] == 30
    assert [version for _, version, *_ in stays(run, 1)] == versions


@examples(40)
@given(traces, st.integers(1, 3), st.integers(1, 3), st.booleans(), st.booleans())
def test_nemo_trains_in_the_order_of_submission_and_no_token_older_than_max_age(
    trace, workers, age, in_flight, recompute
):
    parameters = {"max_age": age, "in_flight": in_flight, "recompute_kv": recompute}
    run = watch(
        prepared(on_gpus("nemo_rl_async", parameters, workers, steps=5), trace, limits=ROOMY)
    )
    assert max(oldest(run)) <= age
    trained = [
        row["trained_step"] for row in rows(run.result.samples) if row["trained_step"] is not None
    ]
    assert trained == sorted(trained)


# verl, fully asynchronous.


@pytest.mark.parametrize(
    "mini_batch, require_batches, staleness, sync_step, required",
    [
        (32, 1, 0.1, 4, 140),  # the defaults, with the README's mini-batch: 140.8
        (32, 1, 0.0, 16, 512),  # its quick start
        (32, 4, 0.5, 4, 768),  # its experiments: 1.5 times a batch of 512
        (32, 4, 0.1, 4, 563),  # 563.2
        (1, 1, 0.1, 4, 4),  # 4.4: no staleness is left of it
        (1, 1, 0.99, 1, 1),
        (1, 1, 1.0, 1, 2),
    ],
)
def test_verl_rounds_down_what_may_be_submitted_between_synchronisations(
    mini_batch, require_batches, staleness, sync_step, required
):
    assert verl.max_required(mini_batch, require_batches, staleness, sync_step) == required


@pytest.mark.parametrize(
    "replicas, required, concurrent",
    [(1, 140, 16), (8, 140, 128), (9, 140, 140), (16, 563, 256), (2, 4, 4)],
)
def test_verl_runs_sixteen_groups_a_replica_and_no_more_than_may_be_submitted(
    replicas, required, concurrent
):
    assert verl.max_concurrent(replicas, 16, required) == concurrent


@pytest.mark.parametrize(
    "what, counted, active, room",
    [
        ("begins: nothing counted, nothing active", 0, 0, 6),
        ("the last of its concurrency", 5, 5, 1),
        ("as many active as may be", 6, 6, 0),
        ("two ended: they stay counted, two more may run", 6, 4, 2),
        ("one below the most", 9, 3, 1),
        ("all submitted: paused, whatever ends", 10, 3, 0),
        ("paused, nothing active", 10, 0, 0),
    ],
)
def test_verl_pauses_by_its_count_and_waits_by_its_concurrency(what, counted, active, room):
    """Ten may be submitted from one synchronisation to the next, six may run."""
    assert verl.room(counted, 10, active, 6) == room, what


def test_verl_updates_twice_and_synchronises_once_in_a_sequence_worked_out_by_hand():
    """Batches of four: two groups an update, a synchronisation every second; 2 · 1.5 · 2 = 6 may be submitted.

    0    six are submitted, the count is 6: paused
    10   all end; updates 0 (not published) and 1 (published at 30) take four, two are left
    30   synchronisation: the count begins with 2, four are submitted; the load takes until 40
    40   update 2 takes the two that were left: generated with version 0
    50   the four end; update 3 takes two, published at 70; two are left
    70   the count begins with 2, four are submitted
    """
    parameters = {"staleness": 0.5, "sync_step": 2}
    run = counted(
        "verl_fully_async", parameters | {"pause": False}, singles(4, *[10] * 4), 4, publish_s=20.0
    )
    assert finished_at(run) == [10, 30, 40, 70]
    assert oldest(run) == [0, 1, 2, 1]
    assert submissions(run)[:2] == [(0, 0, 6), (30, 2, 4)]
    published = [s for s in rows(run.result.spans) if s["kind"] == "publish"]
    assert [round(s["ended_s"]) for s in published] == [30, 70]


def test_verl_interrupts_what_runs_at_a_synchronisation():
    """Two groups an update, each published; four may be submitted. The third has 50 tokens and is interrupted at 31."""
    parameters = {"staleness": 1.0, "sync_step": 1}
    run = counted(
        "verl_fully_async",
        parameters | {"pause": False},
        singles(2, 10, 10, 50, 10),
        2,
        publish_s=20.0,
    )
    assert submissions(run)[:2] == [(0, 0, 4), (30, 1, 2)]  # one runs and one is left: two more
    assert stays(run, 2)[0] == (0, 0, 31, 0.0, 31.0)
    assert stays(run, 2)[1] == (0, 1, 19, 31.0, 60.0)  # loaded until 41
    assert finished_at(run) == [30, 71]  # the fourth and the fifth, there at 51


def test_verl_without_partial_rollout_waits_for_what_runs_and_submits_nothing_meanwhile():
    parameters = {"staleness": 1.0, "sync_step": 1, "partial_rollout": False}
    run = counted(
        "verl_fully_async",
        parameters | {"pause": False},
        singles(2, 10, 10, 50, 10),
        2,
        publish_s=20.0,
    )
    assert submissions(run)[:2] == [(0, 0, 4), (50, 1, 2)]
    assert stays(run, 2) == [(0, 0, 50, 0.0, 50.0)]
    assert finished_at(run) == [30, 80]  # loaded until 60, then the fourth and the third
    assert [row["trained_step"] for row in rows(run.result.samples)][:4] == [0, 0, 1, 1]


@examples(40)
@given(
    traces,
    st.integers(1, 3),
    st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.5]),
    st.integers(1, 4),
    st.integers(1, 2),
    st.booleans(),
)
def test_verl_never_submits_more_than_its_count_allows(
    trace, workers, staleness, sync_step, require_batches, partial
):
    mini_batch = 2
    parameters = {
        "staleness": staleness,
        "sync_step": sync_step,
        "require_batches": require_batches,
        "mini_batch": mini_batch,
        "per_replica": 2,
        "partial_rollout": partial,
        "pause": False,
    }
    run = watch(
        prepared(
            on_gpus("verl_fully_async", parameters, workers, steps=3 * sync_step),
            trace,
            limits=ROOMY,
        )
    )
    update = mini_batch * require_batches
    most = int(update * (1 + staleness) * sync_step)
    for n, submission in enumerate(run.submissions, start=1):
        synchronised = (
            submission.version // sync_step * sync_step
        )  # versions that the workers have been told of
        assert n - synchronised * update <= most  # those trained by then are not counted
    assert [u["step"] for u in rows(run.result.steps)] == list(range(3 * sync_step))
    if staleness == 0 or not partial:
        assert max(oldest(run)) <= (ceil(staleness) + 1) * sync_step - 1
    published = [s for s in rows(run.result.spans) if s["kind"] == "publish"]
    assert len(published) == 3
    loaded = {s["policy_version"] for s in rows(run.result.segments)}
    assert loaded <= {0, sync_step, 2 * sync_step, 3 * sync_step}


@examples(40)
@given(traces, st.integers(1, 3), st.integers(1, 4))
def test_verl_without_staleness_trains_all_that_it_submitted_before_it_synchronises(
    trace, workers, sync_step
):
    parameters = {"staleness": 0.0, "sync_step": sync_step, "mini_batch": 1}
    run = watch(
        prepared(
            on_gpus("verl_fully_async", parameters, workers, steps=2 * sync_step),
            trace,
            limits=ROOMY,
        )
    )
    assert oldest(run) == [*range(sync_step)] * 2


# All of them: nobody trains more than engines that never rest could generate.


def rate_and_bound(name, parameters, steps=4):
    """Trained tokens a second, and what the workers' engines give if every seat is always taken: a token a pass, a second each
    (with speculation, what a pass with a draft yields).
    Loads, publishing and rewards take no time, training hardly any."""
    lengths = np.random.default_rng(7).integers(5, 60, (3, 8, 2))
    mixed = trace([[[(4, int(n)) for n in group] for group in step] for step in lengths])
    limits = ROOMY._replace(max_num_seqs=4)
    run = counted(name, parameters, mixed, steps, workers=2, limits=limits, load_s=0.0)
    tokens = sum(u["response_tokens"] for u in rows(run.result.steps))
    a_pass = summary(run.result, 0)["accept_length"] or 1.0  # with drafts; without, a token
    return tokens / run.result.metadata["end_s"], len(run.workers) * limits.max_num_seqs * a_pass


@pytest.mark.parametrize("name", RECIPES)
def test_no_system_trains_more_than_engines_that_never_rest_generate(name):
    """I19: no system trains more than full engines generate."""
    rate, bound = rate_and_bound(name, {})
    assert 0 < rate <= bound


def test_areal_with_unbounded_staleness_and_enough_to_do_comes_close_to_what_its_engines_can_give():
    # By round robin, as its default is, one worker falls behind the other, and what is finished waits for siblings there.
    parameters = {"eta": 10**6, "max_concurrent": 100, "dispatch": "least_requests"}
    rate, bound = rate_and_bound("areal", parameters, steps=120)
    assert 0.97 * bound < rate <= bound


def test_verl_with_much_staleness_comes_close_to_it_too():
    rate, bound = rate_and_bound("verl_fully_async", {"staleness": 20.0}, steps=240)
    assert 0.97 * bound < rate <= bound
