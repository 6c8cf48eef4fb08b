"""Training of a replay, for real: a learner beside the engines, its predicted seconds, and both phase
by phase.

Invariant: schedule, dispatch and trainer are the simulator's; a phase lasts as long as the learner
takes. What the prediction takes from this machine is measured before it, on other batches. Predicted
and measured training is of one process on one GPU, without a switch and a controller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError
from rich.table import Table

from simrl.analysis.run_view import view_run
from simrl.errors import InputError, broken
from simrl.files import temporary_folder
from simrl.interrupts import ctrl_c_waits
from simrl.profile.model_shape import model_shape
from simrl.result.result import Result
from simrl.result.timeline import spans
from simrl.runtime.rollout import Rollout
from simrl.runtime.simulated_trainer import SimulatedTrainer
from simrl.runtime.trainer import Rewarder, Trainer
from simrl.scenario.model import Scenario
from simrl.show.text import plain_table
from simrl.simulate.prepare import Prepared
from simrl.simulate.run import Schedule, simulate_prepared, simulated_learners
from simrl.trace.trace import Response, Sample, Trace
from simrl.training.config import TrainingConfig
from simrl.training.costs import TrainingCosts
from simrl_replay.clock import WallClock
from simrl_replay.grpo.config import RunConfig
from simrl_replay.grpo.efficiency import Efficiency
from simrl_replay.grpo.phase_learner import Measure, Restart, Trainee, serve_phases
from simrl_replay.grpo.policy import TokenIds
from simrl_replay.grpo.tasks import Countdown, Problem
from simrl_replay.grpo.trainer import PhaseTrainer, Scored, TaskRewarder
from simrl_replay.grpo.update import Trajectory, UpdateConfig
from simrl_replay.link import ProcessLink, received, spare_gpu, wait_until_ready
from simrl_replay.replayer import ReplayConfig, engine_gpus

MEASURED_UPDATES = 4  # after one that warms up
SCORED_GROUPS, SCORED_RESPONSES = 16, 8  # to measure a rule's seconds
KEPT = ("ppo_epochs", "tokens_per_microbatch", "load_s", "load_overhead_s")  # of `training`
PHASES = {  # by name: what its seconds are of
    "generation": "an update",
    "reward": "a group",
    "log-probs": "an update",
    "update": "an update",
    "publish": "an update",
    "load": "at a worker",
    "wall clock": "an update",
}


class Phase(NamedTuple):
    """Seconds of a phase; None where a run had none."""

    predicted_s: float | None
    measured_s: float | None

    @property
    def error(self) -> float | None:
        """Return predicted / measured - 1."""
        p, m = self
        return None if p is None or not m else p / m - 1


class Task(NamedTuple):
    """The task that a recorded run was trained on, and its problems by prompt."""

    rule: Countdown
    problems: Sequence[Problem]


def check_trainable(prepared: Prepared, config: ReplayConfig) -> None:
    """Raise `InputError` for what a replay with real training lacks."""
    system, training = prepared.system, prepared.scenario.training
    if wrong := broken(
        (
            system.name == "rlhfuse",
            "it trains on some GPUs while others roll out, and the trainer here has one; leave --train out",
        ),
        (
            system.log_probs == 0,
            "its log-probs come from the engines, and the trainer here computes them; set system.log_probs=1",
        ),
        (
            system.filter_groups == "after_log_probs",
            "the trainer here drops no groups after their log-probs; set filter_groups to true",
        ),
        (
            training.reference_passes > 0 or system.critic is not None,
            "the trainer here has no reference and no critic; set extra_log_probs to 0, or leave --train out",
        ),
        (training.lora, "the trainer here trains all weights; set training.lora to false"),
        (
            prepared.scenario.precision.training != "bf16",
            f"precision.training is {prepared.scenario.precision.training}, and the trainer here multiplies in the model's "
            "own data type; leave it out",
        ),
        (
            training.checkpoint_every > 0,
            "the trainer here writes no checkpoints; set training.checkpoint_every to 0",
        ),
    ):
        raise InputError(
            f"{prepared.scenario.file}: {system.label} cannot be trained for real: {wrong}"
        )
    refused = (
        (bool(config.weights), "--weights: the trainer makes them; leave it out"),
        (config.dummy_weights, "--dummy: the trainer needs the model's weights; name a folder that has them"),
        (
            config.temperature != 1,
            f"temperature {config.temperature:g}: log-probs of the trainer are of temperature 1; set it to 1",
        ),
    )  # fmt: skip
    if wrong := broken(*refused):
        raise InputError(f"--train and {wrong}")


def follows(prepared: Prepared, config: ReplayConfig) -> bool:
    """Return whether the engines can continue with the trace's own tokens: it has some, and the
    model has them all."""
    table = prepared.trace.table
    if "response_ids" not in table.column_names:
        return False
    largest = max(int(np.max(ids)) for ids in table["response_ids"].to_pylist() if ids)
    return largest < model_shape(config.model / "config.json").vocab


def task_of(trace: Trace) -> Task | None:
    """Return the task of a trace that this project recorded; None for other traces."""
    try:
        config = RunConfig.model_validate_json(trace.metadata.notes or "")
    except ValidationError:
        return None
    problems = config.task.make_prompts(config.seed, config.prompts)
    prompts = zip(
        trace.column("prompt_id").tolist(), trace.column("prompt_tokens").tolist(), strict=True
    )
    same = all(i < len(problems) and len(problems[i].prompt_ids) == n for i, n in set(prompts))
    return Task(config.task, problems) if same else None


@dataclass
class RealTraining:
    """The training of replays in a row: a learner that is up, and the efficiency measured of it.
    `figures`, the learner's by kind of phase, and `scored`, the groups' rewards, are of the last
    replay."""

    link: ProcessLink
    trainee: Trainee
    task: Task | None
    efficiency: Efficiency
    reward_s: float
    figures: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    scored: list[Scored] = field(default_factory=list)

    def weights(self, version: int) -> str:
        """Return the folder of a policy version, which may be in writing."""
        return str(self.trainee.version(version))

    def prompt_ids(self, sample: Sample) -> tuple[int, ...] | None:
        """Return a prompt's tokens, if the trace has text."""
        return self.task.problems[sample.prompt_id].prompt_ids if self.task else None

    @property
    def words(self) -> str:
        """Return what was real, and what the predicted training rests on."""
        e = self.efficiency
        return (
            f"Training was real: rewards {'by the task' if self.task else 'are labels'}; its prediction rests on "
            f"{MEASURED_UPDATES} updates measured before (mfu {e.mfu:.3g}, of log-probs {e.log_prob_mfu:.3g}; they differ by "
            f"{e.spread:.0%})"
        )

    def restart(self) -> None:
        """Go back to version 0, and drop reports of an earlier replay."""
        self.link.send([Restart()])
        while not isinstance(received(self.link)[0], Restart):
            pass

    def learners(
        self,
        prompt_ids: Callable[[Sample], tuple[int, ...]],
        schedule: Schedule,
        lanes: Sequence[int],
    ) -> tuple[Trainer, Rewarder]:
        """Return the trainer and the rewarder of a replay's schedule."""
        env, responses = schedule.env, schedule.workload.responses
        assert isinstance(env, WallClock)
        costs = of_one_process(schedule.prepared.training_costs(1))
        recorder, spot = schedule.recorder, schedule.spot
        trainer = PhaseTrainer(env, costs, lanes, recorder, self.link, prompt_ids, spot)
        rewarder = TaskRewarder(
            env, lambda sample, ids: self.reward(responses[sample.uid], sample, ids)
        )
        self.figures, self.scored = trainer.figures, rewarder.spans
        return trainer, rewarder

    def reward(self, response: Response, sample: Sample, ids: Sequence[int]) -> float:
        """Return the reward of tokens by the task; without one the trace's label, or without labels
        0 and 1 by turns, so that there is something to learn from."""
        if self.task is not None:
            return self.task.rule.reward(self.task.problems[sample.prompt_id], ids)
        return float(sample.sample % 2) if np.isnan(response.reward) else response.reward

    def facts(self, measured: Result) -> dict[str, Any]:
        """Return what the metadata of a measured result has of its training."""
        return {
            "phases_s": phase_seconds(measured, [s.ended_s - s.started_s for s in self.scored]),
            "efficiency": self.efficiency._asdict(),
            "rewards": "by the task" if self.task else "labels",
            "updates": self.figures.get("train", []),
            "log_probs": self.figures.get("log_prob", []),
        }


