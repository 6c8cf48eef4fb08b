"""Prefill and decode pools: what a request's life costs there, what updates, faults and tools do to it, and what is refused."""

import pytest
import simpy
from hypothesis import given, strategies as st

from simrl.dispatch.dispatcher import Dispatcher
from simrl.dispatch.placement import by_prompt, least_requests
from simrl.dispatch.rules import Dispatch
from simrl.engine.state import Limits
from simrl.errors import InputError
from simrl.result.result import TABLES
from simrl.runtime.agents import PLAIN, Agents
from simrl.runtime.rollout import Rollout
from simrl.runtime.simulated_worker import SimulatedWorker, simulated_workers
from simrl.runtime.worker import WorkerCosts
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate
from simrl.trace.trace import Turn
from tests.conservation import assert_nothing_is_lost
from tests.helpers import (
    RESPONSES,
    ROOMY,
    examples,
    lanes,
    one_second_a_pass,
    prepared,
    recorder,
    rows,
    sample,
    scenario,
    watch,
)
from tests.references import prefill as reference

S_PER_TOKEN = 0.0371


class Pools:
    """Workers of which every pass takes a second, as a run has them."""

    def __init__(
        self, prefill: int = 1, decode: int = 1, limits: Limits = ROOMY, load_s: float = 10.0
    ):
        self.env = simpy.Environment()
        self.agents = Agents(self.env, PLAIN)
        names = [f"rollout-{i:03d}" for i in range(prefill + decode)]
        self.record = recorder(*names)
        about = one_second_a_pass(), limits, WorkerCosts(load_s), RESPONSES, self.record
        self.decode = simulated_workers(self.env, decode, *about, agents=self.agents)
        self.prefill = simulated_workers(self.env, prefill, *about, decode_lanes=decode)
        rule = Dispatch("prefill", least_requests)
        self.agents.pool = Dispatcher(self.env, self.prefill, rule, self.record)
        self.agents.kv_s_per_token = S_PER_TOKEN

    @property
    def everyone(self) -> list[SimulatedWorker]:
        return [*self.decode, *self.prefill]


def ended(rollout: Rollout) -> tuple[int, int, float]:
    return rollout.sample.uid, rollout.tokens, rollout.finished_s


def test_a_request_is_prefilled_in_one_pass_sent_and_decoded():
    pools = Pools()
    done = pools.decode[0].submit(sample(0, prompt_tokens=100, response_tokens=5))
    pools.env.run(done)
    rollout = done.value
    assert rollout.done and rollout.first_token_s == 1.0
    assert [(s.worker, s.tokens) for s in rollout.segments] == [(1, 1), (0, 4)]
    assert rollout.finished_s == pytest.approx(1.0 + 100 * S_PER_TOKEN + 4.0)


def test_a_response_of_one_token_never_leaves_the_prefill_worker():
    pools = Pools()
    done = pools.decode[0].submit(sample(0, prompt_tokens=100, response_tokens=1))
    pools.env.run(done)
    assert done.value.done and [s.worker for s in done.value.segments] == [1]
    assert pools.env.now == 1.0


def test_caches_that_come_at_once_share_the_link():
    pools = Pools(prefill=1, decode=2)
    events = [pools.decode[i % 2].submit(sample(i, 100, 2)) for i in range(4)]
    pools.env.run(simpy.AllOf(pools.env, events))
    sent = [event.value.segments[-1].started_s for event in events]
    assert sorted(sent) == pytest.approx([1.0 + (i + 1) * 100 * S_PER_TOKEN for i in range(4)])


TURNS = st.lists(
    st.builds(
        reference.Turn,
        st.integers(1, 6),
        st.floats(0.01, 9.0, allow_nan=False).map(lambda s: round(s, 3) + 0.00017),
        st.integers(0, 40),
    ),
    min_size=1,
    max_size=4,
)
REQUESTS = st.lists(
    st.tuples(
        st.floats(0.0, 12.0).map(lambda s: round(s, 3) + 0.00031),
        st.integers(0, 2),
        st.integers(1, 60),
        TURNS,
    ),
    min_size=1,
    max_size=12,
)


@examples(200)
@given(drawn=REQUESTS, prefill=st.integers(1, 3), decode=st.integers(1, 3))
def test_all_ends_are_those_of_the_plain_reference(drawn, prefill, decode):
    # No two requests act at one instant: who is first then is a matter of the workers' numbers.
    wanted = [
        reference.Request(
            at_s + 1e-5 * uid,
            worker % decode,
            prompt,
            [turn._replace(tool_s=turn.tool_s + 1.7e-5 * uid) for turn in turns],
        )
        for uid, (at_s, worker, prompt, turns) in enumerate(drawn)
    ]
    reference.Reference(prefill, decode, S_PER_TOKEN).run(wanted)
    pools, ends = Pools(prefill, decode), {}

    def client(uid, request):
        yield pools.env.timeout(request.at_s)
        made, turns = 0, []
        for turn in request.turns[:-1]:
            made += turn.tokens
            turns.append(Turn(made, turn.tool_s, turn.observation))
        new = sample(uid, request.prompt, made + request.turns[-1].tokens, turns)
        ends[uid] = yield pools.decode[request.decode].submit(new)

    for uid, request in enumerate(wanted):
        pools.env.process(client(uid, request))
    pools.env.run()
    assert [ends[uid].finished_s for uid in range(len(wanted))] == pytest.approx(
        [request.ended_s for request in wanted], abs=1e-6
    )


