"""The commands as functions: `simrl.compare(…)` simulates what `simrl compare` does, and returns what it prints.

Invariant: every scenario is made by `simrl.scenario`, from a file, from keywords or from both, so that the same scenario gives
the same rows as on the command line. Nothing is printed and, unless a folder is named, nothing is written.

A function's first argument is a scenario or what is to be generated in one:

    "experiments/quickstart.yaml"     a scenario file; {"name": …, "model": …}, what such a file holds
    "traces/…/trace.parquet"          a recorded run; a `Trace`, or a pandas DataFrame with a row a response

With a trace, the keywords `model`, `gpu` and `gpus` say the rest, and `systems` what to simulate. What is not said is: tp 1,
every step of the trace, a quarter of them as warm-up, and step times that are shipped for the model and GPU if there are some,
else a roofline; the result says which. With a scenario, keywords and `overrides` change its fields.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from simrl.acceptance_report import DRAFTERS, measure
from simrl.acceptance_report import report as acceptance_report
from simrl.calibration import Calibration
from simrl.comparison import comparison_rows, compile_kernels, run_names, simulate_scenarios
from simrl.dimensions import SYSTEMS, Dimension, Listed, cross, listed
from simrl.errors import InputError, meant
from simrl.executors import Executor, Here, Processes
from simrl.explanation import diff_results, explain_result
from simrl.goal import Goal, seconds_of
from simrl.hardware import MODELS, model_shape
from simrl.hardware import gpu as gpu_named
from simrl.html_report import write_page, write_report
from simrl.html_report.sources import runs_of
from simrl.importers.tabular import import_frame
from simrl.optimization import BEST, TRIALS, optimization, require_trials, write_optimization
from simrl.outcomes import Outcomes
from simrl.points import SharedInputs
from simrl.profile import TableProfile, read_profile
from simrl.profilers.roofline import roofline_profile
from simrl.result import Result, find_result
from simrl.run_log import CALIBRATED, alternatives, calibrated, check_system
from simrl.scenario import PARAMETER, Choices, Scenario, ScenarioFile, Setting, given, override
from simrl.search_space import FAMILIES, make_space
from simrl.shipped import shipped_profile
from simrl.speculation.drafter import MOST_DRAFT_TOKENS
from simrl.speculation.siblings import Known
from simrl.speculation.windows import Aimd, Fixed, Mimd, Window
from simrl.sweeps import kept, plan
from simrl.sweeps import run as run_sweep
from simrl.systems import parameters_of
from simrl.trace import Trace, read_trace, write_trace
from simrl.views import (
    AcceptanceView,
    AgreementView,
    CalibrationView,
    Comparison,
    DifferenceView,
    ExplanationView,
    OptimizationView,
    Sweep,
    WhatIf,
    agreed,
    comparison,
)

if TYPE_CHECKING:
    import pandas as pd

Systems = Sequence[str | Mapping[str, Any]]
Overrides = Mapping[str, Any] | Sequence[str]
TRACE_SUFFIX = ".parquet"
BETWEEN_PASSES_S = (
    0.001  # of a real engine's host beside shipped profiles, which have kernels alone (validate_engine.py)
)
FIELDS = {
    "model": "model",
    "gpu": "cluster.gpu",
    "gpus": "cluster.gpus",
    "tp": "cluster.tp",
    "steps": "steps",
    "warmup_steps": "warmup_steps",
    "seed": "seed",
}
_OPTION = re.compile(r"--([a-z]+(?:-[a-z]+)*)(?: (\d[\w.]*|[A-Z]+)\b)?")  # of the command line, and its value
_KEYWORDS = {"zip": "zips", "format": "log_format"}  # that are called otherwise here
P = ParamSpec("P")
R = TypeVar("R")
NEEDED = {"model": "'qwen3-8b'", "gpu": "'h100'", "gpus": "64"}  # beside a trace


def _in_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Errors name keyword arguments where those of the commands name options: `trials=3` for `--trials 3`."""

    def keyword(found: re.Match[str]) -> str:
        name = _KEYWORDS.get(found[1], found[1].replace("-", "_"))
        return name if found[2] is None else f"{name}={found[2]}"

    @wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        try:
            return function(*arguments, **keywords)
        except InputError as error:
            raise InputError(_OPTION.sub(keyword, str(error))) from error

    return call


