"""A proof on one machine: predicted blind, then measured, step by step, within minutes.

Invariant: nothing is measured before the blind predictions are on disk, with their digest in the
record; the record of a step is on disk before the next step begins. A step that fails or finds no
time is recorded with the reason, and the others go on.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import signal
import subprocess
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import simpy
import yaml

from simrl.analysis.agreement import agree, finished_on_clock, repeat_spread
from simrl.errors import InputError, StoppedError, first_line
from simrl.files import write_whole_file
from simrl.profile.hardware import GPUS
from simrl.profile.profile import Tables, read_profile
from simrl.profile.shipped import shipped_profile
from simrl.result.result import Result
from simrl.runtime.simulated_worker import SimulatedWorker
from simrl.scenario.load import load_scenarios
from simrl.simulate.prepare import Prepared, prepare
from simrl.simulate.run import Schedule, simulated_workers
from simrl.training.weight_sync import PINNED_SHARE
from simrl_replay.bench import RemoteBench, Shape, bench_then_replay
from simrl_replay.cli_measure import Wanted
from simrl_replay.host import Close, run_host
from simrl_replay.link import EngineLink, Start, engine_link, visible_gpus, wait_until_ready
from simrl_replay.measured_profile import gpu_name, measure_with
from simrl_replay.profile_fit import host_seconds, predicted_s
from simrl_replay.prove_page import page, passes
from simrl_replay.prove_plan import (
    BLOCK_TOKENS,
    DRAFT_TOKENS,
    ENGINE,
    Case,
    Engine,
    cases,
    engines,
    own_gpus,
    scenario,
    settings,
    sizes,
    write_config,
)
from simrl_replay.ray_link import ray_fleet
from simrl_replay.replayer import (
    Measured,
    ReplayConfig,
    ReplayEngines,
    engine_settings,
    replay,
    reset,
)
from simrl_replay.speculative import replayed_form
from simrl_replay.trials import Trial
from simrl_replay.vllm_adapter import EngineSettings, VllmEngine, vllm_version

MOST_MEMORY = 0.97  # of a GPU, for all engines on it
TRIAL_S = 60.0  # at most
# half of it is the longest response of a neighbour: as long as the recorded ones
NEIGHBOUR_TOKENS = 768
Tell = Callable[[str], None]
SMALL_REPLAYS = (
    "areal",
    "verl_colocated",
    "one_step_off",
    "april",
    "short of KV",
    "prefixes",
    "n-grams",
)
BY_RAY = "one_step_off"  # the replay that a cluster runs
COUNTS = {  # the simulator's, and the engine's own
    "passes": "passes",
    "preemptions": "preemptions",
    "lookup_tokens": "prefix_queried_tokens",
    "hit_tokens": "prefix_hit_tokens",
}


class TimeUpError(BaseException):
    """The end of the time: nothing but the loop over the steps catches it."""


class Step(NamedTuple):
    """A step of a proof: it is left out with less than `least_s` seconds to go."""

    name: str
    least_s: float
    run: Callable[[], dict[str, Any]]


class Engines:
    """The engines of a proof that are up. Each begins with scenes; `fleet` lets it go on to
    replays, for good."""

    def __init__(self, logs: Path, start_deadline_s: float, start: Start) -> None:
        self._logs, self._deadline_s, self._start = logs, start_deadline_s, start
        self._links: dict[str, EngineLink] = {}
        self._starts: dict[str, Callable[[], EngineLink]] = {}  # again, for a replay
        self._ready: set[str] = set()
        self._replaying: set[str] = set()
        self.failed: dict[str, str] = {}  # engines that are not up, and why

    def begin(self, name: str, of: EngineSettings, variables: Mapping[str, str]) -> None:
        log = self._logs / f"{name.replace(' ', '-')}.log"
        self._links[name] = engine_link(name, of, log, bench_then_replay, self._start, variables)
        self._starts[name] = partial(engine_link, name, of, log, run_host, self._start, variables)

    def wait(self, names: Sequence[str]) -> None:
        """Wait until these are up, or have failed."""
        for name in names:
            if name in self._links and name not in self._ready:
                try:
                    wait_until_ready([self._links[name]], self._deadline_s)
                    self._ready.add(name)
                except (InputError, StoppedError) as error:
                    self.failed[name] = first_line(error)
                    self.close([name])

    def bench(
        self, name: str, neighbour: str | None, traffic: int, max_model_len: int
    ) -> RemoteBench:
        beside = self.fleet([neighbour]).links if neighbour else []
        return RemoteBench(self._up(name), beside, traffic, max_model_len)

    def fleet(self, names: Sequence[str]) -> ReplayEngines:
        links = [self._up(name) for name in names]
        for name, link in zip(names, links, strict=True):
            if name not in self._replaying:
                link.send([Close()])  # of its scenes
            self._replaying.add(name)
        return ReplayEngines([self._starts[name] for name in names], links=links)

    def keep(self, names: Sequence[str], fleet: ReplayEngines) -> None:
        """Take over what was restarted during a replay."""
        self._links |= dict(zip(names, fleet.links, strict=True))

    def trials(self, name: str) -> list[Trial]:
        """Let an engine go on to its trials, for good, and return their figures."""
        link = self.fleet([name]).links[0]
        link.send([Close()])  # of its replays
        while link.connection.poll(TRIAL_S):
            if figures := [
                report for report in link.connection.recv() if isinstance(report, Trial)
            ]:
                return figures
        raise StoppedError(f"engine {name}: no trial ended for {TRIAL_S:g} s")

    def begun(self, name: str) -> bool:
        return name in self._links

    def close(self, names: Sequence[str] | None = None) -> None:
        for name in list(self._links) if names is None else names:
            if (link := self._links.pop(name, None)) is not None:
                link.kill()
                self._ready.discard(name)

    def _up(self, name: str) -> EngineLink:
        if name not in self._ready:
            raise StoppedError(
                f"engine {name} is not up: {self.failed.get(name, 'it was not started')}"
            )
        return self._links[name]


class Proof:
    """The state of a proof: its record, which `save` writes, and what its steps share."""

    def __init__(
        self,
        device: Literal["cpu", "cuda"],
        gpu: str,
        minutes: float,
        folder: Path,
        tell: Tell,
        graphs: str = "full",
        start: Start = VllmEngine,
        gpus: int = 1,
        ray: str | None = None,
    ) -> None:
        self.device, self.gpu, self.folder, self.tell = device, gpu, folder, tell
        self.gpus, self.ray = gpus, ray
        self.until_s = time.monotonic() + 60 * minutes
        self.of = sizes(device)
        self.engines = engines(self.of, graphs, gpus)
        # Of engines, by name.
        self.variables = (
            own_gpus(self.engines.values(), gpus_here(gpus))
            if device == "cuda" and gpus > 1
            else {}
        )
        self.models = (folder / "models").resolve()
        self.cases = {case.name: case for case in cases(self.of, self.models, gpus)}
        self.tables: dict[str, Tables] = {}  # blind, by engine
        self.refused: dict[str, str] = {}  # cases that this GPU cannot have, and why
        self.partial: dict[str, Any] = {}  # of the running step, should it fail
        for each in ("logs", "scenarios", "profiles"):
            (folder / each).mkdir(parents=True, exist_ok=True)
        self.up = Engines(folder / "logs", min(60 * minutes, 600.0), start)
        choices = {"minutes": minutes, "gpu": gpu, "gpus": gpus, "device": device, "graphs": graphs}
        self.record: dict[str, Any] = {**choices, "steps": []}
        self.memory_bytes = min(GPUS[gpu].memory_bytes, memory_here(device))
        self.predictions: dict[str, tuple[Prepared, Result, dict[str, int]]] = {}  # blind, by case
        for shape in (self.of.small, self.of.large):
            write_config(
                shape, self.models / shape.name, "bfloat16" if device == "cuda" else "float32"
            )

    @property
    def left_s(self) -> float:
        return self.until_s - time.monotonic()

    def run(self) -> dict[str, Any]:
        """Run the steps until the time is up, and return the record."""
        try:
            for step in self.steps():
                if self._run(step) != "done" and step.name == "blind":
                    break  # nothing is measured that was not predicted
        finally:
            self.up.close()
        return self.record

    def steps(self) -> list[Step]:
        first = [
            name for name, engine in self.engines.items() if engine.model == self.of.small.name
        ]
        replays = {
            name: Step(
                name, 60.0 if self.ray and name == BY_RAY else 15.0, partial(self._replay, case)
            )
            for name, case in self.cases.items()
        }
        return [
            Step("here", 0.0, self._here),
            Step("blind", 0.0, partial(self._blind, first)),
            Step("engines", 10.0, partial(self._wait, first)),
            Step("passes alone", 20.0, partial(self._passes, "alone", "a", None)),
            Step(
                "passes drafting",
                20.0,
                partial(self._passes, "drafting", "drafting a", "drafting b"),
            ),
            replays["rhymerl"],
            Step("passes pair", 20.0, partial(self._passes, "pair", "a", "b")),
            *(replays[name] for name in SMALL_REPLAYS),
            *(replays[name] for name, case in self.cases.items() if len(case.engines) > 2),
            Step(
                "passes without graphs", 10.0, partial(self._passes, "no graphs", "no graphs", None)
            ),
            Step("trials", 10.0, partial(self._trials, "a")),
            *([Step("weight sync", 20.0, self._weight_sync)] if self.gpus > 1 else []),
            Step("whole step", 45.0, self._whole),
            Step("engine of the large model", 10.0, self._large),
            Step("passes large", 20.0, partial(self._passes, "large", "large", None)),
            replays["large"],
            Step("trials large", 10.0, partial(self._trials, "large")),
            *(
                [
                    Step("engine of two GPUs", 30.0, partial(self._next, ["tp 2"])),
                    Step("passes of two GPUs", 20.0, partial(self._passes, "tp 2", "tp 2", None)),
                    replays["tp 2"],
                ]
                if self.gpus > 1
                else []
            ),
            Step("engine with a draft model", 30.0, partial(self._next, ["with a draft model"])),
            replays["draft model"],
        ]

    def save(self) -> None:
        """Write the record and its page."""
        record = json.dumps(self.record, indent=1, default=float) + "\n"
        texts = {
            "prove.json": record,
            "prove.md": page(self.record),
            "passes.md": passes(self.record),
        }
        for name, text in texts.items():
            with write_whole_file(self.folder / name) as temporary:
                temporary.write_text(text, encoding="utf-8")

    def _run(self, step: Step) -> str:
        """Run a step, record it, and return its state."""
        entry: dict[str, Any] = {
            "step": step.name,
            "state": "skipped",
            "why": f"{self.left_s:.0f} s were left",
        }
        began_s, self.partial = time.monotonic(), {}
        if self.left_s >= step.least_s:
            try:
                with _until(self.left_s):
                    entry = {"step": step.name, "state": "done", **step.run()}
            except (Exception, TimeUpError) as error:  # the steps after it are worth as much
                entry = {
                    "step": step.name,
                    "state": "failed",
                    "why": str(error).partition("\n")[0] or type(error).__name__,
                    **self.partial,
                }
                with (self.folder / "logs" / "steps.log").open("a", encoding="utf-8") as log:
                    log.write(f"{step.name}\n{traceback.format_exc()}\n")
        entry["took_s"] = round(time.monotonic() - began_s, 1)
        self.record["steps"].append(entry)
        self.save()
        why = f" ({entry['why']})" if "why" in entry else ""
        self.tell(f"{step.name}: {entry['state']}, {entry['took_s']} s{why}")
        return str(entry["state"])

    # Steps.

    def _here(self) -> dict[str, Any]:
        here = facts(self.device) | ({"GPUs": str(self.gpus)} if self.gpus > 1 else {})
        for name, value in here.items():
            self.tell(f"{name}: {value}")
        return {"facts": here}

    def _blind(self, starting: Sequence[str]) -> dict[str, Any]:
        """Predict everything from what is shipped; engines come up meanwhile, and measure
        nothing."""
        self._begin(starting)
        replays = {}
        for case in self.cases.values():
            try:
                prepared = self._prepared(case, None)
            except InputError as error:  # a GPU that is too small for it
                self.refused[case.name] = first_line(error)
                continue
            result, counts = simulated(prepared)
            self.predictions[case.name] = prepared, result, counts
            ends_s = finished_on_clock(result, result)[1].tolist()
            replays[case.name] = {**_summary(result), "counts": counts, "ends_s": ends_s}
        for name, engine in self.engines.items():
            for case in map(self.cases.__getitem__, replays):
                if (
                    first := self.engines[case.engines[0]]
                ).model == engine.model and first.tp == engine.tp:
                    self.tables[name] = self._prepared(case, None, engine).profile.tables
                    break
        whole = self._predicted_whole().phases
        blind = {
            "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "profiles": {name: _source(each) for name, (each, *_) in self.predictions.items()},
            "replays": replays,
            "passes": {name: _grid(tables) for name, tables in self.tables.items()},
            "whole step": whole,
            "weight sync": self._predicted_sync() if self.gpus > 1 else {},
        }
        text = json.dumps(blind, indent=1, default=float)
        (self.folder / "blind.json").write_text(text + "\n", encoding="utf-8")
        digest = hashlib.sha256((text + "\n").encode()).hexdigest()
        self.tell(f"blind predictions in blind.json, sha256 {digest}")
        return {
            "sha256": digest,
            "written": blind["made"],
            "profiles": blind["profiles"],
            "not_predicted": self.refused,
        }

    def _begin(self, names: Sequence[str]) -> None:
        """Start engines, as many as their GPU's memory holds, the first ones first."""
        taken: defaultdict[str, float] = defaultdict(float)  # share of a GPU's memory
        for name in names:
            try:
                of, variables = self._settings(self.engines[name]), self.variables.get(name, {})
                taken[str(variables)] += of.gpu_memory_utilization
                if self.device == "cuda" and taken[str(variables)] > MOST_MEMORY:
                    taken[str(variables)] -= of.gpu_memory_utilization
                    raise InputError(
                        f"{of.gpu_memory_utilization:.0%} of the GPU's memory is not left beside the others"
                    )
                self.up.begin(name, of, variables)
            except InputError as error:
                self.up.failed[name] = first_line(error)

    def _wait(self, names: Sequence[str]) -> dict[str, Any]:
        for name in names:
            self.up.wait([name])
            self.tell(f"engine {name}: {self.up.failed.get(name, 'up')}")
        return {"not_up": {name: self.up.failed[name] for name in names if name in self.up.failed}}

    def _large(self) -> dict[str, Any]:
        """Wait for the engine of the large model, which started beside the whole step, if that
        ran."""
        return self._wait(["large"]) if self.up.begun("large") else self._next(["large"])

    def _next(self, names: Sequence[str]) -> dict[str, Any]:
        self.up.close()
        self._begin(names)
        return self._wait(names)

    def _passes(self, profile: str, engine: str, neighbour: str | None) -> dict[str, Any]:
        """Measure the passes of an engine, alone or beside one that generates, and write its
        profile."""
        of, this = self.of, self.engines[engine]
        wanted = Wanted(
            model=self.models / this.model,
            device=self.device,
            gpu=self.gpu,
            dummy=True,
            dtype="bfloat16" if self.device == "cuda" else "float32",
            tp=this.tp,
            max_num_seqs=of.max_num_seqs,
            max_num_batched_tokens=of.max_num_batched_tokens,
            max_model_len=of.max_model_len,
            block_size=self._settings(this).block_size,
            kv_cache_tokens=this.kv_tokens,
            draft_tokens=this.draft_tokens,
            neighbours=int(neighbour is not None),
            repeats=of.repeats,
            tolerance=0.03,
            budget_s=min(of.budget_s, self.left_s / 10),
        )
        run = self.up.bench(engine, neighbour, of.max_num_seqs // 2, NEIGHBOUR_TOKENS)
        output = self._profile(profile)
        measured = measure_with(
            run, vllm_version(), wanted, output, output.with_suffix(".points.jsonl")
        )
        blind, kernels = self.tables[engine], shipped_profile(this.model, self.gpu, this.tp)
        return {
            "profile": profile,
            "model": this.model,
            "beside": neighbour,
            "passes": [
                {
                    **p.shape._asdict(),
                    "measured_s": p.seconds,
                    "spread": p.spread,
                    "blind_s": predicted_s(blind, p.shape),
                }
                for p in measured.points
            ],
            "held_out": [
                {
                    **h.shape._asdict(),
                    "measured_s": h.measured_s,
                    "profile_s": h.predicted_s,
                    "blind_s": predicted_s(blind, h.shape),
                }
                for h in measured.held_out
            ],
            "between_passes_s": measured.tables.between_passes_s,
            "blind_between_passes_s": blind.between_passes_s,
            "request_s": measured.request_s,
            "host": None
            if kernels is None
            else host_seconds(measured.points, read_profile(kernels).tables),
            "measuring_s": measured.measuring_s,
        }

    def _replay(self, case: Case) -> dict[str, Any]:
        """Replay a case, and compare it with both predictions."""
        profile = case.profile and self._profile(case.profile)
        if case.name in self.refused:
            raise InputError(self.refused[case.name])
        prepared, blind, counts = self.predictions[case.name]
        config = self._config(case)
        measured: list[Measured] = []
        with self._fleet(case, config) as fleet:
            for _ in range(case.times if self.left_s > 60 else 1):
                measured.append(replay(prepared, fleet, config))
                if measured[-1].stopped is not None:
                    break
                # What an asynchronous schedule leaves running would run on beside the next
                # measurement.
                reset(fleet, config, None)
            if not (self.ray and case.name == BY_RAY):
                self.up.keep(case.engines, fleet)
        results = [each.result for each in measured if each.stopped is None]
        if not results:
            raise StoppedError(str(measured[0].stopped))
        spread = repeat_spread(results)
        predicted = {"blind": (blind, counts)}
        if profile and profile.exists():
            predicted["profile"] = simulated(self._prepared(case, profile))
        for name, result in {
            **{name: each for name, (each, _) in predicted.items()},
            "measured": results[0],
        }.items():
            folder = self.folder / "results" / case.name.replace(" ", "-") / name
            folder.mkdir(parents=True, exist_ok=True)
            result.write(folder)
        return {
            "case": case.name,
            "system": prepared.system.label,
            "engines": len(case.engines),
            "gpus": self.gpus,
            "responses": len(finished_on_clock(blind, results[0])[0]),
            "updates": case.updates,
            "about": "engines in Ray's actors" if self.ray and case.name == BY_RAY else case.about,
            "measured": {**_summary(results[0]), "counts": _engine_counts(results[0])},
            "predicted": {
                name: {
                    **_summary(each),
                    "counts": counts,
                    "errors": asdict(agree(each, results[0]).errors),
                }
                for name, (each, counts) in predicted.items()
            },
            "noise": None if spread is None else asdict(spread.largest),
        }

    def _fleet(self, case: Case, config: ReplayConfig) -> AbstractContextManager[ReplayEngines]:
        """Return the engines of a replay: those that are up, or actors of a cluster, which end with
        it."""
        return (
            ray_fleet(
                len(case.engines), self._settings(self.engines[case.engines[0]]), config, self.ray
            )
            if self.ray and case.name == BY_RAY
            else nullcontext(self.up.fleet(case.engines))
        )

    def _predicted_sync(self) -> dict[str, dict[str, Any]]:
        from simrl_replay.grpo.weight_broadcast import predict

        return predict(self.of.small, GPUS[self.gpu], self.gpus)

    def _weight_sync(self) -> dict[str, Any]:
        """Broadcast the small model's weights from one GPU to all others; engines idle
        meanwhile."""
        from simrl_replay.grpo.weight_broadcast import UNLIKE, broadcast, tensor_shapes

        measured = broadcast(
            tensor_shapes(self.models / self.of.small.name), self.gpus, self.device
        )
        return {
            "title": f"Weight sync: {self.of.small.name}, broadcast from one of {self.gpus} GPUs to the others",
            "phases": {
                way: {**phase, "measured_s": measured[way]}
                for way, phase in self._predicted_sync().items()
            },
            "unlike": list(UNLIKE),
        }

    def _predicted_whole(self) -> Any:
        from simrl_replay.grpo.whole_step import predict, scenario_of

        workload = {"steps": 1, "prompts_per_step": 16, "group": 16, "sigma": 0.8}
        lengths = {
            "prompt_tokens": 64,
            "mean_tokens": 2 * self.of.mean_tokens,
            "cap_tokens": self.of.cap_tokens,
        }
        engine: dict[str, Any] = {
            "block_size": BLOCK_TOKENS[self.device],
            "kv_cache_tokens": 2 * self.of.kv_tokens,
        }
        shipped = self.device == "cuda"
        return predict(
            scenario_of(
                str(self.models / self.of.small.name / "config.json"),
                self.gpu,
                Path("shipped") if shipped else None,
                workload={"synthetic": workload | lengths},
                engine=engine | ({"preset": ENGINE[self.device]} if shipped else {}),
            )
        )

    def _whole(self) -> dict[str, Any]:
        """Run a whole colocated step, with a real update of the policy."""
        from simrl_replay.grpo.whole_step import UNLIKE, whole_step

        self.up.close()
        self._begin(["large"])  # it comes up beside the step's engine, before anything is measured
        folder, prediction = self.folder / "whole_step", self._predicted_whole()
        phases = self.partial["phases"] = {
            name: dict(phase) for name, phase in prediction.phases.items()
        }
        self.partial |= {"title": "A whole colocated step", "unlike": list(UNLIKE)}

        def ended(name: str, seconds: float, details: dict[str, Any]) -> None:
            phases[name] |= {"measured_s": seconds, "details": details}
            self.tell(
                f"whole step: {name} {seconds:.2f} s, predicted {phases[name]['predicted_s']:.2f} s"
            )

        of = self._settings(self.engines["a"]._replace(kv_tokens=2 * self.of.kv_tokens))
        engine = {
            name: getattr(of, name)
            for name in ("gpu_memory_utilization", "kv_cache_bytes", "graphs")
        }
        whole_step(
            prediction, self.device, folder, ended, lambda: self.up.wait(["large"]), **engine
        )
        return self.partial

    def _trials(self, engine: str) -> dict[str, Any]:
        """Time the sampler, and sleep and wake-up, of an engine that has replayed all."""
        shape = self.of.large if self.engines[engine].model == self.of.large.name else self.of.small
        return {
            "title": f"Sampling, sleep and wake-up of {shape.name}",
            "figures": [trial._asdict() for trial in self.up.trials(engine)],
            "pinned_copy_s": shape.weight_bytes / (PINNED_SHARE * GPUS[self.gpu].host_bytes_per_s),
        }

    def _settings(self, engine: Engine) -> EngineSettings:
        drafting = None
        if engine.drafting is not None:
            case = self.cases[engine.drafting]
            drafting = engine_settings(self._prepared(case, None), self._config(case)).speculative
        return settings(engine, self.of, self.models, self.device, self.memory_bytes, drafting)

    def _config(self, case: Case) -> ReplayConfig:
        engine = self.engines[case.engines[0]]
        return ReplayConfig(
            model=self.models / engine.model,
            device=self.device,
            dummy_weights=True,
            draft_model=self.models / self.of.small.name,
            recorded_tokens=engine.recorded,
            step_deadline_s=30.0,
        )

    def _profile(self, name: str) -> Path:
        return self.folder / "profiles" / f"{name.replace(' ', '-')}.parquet"

    def _prepared(self, case: Case, profile: Path | None, engine: Engine | None = None) -> Prepared:
        """Return a replay's scenario, on its own engines or like this one; it is also written:
        anybody can simulate it again."""
        eager = profile is None and (engine or self.engines[case.engines[0]]).graphs == "none"
        kind = "eager" if eager else "blind" if profile is None else "profile"
        file = self.folder / "scenarios" / f"{case.name.replace(' ', '-')}-{kind}.yaml"
        path = None if profile is None else profile.resolve()
        described = scenario(case, self.of, self.device, self.gpu, self.models, path)
        described["engine"] |= {"enforce_eager": True} if eager else {}
        file.write_text(yaml.safe_dump(described, sort_keys=False), encoding="utf-8")
        prepared, _ = replayed_form(prepare(load_scenarios(file)[0]))
        return prepared


def gpu_here(device: str) -> str:
    """Return simrl's name of the GPU of this machine. Raise `InputError` if there is none."""
    if device == "cpu":
        return "cpu"
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(
            f"no GPU here ({first_line(error)}); repair the driver, or rehearse with --device cpu"
        ) from None
    return gpu_name(listed.split("(UUID")[0], device)


def memory_here(device: str) -> float:
    """Return the bytes of the smallest GPU that is here; infinity if unknown."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(
            query, capture_output=True, text=True, timeout=30, check=True
        ).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return math.inf
    return (
        min((2**20 * float(each) for each in listed), default=math.inf)
        if device == "cuda"
        else math.inf
    )


def gpus_here(gpus: int) -> list[str]:
    """Return this number of GPUs, as CUDA_VISIBLE_DEVICES names them. Raise `InputError` if fewer
    are visible."""
    visible = visible_gpus() or []
    if len(visible) < gpus:
        raise InputError(
            f"--gpus {gpus}: {len(visible)} visible here (CUDA_VISIBLE_DEVICES, or `nvidia-smi -L`); choose fewer, or "
            "rehearse with --device cpu"
        )
    return visible[:gpus]


def facts(device: str) -> dict[str, str]:
    """Return what is here: the processor or GPU and its driver, and the versions of what runs."""
    here = {"host": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}"}
    if device == "cuda":
        query = [
            "nvidia-smi",
            "--query-gpu=name,memory.total,driver_version",
            "--format=csv,noheader",
        ]
        # Each kind once: a node has many of one.
        here["GPU, memory, driver"] = "; ".join(
            dict.fromkeys(
                subprocess.run(query, capture_output=True, text=True, timeout=30)
                .stdout.strip()
                .splitlines()
            )
        )
    here |= {"python": platform.python_version(), "vllm": vllm_version()}
    for name in ("torch", "triton", "transformers", "numpy", "numba", "simrl"):
        with suppress(PackageNotFoundError):
            here[name] = version(name)
    return here


def _source(prepared: Prepared) -> str:
    """Return what a prediction's step times rest on: the profile, and the preset of the engine."""
    preset = prepared.scenario.engine.preset
    return prepared.profile.metadata.source + (
        f", and the host's time of {preset}" if preset else ""
    )


def simulated(prepared: Prepared) -> tuple[Result, dict[str, int]]:
    """Simulate, and return the result and what all its engines counted."""
    schedule = Schedule(prepared, simpy.Environment(), simulated_workers)
    schedule.run()
    result = schedule.result()
    totals = [
        engine.totals
        for worker in schedule.workers
        for engine in cast(SimulatedWorker, worker).engines
    ]
    return result, {name: sum(each[name] for each in totals) for name in COUNTS}


def _summary(result: Result) -> dict[str, Any]:
    view = agree(result, result).figures
    return {
        "rollout_s": view.rollout_s.measured,
        "wall_s": view.wall_s.measured,
        "acceptance": view.acceptance.measured,
        "accept_length": view.accept_length.measured,
    }


def _engine_counts(result: Result) -> dict[str, int] | None:
    """Return what all real engines counted, by the simulator's names."""
    facts = result.metadata["replay"]
    each = facts.get("engines")
    if not each or not all("passes" in engine for engine in each) or facts["happened"]:
        return None  # an engine that was lost has counted a part
    return {ours: sum(engine[name] for engine in each) for ours, name in COUNTS.items()}


def _grid(tables: Tables) -> list[dict[str, float]]:
    """Return the predicted seconds of decode steps and prompts over a fixed grid."""
    decodes = [Shape(n, 0, kv) for n in (1, 4, 16, 64, 128) for kv in (64.0, 512.0, 2048.0)]
    prompts = [Shape(prompts=1, chunk_tokens=tokens) for tokens in (16, 128, 512, 2048)]
    verifying = [Shape(n, DRAFT_TOKENS, 64.0) for n in (1, 16, 128)]
    return [
        {**shape._asdict(), "s": predicted_s(tables, shape)}
        for shape in (*decodes, *prompts, *verifying)
    ]


@contextmanager
def _until(seconds: float) -> Iterator[None]:
    """End what runs within with `StoppedError` after some seconds."""

    def stop(*_: Any) -> None:
        raise TimeUpError("the time was up")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
