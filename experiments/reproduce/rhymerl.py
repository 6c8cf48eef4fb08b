"""RhymeRL (arXiv 2508.18588): HistoPipe and HistoSpec against verl's one step off and AReaL, 8B to 32B on 128 GPUs.

GPUs, prompts and ranking groups are halved together: a worker, and a ranking group, has the paper's number of responses and
workers, but the longest of 16 groups has the longest 1/16 of the prompts, here the longest 1/8 (rows of migration keep 16 and
8). An epoch has two steps, enough for a ranking. The first two epochs are left out, as pipelines that roll out ahead settle
in them (with one and a half, ratios differed by up to a fifth from twelve steps). Growing lengths are two runs, at the mean
length and at the length of the last steps. Means over the three models are of 14B, on which the paper makes its own
ablations; the split of the GPUs is found for each cap, and AReaL runs on math alone: with all twelve settings a set of inputs
would take minutes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from statistics import mean
from typing import Any

import numpy as np

from experiments.reproduce.lab import Lab, Measures, Predict, made, passes, row, run_model, run_of
from experiments.reproduce.ledger import Inputs, named
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.scenario.model import Scenario
from simrl.speculation.passes import run_passes
from simrl.speculation.run_model import RunModel, draw_runs
from simrl.speculation.windows import Aimd
from simrl.training.config import TrainingConfig

SCALE = 2
MODEL, TP, SIZE = "qwen3-14b", 2, 1  # and its place among the three models
CAPS = {"8k": 8192, "16k": 16384}
TASKS = ("math", "code")
EPOCH_STEPS, STEPS, WARMUP_STEPS = 2, 6, 4
ASYNCHRONOUS = (10, 4)  # as in experiments.reproduce.areal
EARLY_STOP_FACTOR = 0.06  # simrl.synthesis.PRESETS["rhymerl-code"]
SURVEY_STEPS, MIDDLE_STEP, LAST_STEP = (
    320,
    50,
    75,
)  # of Fig. 3a; of the measured 20 to 80, and of their last ten
SHORT_HIT_TOKENS, LEAST_LONG_HIT_TOKENS = 1.5, 4.0  # one or two tokens; what is no short hit
WIDE_GAP_TOKENS = 5.0  # of two to eight; all others are one token
ALONE = 32  # GPUs that train where only rollout is looked at
GIGA = 1e9

System = dict[str, Any]
NO_DRAFTS = "none"
TRAINERS_PHASES = ("transfer", "log_prob", "train", "publish")
CONTROLLER_BYTES_PER_TOKEN = TrainingConfig().controller_bytes_per_token


def one_step_off(inputs: Inputs) -> System:
    """Return verl with rollout and training on GPUs of their own."""
    return {"name": "one_step_off", "dispatch": inputs["dispatch"]}


def areal(inputs: Inputs, eta: int) -> System:
    """Return AReaL at a staleness bound."""
    most = round(inputs["areal_max_concurrent"] * inputs["prompts"] / SCALE)
    return {"name": "areal", "eta": eta, "max_concurrent": most}


def rhymerl(inputs: Inputs, task: str, **ablated: Any) -> System:
    """Return RhymeRL's own system, or without some of its parts."""
    return {
        "name": "rhymerl",
        "ranking_groups": inputs[f"ranking_groups_{task}"] // SCALE,
        **named(inputs, "alpha", "least_beta"),
        **ablated,
    }