@_in_keywords
def compare(
    workload: str | os.PathLike[str] | Mapping[str, Any] | Trace | pd.DataFrame,
    systems: Systems | None = None,
    *,
    model: str | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
    tp: int | None = None,
    profile: str | os.PathLike[str] | None = None,
    steps: int | None = None,
    warmup_steps: int | None = None,
    seed: int | None = None,
    cap_tokens: int | None = None,
    overrides: Overrides = (),
    pipelines: Sequence[str] = (),
    dispatches: Sequence[str] = (),
    speculations: Sequence[str | Mapping[str, Any]] = (),
    jobs: int = 1,
) -> Comparison:
    """Simulates several systems on the same rollouts and GPUs, side by side.

    workload      a scenario file or its content, a trace file, a `Trace` or a DataFrame (columns step, prompt_id,
                  prompt_tokens, response_tokens; sample, epoch, reward … if known)
    systems       names, or names with parameters: ["verl_colocated", {"name": "areal", "eta": 4}]; of a scenario, in place
                  of its own (`simrl systems` lists them)
    model         a name that simrl knows, or the path of a config.json
    gpu, gpus, tp the kind of GPU, how many, and how many of them make a rollout worker
    profile       a file of step times, or "roofline"
    steps         policy updates to simulate; the first `warmup_steps` are left out of averages
    cap_tokens    of a DataFrame: the most tokens that a response could have; else its longest stands for it
    overrides     fields by their dotted keys, {"training.mfu": 0.3}, or as on the command line, ["training.mfu=0.3"]
    pipelines, dispatches, speculations
                  the three choices of a system; every combination is one
    jobs          processes that simulate at the same time

    Raises `InputError`, in one line, for a scenario that cannot be.

    >>> import simrl
    >>> compared = simrl.compare(
    ...     "traces/countdown/sync/trace.parquet",
    ...     systems=["verl_colocated", {"name": "areal", "eta": 4}],
    ...     model="qwen3-8b", gpu="h100", gpus=16, steps=4,
    ... )
    >>> compared
    <Comparison of verl_colocated, areal(eta=4)>
    >>> compared.table.shape[0]
    2
    """
    words = {
        "model": model,
        "gpu": gpu,
        "gpus": gpus,
        "tp": tp,
        "steps": steps,
        "warmup_steps": warmup_steps,
        "seed": seed,
    }
    opened = _open("compare", workload, systems, words, profile, cap_tokens, overrides)
    choices = Choices(pipelines, dispatches, speculations)
    return _simulated(opened.file([]).scenarios(choices, parameters_of), opened, jobs)


@_in_keywords
def run(
    workload: str | os.PathLike[str] | Mapping[str, Any] | Trace | pd.DataFrame,
    system: str | Mapping[str, Any] | None = None,
    *,
    model: str | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
    tp: int | None = None,
    profile: str | os.PathLike[str] | None = None,
    steps: int | None = None,
    warmup_steps: int | None = None,
    seed: int | None = None,
    cap_tokens: int | None = None,
    overrides: Overrides = (),
    dispatch: str | None = None,
    speculation: str | Mapping[str, Any] | None = None,
) -> Comparison:
    """Simulates one system: a `Comparison` of one run, whose methods need no name. Arguments and errors are `compare`'s.

    >>> import simrl
    >>> one = simrl.run("experiments/quickstart.yaml", {"name": "areal", "eta": 2}, gpus=16, steps=4, warmup_steps=1)
    >>> one.result().steps.num_rows
    4
    """
    words = {
        "model": model,
        "gpu": gpu,
        "gpus": gpus,
        "tp": tp,
        "steps": steps,
        "warmup_steps": warmup_steps,
        "seed": seed,
    }
    systems = None if system is None else [system]
    opened = _open("run", workload, systems, words, profile, cap_tokens, overrides)
    choices = Choices((), [dispatch] if dispatch else (), [speculation] if speculation else ())
    scenarios = opened.file([]).scenarios(choices, parameters_of)
    if len(scenarios) > 1:
        raise InputError(
            f"{opened.origin}: {len(scenarios)} runs ({run_names(scenarios)}); choose one with system= and gpus=, or compare"
        )
    return _simulated(scenarios, opened, jobs=1)