@contextmanager
def real_training(prepared: Prepared, config: ReplayConfig, logs: Path) -> Iterator[RealTraining]:
    """Start a learner on a GPU of its own (colocated: the first worker's; on a CPU a process), and
    measure its efficiency. Raise `InputError` for a model that it cannot train."""
    cluster, system = prepared.scenario.cluster, prepared.system
    training = prepared.scenario.training
    update = UpdateConfig(
        objective="decoupled" if system.log_probs > 1 else "ppo",
        minibatches=system.minibatches,
        ppo_epochs=training.ppo_epochs,
        micro_batch_tokens=training.tokens_per_microbatch,
        seed=prepared.scenario.seed,
    )
    card = (cluster.train.gpu if cluster.train else None) or cluster.gpu
    taken = 0 if prepared.colocated else engine_gpus(prepared, config)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(config.threads))
    with temporary_folder() as versions:
        trainee = Trainee(
            config.model,
            versions / "versions",
            update,
            config.device,
            config.dtype,
            card,
            config.threads,
        )
        link = ProcessLink(
            "trainer",
            partial(serve_phases, trainee=trainee),
            logs / "trainer.log",
            threads | (spare_gpu(taken) if config.device == "cuda" else {}),
        )
        try:
            wait_until_ready([link], config.start_deadline_s)
            link.send([Measure(_batches(prepared, config))])
            (efficiency,) = received(link)
            task = task_of(prepared.trace)
            yield RealTraining(link, trainee, task, efficiency, _scored_s(task))
        finally:
            with ctrl_c_waits():
                link.close()


