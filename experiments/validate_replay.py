"""Predicted against measured, on this machine: profiles are measured, schedules simulated with them, and run on real vLLM.

    python experiments/validate_replay.py [--seeds 0,1,2] [--repeats 3] [--output FOLDER] [--page replay.md] [--json]

The model is made here, random; lengths are long-tailed draws; one scenario is simulated and replayed. Nothing is fitted to a
replay: a profile is measured before, by `simrl measure`, with as many engines running as the replay has, for minutes, as the
speed of a shared host varies by half within seconds. Each case is replayed three times; the largest difference between two of
these stands beside its errors.

Errors are of the rollout alone: the clock stands while no worker rolls out, as training is held for the predicted time. Takes
about 45 minutes on two cores that do nothing else.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from itertools import combinations, product
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import typer
import yaml
from rich.console import Console
from rich.table import Table

from experiments.shared import markdown, markdown_of, measure_engine
from simrl.analysis.agreement import Errors, agree, repeat_spread
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
BARS = {1: 0.05, 2: 0.10}  # of the makespan, by workers
SAMPLE_BAR, ACCEPTANCE_BAR = 0.08, 0.03

PAGE_TOP = """# Predicted against measured, on two CPU cores

`python experiments/validate_replay.py --page experiments/replay.md` wrote this page (its rows are in `replay.json`). Profiles were
measured on the machine (`simrl measure`), the schedules simulated with them, and then run by real vLLM engines with a random model of
4 layers (float32, one thread an engine). Nothing was fitted to a replay. Training and rewards take the predicted time; errors are
scored on the rollout clock, which stops while no worker rolls out. An error is the mean absolute error of the replays, *worst* the
error of the worst one, *repeats* the largest difference between two replays of a schedule. Other programs share these cores, and
other machines share the host: its speed varies by half within seconds. A *near-tie* is a decision that differs because two events, at
most two engine passes apart, changed places; other differing decisions are real, and listed.