def history(
    inputs: Inputs, task: str, reuse: float = 1.0, first_epoch: bool = False
) -> dict[str, Any]:
    """Return the run model of its drafts: `reusable` tokens in hits of two kinds, gaps of about one token between them.
    Tokens of hits that a draft misses break them into shorter hits; where these would be shorter than hits can be, gaps are
    longer."""
    share = inputs[f"reusable_{task}"] * inputs["draft_efficiency"] * reuse
    short = inputs["short_hits"]
    least_tokens = short * SHORT_HIT_TOKENS + (1 - short) * LEAST_LONG_HIT_TOKENS
    hit_tokens = max(inputs["gap_tokens"] * share / (1 - share), least_tokens)
    wide = (hit_tokens * (1 - share) / share - 1) / (WIDE_GAP_TOKENS - 1)
    long_tokens = (hit_tokens - short * SHORT_HIT_TOKENS) / (1 - short)
    drafted = {
        "share": 1.0,
        "share_of_long": 1.0,
        "wrong_drafts": inputs["wrong_drafts"],
        "gaps": [
            {"up_to_tokens": 1, "share": 1 - wide, "mean_tokens": 1.0},
            {"up_to_tokens": 8, "share": wide, "mean_tokens": WIDE_GAP_TOKENS},
        ],
        "hits": [
            {"up_to_tokens": 2, "share": short, "mean_tokens": SHORT_HIT_TOKENS},
            {
                "up_to_tokens": round(8 * long_tokens),
                "share": 1 - short,
                "mean_tokens": long_tokens,
            },
        ],
    }
    return run_model([drafted], first_epoch)


def late(inputs: Inputs) -> float:
    """Return the mean length of the last steps over the mean of all measured steps, under linear growth."""
    first, last = inputs["survey_tokens"]
    at_middle, at_last = (
        first + (last - first) * step / SURVEY_STEPS for step in (MIDDLE_STEP, LAST_STEP)
    )
    return float(at_last / at_middle)


def lengths(inputs: Inputs, task: str, cap: str, growth: float = 1.0) -> dict[str, Any]:
    """Return fields of the length model of a task under a cap."""
    over_math = inputs["code_over_math"] if task == "code" else 1.0
    return {
        "cap_tokens": CAPS[cap],
        "mean_tokens": growth * over_math * inputs[f"mean_tokens_{cap}"],
        **likeness(inputs, task),
    }


def likeness(inputs: Inputs, task: str) -> dict[str, Any]:
    """Return how alike a prompt's responses are."""
    stops = {
        "early_stop_share": inputs["early_stop_share_code"],
        "early_stop_factor": EARLY_STOP_FACTOR,
    }
    return {
        "prompt_share": inputs[f"prompt_share_{task}"],
        "epoch_correlation": inputs["epoch_correlation"],
        "shuffle": False,
        **(stops if task == "code" else {}),
    }


def run(
    lab: Lab,
    inputs: Inputs,
    system: System,
    task: str,
    *,
    model: str = MODEL,
    tp: int = TP,
    gpus: int,
    training: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    speculation: dict[str, Any] | None = None,
    first_epoch: bool = False,
    steps: int = STEPS,
    warmup_steps: int = WARMUP_STEPS,
    **lengths: Any,
) -> Measures:
    """Return the measures of one of the paper's runs. A system that drafts pays `draft_s` in every pass; all but AReaL, which
    has SGLang with its CUDA graphs, run on the vLLM that verl starts."""
    on_verl = system["name"] != "areal"
    drafts = (
        system.get("speculation", "histospec" if system["name"] == "rhymerl" else NO_DRAFTS)
        != NO_DRAFTS
    )
    on = inputs if on_verl else inputs | {"engine_preset": inputs["areal_engine_preset"]}
    pause_s = passes(on, model_shape(model), gpu(inputs["gpu"]), tp).tables.between_passes_s
    scenario: Scenario = run_of(
        on | {"prompt_share": inputs[f"prompt_share_{task}"]},
        {**named(inputs, "minibatches", "log_probs"), **system},
        model=model,
        gpus=gpus,
        tp=tp,
        lengths=lengths,
        steps=steps,
        warmup_steps=warmup_steps,
        training={
            **named(inputs, "mfu", "log_prob_mfu", "sequence_parallel"),
            "tokens_per_microbatch": inputs["microbatch_tokens_per_gpu"]
            * inputs["sequence_parallel"],
            "extra_log_probs": inputs["reference"],
            **named(inputs, "publish_s", "load_overhead_s", "switch_s"),
            "reward_s": inputs[f"reward_{task}_s"],
            **(training or {}),
        },
        engine={
            "gpu_memory_utilization": inputs["gpu_memory_utilization"],
            "enforce_eager": on_verl and inputs["enforce_eager"],
            **(engine or {}),
        },
        host={"between_passes_s": pause_s + inputs["draft_s"]} if drafts else None,
        speculation=speculation
        or (
            {"runs": {"history": history(inputs, task, first_epoch=first_epoch)}}
            if drafts
            else None
        ),
    )
    return lab.run(scenario)


