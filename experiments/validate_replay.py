"""Predicted against measured, on this machine: profiles are measured, schedules simulated with them, and run on real vLLM.

    python experiments/validate_replay.py [--seeds 0,1,2] [--repeats 5] [--output FOLDER] [--page replay.md] [--json]

The model is made here, random; lengths are long-tailed draws; one scenario is simulated and replayed. Nothing is fitted to a
replay. Each case is repeated as it is, and the largest difference between two repeats stands beside its errors: no prediction
can be told to be better than that.

Such a machine, whose host others share, is now slower, now faster, by a half within seconds. So a profile is measured by
`simrl measure` in rounds, with as many engines running as the replay has: before the first repeat of the cases that it is for,
in their middle, and after the last (`--more`). And errors are told twice: as it was, and for the *quiet* machine, which noise
can only slow down: the profile of the lower quantile of its repeats, against the replay's time pieced together from blocks of
about a second, each as the fastest of the repeats had it. Live drafting has no quiet column: its repeats draw other tokens.

Errors are those of the rollout: the clock stands while no worker rolls out, so that training, which is held for the
predicted time, does not flatter them. Takes about half an hour on two cores that do nothing else.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
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

from replay.random_model import make_model, nudge
from replay.replayer import Fleet, ReplayConfig, engine_settings, process_fleet, replay
from replay.speculative import forced as with_an_oracle
from simrl.agreement import Agreement, Spread, agree, finished_on_clock, repeat_spread
from simrl.agreement_plot import plot_agreement
from simrl.profile import read_profile
from simrl.result import Result
from simrl.scenario import Scenario, load_scenarios
from simrl.simulate import Prepared, prepare, simulate_prepared, with_measured_loads
from simrl.trace import Trace, TraceMetadata, write_trace

LAYERS, HIDDEN, VOCAB = 4, 256, 1024
PROMPT_TOKENS = (20, 60)
MEDIAN_TOKENS, SIGMA, CAP_TOKENS = 120, 0.8, 400
GPUS = 16
DRAFT_TOKENS = 16
QUIET, BLOCK_S = 0.2, 1.0
ROUND_REPEATS, FIRST_S, ROUND_S = 3, 50, 30  # of a round of measuring a profile: repeats of a point, seconds
ENGINE = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "block_size": 32, "kv_cache_tokens": 51200}
TRAINING = {"reward_s": 0.05, "publish_s": 0.1, "load_overhead_s": 0.0, "switch_s": 0.1}
VERSIONS = 5
BARS = {1: 0.05, 2: 0.10}  # of the makespan, by workers
SAMPLE_BAR, ACCEPTANCE_BAR = 0.08, 0.03

PAGE_TOP = """# Predicted against measured, on two CPU cores

`python experiments/validate_replay.py --page experiments/replay.md` wrote this page. Profiles were measured on the machine
(`simrl measure`), the schedules simulated with them, and then run by real vLLM engines with a random model of 4 layers
(float32, one thread an engine). Nothing was fitted to a replay. Training and rewards are held for the predicted time; errors
are scored on the rollout clock, which stands while no worker rolls out. *repeats* is the largest difference between two
replays of the same schedule: no prediction can be told to be better than that. A *near-tie* is a decision that was taken
otherwise because two events, no further apart than repeats are, changed places.

Other machines share this one's host: it is now slower, now faster, by a half within seconds. So the profile of some cases was
measured in rounds, before, between and after their repeats, and every prediction is made with all rounds. Where the largest
difference of two repeats is larger than a bar, that is the bar. *quiet* is the same without the noise, which can only slow a
machine down: the profile of the lower quantile (0.2) of a point's repeats, against a replay that is pieced together from blocks
of about a second, each as the fastest repeat had it. There the bars hold as they are. Live drafting has no such column, because
its repeats draw other tokens.

