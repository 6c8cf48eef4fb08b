"""A recorded run: GRPO with real rollouts, real rewards and real updates, under one of simrl's own
schedules.

Invariant: the schedule, its dispatch and its recorder are the simulator's; only the clock, the
workers, the trainer and the rewarder are real. A run killed at any moment continues from its last
recorded update when it is started again (`simrl_replay.grpo.records`); unfinished work is repeated.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml

from simrl.errors import InputError, StoppedError
from simrl.files import write_whole_file, write_whole_folder
from simrl.interrupts import ctrl_c_waits
from simrl.result.result import Result, Step
from simrl.runtime.rollout import Rollout
from simrl.scenario.load import load_scenarios
from simrl.simulate.prepare import prepare
from simrl.simulate.run import Schedule
from simrl.trace.trace import Sample, Trace, TraceMetadata, write_trace
from simrl_replay.clock import WallClock
from simrl_replay.grpo.config import RunConfig, read_config
from simrl_replay.grpo.learner import Updated, serve_learner
from simrl_replay.grpo.policy import make_policy, save_policy
from simrl_replay.grpo.records import Group, RunFolder, as_trace
from simrl_replay.grpo.tasks import Problem
from simrl_replay.grpo.trainer import LearningTrainer, TaskRewarder
from simrl_replay.grpo.warm_up import warm_up
from simrl_replay.link import ProcessLink, device_variables, first_report, spare_gpu
from simrl_replay.replayer import ReplayConfig, ReplayEngines, connected, process_fleet, reset
from simrl_replay.vllm_adapter import EngineSettings, vllm_version
from simrl_replay.vllm_worker import VllmWorker

Say = Callable[[str], None]
TRACE, CURVE = "trace.parquet", "curve.csv"
START_DEADLINE_S, STEP_DEADLINE_S = 600.0, 120.0
UPDATES_A_WRITE = 8  # updates between two writes of a part's times


def run(config: RunConfig, folder: RunFolder, warm_ups: Path, say: Say = print) -> None:
    """Run to the end, from the last recorded update in the folder. `warm_ups` holds the warmed-up
    policies of all runs. Raise `InputError` for a folder of another configuration, `StoppedError`
    if a process keeps dying."""
    _check_machine(config, folder)
    with folder.alone():
        _claim(folder, config)
        if not folder.model(0).exists():
            with write_whole_folder(folder.version(0), "files.txt") as temporary:
                shutil.copytree(
                    warmed_up(config, warm_ups, say),
                    temporary / "model",
                    copy_function=shutil.copyfile,
                )
        done = folder.resume()
        if done < config.steps:
            say(
                f"{config.name}: {config.steps - done} of {config.steps} updates to make; engines start …"
            )
            with _learner(config, folder, done) as learner, _engines(config, folder, done) as fleet:
                _Part(config, folder, done, fleet, learner, say).run()
        if not all((folder.path / name).exists() for name in (TRACE, CURVE)):
            finish(config, folder)
    say(f"{config.name}: {config.steps} updates recorded; {TRACE} and {CURVE} are in {folder.path}")


def warmed_up(config: RunConfig, folder: Path, say: Say) -> Path:
    """Return the folder of the initial policy of runs with this task, shape and warm-up; make it if
    it is missing."""
    model_folder = folder / config.warm_up_digest
    if not (model_folder / "model").exists():
        say(f"{config.name}: supervised warm-up, {config.warm_up.steps} steps …")
        lines: list[str] = []

        def tell(line: str) -> None:
            lines.append(line)
            say(line)

        model = make_policy(
            config.policy, config.task.vocabulary, config.most_tokens, config.warm_up.seed
        )
        model.to(config.device)
        warm_up(model, config.task, config.warm_up, tell)
        with write_whole_folder(model_folder, "files.txt") as temporary:
            save_policy(model, temporary / "model")
            (temporary / "warm_up.txt").write_text(
                "".join(f"{line}\n" for line in lines), encoding="utf-8"
            )
        del model
        if config.device == "cuda":
            torch.cuda.empty_cache()  # leaves the memory to the engines
    return model_folder / "model"


def scenario_of(config: RunConfig, folder: RunFolder, trace: Path) -> dict[str, Any]:
    """Return the scenario of the run: a worker is a GPU (on a CPU, a core), the trainer has one of
    its own."""
    gpus = config.workers + 1
    recorded = {
        "max_concurrent": config.prompts_per_step,
        "pause": False,
    }  # the learner publishes while engines go on
    system = {
        **(recorded if config.system.name == "areal" else {}),
        **config.system.model_dump(exclude_none=True),
        "rollout_share": config.workers / gpus,
        "minibatches": config.update.minibatches,
        "log_probs": 1
        if config.system.name == "split"
        else 2,  # of older versions: with their weights and the current
    }
    return {
        "name": config.name,
        "seed": config.seed,
        "steps": config.steps,
        "model": str((folder.model(0) / "config.json").resolve()),
        "cluster": {"gpu": config.gpu, "gpus": gpus, "tp": 1},
        "workload": {"trace": str(trace.resolve()), "synthetic": None},
        "profile": {"roofline": {}, "path": None},
        "engine": config.engine.model_dump(),
        "systems": [system],
    }


def finish(config: RunConfig, folder: RunFolder) -> None:
    """Write the results of all updates: the trace and the learning curve."""
    samples, facts = folder.read()
    write_trace(
        as_trace(samples, config.prompts_per_step * config.group, metadata(config)),
        folder.path / TRACE,
    )
    with write_whole_file(folder.path / CURVE) as temporary:
        curve(samples, facts, config).to_csv(temporary, index=False)


def metadata(config: RunConfig) -> TraceMetadata:
    """Return the metadata of a run's trace."""
    from importlib.metadata import version

    return TraceMetadata(
        name=config.name,
        kind="recorded",
        source=f"a GRPO run of this project ({config.system.name}): {config.prompts} prompts, groups of {config.group}, "
        f"{config.epochs} epochs, seed {config.seed}; vLLM {vllm_version()}, torch {version('torch')}",
        licence="Apache-2.0",
        tokenizer=f"characters of {config.task.kind}",
        cap_tokens=config.task.most_tokens,
        notes=json.dumps(config.model_dump(mode="json"), sort_keys=True),
    )


