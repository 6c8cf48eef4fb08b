"""TLT (arXiv 2511.16665): trees of a one-layer drafter in the tail of verl's rollout, and its tables of decode states.

A step's responses are not divided, as the longest of them decides. TLT drafts without SGLang's overlapped scheduler, which
the baseline has: between passes it has a host time of its own.
"""

from __future__ import annotations

from functools import cache
from math import log
from statistics import NormalDist, mean
from typing import Any

from experiments.reproduce.lab import GIVEN, Lab, Measures, Predict, passes, row, run_model, run_of
from experiments.reproduce.ledger import Inputs, named
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.scenario.model import Scenario
from simrl.speculation.acceptance import ModelAcceptance
from simrl.speculation.choices import Strategy
from simrl.speculation.draft_times import Overheads, eagle_drafts, graph_bytes, model_drafts
from simrl.speculation.methods import EAGLE
from simrl.speculation.trees import accept_length, tree_log_acceptances
from simrl.trace.lognormal import location_of

STEPS, WARMUP_STEPS = 4, 1  # §6.1: three measured
TARGET, SMALL = "qwen2.5-32b", "qwen2.5-0.5b"
# The R1-distilled 7B is Qwen2.5-7B by its shape, of which there are measured kernels on H100.
SHAPES = {"deepseek-r1-distill-qwen-7b": "qwen2.5-7b"}
LENGTHS = {
    "deepseek-r1-distill-qwen-7b": "reasoning",
    "llama-3.3-70b": "instruct",
}  # the others: base
SPREADS = {"deepseek-r1-distill-qwen-7b": "reasoning"}
GIGA = 1e-9

System = dict[str, Any]


def baseline(inputs: Inputs) -> System:
    """Return verl."""
    minibatches = inputs["prompts"] // inputs["minibatch_prompts"]
    return {
        "name": "verl_colocated",
        "minibatches": minibatches,
        **named(inputs, "log_probs", "dispatch"),
    }


def tlt(inputs: Inputs) -> System:
    """Return TLT's system, with the trees of its public scripts."""
    drafting = {
        "name": "tlt",
        **named(inputs, "threshold", "patience"),
        "round_s": inputs["draft_round_s"],
        "level_s": inputs["draft_level_s"],
        "strategies": [list(strategy) for strategy in strategies(inputs)],
        "training": {"every_updates": inputs["train_every"]},
    }
    return {**baseline(inputs), "name": "tlt", "speculation": drafting}


def strategies(inputs: Inputs) -> list[Strategy]:
    """Return depth, top-k and tokens to verify of the public scripts."""
    return [Strategy(*map(int, text.split("_"))) for text in inputs["strategies"]]


def scenario(inputs: Inputs, model: str, system: System, prompts: int) -> Scenario:
    """Return some steps of one of the four models."""
    place = inputs["models"].index(model)
    tp = inputs["tp_32b"] if model == TARGET else inputs["tps"][place]
    sigma = inputs[f"sigma_{SPREADS.get(model, 'base')}"]
    return run_of(
        inputs | {"sigma": sigma},
        system,
        model=SHAPES.get(model, model),
        gpus=inputs["gpus"],
        tp=tp,
        lengths={
            "prompts_per_step": prompts,
            "cap_tokens": inputs["cap_tokens"],
            "mean_tokens": inputs[f"mean_tokens_{LENGTHS.get(model, 'base')}"],
        },
        steps=STEPS,
        warmup_steps=WARMUP_STEPS,
        engine={"gpu_memory_utilization": inputs["gpu_memory_utilization"][place]},
        host=named(inputs, "between_passes_s") if "speculation" in system else None,
        training={
            **named(inputs, "mfu", "log_prob_mfu"),
            "sequence_parallel": inputs["sequence_parallel"][place],
            "tokens_per_microbatch": inputs["microbatch_tokens_per_gpu"][place]
            * inputs["sequence_parallel"][place],
            **named(inputs, "extra_log_probs", "switch_s", "load_s", "reward_s"),
        },
        speculation={
            "temperature": inputs["temperature"],
            "acceptance": {
                EAGLE: {
                    "by_position": [first_choice(inputs["accept_length"], strategies(inputs)[0])],
                    "spread": inputs["accept_spread"],
                    "drift_per_update": inputs["accept_drift"],
                    "source": "the ledger",
                }
            },
            "runs": {"siblings": _siblings(inputs)},
        },
    )