def test_an_update_sends_what_decodes_back_to_the_prefill_workers():
    pools = Pools(load_s=2.0)
    done = pools.decode[0].submit(sample(0, prompt_tokens=10, response_tokens=8))
    pools.env.run(3.5)
    for worker in pools.everyone:
        worker.load_weights(1)
    pools.env.run(done)
    assert [(s.worker, s.policy_version) for s in done.value.segments] == [
        (1, 0),
        (0, 0),
        (1, 1),
        (0, 1),
    ]
    assert sum(s.tokens for s in done.value.segments) == 8


def test_an_update_that_keeps_caches_lets_everything_decode_on():
    pools = Pools(load_s=2.0)
    done = pools.decode[0].submit(sample(0, prompt_tokens=10, response_tokens=8))
    pools.env.run(3.5)
    for worker in pools.everyone:
        worker.load_weights(1, running="keep")
    pools.env.run(done)
    assert [(s.worker, s.policy_version) for s in done.value.segments] == [(1, 0), (0, 0), (0, 1)]


def test_a_cache_of_old_weights_that_arrives_after_an_update_is_computed_again():
    pools = Pools(load_s=0.1)
    done = pools.decode[0].submit(sample(0, prompt_tokens=1000, response_tokens=3))
    pools.env.run(5.0)  # the cache is on its way until 38.1
    for worker in pools.everyone:
        worker.load_weights(1)
    pools.env.run(done)
    assert [(s.worker, s.policy_version) for s in done.value.segments] == [(1, 0), (1, 1), (0, 1)]


def test_an_abort_while_a_request_is_prefilled_comes_back_with_its_tokens():
    pools = Pools(limits=ROOMY._replace(max_num_batched_tokens=10))
    one = sample(0, prompt_tokens=100, response_tokens=8)
    done = pools.decode[0].submit(one)
    pools.env.run(2.5)
    aborted = pools.decode[0].abort(one)
    pools.env.run(aborted)
    assert aborted.value == done.value and not done.value.done and done.value.tokens == 0
    assert pools.env.now <= 4.0


def test_a_lost_prefill_worker_leaves_its_requests_to_the_others():
    pools = Pools(prefill=2, limits=ROOMY._replace(max_num_batched_tokens=10))
    events = [pools.decode[0].submit(sample(i, 100, 4)) for i in range(2)]
    pools.env.run(2.5)
    pools.agents.pool.retire(0, lost=True)
    pools.prefill[0].fail()
    pools.env.run(simpy.AllOf(pools.env, events))
    assert [event.value.segments[0].worker for event in events] == [2, 2]


def test_a_lost_decode_worker_gives_up_what_is_prefilled_for_it():
    pools = Pools(decode=2, limits=ROOMY._replace(max_num_batched_tokens=10))
    events = [pools.decode[i].submit(sample(i, 100, 4)) for i in range(2)]
    pools.env.run(2.5)
    pools.decode[0].fail()
    pools.env.run(simpy.AllOf(pools.env, events))
    assert [event.value.done for event in events] == [False, True]


def test_a_turn_is_prefilled_at_the_worker_of_its_prompt():
    config = with_pools(
        "areal",
        workload={"synthetic": {**AGENTS, "prompts_per_step": 4, "group": 2}},
        cluster={"gpu": "h100", "gpus": 8, "tp": 1, "prefill": {"gpus": 2}},
        engine={"prefix_caching": True},
    )
    result = watch(prepared(config)).result
    prompts = {row["uid"]: row["prompt_id"] for row in rows(result.samples)}
    prefills = [span["lane"] for span in rows(result.spans) if "prefill" in span["lane"]]
    first = min(int(lane[-3:]) for lane in prefills)
    at = {
        (prompts[s["uid"]] % 2, s["worker"] - first)
        for s in rows(result.segments)
        if s["worker"] >= first
    }
    assert at == {(0, 0), (1, 1)}
    cache = result.metadata["prefix_cache"]
    assert cache["hit_tokens"] > 0.1 * cache["lookup_tokens"]  # of earlier turns