def curve(samples: Any, facts: Sequence[dict[str, Any]], config: RunConfig) -> pd.DataFrame:
    """Return a row per update: rewards, lengths, staleness, the update's statistics, and its
    seconds."""
    table = pd.DataFrame({name: samples[name].to_pylist() for name in ("step", "epoch", "reward")})
    table["tokens"] = [len(ids) for ids in samples["response_ids"].to_pylist()]
    rows = []
    for step, fact in enumerate(facts):
        own = table[table["step"] == step]
        lengths = own["tokens"].to_numpy()
        rows.append(
            {
                "step": step,
                "epoch": own["epoch"].mean(),
                "reward": own["reward"].mean(),
                "mean_tokens": lengths.mean(),
                "p50_tokens": np.quantile(lengths, 0.5),
                "p99_tokens": np.quantile(lengths, 0.99),
                "at_cap": float((lengths >= config.task.most_tokens).mean()),
                "off_policyness_mean": fact["step"]["off_policyness_mean"],
                "off_policyness_max": fact["step"]["off_policyness_max"],
                "reward_s": sum(end - start for start, end, _ in fact["rewards"]),
                **{f"{kind}_s": end - start for kind, start, end in fact["phases"]},
                **{name: value for name, value in fact["stats"].items() if not name.endswith("_s")},
            }
        )
    return pd.DataFrame(rows)