**No GPU was at hand: there are no GPU figures here.** The code path for GPUs (CUDA, bf16, dummy weights, synthetic acceptance)
was not run; everything on this page is from a CPU.
"""

Lengths = Callable[[np.random.Generator], list[list[list[int]]]]  # by step, prompt, sample


class Case(NamedTuple):
    """A system on so many workers, over a trace made by `lengths`; prompts come again every step where `epochs`."""

    name: str
    system: dict[str, Any]
    workers: int
    lengths: Lengths
    epochs: bool = False
    forced: bool = False  # greedy, and accepted as the scenario says

    @property
    def drafts(self) -> bool:
        return "speculation" in self.system

    @property
    def draws_anew(self) -> bool:
        """Whether repeats differ by what is drawn: live drafts."""
        return self.drafts and not self.forced

    @property
    def engines(self) -> tuple[int, bool, bool]:
        """Cases that agree in this run on the same engines, with the same profile."""
        return self.workers, self.drafts, self.forced

    @property
    def plain(self) -> Case:
        """The same without drafts."""
        system = {name: value for name, value in self.system.items() if name != "speculation"}
        return self._replace(system=system, name=f"{self.name}, recorded")

    def config(self, config: ReplayConfig) -> ReplayConfig:
        """What its replays are given."""
        return replace(config, temperature=0.0, forced_acceptance=self.drafts) if self.forced else config

    def prepare(self, scenario: Scenario) -> Prepared:
        prepared = prepare(scenario)
        return with_an_oracle(prepared) if self.forced and self.drafts else prepared


def long_tailed(steps: int, prompts: int, group: int) -> Lengths:
    """Lognormal lengths. Responses of a prompt are alike, as far as a prompt goes."""

    def draw(rng: np.random.Generator) -> list[list[list[int]]]:
        of_prompt = rng.normal(0.0, 0.6, (1, prompts, 1))
        own = rng.normal(0.0, (SIGMA**2 - 0.6**2) ** 0.5, (steps, prompts, group))
        lengths = np.exp(np.log(MEDIAN_TOKENS) + of_prompt + own)
        return np.clip(np.rint(lengths), 4, CAP_TOKENS).astype(int).tolist()

    return draw


def with_an_outlier(steps: int, prompts: int, group: int) -> Lengths:
    """The same, but one response of a short prompt is as long as is allowed in the second epoch: HistoPipe moves it."""

    def draw(rng: np.random.Generator) -> list[list[list[int]]]:
        lengths = long_tailed(steps, prompts, group)(rng)
        middle = int(np.argsort([np.median(responses) for responses in lengths[0]])[prompts // 4])
        lengths[1][middle][0] = CAP_TOKENS
        return lengths

    return draw


# The gate stays open: a gate that is mostly shut drafts so little that acceptance is a matter of chance.
HISTORY = {"name": "histospec", "gate": "open", "window": {"kind": "aimd", "most_tokens": DRAFT_TOKENS}}
ORACLE = {"name": "draft_model", "window": {"kind": "fixed", "tokens": 4}}
# One or two rollout workers, and a trainer on many more of these slow cores, so that nobody waits for it for long.
CASES = (
    Case("one worker, 64 requests", {"name": "split"}, 1, long_tailed(1, 16, 4)),
    Case("one worker, HistoSpec", {"name": "split", "speculation": HISTORY}, 1, long_tailed(2, 16, 4), True),
    Case(
        "one worker, forced acceptance", {"name": "split", "speculation": ORACLE}, 1, long_tailed(1, 16, 4), forced=True
    ),
    Case("two workers, one-step-off", {"name": "one_step_off"}, 2, long_tailed(3, 8, 4)),
    Case("two workers, HistoPipe", {"name": "rhymerl", "alpha": 0.5}, 2, with_an_outlier(3, 8, 4), True),
    Case("two workers, AReaL", {"name": "areal", "eta": 2}, 2, long_tailed(3, 8, 4)),
)


class Quiet(NamedTuple):
    """Errors on the machine without its noise: of the makespan with its sign, and of completions."""

    makespan_err: float
    sample_mape: float


@dataclass(frozen=True)
class Outcome:
    """A case with a seed: its prediction against each of the repeats, and these against one another."""

    case: Case
    seed: int
    agreements: tuple[Agreement, ...]
    spread: Spread | None
    quiet: Quiet | None
    migrations: int
    other_between_repeats: int  # decisions, of two repeats, beside near-ties

    def mean(self, error: str) -> float | None:
        """Of an error over the repeats, with its sign."""
        values = [getattr(agreement.errors, error) for agreement in self.agreements]
        return None if None in values else float(np.mean(values))

    def noise(self, error: str) -> float | None:
        """The largest size of this error between two repeats."""
        return None if self.spread is None else getattr(self.spread.largest, error)

    def acceptance(self, run: str) -> float | None:
        values = [getattr(agreement.figures.acceptance, run) for agreement in self.agreements]
        return None if None in values else float(np.mean(values))

    def row(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "case": self.case.name,
            "seed": self.seed,
            "makespan_err": self.mean("makespan_err"),
            "sample_mape": self.mean("sample_mape"),
            "acceptance_predicted": self.acceptance("predicted"),
            "acceptance_live": self.acceptance("measured"),
            "makespan_err_quiet": self.quiet.makespan_err if self.quiet else None,
            "sample_mape_quiet": self.quiet.sample_mape if self.quiet else None,
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
            "decisions": [[d.text for d in a.differences[:5]] for a in self.agreements],
            "rollout_s": [a.figures.rollout_s.measured for a in self.agreements],
            "within": self.within(),
        }

    def within(self) -> dict[str, bool]:
        """The bars that hold; where the machine's own spread is larger than a bar, the spread is the bar."""
        checks = {
            "makespan": ("makespan_err", BARS[self.case.workers]),
            "sample": ("sample_mape", SAMPLE_BAR),
            "acceptance": ("acceptance_err", ACCEPTANCE_BAR),
        }
        held = {}
        for name, (error, bar) in checks.items():
            value = self.mean(error)
            if value is not None:
                held[name] = abs(value) <= max(bar, self.noise(error) or 0.0)
        if self.quiet:
            held["makespan, quiet"] = abs(self.quiet.makespan_err) <= BARS[self.case.workers]
            held["sample, quiet"] = self.quiet.sample_mape <= SAMPLE_BAR
        held["decisions"] = max(len(a.real_differences) for a in self.agreements) <= self.other_between_repeats
        return held


