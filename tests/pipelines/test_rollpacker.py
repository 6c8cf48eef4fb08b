"""RollPacker's tail batching: which prompts a short round trains, what it throws away, and when a long one comes."""

from collections import defaultdict
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, strategies as st

from simrl.analysis.gpu_hours import waterfall
from simrl.errors import InputError
from simrl.pipelines.rollpacker import profiled
from simrl.profile.shipped import PROFILES
from simrl.result.result import TABLES
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate
from simrl.trace.workload import Workload
from simrl_replay.replayer import ReplayConfig, check_replayable
from tests.conservation import assert_nothing_is_lost
from tests.helpers import examples, lanes, rows, scenario, trace, trained, watch, with_status
from tests.pipelines.test_pipelines import run, timed, traces, workers

# Two prompts of two responses a step. Short rounds begin three of three: a third response is as long as the first.
STEPS = trace([[[(4, 10), (4, 30)], [(4, 40), (4, 40)]], [[(4, 8), (4, 20)], [(4, 5), (4, 6)]]])


def half_more(steps, **parameters):
    return timed(
        "rollpacker",
        steps,
        STEPS,
        **{"eta_prompts": 1.5, "eta_responses": 1.5, "reward_s": 0.0, **parameters},
    )


def lasted(result):
    spans = lanes(result)["rollout-000"]
    return [pytest.approx(s["ended_s"] - s["started_s"]) for s in spans if s["kind"] == "rollout"]


def test_a_short_round_trains_the_first_responses_of_the_first_prompts_and_throws_the_others_away():
    result = half_more(1)
    # uids: 0 to 7 from the trace, then an extra one each for the three prompts. The third prompt has two responses done at 8
    # (4 and 10), and its other stops at the next boundary; the first has two at 10 (0 and 8), which ends the round.
    assert trained(result) == [[0, 4, 8, 10]]
    tokens = {row["uid"]: row["generated_tokens"] for row in rows(result.samples)}
    assert {uid: tokens[uid] for uid in with_status(result, "dropped")} == {
        1: 11,
        2: 11,
        3: 11,
        5: 9,
        9: 11,
    }
    assert lasted(result) == [11]


def test_prompts_that_were_put_off_train_together_in_a_long_round_without_surplus():
    result = half_more(4)
    # The second round begins the fourth prompt and, from a new pass, the first two: again the second is put off. It waits there
    # twice now, from two epochs: the third round runs both, two responses each, all 40 tokens. The fourth is short again.
    assert lasted(result)[:3] == [11, 11, 40]
    third = [row for row in rows(result.samples) if row["trained_step"] == 2]
    assert [(r["epoch"], r["prompt_id"], r["generated_tokens"]) for r in third] == [
        (0, 1, 40)
    ] * 2 + [(1, 1, 40)] * 2
    assert len(trained(result)[3]) == 4
    assert [u["off_policyness_max"] for u in rows(result.steps)] == [0] * 4


def test_rewards_of_a_prompt_begin_when_it_is_complete_or_when_the_round_is_over():
    # The prompts of the round are complete at 8 and 10; the last sample leaves its worker at 11.
    ends = [
        rows(half_more(1, reward_s=50.0, async_rewards=on).steps)[0]["started_s"]
        for on in (True, False)
    ]
    assert ends == [pytest.approx(60.0), pytest.approx(61.0)]


# Four prompts a step, of which two are long. A short round of twice as many puts four off; the next round is a long one.
LONG = trace(
    [[[(4, n)] * 2 for n in (10, 10, 400, 500)], [[(4, n)] * 2 for n in (10, 10, 300, 600)]]
)


def test_with_the_stream_trainer_half_of_the_workers_train_what_is_scored_while_the_others_finish_a_long_round():
    def long_round(**parameters):
        result = timed(
            "rollpacker", 2, LONG, 2, eta_prompts=2.0, eta_responses=1.0, reward_s=1.0, **parameters
        )
        update = rows(result.steps)[1]
        busy = [
            s
            for lane in lanes(result).values()
            for s in lane
            if s["kind"] == "train" and s["policy_version"] == 1
        ]
        return result, update, busy

    plain, _, at_the_end = long_round()
    streamed, update, trains = long_round(stream_trainer=0.4)
    last = max(s["ended_s"] for s in rows(streamed.segments) if s["policy_version"] == 1)
    early = [s for s in trains if s["ended_s"] <= last]
    assert {s["lane"] for s in early} == {"rollout-001"}
    assert not [s for s in at_the_end if s["ended_s"] <= last - 100]
    # Nothing is trained twice or left out, and every token has the version that is trained.
    assert sorted(trained(streamed)[1]) == sorted(trained(plain)[1])
    assert update["off_policyness_max"] == 0


def test_without_long_rounds_long_prompts_are_never_trained():
    result = half_more(6, long_rounds=False)
    assert (
        max(row["generated_tokens"] for row in rows(result.samples) if row["status"] == "trained")
        == 10
    )
    assert 1 not in {
        row["prompt_id"]
        for row in rows(result.samples)
        if row["status"] == "trained" and row["trace_step"] == 0
    }


