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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import combinations, product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
import yaml
from rich.console import Console
from rich.table import Table

from experiments.shared import markdown, measure_engine
from simrl.analysis.agreement import Agreement, Spread, agree, repeat_spread
from simrl.analysis.decisions import Discrepancy
from simrl.result.result import Result
from simrl.scenario.load import load_scenarios
from simrl.scenario.model import Scenario
from simrl.show.figures.agree import agreement_figure
from simrl.show.style import save
from simrl.simulate.prepare import Prepared, prepare
from simrl.simulate.run import simulate_prepared
from simrl.trace.trace import Trace, TraceMetadata, write_trace
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

`python experiments/validate_replay.py --page experiments/replay.md` wrote this page. Profiles were measured on the machine
(`simrl measure`), the schedules simulated with them, and then run by real vLLM engines with a random model of 4 layers
(float32, one thread an engine). Nothing was fitted to a replay. Training and rewards take the predicted time; errors are
scored on the rollout clock, which stops while no worker rolls out. An error is the mean absolute error of three replays,
*worst* the error of the worst one, *repeats* the largest difference between two replays of a schedule. Other machines share
this one's host: its speed varies by half within seconds. So a profile is measured for minutes, and where repeats differ by
more than a bar, their difference is the bar, as no prediction can be shown to be better; checks that pass only then
are counted separately. A *near-tie* is a decision that differs because two events, at most two engine passes apart, changed
places; other differing decisions are real, and listed.

