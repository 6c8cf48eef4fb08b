"""Predicted against measured, on this machine: profiles are measured, schedules simulated with them, and run on real vLLM.

    python experiments/validate_replay.py [--seeds 0,1,2] [--repeats 3] [--output FOLDER] [--page replay.md] [--pin 3] [--json]

The model is made here, random; lengths are long-tailed draws; one scenario is simulated and replayed. Nothing is fitted to a
replay: a profile is measured before, by `simrl measure`, with as many engines running as the replay has, for minutes, as the
speed of a shared host varies by half within seconds. Each case is replayed three times; the largest difference between two of
these stands beside its errors. Each replay is then predicted again with the seconds of its own passes, so that what is left of
an error is the schedule's (`simrl_replay.measured_passes`).

Errors are of the rollout alone: the clock stands while no worker rolls out, as training is held for the predicted time. Takes
about 45 minutes on two cores that do nothing else, 15 with `--profile-s 60` and the cases of the page. With `--only`, a page
keeps its other rows, each with its date.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import combinations, product
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import typer
import yaml
from rich.console import Console
from rich.table import Table

from experiments.replay_page import (
    COUNTED,
    TIMES,
    Row,
    counted,
    file_name,
    page_of,
    picture_name,
    times,
)
from experiments.shared import measure_engine
from simrl.analysis.agreement import agree, repeat_spread
from simrl.result.result import Result
from simrl.scenario.load import load_scenarios
from simrl.scenario.model import Scenario
from simrl.show.figures.agree import agreement_figure
from simrl.show.style import save
from simrl.simulate.prepare import Prepared, prepare
from simrl.simulate.run import simulate_prepared
from simrl.trace.trace import Trace, TraceMetadata, write_trace
from simrl_replay.link import ProcessLink
from simrl_replay.measured_passes import split_error
from simrl_replay.random_model import make_model, nudge
from simrl_replay.replayer import (
    Measured,
    ReplayConfig,
    ReplayEngines,
    engine_settings,
    process_fleet,
    replay,
)
from simrl_replay.sized import with_measured_loads
from simrl_replay.speculative import forced as with_an_oracle, replayed_form

LAYERS, HIDDEN, VOCAB = 4, 256, 1024
PROMPT_TOKENS = (20, 60)
MEDIAN_TOKENS, SIGMA, CAP_TOKENS = 120, 0.8, 400
GPUS, DRAFT_TOKENS = 16, 16
PROFILE_REPEATS, PROFILE_S = 9, 200  # of each point; seconds of measuring
ENGINE = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 256,
    "block_size": 32,
    "kv_cache_tokens": 51200,
}
TRAINING = {"reward_s": 0.05, "publish_s": 0.1, "load_overhead_s": 0.0, "switch_s": 0.1}
VERSIONS = 5
Lengths = Callable[[np.random.Generator], list[list[list[int]]]]  # by step, prompt, sample


class Case(NamedTuple):
    """A system on a number of workers, over a trace made by `lengths`; with `epochs`, every step repeats the prompts."""

    name: str
    system: dict[str, Any]
    workers: int
    lengths: Lengths
    epochs: bool = False
    forced: bool = False  # greedy, and accepted as the scenario says
    tp: int = 1  # processes of an engine

    @property
    def drafts(self) -> bool:
        return "speculation" in self.system

    @property
    def engines(self) -> tuple[int, int, bool, bool]:
        """Return the key of the cases that share engines and a profile."""
        return self.workers, self.tp, self.drafts, self.forced

    @property
    def plain(self) -> Case:
        system = {name: value for name, value in self.system.items() if name != "speculation"}
        return self._replace(system=system, name=f"{self.name}, recorded")

    def config(self, config: ReplayConfig) -> ReplayConfig:
        return (
            replace(config, temperature=0.0, forced_acceptance=self.drafts)
            if self.forced
            else config
        )

    def prepare(self, scenario: Scenario) -> Prepared:
        prepared, _ = replayed_form(prepare(scenario))
        return with_an_oracle(prepared) if self.forced and self.drafts else prepared


def long_tailed(steps: int, prompts: int, group: int) -> Lengths:
    """Return lognormal lengths; responses of a prompt are correlated."""

    def draw(rng: np.random.Generator) -> list[list[list[int]]]:
        of_prompt = rng.normal(0.0, 0.6, (1, prompts, 1))
        own = rng.normal(0.0, (SIGMA**2 - 0.6**2) ** 0.5, (steps, prompts, group))
        lengths = np.exp(np.log(MEDIAN_TOKENS) + of_prompt + own)
        return np.clip(np.rint(lengths), 4, CAP_TOKENS).astype(int).tolist()

    return draw


def with_an_outlier(steps: int, prompts: int, group: int) -> Lengths:
    """Return long-tailed lengths; a response of a short prompt reaches the cap in the second epoch: HistoPipe moves it."""

    def draw(rng: np.random.Generator) -> list[list[list[int]]]:
        lengths = long_tailed(steps, prompts, group)(rng)
        middle = int(np.argsort([np.median(responses) for responses in lengths[0]])[prompts // 4])
        lengths[1][middle][0] = CAP_TOKENS
        return lengths

    return draw


# The gate stays open: a gate that is mostly shut drafts so little that acceptance is a matter of chance.
HISTORY = {
    "name": "histospec",
    "gate": "open",
    "window": {"kind": "aimd", "most_tokens": DRAFT_TOKENS},
}
SIBLINGS = {"name": "siblings", "gate": {"threshold": 16}}
ORACLE = {"name": "draft_model", "window": {"kind": "fixed", "tokens": 4}}
# One or two rollout workers, and a trainer on many more of these slow cores, so that nobody waits for it for long.
CASES = (
    Case("one worker, 64 requests", {"name": "split"}, 1, long_tailed(1, 16, 4)),
    Case(
        "one worker, HistoSpec",
        {"name": "split", "speculation": HISTORY},
        1,
        long_tailed(2, 16, 4),
        True,
    ),
    Case(
        "one worker, forced acceptance",
        {"name": "split", "speculation": ORACLE},
        1,
        long_tailed(1, 16, 4),
        forced=True,
    ),
    Case("two workers, one-step-off", {"name": "one_step_off"}, 2, long_tailed(3, 8, 4)),
    Case(
        "two workers, HistoPipe",
        {"name": "rhymerl", "alpha": 0.5},
        2,
        with_an_outlier(3, 8, 4),
        True,
    ),
    Case("two workers, AReaL", {"name": "areal", "eta": 2}, 2, long_tailed(3, 8, 4)),
    Case("two workers, Seer", {"name": "seer", "chunk_tokens": 100}, 2, long_tailed(2, 8, 4)),
    Case(
        "one worker, TLT-Base", {"name": "split", "speculation": SIBLINGS}, 1, long_tailed(1, 16, 4)
    ),
    Case(
        "one worker of two processes, RhymeRL",
        {"name": "rhymerl", "speculation": HISTORY},
        1,
        long_tailed(2, 8, 4),
        True,
        tp=2,
    ),
)


def trace_of(case: Case, seed: int) -> Trace:
    rng = np.random.default_rng([seed, *case.name.encode()])
    lengths = case.lengths(rng)
    prompt_tokens = rng.integers(*PROMPT_TOKENS, size=sum(len(step) for step in lengths)).tolist()
    prompt_tokens[0] = PROMPT_TOKENS[1]  # engines are shared: all have one longest sample
    rows = [
        (step, step if case.epochs else 0, prompt, sample, prompt_tokens[prompt], tokens)
        for step, prompts in enumerate(lengths)
        for prompt, responses in enumerate(prompts, 0 if case.epochs else step * len(prompts))
        for sample, tokens in enumerate(responses)
    ]
    names = ("step", "epoch", "prompt_id", "sample", "prompt_tokens", "response_tokens")
    metadata = TraceMetadata(
        name=f"{case.name}, seed {seed}",
        kind="synthetic",
        source=f"lognormal lengths, median {MEDIAN_TOKENS}, σ {SIGMA}, capped",
        tokenizer="none: lengths alone",
        cap_tokens=CAP_TOKENS,
    )
    return Trace.from_columns(
        dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)), metadata
    )


class Bench:
    """The folder of the model's versions, the profiles, traces and scenarios."""

    def __init__(self, folder: Path, say: Console, profile_s: float) -> None:
        self.folder, self.say, self.profile_s = folder, say, profile_s
        self.weights = [folder / f"model-v{i}" for i in range(VERSIONS)]
        if not self.weights[-1].exists():
            make_model(self.weights[0], LAYERS, HIDDEN, 8, 4, VOCAB)
            for i in range(1, VERSIONS):
                nudge(self.weights[i - 1], self.weights[i], seed=i)
        self.config = ReplayConfig(self.weights[0], tuple(self.weights), dtype="float32")

    def profile(self, case: Case, engines_draft: bool = False) -> Path:
        """Return the profile of the case, measured here if it is missing; `engines_draft` if only the engines can draft."""
        drafts = case.drafts or engines_draft
        name = f"profile-{case.workers}-tp{case.tp}{'-drafts' if drafts else ''}{'-greedy' if case.forced else ''}.parquet"
        return measure_engine(
            self.weights[0],
            self.folder / name,
            ENGINE,
            tp=case.tp,
            neighbours=case.workers - 1,
            max_model_len=PROMPT_TOKENS[1] + CAP_TOKENS + 2 * DRAFT_TOKENS + 1,
            draft_tokens=DRAFT_TOKENS if drafts else 0,
            temperature=0 if case.forced else 1,
            repeats=PROFILE_REPEATS,
            budget=self.profile_s,
        )

    def prepared(
        self,
        case: Case,
        seed: int,
        trace: Trace,
        engines_draft: bool = False,
        profile: dict[str, Any] | None = None,
    ) -> Prepared:
        """Return a case as simulated and replayed; `engines_draft` if only the engines can draft."""
        path = self.folder / f"{file_name(case.name)}-{seed}"
        write_trace(trace, path.with_suffix(".parquet"))
        colocated = case.system["name"] == "seer"
        share = {} if colocated else {"rollout_share": case.workers * case.tp / GPUS}
        scenario = {
            "name": "validation",
            "seed": seed,
            "steps": len(trace.step_slices),
            "model": str(self.weights[0]),
            "cluster": {"gpu": "cpu", "gpus": case.workers if colocated else GPUS, "tp": case.tp},
            "workload": {"trace": str(path.with_suffix(".parquet")), "synthetic": None},
            "profile": profile
            or {"path": str(self.profile(case, engines_draft)), "roofline": None},
            "engine": ENGINE,
            "training": TRAINING,
            "systems": [{"speculation": "none", **case.system, **share}],
        }
        path.with_suffix(".yaml").write_text(yaml.safe_dump(scenario))
        (loaded,) = load_scenarios(path.with_suffix(".yaml"))
        return case.prepare(
            with_measured_loads(loaded, loaded.profile.path) if loaded.profile.path else loaded
        )

    def fleet(self, case: Case, trace: Trace) -> ReplayEngines:
        """Start the engines of a case, and of all like it. They are idle while the profile is measured."""
        self.say.print(f"starting {case.workers} engine(s) …")
        prepared = self.prepared(case, 0, trace, profile={"roofline": {}, "path": None})
        config = case.config(self.config)
        return process_fleet(case.workers, engine_settings(prepared, config), config, self.folder)

    def keep(self, case: Case, seed: int, predicted: Result, measured: Sequence[Measured]) -> None:
        """Keep the results, and the passes of each engine of each replay."""
        kept = self.folder / f"{file_name(case.name)}-{seed}"
        results = {f"measured-{i}": each.result for i, each in enumerate(measured)}
        for name, result in {"predicted": predicted, **results}.items():
            (kept / name).mkdir(parents=True, exist_ok=True)
            result.write(kept / name)
        for i, each in enumerate(measured):
            for engine, passes in enumerate(each.passes):
                np.save(kept / f"measured-{i}" / f"passes-{engine}.npy", passes)

    def recorded(self, case: Case, seed: int, fleet: ReplayEngines) -> Trace:
        """Return the trace of a case that drafts, with tokens, generated once without drafting at the case's temperature: the
        prediction counts drafts on them."""
        recording = self.prepared(case.plain, seed, trace_of(case, seed), True)
        trace = _replayed(recording, fleet, case.plain.config(self.config)).trace
        assert trace is not None
        return trace


