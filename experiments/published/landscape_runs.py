"""The simulations of the landscape: its sizes, its rows, and the table of all rows so far.

Simulated rows are kept in a folder by `simrl.study.store`, so a stopped command continues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simrl.analysis.gpu_hours import waterfall
from simrl.errors import InputError
from simrl.result.metrics import summary, window
from simrl.result.off_policyness import largest_off_policyness
from simrl.scenario.load import ScenarioFile, Setting
from simrl.scenario.model import Scenario
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate_prepared
from simrl.study.executors import Outcomes as Coming, Processes, each
from simrl.study.point import Digests, Point
from simrl.study.store import Outcomes
from simrl.systems.recipes import RECIPES, parameters_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCENARIO = HERE / "landscape.yaml"
COUNTDOWN = ROOT / "traces" / "countdown" / "sync"
VERL_RUN = ROOT / "experiments" / "verl_run.yaml"

BASE = "verl_colocated"
SLOW = "specactor"  # its drafters and verifiers wait for each other window by window, which takes long to simulate
FAMILIES = (
    BASE, "rollpacker", "partial_rollout", "april", "one_step_off", "rhymerl", "areal", "tlt",
)  # fmt: skip
STEPS_PER_EPOCH = 3
EPOCHS = 5  # where they are not what is varied: in two, pipelines that roll out ahead settle, the others are measured
MANY_GPUS, THEIR_EPOCHS = 1024, 3  # for the time: one is measured
MEASURED_EPOCHS = 3  # the last of many: what is put off or in flight makes single ones uneven
AHEAD_STEPS = 4  # of the trace, beyond the updates
PROMPTS_PER_GPU = 0.5  # in groups of 16: 8 responses a GPU and step
SHARES = (0.375, 0.5, 0.625, 0.75)
DRAFTERS = ("none", "histospec", "ngram", "draft_model", "tlt")
Row = Mapping[str, Any]
Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Size:
    """The simulated systems, by numbers of GPUs and of epochs; `base_gpus` are the GPUs of all parts but the scales."""

    scales: Mapping[int, Sequence[str]]
    epochs: Mapping[int, Sequence[str]]
    shares: Sequence[float]
    families: Sequence[str]
    pipelines: Sequence[str]
    drafters: Sequence[str]
    recorded: Sequence[str]
    recorded_steps: int
    verl_steps: int
    combination_steps: int
    limits: Sequence[int] = (0, 1, 4)  # of off-policyness, and the η that are tried
    tokens: Path = COUNTDOWN / "trace.parquet"  # on which text drafts are counted
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def base_gpus(self) -> int:
        return min(self.scales)

    @property
    def systems(self) -> Sequence[str]:
        return self.scales[self.base_gpus]

    def scenario(
        self, gpus: int, epochs: int, system: str | Mapping[str, Any], **changes: Any
    ) -> Scenario:
        """Return landscape.yaml on `gpus` GPUs with their share of the prompts, for `epochs` epochs, of which the last is
        measured; of many, the last three; of one, its second half. `changes` are fields by their dotted keys, with `__` for a
        dot."""
        prompts = changes.pop("prompts_per_step", self.prompts(gpus))
        steps = changes.pop("steps", STEPS_PER_EPOCH * max(epochs, 2))
        in_trace = steps + AHEAD_STEPS
        measured = STEPS_PER_EPOCH * (MEASURED_EPOCHS if epochs > MEASURED_EPOCHS else 1)
        given = {
            "cluster.gpus": gpus,
            **updates(system, steps, changes.pop("warmup_steps", steps - measured)),
            "workload.synthetic.steps": in_trace,
            "workload.synthetic.prompts_per_step": prompts,
            "workload.synthetic.prompts": prompts * (in_trace if epochs == 1 else STEPS_PER_EPOCH),
            **self.changes,
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        return scenario_from(SCENARIO, given, system)

    def prompts(self, gpus: int) -> int:
        """Return the prompts of a step (weak scaling)."""
        return int(gpus * PROMPTS_PER_GPU)


ALL_BUT_SLOW = tuple(name for name in RECIPES if name != SLOW)
FULL = Size(
    scales={
        64: tuple(RECIPES), 256: ALL_BUT_SLOW, 1024: ALL_BUT_SLOW, 4096: ALL_BUT_SLOW,
    },
    epochs={
        1: tuple(RECIPES), 2: tuple(RECIPES), 10: (*FAMILIES, "streamrl", "verl_fully_async"),
        50: (BASE, "partial_rollout", "one_step_off", "streamrl", "rhymerl", "tlt"),
    },
    shares=SHARES,
    families=FAMILIES,
    pipelines=(
        BASE, "rlhfuse", "seer", "rollpacker", "sortedrl", "partial_rollout", "april", "one_step_off", "asyncflow", "streamrl",
        "rhymerl", "areal", "laminar",
    ),
    drafters=DRAFTERS,
    recorded=ALL_BUT_SLOW,
    recorded_steps=20,
    verl_steps=24,
    combination_steps=15,
)  # fmt: skip
TINY = Size(
    scales={8: (BASE, "areal", "dapo", "rhymerl"), 16: (BASE, "areal")},
    epochs={1: (BASE,), 2: (BASE, "areal")},
    shares=(0.5,),
    families=(BASE, "areal"),
    pipelines=(BASE, "areal"),
    drafters=("none", "ngram"),
    recorded=("split", "areal"),
    recorded_steps=4,
    verl_steps=4,
    combination_steps=4,
    limits=(1,),
    tokens=ROOT / "traces" / "countdown-varied" / "dapo-1e-4" / "trace.parquet",
    changes={
        "model": "qwen3-8b", "cluster.tp": 1, "workload.synthetic.group": 4, "workload.synthetic.mean_tokens": 100,
        "workload.synthetic.cap_tokens": 400, "workload.synthetic.reward_mean": None,
    },
)  # fmt: skip


def updates(system: str | Mapping[str, Any], steps: int, warmup_steps: int) -> dict[str, int]:
    """Return the updates that train these batches: verl_fully_async makes several per batch."""
    name = system if isinstance(system, str) else str(system["name"])
    of_a_batch = int(parameters_of(name).get("sync_step", 1))
    return {"steps": steps * of_a_batch, "warmup_steps": warmup_steps * of_a_batch}


def scenario_from(
    path: Path, given: Mapping[str, Any], system: str | Mapping[str, Any]
) -> Scenario:
    entry = {"name": system} if isinstance(system, str) else dict(system)
    settings = [Setting(key, value, "landscape.py") for key, value in given.items()]
    return ScenarioFile(path, settings).scenario([], entry)


def row_of(scenario: Scenario, inputs: InputCache) -> dict[str, Any]:
    """Return the row of a comparison, with the columns of this page: response tokens a second and GPU, the idle share of all
    GPUs, the cost of a million trained tokens, the oldest token trained, and each part of the GPU time as a share,
    `part.NAME`."""
    result = simulate_prepared(prepare(scenario, inputs))
    row = summary(result, scenario.warmup_steps, scenario.cluster.cost_per_gpu_hour)
    start_s, end_s = window(result, scenario.warmup_steps)
    trained = int(
        result.steps.slice(scenario.warmup_steps).column("response_tokens").to_numpy().sum()
    )
    fall = waterfall(result, start_s, end_s)
    shares = {
        f"part.{name}": gpu_s / fall.total_gpu_s for name, gpu_s in fall.gpu_s.items() if gpu_s
    }
    idle = sum(shares.get(f"part.{name}", 0.0) for name in IDLE)
    hourly = scenario.cluster.cost_per_gpu_hour * row["gpus"]
    return {
        **row,
        "tokens_per_s_per_gpu": trained / (end_s - start_s) / row["gpus"],
        "idle_share": idle,
        "cost_per_1m_tokens": hourly / 3600 * 1e6 / row["tokens_per_s"] if hourly else None,
        "oldest": largest_off_policyness(row),
        **shares,
    }


IDLE = ("tail_idle", "trainer_wait", "other_wait", "rest_idle", "train_idle")
_inputs = InputCache()  # of this process


def _outcome(scenario: Scenario) -> dict[str, Any]:
    try:
        return {"row": row_of(scenario, _inputs)}
    except InputError as error:
        return {"error": str(error)}


class Simulations:
    """An executor (`simrl.study.executors`) of rows made by `row_of`, in several processes; `on_row` is called with each."""

    def __init__(self, jobs: int, on_row: Callable[[], None] = lambda: None) -> None:
        self._jobs, self._on_row = jobs, on_row

    def outcomes(self, points: Sequence[Point]) -> Coming:
        scenarios = [point.scenario for point in points]
        with Processes(self._jobs, stay=True) as pool:
            for i, outcome in each(_outcome, scenarios, pool if self._jobs > 1 else None):
                yield i, outcome
                self._on_row()


@dataclass
class Table:
    """All rows so far. Requested rows are simulated unless the folder has them."""

    outcomes: Outcomes
    rows: list[dict[str, Any]]

    def of(
        self, part: str, asked: Mapping[tuple[Any, str], Scenario]
    ) -> dict[tuple[Any, str], dict[str, Any]]:
        """Return the rows of a part of the page, by varied value and system; `error` has the reason for a missing one."""
        digests = Digests()
        points = [Point(scenario, digests) for scenario in asked.values()]
        found: dict[tuple[Any, str], dict[str, Any]] = {}
        for (key, point), outcome in zip(
            zip(asked, points, strict=True), self.outcomes.of(points), strict=True
        ):
            row = dict(outcome.get("row", {"error": outcome.get("error", "")}))
            parameters = point.scenario.system.parameters
            self.rows.append({
                "part": part, "varied": key[0], "name": key[1], "parameters": parameters or None,
                "cluster_gpus": point.scenario.cluster.gpus, **row,
            })  # fmt: skip
            found[key] = row
        return found
