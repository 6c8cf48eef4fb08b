"""Groups that simulated workers generate as one: only speed tells them from responses that are watched one by one."""

from unittest.mock import patch

import numpy as np
import pyarrow.compute as pc
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from simrl.result.result import TABLES, Result
from simrl.runtime.group_runs import GroupRuns
from simrl.scenario.model import Scenario
from simrl.simulate import run

systems = st.one_of(
    st.fixed_dictionaries({"name": st.sampled_from(["verl_colocated", "distflow", "one_step_off", "split", "dapo"])}),
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
                "kv_cache_tokens": draw(st.sampled_from([2400, 100_000])),
                "async_scheduling": draw(st.booleans()),
            },
            "system": draw(systems),
        }
    )


def assert_alike(one: Result, other: Result) -> None:
    """Compare the tables. The clock rounds when it adds a delay, and adds fewer where groups are one: times differ by that, and
    a lane may be idle for as little."""
    for name in TABLES:
        table, expected = (getattr(result, name) for result in (one, other))
        if name == "spans":
            lasts = [pc.greater(pc.subtract(each["ended_s"], each["started_s"]), 1e-9) for each in (table, expected)]
            table, expected = table.filter(lasts[0]), expected.filter(lasts[1])
        assert table.num_rows == expected.num_rows
        for column in table.column_names:
            values, wanted = (each.column(column).to_pylist() for each in (table, expected))
            if isinstance(next((value for value in wanted if value is not None), None), float):
                both = np.array([values, wanted], np.float64)
                assert np.allclose(*both, rtol=1e-9, atol=1e-9, equal_nan=True), (name, column)
            else:
                assert values == wanted, (name, column)


@examples(60)
@given(scenarios())
def test_groups_as_one_have_the_tables_of_responses_watched_one_by_one(scenario):
    with patch.object(run, "_group_runs", return_value=None):
        one_by_one = run.simulate(scenario)
    with patch.object(GroupRuns, "submit", autospec=True, side_effect=GroupRuns.submit) as submit:
        as_one = run.simulate(scenario)
    assert submit.called
    assert_alike(as_one, one_by_one)