def run(
    bench: Bench, cases: Sequence[Case], seeds: Sequence[int], repeats: int, pictures: Path
) -> Iterator[Row]:
    """Run the cases that share engines one after the other, seeds inside, so that an engine starts once."""
    for engines in dict.fromkeys(case.engines for case in cases):
        same = [case for case in cases if case.engines == engines]
        with bench.fleet(same[0], trace_of(same[0], seeds[0])) as fleet:
            for case, seed in product(same, seeds):
                trace = bench.recorded(case, seed, fleet) if case.drafts else trace_of(case, seed)
                prepared, load = bench.prepared(case, seed, trace), os.getloadavg()[0]
                predicted = simulate_prepared(prepared)
                measured = [
                    _replayed(prepared, fleet, case.config(bench.config)) for _ in range(repeats)
                ]
                results = [each.result for each in measured]
                bench.keep(case, seed, predicted, measured)
                if seed == seeds[0]:
                    figure = agreement_figure(predicted, results[0], agree(predicted, results[0]))
                    save(figure, pictures / picture_name(case.name))
                others = [len(agree(*pair).real_differences) for pair in combinations(results, 2)]
                spread = repeat_spread(results)
                yield Row(
                    case=case.name,
                    seed=seed,
                    workers=case.workers,
                    date=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
                    load=(load + os.getloadavg()[0]) / 2,
                    replays=[
                        _beside(bench, case, seed, prepared, predicted, each) for each in measured
                    ],
                    repeats=asdict(spread.largest) if spread else {},
                    others_of_repeats=max(others, default=0),
                    migrations=_migrations(predicted),
                    acceptance=_acceptance(predicted, results),
                    profile_s=bench.profile_s,
                )