def with_measured_training(scenario: Scenario, training: RealTraining) -> Scenario:
    """Return the scenario with the training that was measured: of one process, without a switch."""
    kept = {name: getattr(scenario.training, name) for name in KEPT}
    others = {"reward_s": training.reward_s, "offload": "none", "switch_s": 0.0}
    fields = kept | training.efficiency.as_training() | others
    return scenario.model_copy(update={"training": TrainingConfig.model_validate(fields)})


def of_one_process(costs: TrainingCosts) -> TrainingCosts:
    """Return the costs of a trainer that is one process on one GPU: it publishes to a file, and
    nothing is switched, offloaded or handed on by a controller."""
    return replace(costs, gpus=1, switch=False, controller=False)


def predict(prepared: Prepared) -> Result:
    """Simulate a scenario with measured training."""

    def learners(schedule: Schedule, lanes: Sequence[int]) -> tuple[Trainer, Rewarder]:
        trainer, rewarder = simulated_learners(schedule, lanes)
        assert isinstance(trainer, SimulatedTrainer)
        trainer.costs = of_one_process(trainer.costs)
        return trainer, rewarder

    return simulate_prepared(prepared, make_learners=learners)


def phase_seconds(
    result: Result, rewards_s: Sequence[float], most_updates: int | None = None
) -> dict[str, float | None]:
    """Return the seconds of each phase up to the last of at most this number of updates, as `PHASES` has
    them; None without an update. `rewards_s` are of the groups."""
    view, timeline = view_run(result), spans(result)
    updates = len(view.updated_s[:most_updates])
    if not updates:
        return dict.fromkeys(PHASES)
    end_s = float(view.updated_s[updates - 1])
    within = timeline.within(0.0, end_s)
    seconds, trains = (
        within.ended_s - within.started_s,
        within.of_kind("log_prob", "train", "publish"),
    )
    lane = within.lane[trains].min(initial=len(within.lanes))  # all colocated lanes have its spans

    def an_update(kind: str) -> float:
        return float(seconds[within.of_kind(kind) & (within.lane == lane)].sum()) / updates

    loads_s = seconds[within.of_kind("load_weights")]
    return {
        "generation": float(view.clock(end_s)) / updates,
        "reward": median(rewards_s) if rewards_s else None,
        "log-probs": an_update("log_prob"),
        "update": an_update("train"),
        "publish": an_update("publish"),
        "load": float(loads_s.mean()) if loads_s.size else None,
        "wall clock": end_s / updates,
    }


