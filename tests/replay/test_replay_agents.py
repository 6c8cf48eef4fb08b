"""Agents and asynchronous scheduling on real vLLM: turns of a response are requests for the context so far, and one engine
schedules every pass before the outcome of the one before is known."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from simrl.runtime.events import gather, on_fire
from simrl.runtime.rollout import Rollout
from simrl.simulate.prepare import Prepared
from simrl.simulate.run import simulate_prepared
from simrl.trace.trace import Sample, Turn
from simrl_replay.clock import WallClock
from simrl_replay.link import engine_link
from simrl_replay.replayed import counts_beside
from simrl_replay.replayer import ReplayConfig, ReplayEngines, engine_settings, replay, reset
from simrl_replay.vllm_worker import VllmWorker
from tests.helpers import RESPONSES, prepared as prepared_of, recorder, sample, scenario

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]

LENGTHS = {
    "steps": 2,
    "prompts_per_step": 4,
    "group": 2,
    "cap_tokens": 160,
    "mean_tokens": 60,
    "sigma": 0.8,
    "prompt_tokens": 20,
    "turns": 3.0,
    "environment_s": 0.15,
    "environment_sigma": 0.5,
    "observation_tokens": 12,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ReplayConfig:
    """Two versions of a tiny model."""
    from simrl_replay.random_model import make_model

    folder = tmp_path_factory.mktemp("models")
    for i in range(2):
        make_model(folder / f"v{i}", 2, 64, heads=2, kv_heads=1, vocab=300, seed=i)
    weights = folder / "v0", folder / "v1"
    return ReplayConfig(weights[0], weights, dtype="float32", temperature=0.0, step_deadline_s=20.0)


@pytest.fixture(scope="module")
def prepared(config: ReplayConfig) -> Prepared:
    """Trajectories of several turns, with evaluations, on one engine that schedules ahead."""
    return prepared_of(
        scenario(
            "verl_colocated",
            model=f"{config.model}/config.json",
            steps=2,
            cluster={"gpu": "cpu", "gpus": 1, "tp": 1},
            workload={"synthetic": LENGTHS},
            engine={
                "max_num_seqs": 8,
                "max_num_batched_tokens": 64,
                "block_size": 32,
                "kv_cache_tokens": 4096,
                "async_scheduling": True,
            },
            agents={"tool_slots": 3, "deadline_s": 30.0},
            evaluation={"every": 1, "prompts": 1, "samples": 2},
        )
    )


@pytest.fixture(scope="module")
def fleet(
    prepared: Prepared, config: ReplayConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ReplayEngines]:
    """One engine."""
    log = tmp_path_factory.mktemp("logs") / "0.log"
    settings = engine_settings(prepared, config)
    with ReplayEngines([partial(engine_link, "worker 0", settings, log)]) as fleet:
        yield fleet


def prompt_ids(sample: Sample) -> tuple[int, ...]:
    return tuple((sample.uid * 31 + i * 7) % 300 for i in range(sample.prompt_tokens))


def answer_ids(sample: Sample, turn: Turn) -> tuple[int, ...]:
    return tuple((turn.end_tokens + 11 * i) % 300 for i in range(turn.observation_tokens))


def a_worker(fleet: ReplayEngines, config: ReplayConfig, **more: Any) -> VllmWorker:
    reset(fleet, config, None)
    return VllmWorker(
        WallClock(),
        0,
        fleet.links[0],
        partial(fleet.restart, 0),
        RESPONSES,
        more.pop("prompt_ids", prompt_ids),
        config.folder,
        recorder(),
        60.0,
        600.0,
        print,
        answer_ids=answer_ids,
    )


def generated(worker: VllmWorker, *samples: Sample) -> list[Rollout]:
    ends = gather(worker._env, [worker.submit(each) for each in samples])
    return list(worker._env.run(until=ends))


def test_each_turn_goes_on_from_the_context_so_far_token_by_token(fleet, config):
    turns = Turn(17, 0.1, 9), Turn(40, 0.0, 5)
    a, others = sample(0, 20, 70, turns), [sample(uid, 12, 60) for uid in range(1, 5)]
    [whole, *_] = generated(a_worker(fleet, config), a, *others)
    assert (whole.done, whole.observation_tokens) == (True, 14)
    assert [s.tokens for s in whole.segments] == [17, 23, 30]
    assert whole.segments[1].started_s >= whole.segments[0].ended_s + 0.1

    # its last turn, as a prompt of its own
    ids = whole.token_ids
    text = (
        *prompt_ids(a),
        *ids[:17],
        *answer_ids(a, turns[0]),
        *ids[17:40],
        *answer_ids(a, turns[1]),
    )
    last = sample(9, len(text), 30)
    [alone] = generated(a_worker(fleet, config, prompt_ids=lambda _: text), last)
    assert alone.token_ids == ids[40:]


def test_an_engine_that_schedules_ahead_generates_what_one_does_that_does_not(
    fleet, prepared, config, tmp_path
):
    """Also where a response is aborted, and where weights come between two passes: the pass in flight ends under the old
    ones."""
    a, b, c = sample(0, 20, 90), sample(1, 33, 120), sample(2, 8, 60)

    def tokens(fleet: ReplayEngines) -> dict[str, Any]:
        worker, loads = a_worker(fleet, config), []
        ends = [worker.submit(each) for each in (a, b, c)]
        on_fire(worker.when(a, 30), lambda _: worker.abort(a))
        on_fire(worker.when(b, 60), lambda _: loads.append(worker.load_weights(1)))
        rollouts = worker._env.run(until=gather(worker._env, ends))
        by_version = {
            r.sample.uid: [(s.policy_version, s.tokens) for s in r.segments] for r in rollouts
        }
        assert [r.done for r in rollouts] == [False, True, True]
        assert sum(tokens for _, tokens in by_version[1]) == 120
        old = by_version[1][0][1]
        again = generated(a_worker(fleet, config), b)[0].token_ids
        return {
            "a": rollouts[0].token_ids[:30],
            "c": rollouts[2].token_ids[:40],
            "b": rollouts[1].token_ids[:60],
            "is_old": rollouts[1].token_ids[:old] == again[:old],
            "is_new": rollouts[1].token_ids != again,
        }

    ahead = tokens(fleet)
    settings = replace(engine_settings(prepared, config), async_scheduling=False)
    with ReplayEngines([partial(engine_link, "worker 0", settings, tmp_path / "0.log")]) as other:
        assert tokens(other) == ahead
    assert ahead["is_old"] and ahead["is_new"]


def test_a_replay_of_agents_and_evaluations_decides_as_predicted_and_finds_the_same_prefixes(
    fleet, prepared, config
):
    predicted = simulate_prepared(prepared)
    measured = replay(prepared, fleet, config)
    assert measured.stopped is None and measured.trace is not None
    names = "prompt_id", "sample", "epoch", "status", "response_tokens"
    rows = [
        sorted(zip(*(each.samples[name].to_pylist() for name in names), strict=True))
        for each in (predicted, measured.result)
    ]
    assert rows[0] == rows[1] and {row[3] for row in rows[0]} >= {"trained", "evaluation"}
    kinds = {
        kind: tokens
        for kind, tokens in zip(
            *(measured.result.spans[name].to_pylist() for name in ("kind", "tokens")), strict=True
        )
    }
    assert kinds.keys() >= {"rollout", "evaluate", "load_weights"}
    cache, [engine] = (
        predicted.metadata["prefix_cache"],
        measured.result.metadata["replay"]["engines"],
    )
    assert engine["prefix_queried_tokens"] == cache["lookup_tokens"]
    assert engine["prefix_hit_tokens"] == cache["hit_tokens"] > 0
    [hits, between] = counts_beside(predicted, measured.result)
    assert f"{cache['hit_tokens']:,} of {cache['lookup_tokens']:,} tokens" in hits
    assert "ended by the deadline: 0 (0)" in between
    agents = [each.metadata["agents"] for each in (predicted, measured.result)]
    assert agents[1]["in_tools_s"] == pytest.approx(agents[0]["in_tools_s"], rel=0.05)
    assert agents[1]["waiting_for_tool_slots_s"] > 0

    # what was generated is a trace of agents, too
    turns = measured.trace.table["turn_tokens"].to_pylist()
    assert [sum(each) for each in turns] == measured.trace.column("response_tokens").tolist()
    assert np.array_equal(
        measured.trace.observation_tokens() > 0, [len(each) > 1 for each in turns]
    )