def _beside(
    bench: Bench, case: Case, seed: int, prepared: Prepared, predicted: Result, measured: Measured
) -> dict[str, Any]:
    """Return a replay beside its prediction. Live drafts are counted again on the responses that the
    replay generated."""
    agreement, generated = agree(predicted, measured.result), None
    if case.drafts and not case.forced:
        assert measured.trace is not None
        generated = bench.prepared(case, seed, measured.trace)
    split = split_error(prepared, measured.result, measured.passes, generated)
    return {
        "rollout_s": agreement.figures.rollout_s.measured,
        "errors": asdict(agreement.errors),
        "near_ties": len(agreement.differences) - len(agreement.real_differences),
        "real_differences": len(agreement.real_differences),
        "decisions": [d.text for d in agreement.real_differences[:2]],
        "given": split.as_json(),
    }


def _acceptance(predicted: Result, measured: Sequence[Result]) -> list[float] | None:
    rates = [agree(predicted, each).figures.acceptance for each in measured]
    pairs = [(r.predicted, r.measured) for r in rates]
    if any(None in pair for pair in pairs):
        return None
    return [mean(cast(float, pair[i]) for pair in pairs) for i in (0, 1)]


def _replayed(prepared: Prepared, fleet: ReplayEngines, config: ReplayConfig) -> Measured:
    measured = replay(prepared, fleet, config)
    if measured.stopped is not None:
        raise measured.stopped
    return measured


