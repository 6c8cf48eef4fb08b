"""What a method of speculation is on real engines: vLLM's `speculative_config`, and what the drafter of one's own is told.

Invariant: a method runs as the simulator runs it, or is refused with a remedy; nothing of it is dropped silently.

History, n-grams and what comes from elsewhere are drafted by `replay.proposer.Proposer`, with simrl's windows and gates.
vLLM's own drafters have neither: its `ngram`, `draft_model` and `suffix` draft up to `num_speculative_tokens` in every pass.
They serve where the method says no more than that; what they draft is counted by vLLM alone. Its `ngram` reads prompts too,
and its `suffix` (for srt) has its own rule for how far to draft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np

from replay.proposer import DrafterSetup, Forced
from simrl.drafting import DraftPlan, typical_context
from simrl.errors import InputError
from simrl.simulate import Prepared
from simrl.speculation.acceptance import ModelAcceptance, sample_key
from simrl.speculation.draft_times import text_drafts_of
from simrl.speculation.gates import Elastic, batch_gate
from simrl.speculation.methods import EAGLE, Speculation
from simrl.speculation.ngram import DEFAULT
from simrl.speculation.windows import Window
from simrl.trace import Response, Sample

PROPOSER = "replay.proposer.Proposer"
Ngram = Literal["vllm", "simrl"]


def speculative_config(
    prepared: Prepared, ngram: Ngram = "vllm", draft_folder: str | Path | None = None, synthetic: bool = False
) -> dict[str, Any]:
    """vLLM's `speculative_config` for a scenario's method.

    `ngram` says whose n-gram drafter it is; where the method has a gate, or windows that move, it is simrl's anyway.
    `draft_folder` holds the draft model, unless the method names a folder itself. With `synthetic`, as random weights need it,
    vLLM accepts a draft model's tokens as often as the scenario says, whatever they are (on CUDA alone). Raises `InputError`
    for what no vLLM does.
    """
    plan = _plan(prepared)
    speculation, window = plan.speculation, plan.speculation.window
    most_tokens = window.rule.most_tokens
    _refuse(speculation)
    _refuse_tp(prepared, speculation, ngram)
    if synthetic and plan.acceptance is None:
        raise InputError(
            f"speculation {speculation.label}: random weights do not generate the trace's tokens, so there is nothing to "
            "draft from; choose draft_model, which is accepted as the scenario says, or give weights"
        )
    if speculation.drafter == "model":
        folder = draft_folder if draft_folder is not None else speculation.model
        if not (Path(folder) / "config.json").is_file():
            raise InputError(
                f"speculation {speculation.label}: vLLM drafts with a model in a folder, {str(folder)!r} is none; "
                "give model: FOLDER with a Hugging Face config.json and weights"
            )
        config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": most_tokens}
        return config | _synthetic(plan.acceptance, most_tokens) if synthetic and plan.acceptance else config
    if speculation.drafter == "siblings":
        if find_spec("arctic_inference") is None:
            raise InputError(
                f"speculation {speculation.label}: vLLM's suffix decoding, which drafts for it on real engines, needs "
                "arctic-inference; pip install arctic-inference==0.3.0, or choose histospec or ngram"
            )
        return {"method": "suffix", "num_speculative_tokens": most_tokens}
    if speculation.drafter == "ngram" and ngram == "vllm" and _plain(speculation):
        return {
            "method": "ngram",
            "num_speculative_tokens": most_tokens,
            "prompt_lookup_min": DEFAULT.shortest,
            "prompt_lookup_max": DEFAULT.longest,
        }
    return own_config(most_tokens)


def own_config(most_tokens: int, acceptance: ModelAcceptance | None = None) -> dict[str, Any]:
    """The `speculative_config` of simrl's drafter, for windows of up to so many tokens. With an acceptance, vLLM accepts by it
    whatever is drafted: on CUDA alone, where the weights do not generate the trace's tokens."""
    config: dict[str, Any] = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": most_tokens}
    return config | _synthetic(acceptance, most_tokens) if acceptance is not None else config


def _synthetic(acceptance: ModelAcceptance, most_tokens: int) -> dict[str, Any]:
    """For each drafted position, how often it stands with all before it."""
    rates = np.exp(-acceptance.log_acceptances(most_tokens)).tolist()
    return {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}


def drafter_setup(prepared: Prepared, ngram: Ngram = "vllm") -> DrafterSetup | None:
    """What simrl's drafter is told for a scenario's method; None where vLLM's own drafts, which is told nothing. A batch gate
    is that of the scenario's profile. Raises `InputError` as `speculative_config` does."""
    plan = _plan(prepared)
    speculation = plan.speculation
    _refuse(speculation)
    _refuse_tp(prepared, speculation, ngram)
    if speculation.drafter == "history":
        return DrafterSetup(
            "history", speculation.window, _gate(prepared, plan), speculation.history, speculation.epochs_back
        )
    if speculation.drafter == "ngram" and not (ngram == "vllm" and _plain(speculation)):
        return DrafterSetup("ngram", speculation.window, _gate(prepared, plan))
    if speculation.drafter == "own":
        return DrafterSetup("own", speculation.window, _gate(prepared, plan), make=speculation.make_drafter)
    return None