@_in_keywords
def sweep(
    workload: str | os.PathLike[str] | Mapping[str, Any] | Trace | pd.DataFrame,
    values: Mapping[str, Any],
    systems: Systems | None = None,
    *,
    model: str | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
    tp: int | None = None,
    profile: str | os.PathLike[str] | None = None,
    steps: int | None = None,
    warmup_steps: int | None = None,
    cap_tokens: int | None = None,
    overrides: Overrides = (),
    zips: Sequence[str] = (),
    sample: int | None = None,
    seed: int = 0,
    jobs: int = 1,
    folder: str | os.PathLike[str] | None = None,
) -> Sweep:
    """Simulates every combination of values with every system.

    values        lists by dotted key: {"cluster.gpus": [64, 128], "system.eta": range(5)}; "system.eta" is a parameter of the
                  systems that have it. A text is read as on the command line: "64,128", "0..4"
    zips          keys whose values go together: ["cluster.gpus,cluster.tp"]
    sample, seed  draw so many combinations; values may then be any in between, {"system.rollout_share": "0.5..0.9"}
    folder        where to keep the points: a sweep that was stopped goes on, and none is simulated twice. None keeps no file

    Everything else is as for `compare`. A point that cannot be is a row with its error; `InputError` is raised for what no
    scenario can have.

    >>> import simrl
    >>> swept = simrl.sweep("experiments/quickstart.yaml", {"system.eta": [1, 4]}, ["areal"], gpus=16, steps=4, warmup_steps=1)
    >>> swept.table["system.eta"].tolist()
    [1, 4]
    """
    words = {"model": model, "gpu": gpu, "gpus": gpus, "tp": tp, "steps": steps, "warmup_steps": warmup_steps}
    opened = _open("sweep", workload, systems, words, profile, cap_tokens, overrides)
    with opened.on_disk() as file, _folder(folder) as place:
        own: dict[str, Dimension] = {
            setting.key: Listed((setting.key,), [(setting,)])
            for setting in opened.settings
            if setting.key.startswith(PARAMETER)
        }
        varied = cross(file, own | {key: listed(key, several) for key, several in values.items()}, zips)
        planned = plan(varied, sample, seed)
        outcomes = kept(planned, place)
        if len(outcomes) < len(planned.points):
            compile_kernels()
        executor: Executor = Here() if jobs == 1 else Processes(jobs)
        said = [
            f"{key}={','.join(map(str, each)) if isinstance(each, list | tuple | range) else each}"
            for key, each in values.items()
        ]
        asked = {"scenario": opened.origin, "values": said, "zip": list(zips), "sample": sample, "seed": seed}
        swept = run_sweep(planned, outcomes, place, executor, asked)
        failed = [row["error"] for row in swept.rows if row["error"] is not None]
        if len(failed) == len(swept.rows):
            raise InputError(f"all {len(failed)} points failed; the first: {failed[0]}")
        return Sweep(planned, swept, kept(planned, place), asked)


@_in_keywords
def explain(result: Comparison | Result | str | os.PathLike[str], step: int | None = None) -> ExplanationView:
    """Where the GPU time of a run went, what held its updates up, and which known signs of trouble it shows.

    `result` is a run (a `Comparison` of one, a `Result`) or the folder of one, also of a replay. `step` chooses the update,
    counted from 0, whose critical path is shown. Raises `InputError` for a run without updates, and for a step that it has not.

    >>> import simrl
    >>> simrl.explain("traces/countdown/sync/parts/000").data.updates
    40
    """
    return ExplanationView(explain_result(_result(result), step))


@_in_keywords
def diff(
    a: Comparison | Result | str | os.PathLike[str], b: Comparison | Result | str | os.PathLike[str]
) -> DifferenceView:
    """What makes run `b` faster or slower than run `a`, in GPU-seconds a trained sample. Both are as for `explain`.

    >>> import simrl
    >>> simrl.diff("traces/countdown/sync/parts/000", "traces/countdown/areal/parts/000")
    <Difference of split(...), measured and areal(...), measured>
    """
    return DifferenceView(diff_results(_result(a), _result(b)))


