"""Claims of RhymeRL (arXiv 2508.18588) in the settings of `experiments.reproduce.rhymerl`: 128 GPUs at half size,
verl 0.4.1, AReaL 0.3."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from experiments.claims.claim import Claim, Figure, Undetermined, all_above, within
from experiments.reproduce import rhymerl as paper
from experiments.reproduce.lab import Lab, Measures
from experiments.reproduce.ledger import Inputs
from experiments.reproduce.length_models import mean_under
from simrl.speculation.history_index import PAPER
from simrl.speculation.methods import EAGLE
from simrl.speculation.passes import run_passes
from simrl.speculation.trace_runs import history_runs
from simrl.speculation.windows import Aimd
from simrl.trace.trace import read_trace

LEDGER = "rhymerl"
TRACES = Path(__file__).parents[2] / "traces"
SIZES = ("8B", "14B", "32B")
THIRDS = {"first": 1 / 6, "last": 5 / 6}  # the middle of a third of the measured steps
STEPS = (20, 80)  # §7: measured, after the warm-up
WIDE = 128  # GPUs of §6.4's 32 workers, and as many that train
BATCHES = (1, 4, 8, 16, 32)  # prompts of 16 responses: 16 to 512 run at once
CONTEXTS = (500, 8000)  # tokens
DECODED = (128, 640)  # response tokens: between the two, a batch is as large as before


def survey(lab: Lab, inputs: Inputs, cap: str) -> Measures:
    """Return a step of §3.1's verl. Under 8K the lengths are those under 16K, cut."""
    if cap == "32k":
        return paper.survey(
            lab, inputs, "math", 2 * paper.CAPS["16k"], inputs["survey_mean_tokens_32k"]
        )
    mean_tokens = inputs["survey_mean_tokens"]
    if cap == "8k":
        mean_tokens = mean_under(paper.CAPS["8k"], mean_tokens, inputs["sigma"], paper.CAPS["16k"])
    return paper.survey(lab, inputs, "math", paper.CAPS[cap], mean_tokens)


