"""Small builders for the tests between the engine and the metrics: traces, profiles, scenarios, watched simulations."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from inspect import signature
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import simpy
from hypothesis import settings

from simrl.dispatch.dispatcher import Dispatcher
from simrl.engine.state import Limits
from simrl.profile.profile import ProfileMetadata, TableProfile, Tables
from simrl.result.result import Lane, Result
from simrl.runtime.recorder import Recorder
from simrl.runtime.rollout import Rollout, Segment
from simrl.runtime.simulated_trainer import SimulatedTrainer
from simrl.runtime.simulated_worker import SimulatedWorker, simulated_workers
from simrl.runtime.worker import GroupRun, WorkerCosts
from simrl.scenario.model import Scenario
from simrl.simulate.prepare import Prepared, prepare
from simrl.simulate.run import simulate_prepared
from simrl.systems.recipes import RECIPES
from simrl.trace.trace import Response, Sample, Trace, TraceMetadata, Turn
from simrl.trace.workload import Workload
from simrl.training.costs import Ints, Phase, TrainingCosts

Lengths = tuple[int, int]  # prompt tokens, response tokens
ROOMY = Limits(max_num_seqs=64, max_num_batched_tokens=512, block_size=16, kv_blocks=1000)

SMALL_RECORDED_RUN = {  # a configuration of `python -m simrl_replay.grpo`, without its name and system
    "task": {"counts": [2], "most_tokens": 48},
    "policy": {"layers": 1, "hidden": 32, "heads": 1, "kv_heads": 1, "intermediate": 64},
    "warm_up": {"steps": 3, "evaluate_every": 3, "evaluation_prompts": 4},
    "prompts": 4,
    "prompts_per_step": 2,
    "group": 3,
    "epochs": 3,
    "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_tokens": 2048},
}
FEW_EXAMPLES = 10  # of a property, where not asked to be thorough


def times_trained(samples: Any) -> Counter[tuple[int, ...]]:
    """How often each response of a recorded run was trained."""
    names = ("epoch", "prompt_id", "sample")
    return Counter(zip(*(samples[name].to_pylist() for name in names), strict=True))


def thorough() -> bool:
    """Return whether many random inputs are tried: with `--hypothesis-profile thorough`, as every night."""
    return settings().max_examples > FEW_EXAMPLES


def examples(most: int) -> settings:
    """Try a property on `most` random inputs if the run is thorough, and on a few otherwise."""
    return settings(max_examples=most if thorough() else min(most, FEW_EXAMPLES))


def one_second_a_pass() -> Tables:
    """Every pass takes exactly one second, so that times can be counted by hand and instants coincide exactly."""
    any_tokens, wide, nothing = np.array([0.0, 1e6]), np.array([0.0, 1024.0]), np.zeros(2)
    return Tables(
        any_tokens,
        nothing + 1.0,
        any_tokens,
        nothing,
        wide,
        wide,
        wide,
        wide,
        np.zeros((2, 2, 2, 2)),
        0.0,
    )


RESPONSES: dict[
    int, Response
] = {}  # what the samples below turn out to be, for workers and rewarders


def limits_of(**drawn: Any) -> Limits:
    """Return limits with these fields and the defaults: `st.builds(Limits)` draws the fields that have defaults, too."""
    return Limits(**drawn)


def sample(
    uid: int, prompt_tokens: int = 4, response_tokens: int = 8, turns: Sequence[Turn] = ()
) -> Sample:
    RESPONSES[uid] = Response(response_tokens, 1.0, tuple(turns))
    return Sample(uid, 0, 0, uid, 0, prompt_tokens)


def a_worker(
    env: simpy.Environment,
    index: int = 0,
    limits: Limits = ROOMY,
    load_s: float = 10.0,
    record: Recorder | None = None,
) -> SimulatedWorker:
    """A worker of which every pass takes a second."""
    about = one_second_a_pass(), limits, WorkerCosts(load_s), RESPONSES, record or recorder()
    return simulated_workers(env, index + 1, *about)[index]


def rollout(
    uid: int, tokens_by_version: dict[int, int], done: bool = True, prompt_tokens: int = 4
) -> Rollout:
    """A rollout whose tokens took a second each."""
    segments, clock_s = [], 0.0
    for version, tokens in tokens_by_version.items():
        segments.append(Segment(0, version, tokens, clock_s, clock_s + tokens))
        clock_s += tokens
    tokens = sum(tokens_by_version.values())
    return Rollout(
        sample(uid, prompt_tokens, tokens if done else tokens + 1), tuple(segments), done
    )


def recorder(*lanes: str) -> Recorder:
    return Recorder([Lane(name, 1) for name in lanes or ("rollout-000",)])


def trace(
    steps: Sequence[Sequence[Sequence[Lengths]]],
    rewards: Sequence[Sequence[Sequence[float]]] | None = None,
) -> Trace:
    """A trace from (prompt, response) lengths, nested as steps, groups and samples. Lengths of a prompt may differ. Rewards are
    nested alike; where none are given, they are 0 and 1 in turn."""
    rows = [
        (step, prompt, i, *lengths)
        for step, groups in enumerate(steps)
        for prompt, group in enumerate(groups)
        for i, lengths in enumerate(group)
    ]
    step, prompt, index, prompt_tokens, response_tokens = zip(*rows, strict=True)
    return Trace.from_columns(
        {
            "step": step,
            "epoch": [0] * len(rows),
            "prompt_id": prompt,
            "sample": index,
            "prompt_tokens": prompt_tokens,
            "response_tokens": response_tokens,
            "reward": [float(rewards[s][p][i] if rewards else i % 2) for s, p, i, *_ in rows],
        },
        TraceMetadata(
            name="test", kind="synthetic", source="a test", tokenizer="none", cap_tokens=4096
        ),
    )


LINEAR = {
    "mfu": 0.35,
    "log_prob_mfu": 0.35,
}  # training whose seconds add up, however a batch is divided


def scenario(system: str | dict[str, Any] = "verl_colocated", **changes: Any) -> Scenario:
    """A small model on a few GPUs, short lengths, overheads of the order of a short response; `changes` replace fields."""
    data: dict[str, Any] = {
        "name": "test",
        "steps": 3,
        "model": "qwen3-0.6b",
        "cluster": {"gpu": "h100", "gpus": 4, "tp": 1},
        "workload": {
            "synthetic": {
                "steps": 3,
                "prompts_per_step": 4,
                "group": 2,
                "cap_tokens": 200,
                "mean_tokens": 60,
                "sigma": 0.8,
                "prompt_tokens": 20,
            }
        },
        "profile": {"roofline": {"between_passes_s": 0.01}},
        "training": {
            "reward_s": 0.01,
            "publish_s": 0.02,
            "load_overhead_s": 0.02,
            "switch_s": 0.05,
        },
        "system": {"name": system} if isinstance(system, str) else system,
    }
    data |= changes
    # The controller's way and the host's launches take next to no time, unless a test says so.
    data["cluster"] = {"host_speed": 20.0, **data["cluster"]}
    data["training"] = {"controller_bytes_per_s": 1e15, **data["training"]}
    return Scenario.model_validate(data)


# Few responses an engine: runs of a few short steps would otherwise generate many that never train.
SMALL: dict[str, dict[str, Any]] = {
    "slime_fully_async": {"sglang_server_concurrency": 4},
    "pipeline_rl": {"llm_max_rollouts": 4},
}


def on_gpus(
    name: str, parameters: dict[str, Any], workers: int, train_gpus: int = 1, **changes: Any
) -> Scenario:
    """A recipe with exactly so many workers at tp 1, and train GPUs if it keeps some apart."""
    gpus, parameters = workers, {**SMALL.get(name, {}), **parameters}
    if name == "specactor" and parameters.get("decoupled", True):  # each has a drafter beside it
        gpus, parameters = 2 * workers, {"model": "qwen2.5-0.5b", "draft_gpus": 1, **parameters}
    if "rollout_share" in signature(RECIPES[name]).parameters:
        gpus += train_gpus
        parameters["rollout_share"] = workers / gpus
    return scenario(
        {"name": name, **parameters}, cluster={"gpu": "h100", "gpus": gpus, "tp": 1}, **changes
    )


@cache
def _prepared(scenario_json: str) -> Prepared:
    return prepare(Scenario.model_validate_json(scenario_json))


def prepared(scenario: Scenario, trace: Trace | None = None, **changes: Any) -> Prepared:
    """`prepare`, done once for equal scenarios; then with another trace, limits, tables of step times, or load time."""
    ready = _prepared(scenario.model_dump_json())
    return replace(ready, **({"trace": trace} if trace else {}), **changes)


class Submission(NamedTuple):
    """Samples that a pipeline handed to the dispatcher together, and how things stood then."""

    time_s: float
    version: int
    samples: list[Sample]
    dropped: set[int]


@dataclass
class Watched:
    """A simulation with what no table holds: what was submitted when, and the workers as the run left them."""

    prepared: Prepared
    result: Result = field(init=False)
    submissions: list[Submission] = field(default_factory=list)
    workers: list[SimulatedWorker] = field(default_factory=list)
    responses: dict[int, Response] = field(default_factory=dict)


def watch(prepared: Prepared) -> Watched:
    """Runs a scenario and keeps its actors."""
    watched = Watched(prepared)
    trainers: list[SimulatedTrainer] = []
    recorders: list[Recorder] = []
    workloads: list[Workload] = []

    def keeping(kind: type, kept: list[Any]) -> Callable[..., Any]:
        def make(*arguments: Any) -> Any:
            kept.append(kind(*arguments))
            return kept[-1]

        return make

    class WatchedDispatcher(Dispatcher):
        def note(self, samples: Iterable[Sample]) -> None:
            dropped = set(recorders[0]._dropped)
            watched.submissions.append(
                Submission(self._env.now, trainers[0].version, list(samples), dropped)
            )

        def submit(self, samples: Sequence[Sample], *more: Any, **others: Any) -> list[simpy.Event]:
            self.note(samples)
            return super().submit(samples, *more, **others)

        def submit_groups(
            self, groups: Sequence[Sequence[Sample]], *more: Any, **others: Any
        ) -> list[GroupRun]:
            noted = len(watched.submissions)
            runs = super().submit_groups(groups, *more, **others)
            if len(watched.submissions) == noted:  # not by `submit`
                self.note(sample for group in groups for sample in group)
            return runs

    with (
        patch("simrl.simulate.run.Dispatcher", WatchedDispatcher),
        patch(
            "simrl.runtime.simulated_worker.SimulatedWorker",
            keeping(SimulatedWorker, watched.workers),
        ),
        patch("simrl.simulate.run.SimulatedTrainer", keeping(SimulatedTrainer, trainers)),
        patch("simrl.simulate.run.Workload", keeping(Workload, workloads)),
        patch("simrl.simulate.run.Recorder", keeping(Recorder, recorders)),
    ):
        watched.result = simulate_prepared(prepared)
        watched.workers = [  # the policy's, not a judge's
            worker for worker in watched.workers if worker._recorder is recorders[0]
        ]
        watched.responses = workloads[0].responses
    return watched


def counted(
    name: str,
    parameters: dict[str, Any],
    trace: Trace,
    steps: int,
    workers: int = 1,
    limits: Limits = ROOMY,
    load_s: float = 10.0,
    publish_s: float = 0.0,
    reward_s: float = 0.0,
    pauses: bool | None = None,
) -> Watched:
    """A simulation whose times can be counted by hand: a pass takes a second, loads, publishing and rewards what is asked for,
    the arithmetic of training hardly anything. `pauses` replaces the system's."""
    training = {
        "mfu": 1.0,
        "log_prob_mfu": 1.0,
        "publish_s": publish_s,
        "reward_s": reward_s,
        "switch_s": 0.0,
    }
    config = on_gpus(name, parameters, workers, steps=steps, training=training)
    ready = prepared(config)
    if pauses is not None:
        ready = replace(ready, system=replace(ready.system, pauses=pauses))
    metadata = ProfileMetadata(
        model="qwen3-0.6b", gpu="h100", tp=1, kind="assumed", source="a test"
    )
    profile = TableProfile(one_second_a_pass(), metadata)
    costs = WorkerCosts(load_s, pause_s=ready.costs.pause_s if ready.system.pauses else 0.0)
    return watch(replace(ready, trace=trace, limits=limits, costs=costs, profile=profile))


