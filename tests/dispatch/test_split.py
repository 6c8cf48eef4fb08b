"""A rollout/train split that adapts: where GPUs go, and that nothing is lost on the way."""

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from simrl.dispatch.elastic import wanted_train_units
from simrl.errors import InputError
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate
from simrl.systems.recipes import RECIPES, make_system, recipe_parameters
from tests.helpers import Watched, examples, lanes, prepared, rows, scenario, watch

OVERLAPPING = [
    name
    for name in RECIPES
    if "adapt_split_every" in recipe_parameters(name)
    and make_system(name, {}).schedule != "synchronous"
]


def adapting(
    name: str, gpus: int = 8, share: float = 0.5, every: int = 1, steps: int = 8, **training
) -> Watched:
    workload = {
        "steps": 4,
        "prompts_per_step": 8,
        "group": 2,
        "cap_tokens": 300,
        "mean_tokens": 80,
        "sigma": 0.8,
        "prompt_tokens": 20,
    }
    chosen = scenario(
        {"name": name, "rollout_share": share, "adapt_split_every": every},
        steps=steps,
        cluster={"gpu": "h100", "gpus": gpus, "tp": 1},
        workload={"synthetic": workload},
        training={
            "reward_s": 0.01,
            "publish_s": 0.02,
            "load_overhead_s": 0.02,
            "switch_s": 0.05,
            **training,
        },
    )
    return watch(prepared(chosen))


def roles_at_end(watched: Watched) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for spans in lanes(watched.result).values():
        found[spans[-1]["role"]] += spans[-1]["gpus"]
    return dict(found)


@pytest.mark.parametrize(
    ("units", "training", "busy", "least", "wanted"),
    [
        (32, 8, 0.85, 1, 8),  # busy enough
        (32, 8, 0.75, 1, 8),
        (32, 8, 0.53, 1, 5),  # 4.24 units' worth of work: 5 would be 85 % busy
        (32, 8, 0.10, 1, 4),  # one would do, but no more than an eighth of all moves at a time
        (32, 8, 1.00, 1, 10),  # it never waits: 9.4
        (16, 2, 0.99, 1, 3),  # one more at least
        (16, 2, 0.70, 1, 1),  # one less at least
        (16, 2, 0.70, 2, 2),  # the trainer cannot do with less
        (4, 3, 1.00, 1, 3),  # somebody has to roll out
    ],
)
def test_the_trainer_gets_what_would_have_kept_it_busy(units, training, busy, least, wanted):
    assert wanted_train_units(units, training, busy, least) == wanted


def test_gpus_go_from_a_trainer_that_waits_to_rollout():
    watched = adapting("areal", share=0.25)
    assert roles_at_end(watched)["rollout"] > 2


def test_gpus_go_from_rollout_to_a_trainer_that_is_late():
    watched = adapting("one_step_off", share=0.75, mfu=0.001, log_prob_mfu=0.001)
    assert roles_at_end(watched)["train"] > 2


def test_a_trainer_keeps_as_many_gpus_as_a_sequence_needs():
    watched = adapting("areal", share=0.5, sequence_parallel=2, steps=12)
    trained_by = defaultdict(int)
    for spans in lanes(watched.result).values():
        for span in spans:
            if span["kind"] == "train":
                trained_by[span["policy_version"]] += span["gpus"]
    assert {gpus % 2 for gpus in trained_by.values()} == {0}
    assert min(trained_by.values()) >= 2


@pytest.mark.parametrize("name", OVERLAPPING)
@examples(10)
@given(st.integers(1, 3), st.sampled_from([0.25, 0.5, 0.75]), st.sampled_from([0.35, 0.002]))
def test_nothing_is_lost_and_no_gpu_does_two_things_while_the_split_changes(
    name, every, share, mfu
):
    watched = adapting(name, share=share, every=every, mfu=mfu, log_prob_mfu=mfu)
    result = watched.result
    samples = rows(result.samples)
    submitted = {sample.uid for submission in watched.submissions for sample in submission.samples}
    assert {row["uid"] for row in samples} == submitted
    generated = sum(worker.engine.generated_total for worker in watched.workers)
    assert generated == sum(row["generated_tokens"] for row in samples)
    for spans in lanes(result).values():
        assert (spans[0]["started_s"], spans[-1]["ended_s"]) == (0.0, result.metadata["end_s"])
        assert all(a["ended_s"] == b["started_s"] for a, b in pairwise(spans))
        for span in spans:
            assert (span["kind"] == "rollout") <= (span["role"] == "rollout")
            assert (span["kind"] in ("train", "log_prob", "publish")) <= (span["role"] == "train")
    allowed = watched.prepared.system.off_policyness
    assert allowed is None or max(u["off_policyness_max"] for u in rows(result.steps)) <= allowed


def test_the_same_adapting_scenario_gives_the_same_tables():
    chosen = scenario({"name": "areal", "rollout_share": 0.5, "adapt_split_every": 1}, steps=5)
    assert simulate(chosen).spans.equals(simulate(chosen).spans)


def test_a_system_of_which_one_side_always_waits_cannot_adapt():
    for name in ("split", "verl_colocated"):
        with pytest.raises(InputError, match="unknown parameter 'adapt_split_every'"):
            prepare(scenario({"name": name, "adapt_split_every": 2}))