def trace_of(case: Case, seed: int) -> Trace:
    rng = np.random.default_rng([seed, *case.name.encode()])
    lengths = case.lengths(rng)
    prompt_tokens = rng.integers(*PROMPT_TOKENS, size=sum(len(step) for step in lengths)).tolist()
    prompt_tokens[0] = PROMPT_TOKENS[1]  # engines are shared: all have the same longest sample
    rows = []
    for step, prompts in enumerate(lengths):
        for i, responses in enumerate(prompts):
            prompt = i if case.epochs else step * len(prompts) + i
            for sample, tokens in enumerate(responses):
                rows.append((step, step if case.epochs else 0, prompt, sample, prompt_tokens[prompt], tokens))
    names = ("step", "epoch", "prompt_id", "sample", "prompt_tokens", "response_tokens")
    metadata = TraceMetadata(
        name=f"{case.name}, seed {seed}",
        kind="synthetic",
        source=f"lognormal lengths, median {MEDIAN_TOKENS}, σ {SIGMA}, capped",
        tokenizer="none: lengths alone",
        cap_tokens=CAP_TOKENS,
    )
    return Trace.from_columns(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)), metadata)


class Bench:
    """The folder that everything is in: the model in its versions, profiles, traces, scenarios."""

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
        """Measured, for the first time, unless it has been; `engines_draft` where they can though the case does not."""
        path = self._profile_path(case, engines_draft)
        if not path.exists():
            self._measure(case, path, 1)
        return path

    def measure_again(self, case: Case) -> None:
        """Another round of a case's profile."""
        path = self.profile(case)
        self._measure(case, path, read_profile(path).metadata.repeats // ROUND_REPEATS + 1)

    def quiet_profile(self, case: Case) -> Path:
        """The same rounds, for the quiet machine: nothing is measured."""
        path = self.profile(case)
        quiet = path.with_name(f"{path.stem}-quiet.parquet")
        shutil.copy(path.with_suffix(".points.jsonl"), quiet.with_suffix(".points.jsonl"))
        self._measure(case, quiet, read_profile(path).metadata.repeats // ROUND_REPEATS, "--quantile", str(QUIET))
        return quiet

    def _profile_path(self, case: Case, engines_draft: bool) -> Path:
        drafts = "-drafts" if case.drafts or engines_draft else ""
        return self.folder / f"profile-{case.workers}{drafts}{'-greedy' if case.forced else ''}.parquet"

    def _measure(self, case: Case, path: Path, rounds: int, *more: str) -> None:
        """As a user would, until there are so many rounds."""
        options = {
            "--model": self.weights[0], "--device": "cpu", "--gpu": "cpu", "--neighbours": case.workers - 1,
            "--max-num-seqs": ENGINE["max_num_seqs"], "--max-num-batched-tokens": ENGINE["max_num_batched_tokens"],
            "--block-size": ENGINE["block_size"], "--kv-cache-tokens": ENGINE["kv_cache_tokens"],
            "--max-model-len": PROMPT_TOKENS[1] + CAP_TOKENS + 2 * DRAFT_TOKENS + 1,
            "--draft-tokens": DRAFT_TOKENS if "-drafts" in path.name else 0, "--temperature": 0 if case.forced else 1,
            "--repeats": ROUND_REPEATS * rounds, "--budget": FIRST_S + ROUND_S * (rounds - 1), "--output": path,
        }  # fmt: skip
        words = [str(word) for pair in options.items() for word in pair]
        command = [sys.executable, "-m", "simrl.cli", "measure", *words, *more, *(["--more"] if rounds > 1 else [])]
        subprocess.run(command, check=True, stdout=sys.stderr)

    def prepared(
        self,
        case: Case,
        seed: int,
        trace: Trace,
        engines_draft: bool = False,
        profile: dict[str, Any] | None = None,
    ) -> Prepared:
        """A case as simulated and replayed; `engines_draft` where the engines can draft though the case does not."""
        path = self.folder / f"{case.name.replace(', ', '-').replace(' ', '_')}-{seed}"
        write_trace(trace, path.with_suffix(".parquet"))
        system = {"speculation": "none", **case.system, "rollout_share": case.workers / GPUS}
        scenario = {
            "name": "validation",
            "seed": seed,
            "steps": len(trace.step_slices),
            "model": str(self.weights[0]),
            "cluster": {"gpu": "cpu", "gpus": GPUS, "tp": 1},
            "workload": {"trace": str(path.with_suffix(".parquet")), "synthetic": None},
            "profile": profile or {"path": str(self.profile(case, engines_draft)), "roofline": None},
            "engine": ENGINE,
            "training": TRAINING,
            "systems": [system],
        }
        path.with_suffix(".yaml").write_text(yaml.safe_dump(scenario))
        (found,) = load_scenarios(path.with_suffix(".yaml"))
        return case.prepare(with_measured_loads(found, found.profile.path) if found.profile.path else found)

    def fleet(self, case: Case, trace: Trace) -> Fleet:
        """Engines for a case, and all like it. They are idle while the profile is measured."""
        self.say.print(f"starting {case.workers} engine(s) …")
        prepared = self.prepared(case, 0, trace, profile={"roofline": {}, "path": None})
        config = case.config(self.config)
        return process_fleet(case.workers, engine_settings(prepared, config), config, self.folder)

    def recorded(self, case: Case, seed: int, fleet: Fleet) -> Trace:
        """The trace of a case that drafts: with tokens, generated once without drafting, at the same temperature. What the
        drafter would make of them is the prediction."""
        recording = self.prepared(case.plain, seed, trace_of(case, seed), True)
        measured = replay(recording, fleet, case.plain.config(self.config))
        if measured.stopped is not None or measured.trace is None:
            raise measured.stopped or RuntimeError("nothing was recorded")
        return measured.trace


def run(bench: Bench, cases: Sequence[Case], seeds: Sequence[int], repeats: int, pictures: Path) -> list[Outcome]:
    """All cases that share engines one after the other, seeds inside, so that an engine starts once."""
    outcomes = []
    for engines in dict.fromkeys(case.engines for case in cases):
        same = [case for case in cases if case.engines == engines]
        runs = list(product(same, seeds))
        measured: dict[tuple[str, int], list[Result]] = {(case.name, seed): [] for case, seed in runs}
        with bench.fleet(same[0], trace_of(same[0], seeds[0])) as fleet:
            traces = {
                (case.name, seed): bench.recorded(case, seed, fleet) if case.drafts else trace_of(case, seed)
                for case, seed in runs
            }
            bench.profile(same[0])
            for repeat in range(repeats):
                for case, seed in runs:
                    prepared = bench.prepared(case, seed, traces[case.name, seed])
                    measured[case.name, seed].append(_measured(prepared, fleet, case.config(bench.config)))
                    bench.say.print(f"{case.name}, seed {seed}: repeat {repeat + 1} of {repeats}")
                if repeat in (repeats // 2, repeats - 1):
                    bench.measure_again(same[0])
        quiet = {"path": str(bench.quiet_profile(same[0])), "roofline": None}
        for case, seed in runs:
            trace = traces[case.name, seed]
            predicted = simulate_prepared(bench.prepared(case, seed, trace))
            quietly = (
                simulate_prepared(bench.prepared(case, seed, trace, profile=quiet)) if not case.draws_anew else None
            )
            outcomes.append(_outcome(case, seed, predicted, quietly, measured[case.name, seed]))
            bench.say.print(_line(outcomes[-1]))
            if seed == seeds[0]:
                first = measured[case.name, seed][0]
                plot_agreement(predicted, first, outcomes[-1].agreements[0], pictures / _picture(case))
    return outcomes


def _outcome(case: Case, seed: int, predicted: Result, quietly: Result | None, measured: Sequence[Result]) -> Outcome:
    """What is known of a case after its repeats."""
    tie_s = max(
        agree(predicted, measured[0]).near_tie_s, *(_gaps_apart_s(*pair) for pair in combinations(measured, 2)), 0.0
    )
    return Outcome(
        case,
        seed,
        tuple(agree(predicted, result, tie_s) for result in measured),
        repeat_spread(measured) if len(measured) > 1 else None,
        _quiet(quietly, measured) if quietly else None,
        _migrations(predicted),
        max((len(agree(*pair, tie_s).real_differences) for pair in combinations(measured, 2)), default=0),
    )


def _quiet(predicted: Result, measured: Sequence[Result]) -> Quiet:
    """Blocks end where the same number of samples have finished; a block takes what the fastest repeat took for it."""
    found = [finished_on_clock(predicted, result) for result in measured]
    uids = sorted(set.intersection(*(set(uids.tolist()) for uids, _, _ in found)))
    ends_s = np.array([[dict(zip(u.tolist(), m, strict=True))[uid] for uid in uids] for u, _, m in found])
    predicted_s = np.array([dict(zip(found[0][0].tolist(), found[0][1], strict=True))[uid] for uid in uids])
    blocks = max(2, round(float(np.median(ends_s.max(axis=1))) / BLOCK_S))
    at = np.unique(np.linspace(0, len(uids) - 1, blocks + 1).round().astype(int)[1:])
    borders_s = np.concatenate([np.zeros((len(measured), 1)), np.sort(ends_s, axis=1)[:, at]], axis=1)
    quiet_s = np.concatenate([[0.0], np.diff(borders_s, axis=1).min(axis=0).cumsum()])
    own = [np.interp(ends, borders, quiet_s) for ends, borders in zip(ends_s, borders_s, strict=True)]
    sample_mape = float(np.mean(np.abs(predicted_s / np.mean(own, axis=0) - 1.0)))
    return Quiet(float(predicted_s.max() / quiet_s[-1] - 1.0), sample_mape)


def _gaps_apart_s(one: Result, other: Result) -> float:
    """How far two repeats are apart in the time from one completion to the next: two events this close may change places,
    however a run as a whole drifts."""
    first_s, second_s = _ends_s(one, other)
    order = np.argsort(first_s)
    return float(np.quantile(np.abs(np.diff(first_s[order]) - np.diff(second_s[order])), 0.95))


def _ends_s(one: Result, other: Result) -> tuple[np.ndarray, np.ndarray]:
    """When the samples ended that did in both, in seconds of the rollout clock."""
    _, first_s, second_s = finished_on_clock(one, other)
    return first_s, second_s


def _measured(prepared: Prepared, fleet: Fleet, config: ReplayConfig) -> Result:
    measured = replay(prepared, fleet, config)
    if measured.stopped is not None:
        raise measured.stopped
    return measured.result


def _migrations(result: Result) -> int:
    """Samples with tokens of more than one worker."""
    segments = result.segments.to_pandas()
    return int((segments.groupby("uid")["worker"].nunique() > 1).sum())


COLUMNS = (
    "case", "seed", "rollout, s", "makespan error", "repeats", "quiet", "sample MAPE", "repeats", "quiet", "latency MAPE",
    "acceptance", "tie, ms", "near-ties", "real differences", "of repeats", "migrations",
)  # fmt: skip


def cells(outcome: Outcome) -> list[str]:
    """A row of the table, in the order of `COLUMNS`; "repeats" is the largest difference of two repeats."""

    def percent(value: float | None, sign: str = "") -> str:
        return "" if value is None else f"{value * 100:{sign}.1f} %"

    expected, live = outcome.acceptance("predicted"), outcome.acceptance("measured")
    row = outcome.row()
    return [
        outcome.case.name,
        str(outcome.seed),
        f"{np.mean(row['rollout_s']):.1f}",
        percent(outcome.mean("makespan_err"), "+"),
        percent(outcome.noise("makespan_err")),
        percent(outcome.quiet.makespan_err if outcome.quiet else None, "+"),
        percent(outcome.mean("sample_mape")),
        percent(outcome.noise("sample_mape")),
        percent(outcome.quiet.sample_mape if outcome.quiet else None),
        percent(outcome.mean("latency_mape")),
        "" if expected is None or live is None else f"{expected:.3f} / {live:.3f}",
        f"{outcome.agreements[0].near_tie_s * 1e3:.0f}",
        ", ".join(map(str, row["near_ties"])),
        ", ".join(map(str, row["real_differences"])),
        str(outcome.other_between_repeats),
        str(outcome.migrations),
    ]


def _line(outcome: Outcome) -> str:
    return "  ".join(f"{name} {cell}" for name, cell in zip(COLUMNS, cells(outcome), strict=True) if cell)


def page_of(outcomes: Sequence[Outcome]) -> str:
    """The page: the table, what it means, the pictures of the first seed."""
    held = [(name, ok) for outcome in outcomes for name, ok in outcome.row()["within"].items()]
    lines = [
        PAGE_TOP,
        f"Host: {platform.machine()}, {os.cpu_count()} cores; {datetime.now(UTC):%Y-%m-%d}.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(cells(outcome)) + " |" for outcome in outcomes),
        "",
        f"Of {len(held)} checks (makespan within 5 % on one worker and 10 % on two, completions within 8 %, acceptance "
        "within 0.03, no more real differences than two repeats have; a bar is the repeats' own spread where that is larger) "
        f"{sum(ok for _, ok in held)} hold.",
        "",
        *_in_short(outcomes),
        "",
    ]
    for outcome in outcomes:
        missed = [name for name, ok in outcome.row()["within"].items() if not ok]
        if missed:
            lines.append(f"- Not held: {outcome.case.name}, seed {outcome.seed}: {', '.join(missed)}.")
    lines += ["", "## Decisions that were taken otherwise", ""]
    for outcome in outcomes:
        for agreement in outcome.agreements[:1]:
            lines += [f"- {outcome.case.name}, seed {outcome.seed}: {d.text}" for d in agreement.differences[:3]]
    lines += ["", "## Pictures, predicted above measured", ""]
    lines += [
        f"![{outcome.case.name}]({_picture(outcome.case)})\n"
        for outcome in outcomes
        if outcome.seed == outcomes[0].seed
    ]
    return "\n".join(lines) + "\n"


def _in_short(outcomes: Sequence[Outcome]) -> list[str]:
    """The largest errors."""
    said = []
    for workers, name in ((1, "one worker"), (2, "two workers")):
        own = [outcome for outcome in outcomes if outcome.case.workers == workers]
        raw = [abs(outcome.mean("makespan_err") or 0.0) for outcome in own]
        quiet = [abs(outcome.quiet.makespan_err) for outcome in own if outcome.quiet]
        if raw and quiet:
            said.append(f"{max(raw):.1%} on {name} ({max(quiet):.1%} quiet)")
    apart = [
        abs(told - live)
        for outcome in outcomes
        if (told := outcome.acceptance("predicted")) is not None
        and (live := outcome.acceptance("measured")) is not None
    ]
    lines = [f"The largest error of a makespan, the mean over its repeats: {', '.join(said)}."] if said else []
    if apart:
        lines.append(f"Acceptance, forced and live: at most {max(apart):.3f} apart.")
    return lines


def _picture(case: Case) -> str:
    return f"replay_{case.name.replace(', ', '_').replace(' ', '_').replace('-', '_')}.png"


def main(
    output: Annotated[Path | None, typer.Option(help="a folder to keep everything in, and to go on from")] = None,
    page: Annotated[Path | None, typer.Option(help="a page (.md) to write, with the pictures beside it")] = None,
    seeds: Annotated[str, typer.Option(help="separated by commas")] = "0,1,2",
    repeats: Annotated[int, typer.Option(min=1, help="replays of each case")] = 5,
    only: Annotated[str, typer.Option(help="a part of the names of the cases to run")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON on stdout instead of the table")] = False,
) -> None:
    """Measure, predict, replay, and compare."""
    say = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory() as temporary:
        folder = output or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        pictures = page.parent if page else folder
        cases = [case for case in CASES if only in case.name]
        outcomes = run(Bench(folder, say), cases, [int(seed) for seed in seeds.split(",")], repeats, pictures)
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
    missed = [(r["case"], r["seed"], name) for r in rows for name, held in r["within"].items() if not held]
    say.print(f"{len(rows)} rows; bars that do not hold: {missed or 'none'}")


if __name__ == "__main__":
    typer.run(main)