def phases_of(predicted: Result, measured: Result) -> dict[str, Phase]:
    """Return the phases of a prediction and of a replay with real training, in the updates that
    the replay made."""
    reward_s = predicted.metadata["scenario"]["training"]["reward_s"]
    p = phase_seconds(predicted, [reward_s], measured.steps.num_rows)
    m = measured.metadata["replay"]["trained"]["phases_s"]
    return {name: Phase(p[name], m[name]) for name in PHASES}


def off_policyness(result: Result) -> tuple[float, int] | None:
    """Return the mean off-policyness of all trained tokens and the largest; None without an
    update."""
    steps = result.steps.to_pandas()
    if steps.empty:
        return None
    tokens = steps["response_tokens"]
    mean = float((steps["off_policyness_mean"] * tokens).sum() / tokens.sum())
    return mean, int(steps["off_policyness_max"].max())


def phases_json(predicted: Result, measured: Result) -> dict[str, Any]:
    """Return the phases, and the off-policyness of both runs, for `json.dumps`."""
    phases = phases_of(predicted, measured)
    ages = {"predicted": off_policyness(predicted), "measured": off_policyness(measured)}
    rows = {name: {**each._asdict(), "error": each.error} for name, each in phases.items()}
    return {**rows, "off_policyness": ages}


def phases_table(phases: dict[str, Phase]) -> Table:
    """Return a table of phases, each with the error of the prediction."""
    rows = [
        (
            f"{name}, {PHASES[name]}",
            *("" if s is None else f"{s:.3g} s" for s in phase),
            "" if phase.error is None else f"{phase.error:+.1%}",
        )
        for name, phase in phases.items()
    ]
    return plain_table(("phase", "predicted", "measured", "error"), rows)


def versions_line(predicted: Result, measured: Result, bound: int | None) -> str:
    """Return a line with the off-policyness of both runs, and the schedule's bound."""
    words = [
        "none" if ages is None else f"{ages[0]:.2f} on average, {ages[1]} at most"
        for ages in map(off_policyness, (predicted, measured))
    ]
    bounded = "the schedule has no bound" if bound is None else f"the schedule's bound is {bound}"
    return f"Off-policyness: {words[0]} predicted; {words[1]} measured; {bounded}"


def _batches(prepared: Prepared, config: ReplayConfig) -> tuple[tuple[Trajectory, ...], ...]:
    """Return batches to measure updates of: random tokens, lengths drawn from the trace, as many as
    an update has."""
    trace, draws = prepared.trace, np.random.default_rng(prepared.scenario.seed)
    vocabulary = model_shape(config.model / "config.json").vocab
    prompts, responses = trace.column("prompt_tokens"), trace.column("response_tokens")
    _, first, end = trace.step_slices[0]

    def drawn(sample: int, row: int) -> Trajectory:
        prompt, response = (
            draws.integers(0, vocabulary, n).tolist() for n in (prompts[row], responses[row])
        )
        return Trajectory(
            TokenIds(prompt, response), float(sample % 2), sample // 2, ((0, len(response)),)
        )

    return tuple(
        tuple(drawn(i, row) for i, row in enumerate(draws.integers(0, len(prompts), end - first)))
        for _ in range(1 + MEASURED_UPDATES)
    )


def _scored_s(task: Task | None) -> float:
    """Return the median seconds in which a rewarder scores a group by the task's rule, measured on
    solutions that the task writes; 0 for labels."""
    if task is None:
        return 0.0
    rule, draws = task.rule, np.random.default_rng(0)
    rewarder = TaskRewarder(
        WallClock(), lambda sample, ids: rule.reward(task.problems[sample.prompt_id], ids)
    )
    for i, problem in enumerate(task.problems[:SCORED_GROUPS]):
        samples = [Sample(0, 0, 0, i, k, len(problem.prompt_ids)) for k in range(SCORED_RESPONSES)]
        solutions = [tuple(rule.write_solution(problem, draws)) for _ in samples]
        rewarder.score(
            [Rollout(s, (), True, token_ids=ids) for s, ids in zip(samples, solutions, strict=True)]
        )
    return median(scored.ended_s - scored.started_s for scored in rewarder.spans)
