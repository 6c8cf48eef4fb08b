"""Jobs that share a cluster: no GPU has two jobs, a job keeps its work, and who waits is counted."""

from itertools import pairwise

import pytest

from experiments.share import WAITS, busy, copy_s, require_exclusive, share, table
from simrl.errors import InputError
from simrl.result.result import TABLES
from simrl.simulate.run import simulate_prepared
from tests.helpers import lanes, prepared, rows, scenario, trained

SPLIT = {"name": "split", "rollout_share": 0.5}


def jobs(system=SPLIT, steps=(4, 3), **changes):
    return [
        prepared(scenario(system, name=name, steps=n, seed=n, **changes))
        for name, n in zip("ab", steps, strict=True)
    ]


@pytest.mark.parametrize("system", [SPLIT, "verl_colocated"])
def test_no_gpu_has_two_jobs_and_each_job_trains_what_it_trains_alone(system):
    both = jobs(system)
    shared = share(both)
    require_exclusive([job.result for job in shared])
    for job, ready in zip(shared, both, strict=True):
        alone = simulate_prepared(ready)
        assert trained(job.result) == trained(alone)
        assert job.result.metadata["end_s"] > alone.metadata["end_s"]
        for spans in lanes(job.result).values():
            assert spans[0]["started_s"] == 0.0
            assert all(a["ended_s"] == b["started_s"] for a, b in pairwise(spans))


def test_while_one_split_job_trains_the_other_rolls_out():
    a, b = ([*busy(job.result)] for job in share(jobs()))
    for one, other in ((a, b), (b, a)):
        trains = [(start, end) for pool, start, end, _ in one if pool == "train"]
        rolls = [(start, end) for pool, start, end, _ in other if pool == "rollout"]
        assert any(max(t[0], r[0]) < min(t[1], r[1]) for t in trains for r in rolls)


def test_the_check_of_exclusive_pools_fails_where_two_jobs_use_gpus_at_one_instant():
    alone = [simulate_prepared(job) for job in jobs()]
    with pytest.raises(RuntimeError, match="two jobs have its GPUs"):
        require_exclusive(alone)


def test_waiting_is_a_span_of_its_own_and_copies_are_paid_when_the_job_changes():
    shared = share(jobs())
    for job in shared:
        waits = [s for s in rows(job.result.spans) if s["kind"] == WAITS]
        seconds = {
            use: sum(s["ended_s"] - s["started_s"] for s in waits if s["lane"] == lane)
            for use, lane in (("rollout", "rollout-000"), ("train", "train"))
        }
        assert seconds == pytest.approx(job.waited_s)
    assert any(job.waited_s["rollout"] > 0 for job in shared)
    switches = [s for s in rows(shared[1].result.spans) if s["kind"] == "switch"]
    assert switches and all(s["ended_s"] > s["started_s"] for s in switches)
    assert all(seconds > 0 for seconds in copy_s(jobs()[0]).values())


def test_equal_jobs_give_equal_tables_again():
    first, again = share(jobs()), share(jobs())
    for one, other in zip(first, again, strict=True):
        assert all(getattr(one.result, name).equals(getattr(other.result, name)) for name in TABLES)


def test_the_table_names_each_job_and_the_idle_time_of_the_cluster():
    lines = table(share(jobs()))
    assert [line.split(" ")[0] for line in lines[2:4]] == ["a", "b"]
    assert "idle" in lines[-1] and "× as fast" in lines[-1]


@pytest.mark.parametrize(
    ("jobs_", "words"),
    [
        (lambda: jobs({"name": "areal"}), "never leaves its GPUs"),
        (lambda: [*jobs()[:1], *jobs({"name": "split", "rollout_share": 0.25})[:1]], "one cluster"),
        (lambda: jobs(evaluation={"every": 1}), "leave them out"),
        (lambda: jobs(judge={"model": "qwen3-0.6b", "gpus": 1}), "judges and prefill pools"),
        (
            lambda: jobs(
                cluster={"gpu": "h100", "gpus": 8, "tp": 1, "prefill": {"gpus": 2}},
            ),
            "judges and prefill pools",
        ),
        (
            lambda: jobs(
                {"name": "verl_colocated", "speculation": {"name": "spec_rl", "verify": "trainer"}},
                speculation={"acceptance": {"old_response": {"by_position": [0.9]}}},
            ),
            "drafts",
        ),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(jobs_, words):
    with pytest.raises(InputError, match=words) as refused:
        share(jobs_())
    assert "\n" not in str(refused.value)