**There are no GPU figures here: no GPU was available.** CUDA, bf16, dummy weights and synthetic acceptance were not run.
"""

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


@dataclass(frozen=True)
class Outcome:
    """A case with a seed: its prediction against each of the repeats, and the repeats against one another."""

    case: Case
    seed: int
    agreements: tuple[Agreement, ...]
    spread: Spread | None
    migrations: int
    other_between_repeats: int  # decisions, of two repeats, beside near-ties

    def errors(self, error: str) -> list[float]:
        return [
            value
            for agreement in self.agreements
            if (value := getattr(agreement.errors, error)) is not None
        ]

    def mean(self, error: str) -> float | None:
        """Return the mean absolute error over the repeats; for acceptance, whose repeats are draws, the absolute mean."""
        values = self.errors(error)
        if not values:
            return None
        return (
            abs(float(np.mean(values)))
            if error == "acceptance_err"
            else float(np.mean(np.abs(values)))
        )

    def noise(self, error: str) -> float | None:
        """Return the largest absolute difference of this error between two repeats."""
        return None if self.spread is None else getattr(self.spread.largest, error)

    def acceptance(self, run: str) -> float | None:
        values = [getattr(agreement.figures.acceptance, run) for agreement in self.agreements]
        return None if None in values else float(np.mean(values))

    def row(self) -> dict[str, Any]:
        return {
            "case": self.case.name,
            "seed": self.seed,
            "makespan_err": self.mean("makespan_err"),
            "makespan_errs": self.errors("makespan_err"),
            "sample_mape": self.mean("sample_mape"),
            "acceptance_predicted": self.acceptance("predicted"),
            "acceptance_live": self.acceptance("measured"),
            "latency_mape": self.mean("latency_mape"),
            "bubble_err": self.mean("bubble_err"),
            "makespan_spread": self.noise("makespan_err"),
            "sample_spread": self.noise("sample_mape"),
            "acceptance_spread": self.noise("acceptance_err"),
            "migrations": self.migrations,
            "near_ties": [len(a.differences) - len(a.real_differences) for a in self.agreements],
            "real_differences": [len(a.real_differences) for a in self.agreements],
            "real_differences_between_repeats": self.other_between_repeats,
            "near_tie_s": self.agreements[0].near_tie_s,
            "decisions": [[d.text for d in _real_first(a)[:8]] for a in self.agreements],
            "rollout_s": [a.figures.rollout_s.measured for a in self.agreements],
            "within": self.within(),
            "within_bars_as_they_are": self.within(widened=False),
        }

    def within(self, widened: bool = True) -> dict[str, bool]:
        """Return which bars hold; with `widened`, the spread of the repeats replaces a smaller bar."""
        checks = {
            "makespan": ("makespan_err", BARS[self.case.workers]),
            "sample": ("sample_mape", SAMPLE_BAR),
            "acceptance": ("acceptance_err", ACCEPTANCE_BAR),
        }
        held = {}
        for name, (error, bar) in checks.items():
            value = self.mean(error)
            if value is not None:
                held[name] = value <= max(bar, (self.noise(error) or 0.0) if widened else 0.0)
        most = self.other_between_repeats if widened else 0
        held["decisions"] = max(len(a.real_differences) for a in self.agreements) <= most
        return held


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

    def __init__(self, folder: Path, say: Console) -> None:
        self.folder = folder
        self.say = say
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
            budget=PROFILE_S,
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
        path = self.folder / f"{_file_name(case)}-{seed}"
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
            (folder := self.folder / f"{_file_name(case)}-{seed}" / name).mkdir(
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


def run(
    bench: Bench, cases: Sequence[Case], seeds: Sequence[int], repeats: int, pictures: Path
) -> list[Outcome]:
    """Run the cases that share engines one after the other, seeds inside, so that an engine starts once."""
    outcomes = []
    for engines in dict.fromkeys(case.engines for case in cases):
        same = [case for case in cases if case.engines == engines]
        with bench.fleet(same[0], trace_of(same[0], seeds[0])) as fleet:
            for case, seed in product(same, seeds):
                trace = bench.recorded(case, seed, fleet) if case.drafts else trace_of(case, seed)
                prepared = bench.prepared(case, seed, trace)
                predicted = simulate_prepared(prepared)
                measured = [
                    _replayed(prepared, fleet, case.config(bench.config)).result
                    for _ in range(repeats)
                ]
                bench.keep(case, seed, predicted, measured)
                agreements = tuple(agree(predicted, result) for result in measured)
                spread = repeat_spread(measured)
                others = (len(agree(*pair).real_differences) for pair in combinations(measured, 2))
                outcome = Outcome(
                    case, seed, agreements, spread, _migrations(predicted), max(others, default=0)
                )
                outcomes.append(outcome)
                shown = (
                    f"{name} {cell}"
                    for name, cell in zip(COLUMNS, cells(outcome), strict=True)
                    if cell
                )
                bench.say.print("  ".join(shown))
                if seed == seeds[0]:
                    save(
                        agreement_figure(predicted, measured[0], agreements[0]),
                        pictures / _picture(case),
                    )
    return outcomes


def _replayed(prepared: Prepared, fleet: ReplayEngines, config: ReplayConfig) -> Measured:
    measured = replay(prepared, fleet, config)
    if measured.stopped is not None:
        raise measured.stopped
    return measured


def _migrations(result: Result) -> int:
    segments = result.segments.to_pandas()
    return int((segments.groupby("uid")["worker"].nunique() > 1).sum())


COLUMNS = (
    "case", "seed", "rollout, s", "makespan error", "worst", "repeats", "sample MAPE", "worst", "repeats", "latency MAPE",
    "acceptance, predicted / live", "near-ties", "real differences", "of repeats", "migrations predicted",
)  # fmt: skip


def cells(outcome: Outcome) -> list[str]:
    """Return a row of the table, in the order of `COLUMNS`; "repeats" is the largest difference of two repeats."""

    def percent(value: float | None, sign: str = "") -> str:
        return "" if value is None else f"{value * 100:{sign}.1f} %"

    expected, live = outcome.acceptance("predicted"), outcome.acceptance("measured")
    row = outcome.row()
    return [
        outcome.case.name,
        str(outcome.seed),
        f"{np.mean(row['rollout_s']):.1f}",
        percent(outcome.mean("makespan_err")),
        percent(max(outcome.errors("makespan_err"), key=abs), "+"),
        percent(outcome.noise("makespan_err")),
        percent(outcome.mean("sample_mape")),
        percent(max(outcome.errors("sample_mape"))),
        percent(outcome.noise("sample_mape")),
        percent(outcome.mean("latency_mape")),
        "" if expected is None or live is None else f"{expected:.3f} / {live:.3f}",
        ", ".join(map(str, row["near_ties"])),
        ", ".join(map(str, row["real_differences"])),
        str(outcome.other_between_repeats),
        str(outcome.migrations),
    ]


def page_of(outcomes: Sequence[Outcome]) -> str:
    """Return the page: the table, its summary, and the pictures of the first seed."""
    held, as_is = (
        [ok for outcome in outcomes for ok in outcome.within(widened).values()]
        for widened in (True, False)
    )
    lines = [
        PAGE_TOP,
        f"Host: {platform.machine()}, {os.cpu_count()} cores; {datetime.now(UTC):%Y-%m-%d}.",
        "",
        *markdown(COLUMNS, list(map(cells, outcomes))),
        "",
        f"Of {len(held)} checks (makespan within 5 % on one worker and 10 % on two, completions within 8 %, acceptance "
        f"within 0.03, no decision otherwise but near-ties), {sum(as_is)} hold as they are, and {sum(held)} where the repeats' "
        "own spread, and as many real differences as two repeats have, are the bar if that is larger.",
        "",
        *_in_short(outcomes),
        "",
    ]
    for outcome in outcomes:
        if missed := [name for name, ok in outcome.within().items() if not ok]:
            lines.append(
                f"- Beyond the repeats' spread, too: {outcome.case.name}, seed {outcome.seed}: {', '.join(missed)}."
            )
    lines += ["", "## Decisions that were taken otherwise", ""]
    for outcome in outcomes:
        # A difference has others in its wake, so the first ones of each repeat say most.
        first = [d.text for agreement in outcome.agreements for d in _real_first(agreement)[:2]]
        lines += [
            f"- {outcome.case.name}, seed {outcome.seed}: {text}" for text in dict.fromkeys(first)
        ]
    lines += ["", "## Pictures, predicted above measured", ""]
    shown = [outcome.case for outcome in outcomes if outcome.seed == outcomes[0].seed]
    return (
        "\n".join([*lines, *(f"![{case.name}: {DRAWN}]({_picture(case)})\n" for case in shown)])
        + "\n"
    )


def _real_first(agreement: Agreement) -> list[Discrepancy]:
    return sorted(agreement.differences, key=lambda d: d.near_tie_ms is not None)


def _in_short(outcomes: Sequence[Outcome]) -> list[str]:
    lines = []
    for workers, name in ((1, "one worker"), (2, "two workers")):
        if own := [outcome for outcome in outcomes if outcome.case.workers == workers]:
            mean = max(outcome.mean("makespan_err") or 0.0 for outcome in own)
            worst = max(abs(error) for outcome in own for error in outcome.errors("makespan_err"))
            sample = max(outcome.mean("sample_mape") or 0.0 for outcome in own)
            apart = max(outcome.noise("makespan_err") or 0.0 for outcome in own)
            lines.append(
                f"On {name}, makespans are up to {mean:.1%} off (a single replay up to {worst:.1%}, two replays of one "
                f"schedule up to {apart:.1%} from each other), completions up to {sample:.1%}."
            )
    live = [outcome.mean("acceptance_err") for outcome in outcomes if not outcome.case.forced]
    if found := [error for error in live if error is not None]:
        lines.append(
            f"Acceptance of live drafts: up to {max(found):.3f} off; forced, it is what was simulated, draw by draw."
        )
    return lines


def _file_name(case: Case) -> str:
    return case.name.replace(", ", "_").replace(" ", "_").replace("-", "_")


def _picture(case: Case) -> str:
    return f"replay_{_file_name(case)}.png"


def main(
    output: Annotated[
        Path | None, typer.Option(help="a folder to keep everything in, and to go on from")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="a page (.md) to write, with the pictures beside it")
    ] = None,
    seeds: Annotated[str, typer.Option(help="separated by commas")] = "0,1,2",
    repeats: Annotated[int, typer.Option(min=1, help="replays of each case")] = 3,
    only: Annotated[str, typer.Option(help="a part of the names of the cases to run")] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="print JSON on stdout instead of the table")
    ] = False,
) -> None:
    say = Console(stderr=True, highlight=False)
    cases = [case for case in CASES if only in case.name]
    if not cases:
        raise typer.BadParameter(
            f"--only {only!r} is no part of {', '.join(repr(case.name) for case in CASES)}"
        )
    if not all(seed.strip().isdigit() for seed in seeds.split(",")):
        raise typer.BadParameter(f"--seeds {seeds!r}: numbers, separated by commas")
    numbers = [int(seed) for seed in seeds.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = output or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        pictures = page.parent if page else folder
        outcomes = run(Bench(folder, say), cases, numbers, repeats, pictures)
    rows = [outcome.row() for outcome in outcomes]
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        table = Table(*COLUMNS, title="Predicted against measured")
        for outcome in outcomes:
            table.add_row(*cells(outcome))
        Console(width=200).print(table)
    if page is not None:
        page.write_text(page_of(outcomes), encoding="utf-8")
    missed = [
        (r["case"], r["seed"], name) for r in rows for name, held in r["within"].items() if not held
    ]
    say.print(f"{len(rows)} rows; bars that do not hold: {missed or 'none'}")


if __name__ == "__main__":
    typer.run(main)
