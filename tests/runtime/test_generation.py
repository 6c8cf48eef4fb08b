"""Groups that simulated workers generate as one: only speed tells them from responses that are watched one by one."""

from unittest.mock import patch

import numpy as np
import pyarrow as pa
import simpy
from hypothesis import assume, example, given, strategies as st

from simrl.errors import InputError
from simrl.result.result import TABLES
from simrl.runtime.generation import Generation
from simrl.runtime.simulated_worker import SimulatedWorker
from simrl.scenario.model import Scenario
from simrl.simulate import run
from simrl.simulate.prepare import prepare
from tests.helpers import examples

SUBMIT, END = Generation.submit, Generation._news_of

systems = st.one_of(
    st.fixed_dictionaries(
        {
            "name": st.sampled_from(
                [
                    "verl_colocated",
                    "distflow",
                    "one_step_off",
                    "split",
                    "dapo",
                    "april",
                    "rollpacker",
                    "partial_rollout",
                    "asyncflow",
                    "verl_2x",
                ]
            ),
            "dispatch": st.sampled_from(
                ["least_requests", "even_split", "round_robin", "streamrl"]
            ),
        }
    ),
    st.fixed_dictionaries(
        {
            "name": st.just("sortedrl"),
            "unit": st.sampled_from(["response", "group"]),
            "unfinished": st.sampled_from(["continue", "restart"]),
        }
    ),
    st.fixed_dictionaries(
        {
            "name": st.just("areal"),
            "eta": st.integers(0, 4),
            "interruptible": st.booleans(),
            "on_stale": st.sampled_from(["train", "wait", "drop"]),
        }
    ),
    st.fixed_dictionaries(
        {
            "name": st.just("streamrl"),
            "eta": st.integers(0, 2),
            "skewness_aware": st.booleans(),
            "dedicated_share": st.sampled_from([None, 0.5]),
        }
    ),
    st.fixed_dictionaries(
        {
            "name": st.just("verl_fully_async"),
            "staleness": st.sampled_from([0, 0.5, 1]),
            "partial_rollout": st.booleans(),
        }
    ),
)


@st.composite
def scenarios(draw):
    workload = {
        "steps": 3,
        "prompts_per_step": draw(st.integers(2, 9)),
        "group": draw(st.integers(1, 5)),
        "prompts": 9,
        "cap_tokens": 600,
        "mean_tokens": draw(st.integers(2, 300)),
        "sigma": draw(st.sampled_from([0.0, 0.9])),  # 0: many responses end in one pass
        "prompt_share": 0.6,
        "prompt_tokens": draw(
            st.sampled_from([10, 256, 700, 704])
        ),  # less than a block; with a last block that is full
    }
    return Scenario.model_validate(
        {
            "name": "small",
            "seed": draw(st.integers(0, 99)),
            "steps": draw(st.integers(1, 4)),
            "model": "qwen3-0.6b",
            "cluster": {"gpu": "h100", "gpus": draw(st.sampled_from([4, 6, 10])), "tp": 1},
            "workload": {"synthetic": workload},
            "profile": {"roofline": {"between_passes_s": 0.001}},
            "engine": {
                "max_num_seqs": draw(st.sampled_from([2, 64])),
                "kv_cache_tokens": draw(st.sampled_from([1600, 2400, 100_000])),
                "prefix_caching": draw(st.booleans()),
                "async_scheduling": draw(st.booleans()),
            },
            "training": {"reward_s": draw(st.sampled_from([0.0, 0.2]))},
            "system": draw(systems),
        }
    )


def ends_at_one_instant(seed, group, pause_s, cluster_gpus, **engine):
    """Rollouts that stop with the fastest prompts, of which several workers finish some at one instant."""
    lengths = {
        "prompts_per_step": 9 if group > 3 or seed == 55 else 8,
        "group": group,
        "cap_tokens": 600,
    }
    workload = {
        **lengths,
        "steps": 3,
        "prompts": 9,
        "mean_tokens": 2.0,
        "sigma": 0.9,
        "prompt_share": 0.6,
    }
    return Scenario.model_validate(
        {
            "name": "small",
            "seed": seed,
            "steps": 3,
            "model": "qwen3-0.6b",
            "cluster": {"gpu": "h100", "gpus": cluster_gpus, "tp": 1},
            "workload": {"synthetic": {**workload, "prompt_tokens": 256 if seed == 55 else 700}},
            "profile": {"roofline": {"between_passes_s": pause_s}},
            "engine": {"prefix_caching": True, **engine},
            "training": {"reward_s": 0.0},
            "system": {"name": "rollpacker"},
        }
    )


@examples(300)
@example(ends_at_one_instant(31, 3, 0.05, 10, max_num_seqs=2, kv_cache_tokens=1600))
@example(
    ends_at_one_instant(
        55, 3, 0.001, 6, max_num_seqs=64, kv_cache_tokens=100_000, async_scheduling=True
    )
)
@given(scenarios())
def test_groups_as_one_have_the_tables_of_responses_watched_one_by_one(scenario):
    """I29: a group as one is its responses one by one."""
    with patch.object(SimulatedWorker, "offer_groups"):
        try:
            one_by_one = run.simulate(scenario)
        except InputError as error:  # every reward of these few groups was drawn alike
            assume("nothing is left" not in str(error))
            raise
    with patch.object(Generation, "submit", autospec=True, side_effect=Generation.submit) as submit:
        as_one = run.simulate(scenario)
    assert submit.called
    for name in TABLES:
        ours, theirs = getattr(as_one, name), getattr(one_by_one, name)
        for column in ours.column_names:
            if (
                ours[column].type == pa.float64()
            ):  # sums of passes, which may be cut into stretches elsewhere
                of_each = [table[column].to_numpy(zero_copy_only=False) for table in (ours, theirs)]
                np.testing.assert_allclose(*of_each, rtol=1e-12, err_msg=f"{name}.{column}")
            else:
                assert ours[column].equals(theirs[column]), f"{name}.{column}"


@examples(40)
@given(scenarios(), st.integers(1, 5))
def test_a_group_that_is_over_at_the_last_instant_is_in_the_tables(scenario, nth):
    submitted: list[int] = []
    over: list[int] = []

    def submit(self, groups, *more):
        submitted.extend(sample.uid for group in groups for sample in group.samples)
        return SUBMIT(self, groups, *more)

    def end_of_a_group(self, number):
        END(self, number)
        over.append(number)
        if len(over) == nth:  # before anybody hears of it
            raise simpy.core.StopSimulation(None)

    with (
        patch.object(Generation, "submit", autospec=True, side_effect=submit),
        patch.object(Generation, "_news_of", autospec=True, side_effect=end_of_a_group),
    ):
        schedule = run.Schedule(prepare(scenario), simpy.Environment(), run.simulated_workers)
        schedule.run()
        samples = schedule.result().samples
    assert set(samples["uid"].to_pylist()) == set(submitted)