class _Part:
    """The run from one start to its end."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        done: int,
        fleet: ReplayEngines,
        learner: ProcessLink,
        say: Say,
    ) -> None:
        self._config, self._folder, self._done = config, folder, done
        self._fleet, self._learner, self._say = fleet, learner, say
        self._problems: list[Problem] = config.task.make_prompts(config.seed, config.prompts)
        self._happened: list[dict[str, Any]] = []

    def run(self) -> None:
        config, folder = self._config, self._folder
        prompts = folder.path / "prompts.parquet"
        write_trace(prompts_left(config, folder.trained(), self._problems), prompts)
        scenario = {**scenario_of(config, folder, prompts), "steps": config.steps - self._done}
        file = folder.path / "scenario.yaml"
        file.write_text(yaml.safe_dump(scenario, sort_keys=False), encoding="utf-8")
        (found,) = load_scenarios(file)
        self._prepared = prepared = prepare(found)
        reset(self._fleet, _first_weights(config, folder, self._done), None)
        self._env = WallClock()
        self._env.restart()
        # Once: a repeated prompt could train in place of a slow one, whose responses the records
        # would miss.
        self._schedule = Schedule(
            prepared, self._env, self._workers, None, self._learners, once=True
        )
        connected(self._schedule)
        try:
            self._schedule.run()
        finally:
            self._write(self._schedule.result())

    def _workers(self, schedule: Schedule) -> list[VllmWorker]:
        return [
            VllmWorker(
                self._env,
                i,
                self._fleet.links[i],
                partial(self._fleet.restart, i),
                schedule.workload.responses,
                self._prompt_ids,
                lambda version: str(self._folder.model(self._done + version)),
                schedule.recorder,
                STEP_DEADLINE_S,
                START_DEADLINE_S,
                self._happened.append,
                stop_token=self._config.task.eos,
                prompts=schedule.prompts,
            )
            for i in range(schedule.units)
        ]

    def _learners(
        self, schedule: Schedule, lanes: Sequence[int]
    ) -> tuple[LearningTrainer, TaskRewarder]:
        (lane,) = lanes
        if schedule.prepared.system.filter_groups == "after_log_probs":
            raise InputError(
                f"{self._config.name}: filter_groups is after_log_probs, and this trainer drops no groups; use true"
            )
        self._recorder = schedule.recorder
        reward = self._config.task.reward
        self._rewarder = TaskRewarder(
            self._env, lambda sample, ids: reward(self._problem(sample), ids)
        )
        trainer = LearningTrainer(
            self._env,
            self._learner,
            lane,
            schedule.recorder,
            self._done,
            self._prompt_ids,
            self._recorded,
            self._write_now_and_then,
        )
        return trainer, self._rewarder

    def _problem(self, sample: Sample) -> Problem:
        return self._problems[sample.prompt_id]

    def _prompt_ids(self, sample: Sample) -> tuple[int, ...]:
        return self._problem(sample).prompt_ids

    def _recorded(self, step: Step, rollouts: Sequence[Rollout], updated: Updated) -> None:
        rewards, self._rewarder.spans = self._rewarder.spans, []
        facts = {
            "step": step._asdict(),
            "phases": [
                (kind, a - self._env.monotonic_s, b - self._env.monotonic_s)
                for kind, a, b in updated.phases
            ],
            "rewards": [tuple(scored) for scored in rewards],
            "stats": updated.stats,
        }
        self._folder.record(self._done + step.step, self._done, rollouts, facts)
        self._folder.forget_versions(self._done + step.step + 1)
        tokens = sum(rollout.tokens for rollout in rollouts)
        reward = float(np.mean([rollout.reward for rollout in rollouts]))
        self._say(
            f"{self._config.name}: update {self._done + step.step + 1} of {self._config.steps} at {self._env.now:.0f} s: "
            f"reward {reward:.3f}, {tokens / len(rollouts):.0f} tokens a response, off-policyness "
            f"{step.off_policyness_mean:.2f}"
        )

    def _write_now_and_then(self) -> None:
        """Write the part's times while the learner works: a schedule that waits for the update
        loses no time."""
        if self._recorder.steps and len(self._recorder.steps) % UPDATES_A_WRITE == 0:
            self._write(self._recorder.result(self._env.now, {}))

    def _write(self, seen: Result) -> None:
        if not seen.steps.num_rows:
            return
        replay = {
            "first_update": self._done,
            "happened": self._happened,
            "clock": "wall",
            "engine": f"vLLM {vllm_version()}",
            "config": self._config.model_dump(mode="json"),
            "end_s": self._env.now,
        }
        metadata = {**self._prepared.inputs(), **seen.metadata, "replay": replay}
        self._folder.write_part(self._done, replace(seen, metadata=metadata))


def prompts_left(config: RunConfig, trained: set[Group], problems: Sequence[Problem]) -> Trace:
    """Return the groups that are not trained yet, in order, with the largest number of response
    tokens."""
    groups = [
        group
        for epoch in range(config.epochs)
        for group in _epoch(config, epoch)
        if group not in trained
    ]
    rows = [
        (
            i // config.prompts_per_step,
            group.epoch,
            group.prompt_id,
            sample,
            len(problems[group.prompt_id].prompt_ids),
        )
        for i, group in enumerate(groups)
        for sample in range(config.group)
    ]
    names = ("step", "epoch", "prompt_id", "sample", "prompt_tokens")
    columns: dict[str, Any] = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    columns["response_tokens"] = [config.task.most_tokens] * len(rows)
    return Trace.from_columns(
        columns,
        TraceMetadata(
            name=f"{config.name}: prompts",
            kind="synthetic",
            source="what is to be generated; lengths are the most that a response may have",
            tokenizer=f"characters of {config.task.kind}",
            cap_tokens=config.task.most_tokens,
        ),
    )


def _epoch(config: RunConfig, epoch: int) -> list[Group]:
    order = np.random.default_rng([config.seed, epoch]).permutation(config.prompts)
    return [Group(epoch, int(prompt)) for prompt in order]


def _check_machine(config: RunConfig, folder: RunFolder) -> None:
    """Raise `InputError` if engines or learner cannot run here; checked before the long warm-up."""
    vllm_version()
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "device is cuda, and torch finds no GPU here; check `nvidia-smi`, or set device=cpu"
        )
    device_variables(config.workers, engine_settings(config, folder.model(0)))


def _claim(folder: RunFolder, config: RunConfig) -> None:
    """Bind the folder to this configuration; raise `InputError` if it has another."""
    file, text = (
        folder.path / "config.yaml",
        yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False),
    )
    if file.exists() and read_config(file) != config:
        raise InputError(
            f"{file}: a run with another configuration is here; name another --output, or remove the folder"
        )
    if not file.exists():
        with write_whole_file(file) as temporary:
            temporary.write_text(text, encoding="utf-8")


@contextmanager
def _learner(config: RunConfig, folder: RunFolder, version: int) -> Iterator[ProcessLink]:
    log = folder.path / "logs" / "learner.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    life = partial(serve_learner, config=config, folder=folder, version=version)
    variables = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    link = ProcessLink(
        "learner",
        life,
        log,
        variables | (spare_gpu(config.workers) if config.device == "cuda" else {}),
    )
    try:
        if not link.connection.poll(START_DEADLINE_S):
            raise StoppedError(f"learner: not up after {START_DEADLINE_S:g} s; see {log}")
        first_report(link)
        yield link
    finally:
        with ctrl_c_waits():
            link.close()


def engine_settings(config: RunConfig, model: Path) -> EngineSettings:
    """Return the settings of a rollout engine, which begins with the weights of `model`."""
    sizes = config.engine
    return EngineSettings(
        model=str(model),
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        block_size=sizes.block_size,
        max_model_len=config.most_tokens,
        kv_blocks=sizes.kv_blocks,
        device=config.device,
        dtype="float32",
        temperature=1.0,
        stop_token=config.task.eos,
    )


def _engines(config: RunConfig, folder: RunFolder, version: int) -> ReplayEngines:
    # Version 0 always exists, also for an engine that restarts late in a run; the required version
    # is loaded after it.
    settings = engine_settings(config, folder.model(0))
    first = _first_weights(config, folder, version)
    return process_fleet(
        config.workers,
        settings,
        first,
        folder.path / "logs",
        partial(engine_seed, config.seed, version),
    )


def engine_seed(seed: int, version: int, worker: int, restarts: int) -> int:
    """Return the seed of an engine, different for every worker and restart: a group generated by
    two engines with one seed would hold a response twice. The first engine of a run has the run's
    seed."""
    if (version, worker, restarts) == (0, 0, 0):
        return seed
    return int(np.random.SeedSequence([seed, version, worker, restarts]).generate_state(1)[0])


def _first_weights(config: RunConfig, folder: RunFolder, version: int) -> ReplayConfig:
    return ReplayConfig(
        folder.model(version),
        device=config.device,
        dtype="float32",
        start_deadline_s=START_DEADLINE_S,
    )