def _migrations(result: Result) -> int:
    segments = result.segments.to_pandas()
    return int((segments.groupby("uid")["worker"].nunique() > 1).sum())


def noise(bench: Bench, case: Case, repeats: int) -> list[dict[str, Any]]:
    """Replay a case in turns with the engine on one core and free to move, and return both spreads."""
    trace, every = trace_of(case, 0), os.sched_getaffinity(0)
    prepared, runs = bench.prepared(case, 0, trace), []
    with bench.fleet(case, trace) as fleet:
        for number in range(2 * repeats):
            cores = {max(every)} if number % 2 else every
            for link in fleet.links:
                for task in Path(f"/proc/{cast(ProcessLink, link).process.pid}/task").iterdir():
                    os.sched_setaffinity(int(task.name), cores)
            measured = _replayed(prepared, fleet, case.config(bench.config))
            split = split_error(prepared, measured.result, measured.passes)
            runs.append((number % 2, measured.result, split))
    rows = []
    for pinned, name in enumerate(("free to move", "on one core")):
        of_this = [(result, split) for at, result, split in runs if at == pinned]
        spread = repeat_spread([result for result, _ in of_this])
        assert spread is not None
        rows.append(
            {
                "engine": name,
                "replays": len(of_this),
                "makespans apart": f"{spread.largest.makespan_err:.1%}",
                "samples' ends apart": f"{spread.largest.sample_mape:.1%}",
                "schedule's part of the error, largest": f"{max(abs(s.schedule_err or 0.0) for _, s in of_this):.1%}",
                "had a core": f"{min(s.core_share for _, s in of_this):.0%} to {max(s.core_share for _, s in of_this):.0%}",
                "passes as predicted": f"{sum(s.equal_passes for _, s in of_this)} of {len(of_this)}",
                "load": f"{os.getloadavg()[1]:.1f}",
            }
        )
    return rows


