"""Soaking: random scenarios over all systems, each simulated with every invariant on.

A scenario belongs to (seed, number): its system is the number's in turn, its parameters are drawn from their declared types and
bounds, and so is what it runs on. One that cannot be is refused by `prepare`, in one line; any other ends in time, loses
nothing (`conservation.py`), keeps its bound on staleness, and gives the same tables again.
"""

from __future__ import annotations

import signal
import traceback
import types
from random import Random
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from simrl.errors import InputError
from simrl.result.result import TABLES
from simrl.scenario.model import Scenario
from simrl.simulate.prepare import prepare
from simrl.speculation.choices import Toggle
from simrl.speculation.methods import METHODS
from simrl.systems.recipes import RECIPES, recipe_parameters
from tests.conservation import assert_nothing_is_lost
from tests.helpers import watch

LIMIT_S = 60.0  # of computing, a scenario
LARGEST = 12.0  # of a drawn number, whatever more its bounds allow: runs are small
DRAFTERS = ("qwen2.5-0.5b", "qwen2.5-1.5b")


class Soaked(NamedTuple):
    """What became of a scenario: "ran", "refused" or "failed", and what was said."""

    outcome: str
    said: str = ""


def a_scenario(seed: int, number: int) -> dict[str, Any]:
    """The scenario of a number, as plain data."""
    rng = Random(f"soak {seed} {number}")
    name = list(RECIPES)[number % len(RECIPES)]
    tp = rng.choice((1, 1, 1, 2))
    gpus = tp * rng.choice((2, 3, 4, 4, 6, 8))
    cap = rng.choice((20, 100, 400, 2000))
    synthetic: dict[str, Any] = {
        "steps": rng.randint(1, 3),
        "prompts_per_step": rng.choice((1, 2, 3, 5, 8)),
        "group": rng.choice((1, 2, 2, 4)),
        "cap_tokens": cap,
        "mean_tokens": round(cap * rng.choice((0.1, 0.3, 0.8)) + 1.5, 1),
        "sigma": rng.choice((0.0, 0.5, 1.0, 2.0)),
        "prompt_tokens": rng.choice((2, 20, 200)),
    }
    if rng.random() < 0.3:
        synthetic |= {
            "turns": rng.choice((1.5, 4.0)),
            "environment_s": rng.choice((0.0, 0.5, 20.0)),
            "environment_sigma": 0.5,
        }
        synthetic |= {"observation_tokens": rng.choice((0, 30))}
    if rng.random() < 0.5:
        synthetic["prompts"] = synthetic["prompts_per_step"]
    scenario = {
        "name": "soak",
        "seed": rng.randrange(1000),
        "steps": rng.randint(1, 5),
        "model": "qwen3-0.6b",
        "cluster": {"gpu": rng.choice(("h100", "a100")), "gpus": gpus, "tp": tp},
        "workload": {"synthetic": synthetic},
        "profile": {"roofline": {"between_passes_s": rng.choice((0.0, 0.001, 0.02))}},
        "engine": _engine(rng, cap + 500),
        "training": {
            "reward_s": rng.choice((0.0, 0.01, 2.0)),
            "publish_s": rng.choice((0.0, 0.05)),
            "load_overhead_s": rng.choice((0.0, 0.02, 1.0)),
            "switch_s": rng.choice((0.0, 0.05)),
            "evaluate_every": rng.choice((0, 0, 2)),
            "evaluate_s": 0.5,
            "checkpoint_every": rng.choice((0, 0, 2)),
            "checkpoint_s": 0.3,
        },
        "faults": [
            _fault(rng, max(gpus // tp // 2, 1)) for _ in range(rng.choice((0, 0, 0, 1, 2)))
        ],
        "system": {"name": name, **_parameters(rng, name)},
    }
    if rng.random() < 0.2:
        scenario["engine"]["prefill_schedule_interval"] = rng.choice((2, 5, 20))
    if rng.random() < 0.2:
        scenario["engine"]["watermark"] = rng.choice((0.01, 0.2, 0.6))
    if rng.random() < 0.12:
        scenario["cluster"]["prefill"] = _prefill(rng, tp)
        scenario["cluster"]["gpus"] += 2 * tp
        scenario["system"].pop("speculation", None)  # drafts of decode workers are refused
    if rng.random() < 0.2:
        scenario["judge"] = _judge(rng, scenario["profile"])
    if "dispatch" in recipe_parameters(name) and rng.random() < 0.1:
        scenario["system"]["dispatch"] = "programs"
        scenario["agents"] = rng.choice(({}, {"acting_token_weight": 0.5}))
    if "prefill" not in scenario["cluster"] and rng.random() < 0.2:
        _draft(rng, name, scenario)
    if not scenario["training"]["evaluate_every"] and rng.random() < 0.25:
        scenario["evaluation"] = {
            "every": rng.choice((1, 2)),
            "at_start": rng.random() < 0.5,
            "prompts": rng.choice((1, 3, 8)),
            "samples": rng.choice((1, 2)),
        }
    return scenario


def _prefill(rng: Random, tp: int) -> dict[str, Any]:
    """A pool of prefill workers, now and then of another size than the workers that decode."""
    pool = {
        "gpus": tp * rng.choice((1, 2)),
        "dispatch": rng.choice(("prefix", "least_requests")),
    }
    return pool | ({"tp": rng.choice((1, 2))} if rng.random() < 0.3 else {})


def _judge(rng: Random, profile: dict[str, Any]) -> dict[str, Any]:
    """A judge on GPUs of its own, or one that takes turns."""
    judge = {
        "model": "qwen3-0.6b",
        "tp": rng.choice((1, 1, 2)),
        "per": rng.choice(("response", "group")),
        "prompt_tokens": rng.choice((0, 50)),
        "response_tokens": rng.choice((0, 10)),
        "response_cap_tokens": 50,
        "profile": profile,
    }
    return judge | ({"gpus": judge["tp"] * rng.choice((1, 2))} if rng.random() < 0.8 else {})


def _draft(rng: Random, name: str, scenario: dict[str, Any]) -> None:
    """Give a system that takes one a drafter with inputs of its own."""
    if "speculation" not in recipe_parameters(name):
        return
    method = rng.choice(("eagle3", "efficient_rollout", "spec_rl"))
    inputs = {
        "eagle3": {"eagle": {"accept_length": 2.2, "draft_shape": [3, 1, 4]}},
        "efficient_rollout": {"int4": {"accepted_per_position": [0.9, 0.7, 0.6]}},
        "spec_rl": {"old_response": {"by_position": [0.95]}},
    }
    choices: dict[str, tuple[dict[str, Any], ...]] = {
        "eagle3": ({}, {"topk": 4, "steps": 3, "tokens": 8}),
        "efficient_rollout": (
            {"gate": "open", "draft_tokens": 3},
            {"gate": {"ramp": 1}},
            {"gate": {"ramp": 2, "ladder": [2, 3], "margin": 0}},
        ),
        "spec_rl": ({"verify": "engine"}, {"verify": "trainer"}),
    }
    scenario["system"]["speculation"] = {"name": method, **rng.choice(choices[method])}
    scenario["speculation"] = {"acceptance": inputs[method]}


def _engine(rng: Random, longest_tokens: int) -> dict[str, Any]:
    """Now and then with hardly any cache."""
    engine: dict[str, Any] = {
        "max_num_seqs": rng.choice((1, 4, 16, 256)),
        "max_num_batched_tokens": rng.choice((16, 64, 512, 8192)),
        "block_size": rng.choice((1, 16)),
    }
    engine["max_num_batched_tokens"] = max(engine["max_num_batched_tokens"], engine["max_num_seqs"])
    if rng.random() < 0.3:
        engine["kv_cache_tokens"] = longest_tokens * rng.choice((2, 3, 8))
    return engine


def _fault(rng: Random, workers: int) -> dict[str, Any]:
    kind = rng.choice(("slow", "lost", "weight_sync_delayed"))
    size: dict[str, Any] = {"slow": {"factor": rng.choice((1.5, 5.0))}, "lost": {}}.get(
        kind, {"delay_s": rng.choice((0.1, 5.0))}
    )
    if rng.random() < 0.4:
        return {
            "kind": kind,
            "rate_per_hour": rng.choice((1.0, 60.0)),
            "duration_s": rng.choice((0.5, 20.0)),
            **size,
        }
    begin_s = rng.choice((0.0, 0.1, 1.0, 5.0))
    end = "back_s" if kind == "lost" else "until_s"
    return {
        "kind": kind,
        "worker": rng.randrange(workers),
        "at_s": begin_s,
        end: begin_s + rng.choice((0.2, 3.0)),
        **size,
    }


RARE = (
    "on_loss",
    "adapt_split_every",
    "dynamic_sampling",
    "filter_groups",
    "speculation",
)  # few systems are drawn with them


def _parameters(rng: Random, name: str) -> dict[str, Any]:
    """Some of a recipe's, and of those that it has in common with others."""
    parameters = {key: parameter.annotation for key, parameter in recipe_parameters(name).items()}
    own = {key: annotation for key, annotation in parameters.items() if key not in RARE}
    common = {key: annotation for key, annotation in parameters.items() if key in RARE}
    found: dict[str, Any] = {}
    for key, annotation in own.items():
        if rng.random() < 0.4:
            found[key] = _drawn(rng, key, annotation)
    for key, annotation in common.items():
        if key == "speculation":
            if rng.random() < 0.3:
                found[key] = rng.choice((*METHODS, "none"))
        elif rng.random() < 0.2:
            found[key] = _drawn(rng, key, annotation)
    return found


def _drawn(rng: Random, key: str, annotation: Any) -> Any:
    """A value of a declared type within its declared bounds."""
    if key == "model":
        return rng.choice(DRAFTERS)
    if key == "drafters":
        return rng.sample(["ngram", *DRAFTERS], rng.randint(0, 3))
    if key == "rollout_share":
        return rng.choice((0.25, 0.5, 0.75))
    if annotation is Toggle:
        return {"ramp": rng.choice((1, 4)), "ladder": [2, 3]}
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _drawn(rng, key, rng.choice(get_args(annotation)))
    if annotation is type(None):
        return None
    if origin is tuple:
        return [_drawn(rng, key, get_args(annotation)[0]) for _ in range(rng.randint(0, 2))]
    if origin is Literal:
        return rng.choice(get_args(annotation))
    if annotation is bool:
        return rng.random() < 0.5
    low, high = 0.0, LARGEST
    if origin is Annotated:
        annotation, *facts = get_args(annotation)
        for fact in facts:
            for bound in getattr(fact, "metadata", [fact]):
                above, below = (
                    getattr(bound, a, getattr(bound, b, None))
                    for a, b in (("ge", "gt"), ("le", "lt"))
                )
                low, high = (
                    low if above is None else float(above),
                    high if below is None else min(float(below), LARGEST),
                )
        if get_origin(annotation) is not None:
            return _drawn(rng, key, annotation)
    if annotation is int:
        return rng.choice(
            (int(low), int(low) + 1, rng.randint(int(low), max(int(high), int(low))), 100)
        )
    if annotation is float:
        return round(rng.uniform(low, high) or (low + high) / 2, 3) or 0.5
    raise NotImplementedError(f"{key}: {annotation}")


def soak(seed: int, number: int, limit_s: float = LIMIT_S) -> Soaked:
    """Simulates the scenario of a number, every third one twice."""
    signal.signal(signal.SIGPROF, _late)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        return _soak(seed, number)
    except Exception:
        return Soaked("failed", traceback.format_exc())
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _late(*_: object) -> None:
    raise TimeoutError("a small scenario that does not end")


def _soak(seed: int, number: int) -> Soaked:
    try:
        prepared = prepare(Scenario.model_validate(a_scenario(seed, number)))
        watched = watch(prepared)
    except InputError as error:
        return Soaked("refused", str(error))
    record = watched.workers[0]._recorder
    watched.workers = [one for one in watched.workers if one._recorder is record]  # no judge's
    assert_nothing_is_lost(watched)
    allowed = prepared.system.off_policyness
    assert (
        allowed is None
        or max(watched.result.steps.column("off_policyness_max").to_pylist()) <= allowed
    )
    if number % 3 == 0:
        again = watch(prepare(prepared.scenario)).result
        assert again.metadata == watched.result.metadata
        assert all(getattr(again, table).equals(getattr(watched.result, table)) for table in TABLES)
    return Soaked("ran")