def rows(table: Any) -> list[dict[str, Any]]:
    return table.to_pylist()


def lanes(result: Result) -> dict[str, list[dict[str, Any]]]:
    """Spans by lane, in time."""
    by_lane: dict[str, list[dict[str, Any]]] = {}
    for span in sorted(rows(result.spans), key=lambda s: s["started_s"]):
        by_lane.setdefault(span["lane"], []).append(span)
    return by_lane


def versions(result: Result) -> dict[int, list[tuple[int, int]]]:
    """(policy_version, tokens) of each sample's segments, by uid."""
    found: dict[int, list[tuple[int, int]]] = {}
    for segment in rows(result.segments):
        found.setdefault(segment["uid"], []).append((segment["policy_version"], segment["tokens"]))
    return found


def trained(result: Result) -> list[list[int]]:
    """The uids that each update trained."""
    found: list[list[int]] = [[] for _ in rows(result.steps)]
    for row in rows(result.samples):
        if row["trained_step"] is not None:
            found[row["trained_step"]].append(row["uid"])
    return found


def with_status(result: Result, status: str) -> list[int]:
    """The uids with a status."""
    return [row["uid"] for row in rows(result.samples) if row["status"] == status]


def update_phases(costs: TrainingCosts, lengths: Ints, publish: bool = True) -> list[Phase]:
    """Return all phases of an update in order, for a batch of sequences of `lengths` tokens."""
    before = costs.transfer(lengths) + ([("switch", costs.switch_s)] if costs.switch else [])
    return (
        before
        + costs.inference(lengths)
        + costs.update(lengths, costs.minibatches)
        + costs.after(0, publish)
    )