@_in_keywords
def agree(
    predicted: Comparison | Result | str | os.PathLike[str], measured: Comparison | Result | str | os.PathLike[str]
) -> AgreementView:
    """Predicted against measured: how far apart two runs of one schedule on one trace are, and what they decided otherwise.

    Either is as for `explain`; `predicted` may also be a scenario file with one system, which is simulated. Raises `InputError`
    for runs that have nothing in common.

    >>> import simrl
    >>> agreement = simrl.agree("traces/countdown/sync/scenario.yaml", "traces/countdown/sync/parts/000")
    >>> agreement.data.samples
    5120
    """
    happened = _result(measured)
    if isinstance(predicted, str | os.PathLike) and not Path(predicted).is_dir():
        predicted = run(predicted)
    return agreed(_result(predicted), happened)


@_in_keywords
def acceptance(
    trace: str | os.PathLike[str] | Trace,
    *,
    profile: str | os.PathLike[str] | TableProfile | None = None,
    model: str | None = None,
    gpu: str | None = None,
    tp: int = 1,
    drafter: str = "history-paper",
    window: int | str | None = None,
    epochs_back: int = 1,
    siblings_known: str = "lockstep",
) -> AcceptanceView:
    """What drafts from history, siblings or a response's own text would give on a recorded run, counted on its tokens.

    profile       step times, a file or a `TableProfile`, to tell at which batch sizes drafts pay; or `model`, `gpu` and
                  `tp`, for which the shipped profile is taken if there is one, else a roofline
    drafter       "history-paper", "history-code" (HistoSpec's two variants), "siblings" or "ngram"
    window        tokens of a draft: "aimd", "mimd" or a number; None is the drafter's own rule
    epochs_back   of a history: the epochs before that are drafted from
    siblings_known  "lockstep" (all run side by side) or "finished" (all others are over)

    Raises `InputError` for a trace without token ids, or in which the drafter has nothing to draft from.

    >>> import simrl
    >>> found = simrl.acceptance("traces/countdown/sync/trace.parquet", model="qwen3-8b", gpu="h100")
    >>> round(found.data["accept_length"], 1)
    3.3
    """
    chosen = next((name for name in DRAFTERS if name == drafter), None)
    if chosen is None:
        raise InputError(f"drafter={drafter!r}{meant(drafter, DRAFTERS)}: choose one of {', '.join(DRAFTERS)}")
    if siblings_known not in ("lockstep", "finished"):
        raise InputError(f"siblings_known={siblings_known!r}: choose lockstep or finished")
    if epochs_back < 1:
        raise InputError(f"epochs_back={epochs_back}: give 1 or more")
    rule, times = _window(window), _step_times(profile, model, gpu, tp)
    known: Known = "finished" if siblings_known == "finished" else "lockstep"
    recorded = trace if isinstance(trace, Trace) else read_trace(os.fspath(trace))
    return AcceptanceView(
        acceptance_report(measure(recorded, chosen, rule, epochs_back, known, threads=os.cpu_count() or 1), times)
    )