def train(
    lab: Lab,
    inputs: Inputs,
    system: System,
    task: str,
    cap: str,
    growth: float = 1.0,
    rollout_share: float | None = None,
    size: int = SIZE,
    updates: tuple[int, int] | None = None,
) -> Measures:
    """Return a run of §7, at half its size, of the model of this place; all systems have the split of `split`. `updates`, and
    the first of them that are left out: more under AReaL, where the long siblings of a first batch of short responses follow
    in its next updates."""
    prompts = inputs["prompts"] // SCALE
    steps, warmup_steps = updates or (
        ASYNCHRONOUS if system["name"] == "areal" else (STEPS, WARMUP_STEPS)
    )
    share = split(lab, inputs, cap, size) if rollout_share is None else rollout_share
    return run(
        lab,
        inputs,
        {"rollout_share": share, **system},
        task,
        model=inputs["models"][size],
        tp=inputs["tps"][size],
        gpus=inputs["gpus"] // SCALE,
        # A batch comes through one process, however many GPUs there are.
        training={"controller_bytes_per_token": SCALE * CONTROLLER_BYTES_PER_TOKEN},
        steps=steps,
        warmup_steps=warmup_steps,
        prompts_per_step=prompts,
        prompts=EPOCH_STEPS * prompts,
        **lengths(inputs, task, cap, growth),
    )


def split(lab: Lab, inputs: Inputs, cap: str, size: int = SIZE) -> float:
    """Return the largest share of GPUs for rollout, of `rollout_shares`, at which the baseline's trainer takes no more than
    `trainer_over_rollout` of its rollout; on mathematics, and for both tasks. The smallest share if it always takes more."""
    shares = sorted(inputs["rollout_shares"])

    def trainer_waits(share: float) -> bool:
        phase_s = train(
            lab, inputs, one_step_off(inputs), "math", cap, rollout_share=share, size=size
        )["phase_s"]
        trainer_s = sum(phase_s.get(phase, 0.0) for phase in TRAINERS_PHASES)
        return bool(trainer_s <= inputs["trainer_over_rollout"] * phase_s["rollout"])

    fitting = bisect_left(shares[1:], True, key=lambda share: not trainer_waits(share))
    return float(shares[fitting])


def gain(
    lab: Lab,
    inputs: Inputs,
    system: System,
    over: System,
    task: str,
    cap: str,
    growth: float = 1.0,
    size: int = SIZE,
) -> float:
    """Return the training throughput of a system over another's, on equal batches."""
    runs = [train(lab, inputs, each, task, cap, growth, size=size) for each in (system, over)]
    return float(runs[0]["samples_per_s"] / runs[1]["samples_per_s"])


@row
def end_to_end(
    lab: Lab,
    inputs: Inputs,
    caps: tuple[str, ...],
    against: str,
    of: Callable[[list[float]], float] = mean,
) -> list[float]:
    """Predict Fig. 13: its throughput over a baseline's, the mean (or the largest) over tasks and caps."""
    baseline = {
        "verl": one_step_off(inputs),
        "areal1": areal(inputs, 1),
        "areal8": areal(inputs, 8),
    }[against]
    tasks = TASKS if against == "verl" else TASKS[:1]
    return [
        of([gain(lab, inputs, rhymerl(inputs, t), baseline, t, cap) for cap in caps for t in tasks])
    ]