def _siblings(inputs: Inputs) -> dict[str, Any]:
    """Return the model-free drafter's drafts, for where it is predicted to be faster."""
    short = inputs["siblings_short_share"]
    drafted = {
        "share": 1.0,
        "share_of_long": 1.0,
        "wrong_drafts": inputs["siblings_wrong_drafts"],
        "gaps": [{"up_to_tokens": 64, "share": 1.0, "mean_tokens": inputs["siblings_gap_tokens"]}],
        "hits": [
            {"up_to_tokens": 2, "share": short, "mean_tokens": inputs["siblings_short_tokens"]},
            {"up_to_tokens": 128, "share": 1 - short, "mean_tokens": inputs["siblings_hit_tokens"]},
        ],
    }
    return run_model([drafted])


@cache
def first_choice(length: float, strategy: Strategy) -> float:
    """Return the probability of the drafter's first choice at every level with which a pass yields `length` tokens by this
    tree."""
    from scipy.optimize import brentq

    def excess(probability: float) -> float:
        return accept_length(_levels(probability, strategy)) - length

    return float(brentq(excess, 0.01, 0.999, xtol=1e-5))


def _levels(probability: float, strategy: Strategy) -> Any:
    return tree_log_acceptances(ModelAcceptance(by_position=(probability,)), strategy)


def throughput(lab: Lab, inputs: Inputs) -> list[float]:
    """Predict §6.2: tokens a second over verl's, which trains equal batches; a mean over the models."""
    pairs = (_both(lab, inputs, model, inputs["prompts"]) for model in inputs["models"])
    return [mean(own["tokens_per_s"] / plain["tokens_per_s"] for plain, own in pairs)]


def _both(lab: Lab, inputs: Inputs, model: str, prompts: int) -> list[Measures]:
    """Return the measures of verl and of TLT."""
    return [
        lab.run(scenario(inputs, model, system, prompts))
        for system in (baseline(inputs), tlt(inputs))
    ]


def rollout_share(lab: Lab, inputs: Inputs) -> list[float]:
    """Return the rollout's share of one step of verl, 32B."""
    run = scenario(inputs, TARGET, baseline(inputs), inputs["prompts"])
    found = lab.run(run.model_copy(update={"steps": 1, "warmup_steps": 0}))
    return [float(found["rollout_s"] / found["step_s"])]


def capped(lab: Lab, inputs: Inputs) -> list[float]:
    """Return the expected number of a step's responses that reach the cap, 32B."""
    cap, sigma = inputs["cap_tokens"], inputs["sigma_base"]
    location = location_of(inputs["mean_tokens_base"], sigma, cap, "mean_tokens_base")
    return [
        inputs["prompts"]
        * inputs["group"]
        * NormalDist(location, sigma).cdf(2 * location - log(cap))
    ]


def rollout_of_a_worker(lab: Lab, inputs: Inputs) -> list[float]:
    """Predict §6.3, Fig. 14: the rollout of the case study's requests at one worker, a mean over the cluster's workers."""
    prompts = inputs["gpus"] // inputs["tp_32b"] * inputs["case_requests"] // inputs["group"]
    plain, own = _both(lab, inputs, TARGET, prompts)
    return [plain["worker_s"] / own["worker_s"]]


def table_1(lab: Lab, inputs: Inputs) -> list[float]:
    """Predict Table 1: decode speed-up at batch 1, where the accept length is printed."""
    strategy = Strategy(inputs["table_depth"], inputs["topk"], inputs["table_verify_tokens"])
    return [speedup(inputs, 1, strategy, inputs["grid_accept_length"])]