@_in_keywords
def calibrate(
    log: str | os.PathLike[str],
    *,
    window: tuple[int, int] = (1, 20),
    group: int = 1,
    launch: str | os.PathLike[str] | None = None,
    overrides: Overrides = (),
    samples: int | None = None,
    prompt_tokens: float | None = None,
    cap_tokens: int | None = None,
    log_format: str | None = None,
    trace: str | os.PathLike[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> CalibrationView:
    """Fits a few named corrections to some steps of a real run's log, and tells the error on the others.

    log           a metrics log: verl's console log or file logger, TRL's history, slime's console log
    window        the first and the last step to fit; all others are held out
    group         responses a prompt, of which no log tells
    launch        a scenario file that says how the run was started; its name, steps and workload are the log's instead
    overrides     the same by keys, {"model": "qwen2.5-3b", "cluster.gpu": "a100", "cluster.gpus": 4, "cluster.tp": 1}
    samples, prompt_tokens, cap_tokens, log_format
                  where the log does not say: responses a step, mean length of a prompt, largest response, "verl" or "trl" …
    trace         the run's own lengths, in place of ones that are made from the log's statistics
    folder        where to keep calibrated.yaml, the run as a scenario, with its lengths. None keeps no file

    Raises `InputError` for a log that has not what is fitted, and where nobody said how the run was started.
    """
    with _folder(folder) as place:
        found = _calibrated(
            log, place, window, group, launch, overrides, samples, prompt_tokens, cap_tokens, log_format, trace
        )
    return CalibrationView(found)


@_in_keywords
def whatif(
    log: str | os.PathLike[str],
    systems: Systems,
    *,
    window: tuple[int, int] = (1, 20),
    group: int = 1,
    launch: str | os.PathLike[str] | None = None,
    overrides: Overrides = (),
    samples: int | None = None,
    prompt_tokens: float | None = None,
    cap_tokens: int | None = None,
    log_format: str | None = None,
    trace: str | os.PathLike[str] | None = None,
    jobs: int = 1,
) -> WhatIf:
    """What a real run would have taken under other systems: calibrates on its log, simulates its own steps under all of them.

    `systems` are as for `compare`, everything else as for `calibrate`; the run's own system comes first.
    """
    _at_least(1, {"jobs": jobs})
    asked = _listed_systems("whatif", systems)
    for system in asked:  # before minutes go into a calibration
        check_system(system)
    with tempfile.TemporaryDirectory(prefix="simrl-whatif-") as temporary:
        place = Path(temporary) / "run"
        found = _calibrated(
            log, place, window, group, launch, overrides, samples, prompt_tokens, cap_tokens, log_format, trace
        )
        scenarios, said = alternatives(place / CALIBRATED, asked)
        results = simulate_scenarios(scenarios, jobs, SharedInputs())
    compared = comparison(scenarios, results, comparison_rows(scenarios, results))
    return WhatIf(CalibrationView(found), compared, tuple(said))


@_in_keywords
def optimize(
    workload: str | os.PathLike[str] | Mapping[str, Any] | Trace | pd.DataFrame,
    values: Mapping[str, Any] | None = None,
    systems: Systems | None = None,
    *,
    model: str | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
    tp: int | None = None,
    profile: str | os.PathLike[str] | None = None,
    steps: int | None = None,
    warmup_steps: int | None = None,
    cap_tokens: int | None = None,
    overrides: Overrides = (),
    max_off_policyness: float | None = None,
    max_cost: float | None = None,
    updates: int | None = None,
    deadline: str | None = None,
    budget: float | None = None,
    trials: int = TRIALS,
    best: int = BEST,
    robust: bool = True,
    seed: int = 0,
    jobs: int = 1,
    folder: str | os.PathLike[str] | None = None,
) -> OptimizationView:
    """Searches for the system, split, tp, drafter and η to run on these GPUs, or for a deadline or a budget.

    values        what may be chosen, as for `sweep`: {"cluster.gpus": [32, 64], "system.rollout_share": "0.5..0.9"}. What is
                  not named has a default, systems too: one of each family, and a scenario's own
    max_off_policyness
                  of any trained token, in policy updates
    max_cost      of 1,000 trained samples, at cluster.cost_per_gpu_hour
    updates       of a whole batch, that the run is to make: with a `deadline`, "36h", the cheapest that makes it is sought;
                  with a `budget`, the fastest within it. Without them, the most trained samples a second
    trials, seed  points to simulate at most, and the seed of the search; a smaller space is simulated whole
    best          systems to tell of
    robust        simulate the best again, 20 % off in decode, train and acceptance
    folder        where to keep the points: a search that was stopped goes on, and none is simulated twice. None keeps no file

    Everything else is as for `compare`, but that `tp` and what else is given is not searched. Raises `InputError` also where
    nothing that was tried keeps the limits, with the reasons.

    >>> import simrl
    >>> found = simrl.optimize(
    ...     "experiments/quickstart.yaml", {"system.eta": [1, 4], "system.rollout_share": 0.5, "system.speculation": "none"},
    ...     ["areal"], gpus=16, tp=1, steps=4, warmup_steps=1, max_off_policyness=2, robust=False,
    ... )
    >>> found
    <Optimization of quickstart: areal(...)>
    >>> found.table.shape[0]
    1
    """
    limits = {"max_off_policyness": max_off_policyness, "max_cost": max_cost, "budget": budget}
    _at_least(0, limits | {"seed": seed})
    _at_least(1, {"updates": updates, "best": best, "jobs": jobs})
    require_trials(trials, best)
    deadline_s = None if deadline is None else seconds_of(str(deadline), "deadline")
    words = {"model": model, "gpu": gpu, "gpus": gpus, "tp": tp, "steps": steps, "warmup_steps": warmup_steps}
    if systems is None and not _is_scenario(workload):
        systems = FAMILIES
    opened = _open("optimize", workload, systems, words, profile, cap_tokens, overrides)
    said: dict[str, Dimension] = {
        setting.key: listed(SYSTEMS, setting.value) if setting.key == SYSTEMS else Listed((setting.key,), [(setting,)])
        for setting in opened.settings
    }
    said |= {key: listed(key, several) for key, several in (values or {}).items()}
    with opened._replace(settings=()).on_disk() as file, _folder(folder) as place:
        space = make_space(file, said)
        goal = Goal(
            batch_samples=space.batch_samples,
            price=space.first.cluster.cost_per_gpu_hour,
            updates=updates,
            deadline_s=deadline_s,
            **limits,
        )
        compile_kernels()
        staying = Processes(jobs, stay=True) if jobs > 1 else None
        try:
            outcomes = Outcomes(place, staying or Here())
            found = optimization(space, goal, outcomes, trials=trials, seed=seed, best=best, robust=robust)
        finally:
            if staying is not None:
                staying.end()
        write_optimization(found, place)
        return OptimizationView(found)


@_in_keywords
def report(
    results: Comparison | Sweep | AgreementView | Result | str | os.PathLike[str], path: str | os.PathLike[str]
) -> Path:
    """Writes results as one HTML page that needs no network: who is fastest and why, timelines to zoom into, what it rests on.

    `results` are runs, a sweep, an agreement (predicted beside measured), or a folder of any of them. Returns `path`. Raises
    `InputError` for what is none of these, and for a path that is no .html, cannot be written or lies among results.

    >>> import simrl, tempfile
    >>> page = simrl.report("traces/countdown/sync/parts/000", tempfile.mkdtemp() + "/sync.html")
    >>> page.name
    'sync.html'
    """
    place = Path(path)
    if isinstance(results, str | os.PathLike):
        write_report(Path(results), place)
    elif isinstance(results, Result):
        write_page(runs_of({"run": results}), place)
    elif isinstance(results, Comparison | Sweep | AgreementView):
        results.report(place)
    else:
        raise InputError(
            f"simrl.report: {results!r} has no page; give what compare, run, sweep or agree return, or a folder of results"
        )
    return place


class _Opened(NamedTuple):
    """What a function was given: the settings of a scenario, where they go, and the trace if it is no file."""

    origin: str
    data: Mapping[str, Any] | None
    settings: Sequence[Setting]
    trace: Trace | None

    def file(self, more: Sequence[Setting]) -> ScenarioFile:
        return ScenarioFile(self.origin, [*self.settings, *more], self.data)

    def inputs(self) -> _Inputs:
        return _Inputs(self.trace)

    @contextmanager
    def on_disk(self) -> Iterator[Any]:
        """What opens the file, while a trace that is none lies in a temporary one."""
        if self.trace is None:
            yield self.file
            return
        with tempfile.TemporaryDirectory(prefix="simrl-trace-") as folder:
            path = Path(folder) / "trace.parquet"
            write_trace(self.trace, path)
            data = {**(self.data or {}), "workload": {"trace": str(path)}}
            yield self._replace(data=data).file


class _Inputs(SharedInputs):
    """Traces and profiles, each read once; a trace that was given is not read at all."""

    def __init__(self, trace: Trace | None) -> None:
        super().__init__()
        self._given = trace

    def trace(self, scenario: Scenario) -> Trace:
        if self._given is not None and scenario.workload.trace == self._given.metadata.name:
            return self._given
        return super().trace(scenario)


def _open(
    call: str,
    workload: Any,
    systems: Systems | None,
    words: Mapping[str, Any],
    profile: str | os.PathLike[str] | None,
    cap_tokens: int | None,
    overrides: Overrides,
) -> _Opened:
    """The scenario that a call describes. Raises `InputError` for what a trace needs beside it and was not given."""
    settings = [
        given(FIELDS[name], _plain(value), f"argument {name}={value!r}")
        for name, value in words.items()
        if value is not None
    ]
    if systems is not None:
        settings.insert(0, Setting("systems", _listed_systems(call, systems), "argument systems"))
    settings += _overrides(overrides)
    said = {setting.key: setting.value for setting in settings}
    if isinstance(workload, Mapping):
        return _Opened(f"simrl.{call}", _plain(workload), [*_profile_setting(profile), *settings], None)
    if _is_scenario(workload):
        return _Opened(os.fspath(workload), None, [*_profile_setting(profile), *settings], None)

    trace, path = _trace(workload, cap_tokens)
    for name, example in NEEDED.items():
        if FIELDS[name] not in said and FIELDS[name].partition(".")[0] not in said:
            raise InputError(f"simrl.{call}: no {name}; a trace needs one beside it, such as {name}={example}")
    if SYSTEMS not in said:
        raise InputError(
            f"simrl.{call}: no systems; a trace needs some beside it, such as ['verl_colocated', {{'name': 'areal', 'eta': 4}}]"
        )
    updates = said.get("steps", len(trace.step_slices))
    data = {
        "name": re.sub(r"[^A-Za-z0-9._-]+", "-", trace.metadata.name).strip("-._") or "trace",
        "steps": updates,
        "warmup_steps": updates // 4 if isinstance(updates, int) else 0,
        "cluster": {"tp": 1},
        "workload": {"trace": trace.metadata.name if path is None else path},
        "profile": _default_profile(said) if profile is None else _named_profile(profile),
    }
    return _Opened(f"simrl.{call}", data, settings, trace if path is None else None)


def _is_scenario(workload: Any) -> bool:
    """Rather than a trace."""
    if isinstance(workload, str | os.PathLike):
        return Path(workload).suffix != TRACE_SUFFIX
    return isinstance(workload, Mapping)


def _trace(workload: Any, cap_tokens: int | None) -> tuple[Trace, str | None]:
    """A trace, and its file if it is one."""
    if isinstance(workload, str | os.PathLike):
        if cap_tokens is not None:
            raise InputError(f"cap_tokens={cap_tokens}: {os.fspath(workload)} has its own; leave it out")
        return read_trace(os.fspath(workload)), os.fspath(workload)
    if isinstance(workload, Trace):
        return workload, None
    return import_frame(workload, cap_tokens=cap_tokens), None


def _listed_systems(call: str, systems: Systems) -> list[Any]:
    if isinstance(systems, str | Mapping):
        raise InputError(f"simrl.{call}: systems is {systems!r}; give a list, such as [{systems!r}]")
    plain: list[Any] = _plain(list(systems))
    return plain


def _calibrated(
    log: str | os.PathLike[str],
    folder: Path,
    window: tuple[int, int],
    group: int,
    launch: str | os.PathLike[str] | None,
    overrides: Overrides,
    samples: int | None,
    prompt_tokens: float | None,
    cap_tokens: int | None,
    log_format: str | None,
    trace: str | os.PathLike[str] | None,
) -> Calibration:
    if len(window) != 2 or not 0 <= window[0] <= window[1]:
        raise InputError(f"window={window!r}: give the first and the last step of the log, such as (1, 20)")
    _at_least(1, {"group": group, "samples": samples, "prompt_tokens": prompt_tokens, "cap_tokens": cap_tokens})
    _refuse_text(overrides)
    said = (
        [f"{key}={json.dumps(_plain(value))}" for key, value in overrides.items()]
        if isinstance(overrides, Mapping)
        else overrides
    )
    return calibrated(
        Path(log),
        said,
        None if launch is None else Path(launch),
        window,
        group,
        samples,
        prompt_tokens,
        cap_tokens,
        log_format,
        None if trace is None else Path(trace),
        folder,
    )


def _overrides(overrides: Overrides) -> list[Setting]:
    _refuse_text(overrides)
    if isinstance(overrides, Mapping):
        return [given(key, _plain(value), f"override {key}={value!r}") for key, value in overrides.items()]
    return [override(text) for text in overrides]


def _refuse_text(overrides: Overrides) -> None:
    if isinstance(overrides, str):
        raise InputError(f"overrides is {overrides!r}; give a list, such as [{overrides!r}], or a dictionary")


def _profile_setting(profile: str | os.PathLike[str] | None) -> list[Setting]:
    """In a scenario, in place of its own."""
    if profile is None:
        return []
    return [
        given(
            "profile", {"path": None, "roofline": None, **_named_profile(profile)}, f"argument profile={str(profile)!r}"
        )
    ]


def _named_profile(profile: str | os.PathLike[str]) -> dict[str, Any]:
    return {"roofline": {}} if profile == "roofline" else {"path": os.fspath(profile)}


def _default_profile(said: Mapping[str, Any]) -> dict[str, Any]:
    """The shipped profile, wherever model, GPU and tp go from here, if there is one of those that are said; else a roofline."""
    model, gpu = (str(said.get(key, "")).lower() for key in ("model", "cluster.gpu"))
    file = shipped_profile(model, gpu, said.get("cluster.tp", 1)) if model in MODELS else None
    if file is None:
        return {"roofline": {}}
    template = file.parent / "${model}_${cluster.gpu}_tp${cluster.tp}.parquet"
    return {"path": str(template), "between_passes_s": BETWEEN_PASSES_S}


def _step_times(
    profile: str | os.PathLike[str] | TableProfile | None, model: str | None, gpu: str | None, tp: int
) -> TableProfile | None:
    if profile is not None:
        if model or gpu:
            raise InputError("profile= and model= or gpu=: a profile has its own; give one of them")
        return profile if isinstance(profile, TableProfile) else read_profile(os.fspath(profile))
    if model is None and gpu is None:
        return None
    if model is None or gpu is None:
        raise InputError(f"{'gpu' if model is None else 'model'}= alone: step times need model= and gpu=, or profile=")
    shipped = shipped_profile(model, gpu, tp)
    return read_profile(shipped) if shipped else roofline_profile(model_shape(model), gpu_named(gpu), tp)


def _window(window: int | str | None) -> Window | None:
    if window is None:
        return None
    if window in ("aimd", "mimd"):
        return Aimd() if window == "aimd" else Mimd()
    if not isinstance(window, int) or not 1 <= window <= MOST_DRAFT_TOKENS:
        raise InputError(
            f"window={window!r}: choose 'aimd', 'mimd' or a number of tokens from 1 to {MOST_DRAFT_TOKENS}"
        )
    return Fixed(tokens=window)


def _at_least(least: int, given: Mapping[str, float | None]) -> None:
    for name, value in given.items():
        if value is not None and not value >= least:  # nan is refused, too
            raise InputError(f"{name}={value}: give {least} or more")


def _simulated(scenarios: Sequence[Scenario], opened: _Opened, jobs: int) -> Comparison:
    _at_least(1, {"jobs": jobs})
    results = simulate_scenarios(scenarios, jobs, opened.inputs())
    return comparison(scenarios, results, comparison_rows(scenarios, results))


def _result(found: Comparison | Result | str | os.PathLike[str]) -> Result:
    if isinstance(found, Comparison):
        return found.result()
    return found if isinstance(found, Result) else find_result(os.fspath(found))


@contextmanager
def _folder(folder: str | os.PathLike[str] | None) -> Iterator[Path]:
    if folder is not None:
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory(prefix="simrl-sweep-") as temporary:
        yield Path(temporary)


def _plain(value: Any) -> Any:
    """As YAML has it: paths as texts, numbers of numpy as Python's, tuples as lists."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.item() if hasattr(value, "item") else value