@row
def ablation(lab: Lab, inputs: Inputs, part: str, task: str, peak: bool = False) -> list[float]:
    """Predict Fig. 14: the gain of a part, 16K. `peak`, Fig. 15: in the best of all windows of 10 steps; here there are two
    windows, at the mean length and at the length of the last steps."""
    piped = rhymerl(inputs, task, two_tier=False, speculation=NO_DRAFTS)
    in_tiers = rhymerl(inputs, task, speculation=NO_DRAFTS)
    with_it, without = {
        "pipe": (piped, one_step_off(inputs)),
        "2tier": (in_tiers, piped),
        "spec": (rhymerl(inputs, task), in_tiers),
    }[part]
    growths = (1.0, late(inputs)) if peak else (1.0,)
    return [max(gain(lab, inputs, with_it, without, task, "16k", growth) for growth in growths)]


@row
def migrated(lab: Lab, inputs: Inputs, task: str) -> list[float]:
    """Predict Fig. 18: share of samples that migrate, under the paper's number of ranking groups."""
    system = rhymerl(inputs, task, two_tier=False, speculation=NO_DRAFTS)
    system["ranking_groups"] = inputs[f"ranking_groups_{task}"]
    return [float(train(lab, inputs, system, task, "16k")["continued_share"])]


def _rollout_s(
    lab: Lab, inputs: Inputs, speculation: str, model: str, tp: int, workers: int, prompts: int
) -> float:
    """Return the seconds of one rollout of the last steps, 8K, when the history is full."""
    gpus = workers * tp + ALONE
    system = {"name": "split", "rollout_share": workers * tp / gpus, "speculation": speculation}
    found = run(
        lab,
        inputs,
        system,
        "math",
        model=model,
        tp=tp,
        gpus=gpus,
        first_epoch=True,
        steps=1,
        warmup_steps=0,
        prompts_per_step=prompts,
        **lengths(inputs, "math", "8k", late(inputs)),
    )
    return float(found["rollout_s"])


def _drafting_gain(lab: Lab, inputs: Inputs, *of: Any) -> float:
    return _rollout_s(lab, inputs, NO_DRAFTS, *of) / _rollout_s(lab, inputs, "histospec", *of)


def best_step(lab: Lab, inputs: Inputs) -> list[float]:
    """Predict Fig. 16: rollout without drafts over rollout with them, the largest of the models' ratios."""
    return [max(last_steps(lab, inputs))]


def last_steps(lab: Lab, inputs: Inputs) -> list[float]:
    """Return this ratio of each model, in the last steps; an eighth of the workers."""
    gains = []
    for model, tp in zip(inputs["models"], inputs["tps"], strict=True):
        all_workers = inputs["gpus"] * split(lab, inputs, "8k") / tp
        workers = max(round(all_workers / 8), 1)
        gains.append(
            _drafting_gain(
                lab, inputs, model, tp, workers, round(inputs["prompts"] * workers / all_workers)
            )
        )
    return gains