def test_without_surplus_prompts_the_responses_alone_race():
    result = half_more(1, eta_prompts=1.0)
    # Of two prompts, the second needs two of its three responses of 40.
    assert lasted(result) == [40]
    assert len(with_status(result, "dropped")) == 2
    # And without surplus responses, the prompts alone: the second and third response of 20 and 30 tokens are waited for.
    assert lasted(half_more(1, eta_responses=1.0)) == [31]


@examples(40)
@given(traces, workers, st.floats(1, 2), st.floats(1, 2), st.booleans())
def test_every_update_trains_whole_prompts_each_at_most_once(
    trace, workers, eta_prompts, eta_responses, long_rounds
):
    parameters = {
        "eta_prompts": eta_prompts,
        "eta_responses": eta_responses,
        "long_rounds": long_rounds,
    }
    watched = run(("rollpacker", parameters), trace, workers, steps=6)
    batch = Workload(trace).batch_groups
    sizes = defaultdict(int)
    for row in rows(trace.table):
        sizes[row["step"], row["prompt_id"]] += 1
    prompts = defaultdict(list)
    for row in rows(watched.result.samples):
        if row["status"] == "trained":
            prompts[row["epoch"], row["trace_step"], row["prompt_id"]].append(row["trained_step"])
    for (_, step, prompt), in_steps in prompts.items():
        assert len(set(in_steps)) == 1
        assert len(in_steps) == sizes[step, prompt]
    for step in range(6):
        assert sum(step in in_steps for in_steps in prompts.values()) == batch
    assert not with_status(
        watched.result, "buffered"
    )  # no finished response is kept from one round to another


# The planner. Eight prompts of four responses a step, on four GPUs.
SMALL = {
    "steps": 6,
    "prompts_per_step": 8,
    "group": 4,
    "cap_tokens": 400,
    "mean_tokens": 90,
    "sigma": 1.0,
    "prompt_tokens": 20,
}


def planned(planner, tp=1, gpus=4, system=(), **changes):
    own = {"name": "rollpacker", **({"planner": planner} if planner else {}), **dict(system)}
    cluster = {"gpu": "h100", "gpus": gpus, "tp": tp}
    return scenario(
        own, **{"steps": 12, "workload": {"synthetic": SMALL}, "cluster": cluster, **changes}
    )


def chosen_by(choices):
    """The planner, with sizes given in turn in place of those that it predicts to be fastest."""
    left = iter(choices)
    sizes = {}

    def seconds(layout, tokens, number):
        if layout.tp == 1:
            sizes["next"] = next(left)
        return float(layout.tp != sizes["next"])

    return patch("simrl.pipelines.rollpacker._round_s", seconds)


def sizes_of(result):
    return {(each["round"], each["tp"]) for each in result.metadata["planner"]}


def preemptions(result):
    return sum(span["preemptions"] or 0 for span in rows(result.spans))


def long_rounds_of_7b(planner, memory):
    """Two GPUs whose caches hold the long rounds at tp 1 only where they have most of the `memory`."""
    lengths = {
        "steps": 6,
        "prompts_per_step": 64,
        "group": 16,
        "cap_tokens": 2000,
        "mean_tokens": 600,
    }
    return simulate(
        planned(
            planner,
            gpus=2,
            steps=6,
            model="qwen2.5-7b",
            cluster={"gpu": "h800", "gpus": 2, "tp": 1},
            workload={"synthetic": {**lengths, "sigma": 1.0, "prompt_tokens": 250}},
            profile={
                "path": str(PROFILES / "qwen2.5-7b_h800_tp1.parquet"),
                "between_passes_s": 0.0025,
            },
            engine={"max_num_seqs": 1024, "gpu_memory_utilization": memory},
            training={"load_s": 1.0, "tokens_per_microbatch": 8192},
        )
    )


def test_a_long_round_whose_kv_cache_does_not_fit_gets_the_larger_size_and_all_that_fits_the_smaller():
    small, fixed = long_rounds_of_7b([2], 0.4), long_rounds_of_7b([], 0.4)
    assert sizes_of(small) == {("short", 1), ("long", 2)}
    assert preemptions(small) < preemptions(fixed)
    assert small.metadata["end_s"] < fixed.metadata["end_s"]
    large = long_rounds_of_7b([2], 0.9)
    assert sizes_of(large) == {("short", 1), ("long", 1)}
    assert preemptions(large) == 0


def tables(result, *names):
    return [getattr(result, name).to_pylist() for name in names or TABLES]


@pytest.mark.parametrize("more", [{}, {"async_rewards": False}, {"filter_groups": True}])
def test_a_planner_with_the_clusters_size_alone_changes_nothing(more):
    changes = {"system": more, "workload": {"synthetic": SMALL}}
    plain, alone = simulate(planned([], **changes)), simulate(planned([1], **changes))
    assert tables(plain) == tables(alone)