**There are no GPU figures here: no GPU was available.** The code path for GPUs (CUDA, bf16, dummy weights, synthetic
acceptance) was not run; everything on this page is from a CPU.
"""
# Cases in which a decision depends on when a response or an update ends: their passes may differ.
TIMED = ("two workers, HistoPipe", "two workers, AReaL", "two workers, Seer")

Lengths = Callable[[np.random.Generator], list[list[list[int]]]]  # by step, prompt, sample

DRAWN = "what each worker did in time, predicted above measured; below, when each sample finished, predicted over measured"


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
        path = self.folder / f"{_file_name(case.name)}-{seed}"
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
        (found,) = load_scenarios(path.with_suffix(".yaml"))
        return case.prepare(
            with_measured_loads(found, found.profile.path) if found.profile.path else found
        )

    def fleet(self, case: Case, trace: Trace) -> ReplayEngines:
        """Start the engines of a case, and of all like it. They are idle while the profile is measured."""
        self.say.print(f"starting {case.workers} engine(s) …")
        prepared = self.prepared(case, 0, trace, profile={"roofline": {}, "path": None})
        config = case.config(self.config)
        return process_fleet(case.workers, engine_settings(prepared, config), config, self.folder)

    def keep(self, case: Case, seed: int, predicted: Result, measured: Sequence[Result]) -> None:
        for name, result in (
            ("predicted", predicted),
            *((f"measured-{i}", m) for i, m in enumerate(measured)),
        ):
            (folder := self.folder / f"{_file_name(case.name)}-{seed}" / name).mkdir(
                parents=True, exist_ok=True
            )
            result.write(folder)

    def recorded(self, case: Case, seed: int, fleet: ReplayEngines) -> Trace:
        """Return the trace of a case that drafts, with tokens, generated once without drafting at the case's temperature: the
        prediction counts drafts on them."""
        recording = self.prepared(case.plain, seed, trace_of(case, seed), True)
        trace = _replayed(recording, fleet, case.plain.config(self.config)).trace
        assert trace is not None
        return trace


@dataclass(frozen=True)
class Check:
    """A bar of a case: the figure as predicted, the largest of two repeats, and predicted again."""

    name: str
    figure: float
    bar: float
    repeats: float
    given: float

    def holds(self, widened: bool = False) -> bool:
        return self.figure <= max(self.bar, self.repeats if widened else 0.0)

    @property
    def holds_given(self) -> bool:
        return self.given <= self.bar

    @property
    def text(self) -> list[str]:
        number = "{:.0f}" if self.name == "decisions" else "{:.1%}"
        if self.name == "acceptance":
            number = "{:.3f}"
        return [number.format(each) for each in (self.figure, self.bar, self.repeats, self.given)]


@dataclass(frozen=True)
class Row:
    """A case with a seed: its replays beside what was predicted, as the page and its JSON have it.

    `replays` have the errors as predicted, the decisions that differ, and the parts of the error
    (`Split.as_json`); `repeats` the largest errors of two replays. `load` is the machine's load, as a
    mean of the minute before and after.
    """

    case: str
    seed: int
    workers: int
    date: str
    load: float
    replays: list[dict[str, Any]]
    repeats: dict[str, float | None]
    others_of_repeats: int  # decisions, of two repeats, beside near-ties
    migrations: int
    acceptance: list[float] | None  # predicted, live

    def errors(self, name: str, given: bool = False) -> list[float]:
        every = [(each["given"] if given else each)["errors"][name] for each in self.replays]
        return [error for error in every if error is not None]

    def mean(self, name: str, given: bool = False) -> float | None:
        """Return the mean absolute error; of acceptance, whose replays are draws, the absolute mean."""
        if not (errors := self.errors(name, given)):
            return None
        return abs(mean(errors)) if name == "acceptance_err" else mean(map(abs, errors))

    def real(self, given: bool = False) -> list[int]:
        return [(each["given"] if given else each)["real_differences"] for each in self.replays]

    def of_host(self, name: str) -> float:
        return mean(each["given"][name] for each in self.replays)

    @property
    def checks(self) -> list[Check]:
        checks = []
        for name, (error, bar) in {
            "makespan": ("makespan_err", BARS[self.workers]),
            "samples": ("sample_mape", SAMPLE_BAR),
            "acceptance": ("acceptance_err", ACCEPTANCE_BAR),
        }.items():
            figure, given = self.mean(error), self.mean(error, given=True)
            if figure is not None and given is not None:
                checks.append(Check(name, figure, bar, self.repeats[error] or 0.0, given))
        most, most_given = max(self.real()), max(self.real(given=True))
        return [*checks, Check("decisions", most, 0, self.others_of_repeats, most_given)]

    @property
    def passes(self) -> tuple[int, int]:
        """Passes up to the end of the last trained sample, of all replays: predicted, measured."""
        engines = [engine for each in self.replays for engine in each["given"]["engines"]]
        predicted, measured = (
            sum(e[of]["passes"] for e in engines) for of in ("predicted", "measured")
        )
        return predicted, measured

    def equal_passes(self, parted: str = "parted") -> list[bool]:
        """Return for each replay whether its passes have the predicted work, one by one."""
        return [all(e[parted] is None for e in each["given"]["engines"]) for each in self.replays]

    def cause(self, check: Check) -> str:
        """Return why a check fails, by what is left of it given the seconds of the passes."""
        if not check.holds_given:
            return "open: what is left is simrl's own"
        if check.name == "acceptance":
            return "sampling: on the responses that the replay generated, it is as counted"
        if check.name == "decisions":
            return (
                "times: with the measured seconds of each pass, no decision differs but near-ties"
            )
        slower = 1 / (1 + self.of_host("passes_err")) - 1
        return (
            f"the host: its passes took {slower:+.0%} of their profiled seconds, and had a core for "
            f"{self.of_host('core_share'):.0%} of their time"
        )


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
                bench.keep(case, seed, predicted, results)
                if seed == seeds[0]:
                    figure = agreement_figure(predicted, results[0], agree(predicted, results[0]))
                    save(figure, pictures / _picture(case.name))
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
                    repeats=asdict(spread.largest) if spread else dict.fromkeys(fields_of_errors()),
                    others_of_repeats=max(others, default=0),
                    migrations=_migrations(predicted),
                    acceptance=_acceptance(predicted, results),
                )


def fields_of_errors() -> list[str]:
    return [field.name for field in fields(Errors)]


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
        mine = [(result, split) for at, result, split in runs if at == pinned]
        spread = repeat_spread([result for result, _ in mine])
        assert spread is not None
        rows.append(
            {
                "engine": name,
                "replays": len(mine),
                "makespans apart": f"{spread.largest.makespan_err:.1%}",
                "samples' ends apart": f"{spread.largest.sample_mape:.1%}",
                "schedule's part of the error, largest": f"{max(abs(s.schedule_err or 0.0) for _, s in mine):.1%}",
                "had a core": f"{min(s.core_share for _, s in mine):.0%} to {max(s.core_share for _, s in mine):.0%}",
                "passes as predicted": f"{sum(s.equal_passes for _, s in mine)} of {len(mine)}",
                "load": f"{os.getloadavg()[1]:.1f}",
            }
        )
    return rows


COLUMNS = (
    "case", "seed", "rollout, s", "load", "had a core", "passes, predicted / measured", "makespan error", "worst", "repeats",
    "given the speed", "samples' ends", "repeats", "given the speed", "acceptance, predicted / live", "near-ties", "real differences",
    "of repeats", "given the speed", "migrations predicted", "measured",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    """Return a row of the table, in the order of `COLUMNS`; "repeats" is the largest difference of two repeats."""

    def percent(value: float | None, sign: str = "") -> str:
        return "" if value is None else f"{value * 100:{sign}.1f} %"

    predicted, measured = row.passes
    return [
        row.case,
        str(row.seed),
        f"{mean(each['rollout_s'] for each in row.replays):.1f}",
        f"{row.load:.1f}",
        f"{row.of_host('core_share'):.0%}",
        f"{measured:,}, all equal" if all(row.equal_passes()) else f"{predicted:,} / {measured:,}",
        percent(row.mean("makespan_err")),
        percent(max(row.errors("makespan_err"), key=abs), "+"),
        percent(row.repeats["makespan_err"]),
        percent(row.mean("makespan_err", given=True)),
        percent(row.mean("sample_mape")),
        percent(row.repeats["sample_mape"]),
        percent(row.mean("sample_mape", given=True)),
        "" if row.acceptance is None else "{:.3f} / {:.3f}".format(*row.acceptance),
        ", ".join(str(each["near_ties"]) for each in row.replays),
        ", ".join(map(str, row.real())),
        str(row.others_of_repeats),
        ", ".join(map(str, row.real(given=True))),
        str(row.migrations),
        row.date,
    ]


def page_of(rows: Sequence[Row], noises: Sequence[dict[str, Any]]) -> str:
    """Return the page: how many checks hold, and why the others fail; the table; the noise; the pictures of the first seed."""
    failing = [(row, check) for row in rows for check in row.checks if not check.holds()]
    lines = [
        PAGE_TOP,
        f"Host: {platform.machine()}, {os.cpu_count()} cores. {_dates(rows)}",
        "",
        *_in_short(rows),
        "",
        "## Errors in their parts",
        "",
        *markdown(
            ("error, with its sign", "n", "median", "worst", "given the speed: median", "worst"),
            [_parts_of(rows, *each) for each in product((1, 2), ("makespan_err", "sample_mape"))],
        ),
        "",
        "## Checks that fail as they are, and why",
        "",
        *markdown(
            (
                "case",
                "seed",
                "check",
                "figure",
                "bar",
                "of two repeats",
                "given the speed",
                "cause",
            ),
            [
                [row.case, row.seed, check.name, *check.text, row.cause(check)]
                for row, check in failing
            ],
        ),
        "",
        "## Every case",
        "",
        *markdown(COLUMNS, list(map(cells, rows))),
        "",
    ]
    if noises:
        lines += ["## One engine on a core of its own", "", *markdown_of(noises), ""]
    lines += ["## Decisions that were taken otherwise", ""]
    for row in rows:
        # A difference has others in its wake, so the first ones of each replay say most.
        for title, every in (
            ("", [text for each in row.replays for text in each["decisions"]]),
            (
                ", given the speed too",
                [
                    t
                    for each in row.replays
                    for t in each["given"]["differences"]
                    if "near-tie" not in t
                ][:4],
            ),
        ):
            lines += [
                f"- {row.case}, seed {row.seed}{title}: {text}" for text in dict.fromkeys(every)
            ]
    lines += ["", "## Pictures, predicted above measured", ""]
    shown = dict.fromkeys(row.case for row in rows)
    return (
        "\n".join([*lines, *(f"![{case}: {DRAWN}]({_picture(case)})\n" for case in shown)]) + "\n"
    )


def _dates(rows: Sequence[Row]) -> str:
    dates, loads = sorted(row.date for row in rows), [row.load for row in rows]
    return (
        f"Measured from {dates[0]} to {dates[-1]} (UTC); the last column has each row's time. Other programs ran on these cores: "
        f"the machine's load was {min(loads):.1f} to {max(loads):.1f}, and the engines had a core for "
        f"{min(row.of_host('core_share') for row in rows):.0%} to {max(row.of_host('core_share') for row in rows):.0%} of their passes."
    )


def _in_short(rows: Sequence[Row]) -> list[str]:
    checks = [check for row in rows for check in row.checks]
    steady = [row for row in rows if row.case not in TIMED]
    equal = [ok for row in steady for ok in row.equal_passes("parted_given")]
    passes = sum(row.passes[1] for row in steady)
    live = [row.mean("acceptance_err") for row in rows if "forced" not in row.case]
    lines = [
        f"Of {len(checks)} checks (makespan within 5 % on one worker and 10 % on two, samples' ends within 8 %, acceptance "
        f"within 0.03, no decision otherwise but near-ties), **{sum(c.holds() for c in checks)} hold as they are**, "
        f"**{sum(c.holds(widened=True) for c in checks)}** where the largest difference of two replays of a schedule is the bar if "
        f"that is larger, and **{sum(c.holds_given for c in checks)} given the measured speed**: predicted again with the seconds "
        "that the replay's own passes and loads took, but with no decision of it. This third figure is conditional on the measured "
        "speed. It says what simrl's schedule and engine do, nothing about the profile.",
        "",
        f"Where no decision depends on time, an engine's passes must be the predicted ones, one by one: which requests decode, how "
        f"many tokens of prompts are computed. They are in {sum(equal)} of {len(equal)} replays ({passes:,} passes).",
    ]
    if errors := [error for error in live if error is not None]:
        lines += [
            "",
            f"Acceptance of live drafts: up to {max(errors):.3f} off; forced, it is what was simulated, draw by draw. Counted on the "
            "responses that the replay generated, up to "
            f"{max(row.mean('acceptance_err', given=True) or 0.0 for row in rows):.3f} off.",
        ]
    return lines


def _parts_of(rows: Sequence[Row], workers: int, error: str) -> list[str]:
    name = {"makespan_err": "makespan", "sample_mape": "samples' ends"}[error]
    chosen = [row for row in rows if row.workers == workers]
    sides = [
        [each for row in chosen for each in row.errors(error, given)] for given in (False, True)
    ]
    figures = [
        f"{of(side):+.1%}" for side in sides if side for of in (median, partial(max, key=abs))
    ]
    return [f"{name}, {('one worker', 'two workers')[workers - 1]}", str(len(sides[0])), *figures]


def _file_name(case: str) -> str:
    return case.replace(", ", "_").replace(" ", "_").replace("-", "_")


def _picture(case: str) -> str:
    return f"replay_{_file_name(case)}.png"


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
        bench = Bench(folder, say, profile_s)
        measured = []
        for row in run(bench, cases, numbers, repeats, page.parent if page else folder):
            rows[row.case, row.seed] = row
            measured.append(row)
            shown = zip(COLUMNS, cells(row), strict=True)
            say.print("  ".join(f"{name} {cell}" for name, cell in shown if cell))
            write()
        if pin:
            kept["noise"] = noise(bench, CASES[0], pin)
    write()
    if as_json:
        print(json.dumps([asdict(row) for row in measured], indent=1))
    else:
        table = Table(*COLUMNS, title="Predicted against measured")
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