def test_prompts_are_divided_among_workers_by_their_number():
    samples = [sample(uid)._replace(prompt_id=uid // 2) for uid in range(8)]
    places = by_prompt(samples, Pools(prefill=3).agents.pool.unfinished, 0, None)
    assert places == [0, 0, 1, 1, 2, 2, 0, 0]


# Runs.

AGENTS = {
    "steps": 3,
    "prompts_per_step": 3,
    "group": 2,
    "cap_tokens": 200,
    "mean_tokens": 60,
    "sigma": 0.8,
    "prompt_tokens": 40,
    "turns": 3.0,
    "environment_s": 0.3,
    "environment_sigma": 0.5,
    "observation_tokens": 30,
}
POOLS = {"gpu": "h100", "gpus": 6, "tp": 1, "prefill": {"gpus": 2}}


def with_pools(system, **changes):
    return scenario(system, **{"cluster": POOLS, **changes})


@pytest.mark.parametrize(
    "system",
    [
        "verl_colocated",
        "one_step_off",
        "areal",
        "verl_fully_async",
        "partial_rollout",
        "seer",
        "april",
        "rlhfuse",
    ],
)
@pytest.mark.parametrize("agents", [False, True])
def test_nothing_is_lost_with_pools_whatever_the_system(system, agents):
    changes = {"workload": {"synthetic": AGENTS}} if agents else {}
    faults = [
        {"kind": "lost", "worker": 0, "at_s": 0.3, "back_s": 0.9},
        {"kind": "lost", "worker": 2, "at_s": 0.2, "back_s": 0.7},
    ]
    name = (
        {"name": system, "rollout_share": 0.67} if system != "verl_colocated" else {"name": system}
    )
    try:
        ready = prepare(with_pools(name, faults=faults, **changes))
    except InputError:
        ready = prepare(with_pools(system, faults=faults, **changes))
    assert ready.prefill is not None
    watched = watch(ready)
    assert_nothing_is_lost(watched)
    again = watch(ready).result
    assert all(getattr(watched.result, table) == getattr(again, table) for table in TABLES)


def test_the_kinds_of_workers_have_lanes_and_idle_shares_of_their_own():
    from simrl.result.metrics import summary

    result = simulate(with_pools("verl_colocated"))
    assert [name for name in lanes(result) if "prefill" in name] == [
        "rollout-prefill-004",
        "rollout-prefill-005",
    ]
    row = summary(result, 0)
    shares = row["prefill_idle"], row["decode_idle"]
    assert min(shares) <= row["rollout_bubble"] <= max(shares)
    assert "prefill_idle" not in summary(simulate(scenario()), 0)


def test_workers_of_both_pools_may_have_sizes_of_their_own():
    cluster = {"gpu": "h100", "gpus": 8, "tp": 2, "prefill": {"gpus": 4, "tp": 4}}
    ready = prepare(with_pools("verl_colocated", cluster=cluster))
    assert (ready.tp, ready.workers, ready.prefill.tp, ready.prefill.workers) == (2, 2, 4, 1)
    # the two GPUs of a decode worker receive what four send
    assert ready.costs.fetch_s_per_token == pytest.approx(2 * ready.prefill.costs.fetch_s_per_token)
    assert_nothing_is_lost(watch(ready))


def test_the_size_of_prefill_workers_divides_their_own_gpus_alone():
    cluster = {"gpu": "h100", "gpus": 6, "tp": 1, "prefill": {"gpus": 4, "tp": 4}}
    ready = prepare(with_pools("verl_colocated", cluster=cluster))
    assert (ready.workers, ready.prefill.tp, ready.prefill.workers) == (2, 4, 1)
    assert_nothing_is_lost(watch(ready))


@pytest.mark.parametrize(
    ("system", "changes", "words"),
    [
        (
            "verl_colocated",
            {"cluster": {**POOLS, "gpus": 12, "prefill": {"gpus": 5, "tp": 5}}},
            "cluster.prefill.tp is 5: it does not divide the 16 attention heads",
        ),
        ("laminar", {}, "loads? weights one by one"),
        ("verl_2x", {}, "change sides or sizes"),
        ({"name": "verl_colocated", "speculation": "ngram"}, {}, "drafts of decode workers"),
        ("verl_colocated", {"cluster": {**POOLS, "prefill": {"gpus": 3, "tp": 2}}}, "a prefill worker has 2 GPUs"),
        ("verl_colocated", {"cluster": {**POOLS, "prefill": {"gpus": 6}}}, "less 6 for prefill"),
        (
            "verl_colocated",
            {"agents": {"kv_while_tool_runs": "keep"}, "engine": {"prefix_caching": True}},
            "prefilled elsewhere",
        ),
        (
            "verl_colocated",
            {"faults": [{"kind": "lost", "worker": w, "at_s": 1.0, "back_s": None} for w in (4, 5)]},
            "all 2 prefill workers are lost",
        ),
    ],
)  # fmt: skip
def test_what_pools_do_not_have_is_refused_in_a_line(system, changes, words):
    with pytest.raises(InputError, match=words):
        prepare(with_pools(system, **changes))