def forced(prepared: Prepared) -> Prepared:
    """The scenario as a replay with forced acceptance has it: its model drafter is an oracle on the CPU, which costs what text
    drafters do and takes no memory. Simulate and replay this one."""
    drafts = replace(_plan(prepared), times=text_drafts_of(prepared.profile), weight_bytes=0.0, kv_bytes_per_token=0.0)
    return replace(prepared, drafts=drafts)


def forced_answers(prepared: Prepared, responses: Mapping[int, Response]) -> Callable[[Sample], Forced]:
    """What an oracle is told of a sample: the trace's tokens, and the key and hardness of the simulated engine's draws."""
    acceptance, seed = _plan(prepared).acceptance, prepared.scenario.seed
    ids = prepared.trace.table["response_ids"]

    def told(sample: Sample) -> Forced:
        response = responses[sample.uid]
        key = sample_key(seed, sample.prompt_id, sample.epoch, sample.sample)
        assert acceptance is not None
        return Forced(tuple(ids[response.row].as_py()), key, acceptance.hardness(key, response.tokens))

    return told


def forced_setup(prepared: Prepared) -> DrafterSetup:
    """A setup that accepts what the scenario says of a model drafter, exactly: it is told the recorded greedy responses, and
    drafts them wrong where the simulated engine's draws are against it. Raises `InputError` for a method without such a
    drafter."""
    plan = _plan(prepared)
    speculation = plan.speculation
    if plan.acceptance is None or speculation.strategies is not None or speculation.decoupled is not None:
        raise InputError(
            f"speculation {speculation.label}: acceptance is forced for chains of a draft model; choose draft_model"
        )
    _refuse_own_with_tp(prepared, speculation)
    return DrafterSetup("oracle", speculation.window, _gate(prepared, plan), acceptance=plan.acceptance)


def _plan(prepared: Prepared) -> DraftPlan:
    if prepared.drafts is None:
        raise InputError(f"{prepared.scenario.file}: the scenario drafts nothing; choose a --speculation")
    return prepared.drafts


def _plain(speculation: Speculation) -> bool:
    """Whether it always drafts, and always as much: what vLLM's own drafters do."""
    return speculation.window.kind == "fixed" and speculation.gate == "open"


def _gate(prepared: Prepared, plan: DraftPlan) -> tuple[int, ...] | Elastic | None:
    speculation = plan.speculation
    if speculation.gate == "open":
        return None
    if isinstance(speculation.gate, Elastic):
        return speculation.gate
    window: Window = speculation.window
    most_sequences = prepared.limits.max_num_seqs
    thresholds = batch_gate(prepared.profile, plan.times, window.rule, typical_context(prepared.trace), most_sequences)
    return tuple(thresholds.tolist())


def _refuse_tp(prepared: Prepared, speculation: Speculation, ngram: Ngram) -> None:
    """As `_refuse_own_with_tp`, if it is simrl's drafter that drafts."""
    if speculation.drafter in ("history", "own") or (
        speculation.drafter == "ngram" and not (ngram == "vllm" and _plain(speculation))
    ):
        _refuse_own_with_tp(prepared, speculation)


def _refuse_own_with_tp(prepared: Prepared, speculation: Speculation) -> None:
    """simrl's drafter is where the loop is; with tensor parallelism, vLLM's workers are elsewhere."""
    if (tp := prepared.scenario.cluster.tp) > 1:
        raise InputError(
            f"speculation {speculation.label}: simrl's drafter needs the engine in one process, and cluster.tp is {tp}; "
            "set cluster.tp to 1, or choose vLLM's own drafters: ngram without gate and window, or draft_model"
        )


def _refuse(speculation: Speculation) -> None:
    """Raises `InputError` for what no engine here does."""
    own = speculation.drafter in ("history", "ngram", "own")
    refused = {
        "vLLM verifies chains, not trees that a bandit chooses; choose draft_model": speculation.strategies is not None,
        "vLLM drafts and verifies in turns, not on GPUs of a drafter's own; choose specactor with decoupled: false": (
            speculation.decoupled is not None
        ),
        "vLLM verifies no whole old response with the prompt; choose histospec": speculation.drafter == "old_response",
        "windows by the length of a prompt's responses are not replayed; choose histospec": speculation.budget
        is not None,
        "vLLM's suffix decoding drafts from siblings and a response's own text together; choose srt": (
            speculation.drafter == "siblings" and not speculation.own_text
        ),
        "an EAGLE head would have to be trained for the model; choose draft_model": speculation.model == EAGLE,
        "vLLM's own drafters have no gate and a fixed window; leave out gate and window": (
            not own and speculation.drafter != "old_response" and not _plain(speculation)
        ),
    }
    for why, is_so in refused.items():
        if is_so:
            raise InputError(f"speculation {speculation.label}: {why}")