@row
def table_2(lab: Lab, inputs: Inputs, batch: int, verify_tokens: int) -> list[float]:
    """Predict the decode speed-up of another tree of Table 1's drafter."""
    depth, topk = inputs["table_depth"], inputs["topk"]
    probability = first_choice(
        inputs["grid_accept_length"], Strategy(depth, topk, inputs["table_verify_tokens"])
    )
    strategy = Strategy(depth, topk, verify_tokens)
    return [speedup(inputs, batch, strategy, accept_length(_levels(probability, strategy)))]


def speedup(inputs: Inputs, batch: int, strategy: Strategy, length: float) -> float:
    """Return tokens a second of a batch that drafts, over plain passes, all at one context."""
    model, context = inputs["table_model"], inputs["table_context_tokens"]
    tp = inputs["tp_32b"] if model == TARGET else inputs["tps"][inputs["models"].index(model)]
    kind, shape = gpu(inputs["gpu"]), model_shape(model)
    plain = passes(inputs, shape, kind, tp)
    drafting = passes(inputs, shape, kind, tp, **named(inputs, "between_passes_s"))
    host = Overheads(inputs["draft_round_s"], inputs["draft_level_s"])
    drafts = eagle_drafts(shape, kind, tp, context, strategy.topk, host)
    round_s = drafts.draft_s(batch, strategy.draft_depth)
    round_s += drafting.verify_s(batch, strategy.tokens_to_verify - 1, context)
    return length * plain.decode_s(batch, round(context)) / round_s


def drafting_speed(lab: Lab, inputs: Inputs) -> list[float]:
    """Predict §4.1: a pass of a small model's 24 layers over a pass of a single layer as wide as the target's, both with
    heads."""
    kind, small, tp = gpu(inputs["gpu"]), model_shape(SMALL), inputs["latency_tp"]
    context, overheads = (
        inputs["table_context_tokens"],
        Overheads(layer_s=inputs["small_kernels_s"]),
    )
    many = model_drafts(small, kind, 1 if small.heads % tp else tp, context, overheads=overheads)
    one = eagle_drafts(model_shape(TARGET), kind, tp, context, overheads=overheads)
    return [many.draft_s(1, 1) / one.draft_s(1, 1)]


def graphs(lab: Lab, inputs: Inputs) -> list[float]:
    """Predict Table 3: the constants of `simrl.speculation.draft_times` are solved from the first two elements, which are
    therefore given."""
    drafters = inputs["graph_drafters"]
    shared = [
        Strategy(8, 4 + 2 * (i % drafters), tokens_to_verify)
        for i, tokens_to_verify in enumerate(inputs["verify_tokens"])
    ]
    bucketed = graph_bytes("bucketed", model_shape(TARGET), shared, inputs["graph_layers"])
    return [GIVEN, GIVEN, GIGA * bucketed]


ROWS: dict[str, Predict] = {
    "tlt-e2e": throughput,
    "tlt-rollout-case": rollout_of_a_worker,
    "tlt-topk8": table_1,
    "tlt-sd-bs1-v48": table_2(1, 48),
    "tlt-sd-bs8-v16": table_2(8, 16),
    "tlt-sd-bs8-v64": table_2(8, 64),
    "tlt-sd-bs32-v16": table_2(32, 16),
    "tlt-drafter-latency": drafting_speed,
    "tlt-graph-memory": graphs,
}

_ACCEPTANCE = "acceptance is an input of the rows of times; nothing in simrl predicts it without the drafter's tokens"
LEFT_OUT = {"tlt-accept-base": _ACCEPTANCE, "tlt-accept-r": _ACCEPTANCE}

# What descriptors are compared with: one step of verl, its lengths, and the drafter's accept length, which is an input.
BASELINE: dict[str, Predict] = {
    "rollout_share": rollout_share,
    "capped": capped,
    "accept_length": lambda lab, inputs: [inputs["accept_length"]],
}