def rollout_share(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate rh-1."""
    runs = {cap: survey(lab, inputs, cap) for cap in ("8k", "16k", "32k")}
    shares = {cap: float(run["rollout_s"] / run["step_s"]) for cap, run in runs.items()}
    return Figure(shares, shares["16k"] >= 0.75 and shares["8k"] < shares["16k"] < shares["32k"])


def earliest(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate rh-2."""
    return within({"idle": float(survey(lab, inputs, "16k")["earliest_idle_share"])}, 0.5, 1.0)


def idle(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate rh-3."""
    run = survey(lab, inputs, "16k")
    return within({"idle": float(run["idle_share"] * run["rollout_s"] / run["step_s"])}, 0.3, 0.6)


def gains(lab: Lab, inputs: Inputs, whole: bool, against: str, cap: str) -> dict[str, float]:
    """Return RhymeRL's gains over a baseline by model and task, over AReaL on mathematics; of 14B on mathematics only if not
    `whole`."""
    baseline = {
        "one step off": paper.one_step_off(inputs),
        "AReaL 1": paper.areal(inputs, 1),
        "AReaL 8": paper.areal(inputs, 8),
    }[against]
    sizes = range(len(SIZES)) if whole else (paper.SIZE,)
    tasks = paper.TASKS if whole and against == "one step off" else paper.TASKS[:1]
    return {
        f"{SIZES[size]} {task} {cap}": paper.gain(
            lab, inputs, paper.rhymerl(inputs, task), baseline, task, cap, size=size
        )
        for size in sizes
        for task in tasks
    }


def both_caps(lab: Lab, inputs: Inputs, whole: bool, against: str) -> dict[str, float]:
    """Return the gains of `gains` under both caps."""
    return {
        key: value
        for cap in paper.CAPS
        for key, value in gains(lab, inputs, whole, against, cap).items()
    }


def longer_gains_more(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate rh-4."""
    means = {
        cap: mean(gains(lab, inputs, whole, "one step off", cap).values()) for cap in paper.CAPS
    }
    return Figure(means, means["16k"] > means["8k"])


def over_one_step_off(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate rh-5."""
    return all_above(both_caps(lab, inputs, whole, "one step off"), 1.1)


def over_areal(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate rh-6."""
    return all_above({"mean": mean(both_caps(lab, inputs, whole, "AReaL 1").values())}, 1.1)


def lead_over_areal(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate rh-7."""
    means = {
        f"eta {eta}": mean(both_caps(lab, inputs, whole, f"AReaL {eta}").values()) for eta in (1, 8)
    }
    return Figure(means, 1.0 < means["eta 8"] < means["eta 1"])


def part(lab: Lab, inputs: Inputs, whole: bool, name: str) -> dict[str, float]:
    """Return the gain of a part of RhymeRL on what is there before it, 14B and 16K, by task."""
    tasks = paper.TASKS if whole else paper.TASKS[:1]
    return {task: paper.ablation(name, task)(lab, inputs)[0] for task in tasks}


def histopipe(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate rh-8."""
    return all_above(part(lab, inputs, whole, "pipe"), 1.15)


def two_tiers(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate rh-9."""
    tiers, pipe = (part(lab, inputs, whole, name) for name in ("2tier", "pipe"))
    return Figure(tiers, all(1.0 < tiers[task] < pipe[task] for task in tiers))


def histospec(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate rh-10."""
    return all_above(part(lab, inputs, whole, "spec"), 1.15)


def rollout(
    lab: Lab,
    inputs: Inputs,
    speculation: Any,
    prompts: int,
    *,
    size: int = 0,
    growth: float = 1.0,
    reuse: float = 1.0,
    drafts: dict[str, Any] | None = None,
) -> float:
    """Return the seconds of one worker's rollout under 8K, with a history whose reuse is `reuse` of the ledger's."""
    tp = inputs["tps"][size]
    gpus = tp + paper.ALONE
    history = {"runs": {"history": paper.history(inputs, "math", reuse, first_epoch=True)}}
    run = paper.run(
        lab,
        inputs,
        {"name": "split", "rollout_share": tp / gpus, "speculation": speculation},
        "math",
        model=inputs["models"][size],
        tp=tp,
        gpus=gpus,
        speculation=None if speculation == paper.NO_DRAFTS else drafts or history,
        steps=1,
        warmup_steps=0,
        prompts_per_step=prompts,
        **paper.lengths(inputs, "math", "8k", growth),
    )
    return float(run["rollout_s"])


def rises_with_training(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate rh-11."""
    workers = inputs["gpus"] * paper.split(lab, inputs, "8k") / paper.TP
    prompts = round(inputs["prompts"] / workers)
    first, last = inputs["survey_tokens"]
    found = {}
    for third, share in THIRDS.items():
        step = STEPS[0] + share * (STEPS[1] - STEPS[0])
        at_step, at_middle = (
            first + (last - first) * s / paper.SURVEY_STEPS for s in (step, paper.MIDDLE_STEP)
        )
        reuse = inputs["early_reuse"] + share * (1 - inputs["early_reuse"])
        of: dict[str, Any] = {"size": paper.SIZE, "growth": at_step / at_middle}
        plain_s = rollout(lab, inputs, paper.NO_DRAFTS, prompts, **of)
        found[f"{third} third"] = plain_s / rollout(
            lab, inputs, "histospec", prompts, reuse=reuse, **of
        )
    return Figure(found, found["last third"] > found["first third"])


def migrate(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate rh-12."""
    tasks = paper.TASKS if whole else paper.TASKS[:1]
    return within({task: paper.migrated(task)(lab, inputs)[0] for task in tasks}, 0.005, 0.08)


def thousands(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate rh-13."""
    ratios = {}
    for size, responses in (
        (2, inputs["rollouts_a_worker"][0]),
        (0, inputs["rollouts_a_worker"][1]),
    ):
        of: dict[str, Any] = {"size": size, "growth": paper.late(inputs)}
        prompts = responses // inputs["group"]
        plain_s = rollout(lab, inputs, paper.NO_DRAFTS, prompts, **of)
        ratios[f"{responses} of {SIZES[size]}"] = plain_s / rollout(
            lab, inputs, "histospec", prompts, **of
        )
    return all_above(ratios, 1.3)


def alternation(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate rh-14."""
    system = paper.rhymerl(inputs, "math", two_tier=False, speculation=paper.NO_DRAFTS)
    part_s = paper.train(lab, inputs, system, "math", "16k")["part_s"].iloc[-2:]
    single = float((part_s.std(axis=1, ddof=0) / part_s.mean(axis=1)).mean())
    both = part_s.sum()
    of_sums = float(both.std(ddof=0) / both.mean())
    return Figure({"single steps": single, "two-step sums": of_sums}, of_sums < 0.5 * single)


def tiers_fill_bubbles(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate rh-15."""
    prompts, bubbles = inputs["prompts"] // paper.SCALE, {}
    for name, two_tier in (("equal workers", False), ("two tiers", True)):
        system = paper.rhymerl(inputs, "math", two_tier=two_tier, speculation=paper.NO_DRAFTS)
        run = paper.run(
            lab,
            inputs,
            {"rollout_share": 0.5, **system},
            "math",
            gpus=WIDE,
            prompts_per_step=prompts,
            prompts=paper.EPOCH_STEPS * prompts,
            **paper.lengths(inputs, "math", "16k"),
        )
        bubbles[name] = float(run["rollout_bubble"])
    return Figure(bubbles, bubbles["two tiers"] <= 2 / 3 * bubbles["equal workers"])


def eagle(inputs: Inputs) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the method and the acceptance of model-based speculation (§7.4)."""
    method = {
        "name": "draft_model",
        "model": EAGLE,
        "window": {"kind": "fixed", "tokens": inputs["eagle_tokens"]},
    }
    accepted = {"by_position": [inputs["eagle_accept"]], "source": "the ledger"}
    return method, {"acceptance": {EAGLE: accepted}, "draft_round_s": inputs["eagle_round_s"]}


def model_drafts_lose(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate rh-16: batches that stay as large as they are, at short and at long contexts."""
    method, drafts = eagle(inputs)
    gains, loses = dict[str, float](), True
    for context in CONTEXTS:
        plain = decoded_s(lab, inputs, context, paper.NO_DRAFTS)
        histospec, model_based = (
            {batch: plain[batch] / s for batch, s in decoded_s(lab, inputs, context, *of).items()}
            for of in (("histospec",), (method, drafts))
        )
        gains |= {f"HistoSpec {batch} at {context}": x for batch, x in histospec.items()}
        gains |= {f"EAGLE {batch} at {context}": x for batch, x in model_based.items()}
        small, large = min(plain), max(plain)
        shares = {batch: (model_based[batch] - 1) / (histospec[batch] - 1) for batch in plain}
        loses &= (
            any(model_based[batch] < 1.05 for batch in plain if batch > 64)
            or shares[large] <= 0.5 * shares[small]
        ) and all(gain > 1.3 for gain in histospec.values())
    return Figure(gains, loses)


def decoded_s(
    lab: Lab,
    inputs: Inputs,
    context_tokens: int,
    speculation: Any,
    drafts: dict[str, Any] | None = None,
) -> dict[int, float]:
    """Return the seconds in which one worker decodes equal responses from the first to the second of `DECODED` tokens, by the
    requests that run at once: the rollout of the longer responses less the shorter ones' has no prefill and no tail."""
    alike = inputs | {"sigma": 0.0, "prompt_tokens": float(context_tokens)}
    alike["prompt_cap_tokens"] = 2 * context_tokens
    lengths = [{"mean_tokens_8k": float(tokens)} for tokens in DECODED]
    return {
        prompts * inputs["group"]: rollout(
            lab, alike | lengths[1], speculation, prompts, drafts=drafts
        )
        - rollout(lab, alike | lengths[0], speculation, prompts, drafts=drafts)
        for prompts in BATCHES
    }


def branches(lab: Lab, inputs: Inputs, whole: bool) -> Figure:
    """Simulate rh-17."""
    trace = read_trace(TRACES / inputs["recorded"] / "trace.parquet")
    tokens = trace.column("response_tokens").astype(np.int64)
    found = {}
    for branch in ("reward", "count"):
        runs = history_runs(trace, PAPER.model_copy(update={"branch": branch}))
        found[branch] = (
            run_passes(runs, tokens, Aimd().rule)
            .of((runs.first >= 0) & (tokens > 1))
            .speculation_rate
        )
    return Figure(found, found["reward"] >= found["count"])


_HALF = "half size: 64 GPUs, half of the prompts, 14B on mathematics in draws, all models and tasks at the middle"
_PART = "half size: 64 GPUs, half of the prompts; math and code at the middle, math in draws"

_BATCH = (
    "512 prompts a step at the middle: training takes half of a step, and a worker's responses do not fit its KV cache "
    "together; §6.1's 20 epochs in 300 to 1,000 steps are 160 to 550 prompts"
)
_SIXTH = {"160 prompts a step": {"prompts": 160}}
_GRAPHS = {"CUDA graphs in vLLM": {"enforce_eager": False}}
_FAST_HOSTS = {"enforce_eager": False, "host_speed": 4.0}
_SURVEY = Undetermined(
    "the prompts of a step of §3.1 are not printed", "survey_prompts", (32, 64, 128, 256, 512)
)
_PROMPTS = Undetermined("the prompts of a step are not printed", "prompts", (160, 256, 512, 1024))
_STREAMS = _PROMPTS._replace(
    why=f"{_PROMPTS.why}; training that streams mini-batches is one reading of §4.2"
)

CLAIMS = {
    "rh-1": Claim(
        LEDGER,
        rollout_share,
        "share at 16K >= 0.75 and rising with the cap",
        "32B math, 64 GPUs, whole; one step",
        "the batch: with 256 prompts a step, update and log-probs take 380 s at the middle MFU beside 450 s of rollout",
        undetermined=_SURVEY,
    ),
    "rh-2": Claim(LEDGER, earliest, "idle share of the earliest worker >= 0.5", "as rh-1, 16K"),
    "rh-3": Claim(
        LEDGER,
        idle,
        "idle share 0.3 to 0.6",
        "as rh-1, 16K; waiting for the slowest worker only",
        "as rh-1, and 16 prompts a worker leave workers less unlike than theirs; idle time inside training is not counted",
        undetermined=_SURVEY._replace(why="the run of the sentence is not named"),
    ),
    "rh-4": Claim(LEDGER, longer_gains_more, "gain(16K) > gain(8K) on the mean of models", _HALF),
    "rh-5": Claim(
        LEDGER, over_one_step_off, "all ratios > 1.1", _HALF, _BATCH, undetermined=_PROMPTS
    ),
    "rh-6": Claim(
        LEDGER,
        over_areal,
        "ratio > 1.1",
        _HALF,
        "AReaL's SGLang has CUDA graphs, and verl's vLLM, on which RhymeRL runs, has none by default",
        _GRAPHS,
    ),
    "rh-7": Claim(
        LEDGER,
        lead_over_areal,
        "1 < ratio(eta 8) < ratio(eta 1)",
        _HALF,
        "as rh-6: the order holds, and at eta 8 AReaL is level",
        _GRAPHS,
    ),
    "rh-8": Claim(LEDGER, histopipe, "ratio > 1.15", _PART, _BATCH, undetermined=_STREAMS),
    "rh-9": Claim(
        LEDGER,
        two_tiers,
        "1 < two-tier ratio < HistoPipe ratio",
        _PART,
        f"as rh-8: {_BATCH}",
        undetermined=_STREAMS,
    ),
    "rh-10": Claim(LEDGER, histospec, "ratio > 1.15", _PART, _BATCH, _SIXTH),
    "rh-11": Claim(
        LEDGER,
        rises_with_training,
        "gain of last third > first third",
        "one worker of 14B with its share of a step",
        undetermined=Undetermined(
            "by construction: the reuse of the history rises by assumption",
            "early_reuse",
            (0.8, 0.9, 1.0, 1.1),
        ),
    ),
    "rh-12": Claim(
        LEDGER,
        migrate,
        "between 0.5 % and 8 %",
        "half size, 16 (math) and 8 (code) ranking groups",
    ),
    "rh-13": Claim(LEDGER, thousands, "ratio > 1.3", "one worker with all of its rollouts"),
    "rh-14": Claim(
        LEDGER,
        alternation,
        "CV of two-step sums < half that of single steps",
        "half size, 14B, HistoPipe alone",
        "without CUDA graphs a pass takes its launch, however many requests it has, and steps are the more uneven",
        {
            "ranks that change less": {"prompt_share_math": 0.985, "epoch_correlation": 0.9995},
            **_GRAPHS,
        },
    ),
    "rh-15": Claim(
        LEDGER,
        tiers_fill_bubbles,
        "bubble falls by at least a third",
        "32 workers with half of the prompts",
    ),
    "rh-16": Claim(
        LEDGER,
        model_drafts_lose,
        "at both contexts: EAGLE's gain is below 1.05 at a batch beyond 64, or its share of HistoSpec's gain halves; "
        "HistoSpec > 1.3 throughout",
        "one worker of 8B, 16 to 512 requests of equal lengths run at once, at contexts of 500 and 8,000 tokens",
        "a pass takes as long whether or not it verifies drafts where the host is its longest part (launches without CUDA "
        "graphs, and 28 ms for 512 sequences) or, at 8,000 tokens, the reading of the cache: EAGLE's drafts then pay at every "
        "batch. At 500 tokens they stop to pay where kernels are the longest part and drafts are long and often wrong",
        {
            **_GRAPHS,
            "and hosts of four times the speed": _FAST_HOSTS,
            "and five draft tokens, accepted at 0.6": {
                **_FAST_HOSTS,
                "eagle_tokens": 5,
                "eagle_accept": 0.6,
            },
        },
    ),
    "rh-17": Claim(
        LEDGER,
        branches,
        "accepted share not lower",
        "recorded runs of traces/, teacher-forced",
        "the two are level within 0.3 % in all 18 recorded runs: right and wrong responses of this task go on alike",
        undetermined=Undetermined(
            "no number in the text; recorded runs of a small model stand for the paper's",
            "recorded",
            ("countdown/sync", "countdown-1/sync", "countdown-2/sync"),
        ),
    ),
}