def main(
    output: Annotated[
        Path | None, typer.Option(help="a folder to keep everything in, and to go on from")
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            help="a page (.md) to write, with its rows (.json) and pictures beside it; it keeps rows that are not measured now"
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(help="separated by commas")] = "0,1,2",
    repeats: Annotated[int, typer.Option(min=1, help="replays of each case")] = 3,
    only: Annotated[
        str,
        typer.Option(help="a part of the names of the cases to run; 'none' writes the page anew"),
    ] = "",
    pin: Annotated[
        int, typer.Option(min=0, help="replays with an engine on one core, and as many without")
    ] = 0,
    profile_s: Annotated[
        float, typer.Option(min=1.0, help="seconds in which a profile is measured")
    ] = PROFILE_S,
    as_json: Annotated[
        bool, typer.Option("--json", help="print JSON on stdout instead of the table")
    ] = False,
) -> None:
    say = Console(stderr=True, highlight=False)
    cases = [case for case in CASES if only in case.name]
    if not cases and only != "none":
        raise typer.BadParameter(
            f"--only {only!r} is no part of {', '.join(repr(case.name) for case in CASES)}"
        )
    if not all(seed.strip().isdigit() for seed in seeds.split(",")):
        raise typer.BadParameter(f"--seeds {seeds!r}: numbers, separated by commas")
    numbers = [int(seed) for seed in seeds.split(",")]
    stored = page.with_suffix(".json") if page else None
    kept: dict[str, Any] = {"rows": [], "noise": []}
    if stored is not None and stored.exists():
        kept = json.loads(stored.read_text(encoding="utf-8"))
    rows = {(row["case"], row["seed"]): Row(**row) for row in kept["rows"]}
    order = [case.name for case in CASES]

    def write() -> None:
        every = sorted(rows.values(), key=lambda row: (order.index(row.case), row.seed))
        if page is not None and stored is not None:
            data = {"rows": [asdict(row) for row in every], "noise": kept["noise"]}
            stored.write_text(json.dumps(data) + "\n", encoding="utf-8")
            page.write_text(page_of(every, kept["noise"]), encoding="utf-8")

    with tempfile.TemporaryDirectory() as temporary:
        folder = output or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        measured = []
        bench = Bench(folder, say, profile_s) if cases or pin else None
        pictures = page.parent if page else folder
        for row in run(bench, cases, numbers, repeats, pictures) if bench else ():
            rows[row.case, row.seed] = row
            measured.append(row)
            shown = (*zip(TIMES, times(row), strict=True), *zip(COUNTED, counted(row), strict=True))
            say.print("  ".join(f"{name} {cell}" for name, cell in shown if cell))
            write()
        if bench and pin:
            kept["noise"] = noise(bench, CASES[0], pin)
    write()
    if as_json:
        print(json.dumps([asdict(row) for row in measured], indent=1))
    else:
        for columns, cells in ((TIMES, times), (COUNTED, counted)):
            table = Table(*columns)
            for row in measured:
                table.add_row(*cells(row))
            Console(width=200).print(table)
    missed = [
        (row.case, row.seed, c.name) for row in measured for c in row.checks if not c.holds_given
    ]
    say.print(
        f"{len(measured)} rows; bars that do not hold given the measured speed: {missed or 'none'}"
    )


if __name__ == "__main__":
    typer.run(main)