def large_batches(lab: Lab, inputs: Inputs) -> list[float]:
    """Predict §7.4: this ratio for one worker of 32B, and one of 8B, with thousands of responses at once."""
    names, tps = inputs["models"], inputs["tps"]
    workers = ((names[2], tps[2]), (names[0], tps[0]))
    return [
        mean(
            _drafting_gain(lab, inputs, *worker, 1, responses // inputs["group"])
            for worker, responses in zip(workers, inputs["rollouts_a_worker"], strict=True)
        )
    ]


@row
def acceptance(lab: Lab, inputs: Inputs, at: str) -> list[float]:
    """Predict Fig. 17: share of drafted tokens accepted, in the first steps that have history or in the last ones, math."""
    reuse = inputs["early_reuse"] if at == "first" else 1.0
    model = made(RunModel, history(inputs, "math", reuse))
    tokens = np.full(256, round(inputs["mean_tokens_8k"]))
    return [
        run_passes(draw_runs(model, tokens, np.arange(256)), tokens, Aimd().rule).acceptance_rate
    ]


def survey(lab: Lab, inputs: Inputs, task: str, cap_tokens: int, mean_tokens: float) -> Measures:
    """Return a step of §3.1's verl, 32B on 64 GPUs, in its full size."""
    return run(
        lab,
        inputs,
        {"name": "verl_colocated", "dispatch": inputs["dispatch"]},
        task,
        model=inputs["models"][2],
        tp=inputs["tps"][2],
        gpus=inputs["survey_gpus"],
        steps=1,
        warmup_steps=0,
        prompts_per_step=inputs["survey_prompts"],
        cap_tokens=cap_tokens,
        mean_tokens=mean_tokens * (inputs["code_over_math"] if task == "code" else 1.0),
        **likeness(inputs, task),
    )


def _surveyed(lab: Lab, inputs: Inputs, task: str = "math", cap: str = "16k") -> Measures:
    if cap == "32k":
        return survey(lab, inputs, task, 2 * CAPS["16k"], inputs["survey_mean_tokens_32k"])
    return survey(lab, inputs, task, CAPS[cap], inputs["survey_mean_tokens"])


@row
def rollout_share(lab: Lab, inputs: Inputs, task: str, cap: str = "16k") -> list[float]:
    """Predict Fig. 2 (16K) and §3.1 (32K): rollout's share of a step."""
    found = _surveyed(lab, inputs, task, cap)
    return [float(found["rollout_s"] / found["step_s"])]


def earliest_idle(lab: Lab, inputs: Inputs) -> list[float]:
    """Predict Fig. 3c: idle share of the rollout, for the worker that finishes first."""
    return [float(_surveyed(lab, inputs)["earliest_idle_share"])]


def idle(lab: Lab, inputs: Inputs) -> list[float]:
    """Predict §1: share of all GPU time spent waiting for the slowest responses. The paper's also counts the idle time of
    training."""
    found = _surveyed(lab, inputs)
    return [float(found["idle_share"] * found["rollout_s"] / found["step_s"])]


def store(lab: Lab, inputs: Inputs) -> list[float]:
    """Predict §5.3: GB of a node for the indexes of an epoch."""
    tokens = inputs["store_prompts"] * inputs["group"] * inputs["store_mean_tokens"]
    return [float(tokens * inputs["store_bytes_per_token"] / inputs["store_nodes"] / GIGA)]


ROWS: dict[str, Predict] = {
    "rhyme-e2e-8k-verl": end_to_end(("8k",), "verl"),
    "rhyme-e2e-16k-verl": end_to_end(("16k",), "verl"),
    "rhyme-e2e-max-verl": end_to_end(("8k", "16k"), "verl", max),
    "rhyme-e2e-8k-areal1": end_to_end(("8k",), "areal1"),
    "rhyme-e2e-16k-areal1": end_to_end(("16k",), "areal1"),
    "rhyme-e2e-8k-areal8": end_to_end(("8k",), "areal8"),
    "rhyme-e2e-16k-areal8": end_to_end(("16k",), "areal8"),
    "rhyme-abl-pipe-math": ablation("pipe", "math"),
    "rhyme-abl-2tier-math": ablation("2tier", "math"),
    "rhyme-abl-spec-math": ablation("spec", "math"),
    "rhyme-abl-pipe-code": ablation("pipe", "code"),
    "rhyme-abl-2tier-code": ablation("2tier", "code"),
    "rhyme-abl-spec-code": ablation("spec", "code"),
    "rhyme-spec-peak": best_step,
    "rhyme-accept-low": acceptance("first"),
    "rhyme-accept-high": acceptance("last"),
    "rhyme-migr-math": migrated("math"),
    "rhyme-migr-code": migrated("code"),
    "rhyme-idle": earliest_idle,
    "rhyme-rollout-share-math": rollout_share("math"),
    "rhyme-rollout-share-code": rollout_share("code"),
    "rhyme-idle-total": idle,
    "rhyme-rollout-32k": rollout_share("math", "32k"),
    "rhyme-pipe-peak": ablation("pipe", "math", peak=True),
    "rhyme-2tier-peak": ablation("2tier", "math", peak=True),
    "rhyme-store": store,
    "rhyme-batch": large_batches,
}

# What descriptors are compared with: one step of §3.1's run, and the drafts' acceptance.
BASELINE: dict[str, Predict] = {
    "rollout_share": rollout_share("math"),
    "earliest_idle": earliest_idle,
    "idle": idle,
    "first_acceptance": acceptance("first"),
    "last_acceptance": acceptance("last"),
}