def test_rounds_that_all_get_the_larger_size_are_those_of_workers_of_that_size():
    with chosen_by([2] * 12):
        formed = simulate(planned([2]))
    fixed = simulate(planned([], tp=2))
    assert tables(formed, "steps") == tables(fixed, "steps")
    own = ("uid", "generated_tokens", "started_s", "finished_s", "status")
    assert formed.samples.select(own).equals(fixed.samples.select(own))
    # Each worker's GPUs are two lanes, which do what it does; its tokens count once.
    wide, narrow = lanes(formed), lanes(fixed)
    for worker in range(2):
        both = [wide[f"rollout-{2 * worker + i:03d}"] for i in range(2)]
        times = [
            [(s["kind"], s["started_s"], s["ended_s"]) for s in spans]
            for spans in (*both, narrow[f"rollout-00{worker}"])
        ]
        assert times[0] == times[1] == times[2]
        assert [s["tokens"] for s in both[0]] == [
            s["tokens"] for s in narrow[f"rollout-00{worker}"]
        ]
        assert not any(s["tokens"] for s in both[1])
    for result in (formed, fixed):
        assert sum(waterfall(result).gpu_s.values()) == pytest.approx(4 * result.metadata["end_s"])


@examples(8)
@given(
    st.lists(st.sampled_from([1, 2, 4]), min_size=9, max_size=9),
    st.sampled_from(
        [
            {},
            {"stream_trainer": 0.4, "stream_samples": 2},
            {"dispatch": "streamrl"},
            {"dispatch": "seer"},
        ]
    ),
    st.sampled_from([{}, {"max_num_seqs": 4}, {"kv_cache_tokens": 900, "block_size": 4}]),
)
def test_whatever_the_sizes_of_rounds_nothing_is_lost_and_every_gpu_second_is_in_one_span(
    sizes, more, engine
):
    training = {"evaluate_every": 2, "evaluate_s": 3.0, "reward_s": 0.01, "load_s": 0.5}
    with chosen_by(sizes):
        watched = watch(
            prepare(planned([2, 4], system=more, steps=9, engine=engine, training=training))
        )
    assert_nothing_is_lost(watched)
    assert [each["tp"] for each in watched.result.metadata["planner"]] == sizes
    # Versions are evaluated once, by the workers that are formed when they are loaded.
    for spans in lanes(watched.result).values():
        assert [s["policy_version"] for s in spans if s["kind"] == "evaluate"] == [2, 4, 6, 8]


def test_a_run_with_a_planner_is_the_same_again_and_says_what_it_chose():
    first, again = (simulate(planned([2, 4])) for _ in range(2))
    assert first.metadata == again.metadata
    assert tables(first) == tables(again)
    assert [each["tp"] for each in first.metadata["layouts"]] == [1, 2, 4]
    for number, each in enumerate(first.metadata["planner"]):
        assert each["step"] == number
        assert each["predicted_s"][str(each["tp"])] == min(each["predicted_s"].values())


def test_before_the_first_rounds_their_lengths_are_what_the_rules_make_of_the_first_step():
    # Of three responses two are enough, of two prompts one: it ends at 20. The other prompt is put off, and runs to 90.
    found = profiled([np.array([10, 20, 90]), np.array([30, 40, 50])], 2.0, 1.5)
    assert [sorted(tokens.tolist()) for tokens, _ in found.values()] == [
        [10, 20, 20, 20, 20, 20],
        [30, 40, 50],
    ]
    assert [number for _, number in found.values()] == [18, 6]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"planner": [3], "tp": 2},
            r"planner has 3, and its workers are formed of whole workers of cluster.tp 2; use",
        ),
        ({"planner": [8]}, r"planner has 8: cluster.tp is 8"),
        (
            {"planner": [2], "system": {"speculation": "ngram"}},
            r"planner has 2, and ngram has its drafts planned",
        ),
        (
            {"planner": [2], "system": {"dynamic_sampling": 2.0}},
            r"planner and dynamic_sampling exclude each other",
        ),
        (
            {"planner": [2], "faults": [{"kind": "slow", "worker": 0, "at_s": 1.0, "factor": 2.0}]},
            r"leave planner or faults",
        ),
    ],
)
def test_sizes_that_cannot_be_formed_are_refused_with_what_to_do(changes, said):
    with pytest.raises(InputError, match=said) as refused:
        simulate(planned(**changes))
    assert "\n" not in str(refused.value)


def test_real_engines_keep_their_size_so_a_replay_with_a_planner_is_refused_unless_it_leaves_no_choice():
    with pytest.raises(
        InputError, match=r"rollpacker\(planner=\[2\]\) cannot be replayed: .*leave planner out"
    ):
        check_replayable(prepare(planned([2])), ReplayConfig(Path("model")))
    check_replayable(prepare(planned([1])), ReplayConfig(Path("model")))
