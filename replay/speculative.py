"""Speculation methods on real engines: vLLM's `speculative_config`, and the setup of simrl's own drafter.

Invariant: a method runs as the simulator runs it, or is refused with a remedy; nothing of it is dropped silently.

History, n-grams and external sources are drafted by `replay.proposer.Proposer`, with simrl's windows and gates.
vLLM's own drafters have neither: its `ngram`, `draft_model` and `suffix` draft up to `num_speculative_tokens` in every pass.
They serve methods without windows and gates; their drafts are counted by vLLM alone. Its `ngram` reads prompts too,
and its `suffix` (for srt) has its own rule for how far to draft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from replay.proposer import DrafterSetup, Forced
from simrl.errors import InputError
from simrl.simulate.prepare import Prepared
from simrl.speculation.acceptance import ModelAcceptance, sample_key
from simrl.speculation.deployment import typical_context_tokens
from simrl.speculation.draft_times import text_drafts_of
from simrl.speculation.gates import Elastic, batch_gate
from simrl.speculation.methods import EAGLE, Speculation
from simrl.speculation.ngram import DEFAULT
from simrl.speculation.plan import DraftPlan
from simrl.trace.trace import Response, Sample

PROPOSER = "replay.proposer.Proposer"


def speculative_config(
    prepared: Prepared, draft_folder: str | Path | None = None, synthetic: bool = False
) -> dict[str, Any]:
    """Return vLLM's `speculative_config` for a scenario's method.

    `draft_folder` holds the draft model, unless the method names a folder. With `synthetic`, for random weights, vLLM accepts
    a draft model's tokens at the scenario's acceptance rates, whatever they are (CUDA only). Raise `InputError` for a method
    that vLLM cannot run.
    """
    plan = _replayable(prepared)
    speculation = plan.speculation
    most_tokens = speculation.window.rule.most_tokens
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
        return config | synthetic_acceptance(plan.acceptance, most_tokens) if synthetic and plan.acceptance else config
    if speculation.drafter == "siblings":
        if find_spec("arctic_inference") is None:
            raise InputError(
                f"speculation {speculation.label}: vLLM's suffix decoding, which drafts for it on real engines, needs "
                "arctic-inference; pip install arctic-inference==0.3.0, or choose histospec or ngram"
            )
        return {"method": "suffix", "num_speculative_tokens": most_tokens}
    if _drafts_itself(speculation):
        return own_config(most_tokens)
    lookup = {"prompt_lookup_min": DEFAULT.shortest, "prompt_lookup_max": DEFAULT.longest}
    return {"method": "ngram", "num_speculative_tokens": most_tokens, **lookup}


def own_config(most_tokens: int) -> dict[str, Any]:
    """Return the `speculative_config` of simrl's drafter, for windows up to `most_tokens`."""
    return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": most_tokens}


def synthetic_acceptance(acceptance: ModelAcceptance, most_tokens: int) -> dict[str, Any]:
    """Return vLLM's synthetic acceptance: for each drafted position, how often it and all before it are accepted."""
    rates = np.exp(-acceptance.log_acceptances(most_tokens)).tolist()
    return {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}


def drafter_setup(prepared: Prepared) -> DrafterSetup | None:
    """Return the setup of simrl's drafter for a scenario's method; None if vLLM's own drafter is used. A batch gate comes from
    the scenario's profile. Raise `InputError` as `speculative_config` does."""
    plan = _replayable(prepared)
    speculation = plan.speculation
    if not _drafts_itself(speculation):
        return None
    window, gate = speculation.window, _gate(prepared, plan)
    if speculation.drafter == "history":
        return DrafterSetup("history", window, gate, speculation.history, speculation.epochs_back)
    if speculation.drafter == "own":
        return DrafterSetup("own", window, gate, make=speculation.make_drafter)
    return DrafterSetup("ngram", window, gate)


def forced(prepared: Prepared) -> Prepared:
    """Return the scenario for a replay with forced acceptance: its model drafter becomes an oracle on the CPU, with the costs
    of a text drafter and without GPU memory. Simulate and replay this scenario."""
    drafts = replace(_plan(prepared), times=text_drafts_of(prepared.profile), weight_bytes=0.0, kv_bytes_per_token=0.0)
    return replace(prepared, drafts=drafts)


def forced_answers(prepared: Prepared, responses: Mapping[int, Response]) -> Callable[[Sample], Forced]:
    """Return the oracle's inputs by sample: the trace's tokens, and the key and hardness of the simulated engine's draws."""
    acceptance, seed = _plan(prepared).acceptance, prepared.scenario.seed
    ids = prepared.trace.table["response_ids"]

    def answer(sample: Sample) -> Forced:
        response = responses[sample.uid]
        key = sample_key(seed, sample.prompt_id, sample.epoch, sample.sample)
        assert acceptance is not None
        return Forced(tuple(ids[response.row].as_py()), key, acceptance.hardness(key, response.tokens))

    return answer


def forced_setup(prepared: Prepared) -> DrafterSetup:
    """Return a setup that accepts exactly as the scenario's model drafter: an oracle has the recorded greedy responses, and
    drafts them wrong where the simulated engine's draws reject. Raise `InputError` for a method without a model drafter."""
    plan = _plan(prepared)
    speculation = plan.speculation
    if plan.acceptance is None or speculation.strategies is not None or speculation.decoupled is not None:
        raise InputError(
            f"speculation {speculation.label}: acceptance is forced for chains of a draft model; choose draft_model"
        )
    _require_one_process(prepared, speculation)
    return DrafterSetup("oracle", speculation.window, _gate(prepared, plan), acceptance=plan.acceptance)


def _plan(prepared: Prepared) -> DraftPlan:
    if prepared.drafts is None:
        raise InputError(f"{prepared.scenario.file}: the scenario drafts nothing; choose a --speculation")
    return prepared.drafts


def _replayable(prepared: Prepared) -> DraftPlan:
    """Return the plan; raise `InputError` for a method that no engine here supports."""
    plan = _plan(prepared)
    _refuse(plan.speculation)
    if _drafts_itself(plan.speculation):
        _require_one_process(prepared, plan.speculation)
    return plan


def _plain(speculation: Speculation) -> bool:
    """Return whether the method always drafts a fixed number of tokens, as vLLM's own drafters do."""
    return speculation.window.kind == "fixed" and speculation.gate == "open"


def _drafts_itself(speculation: Speculation) -> bool:
    """Return whether simrl's drafter drafts; n-grams with a fixed window and without a gate are vLLM's."""
    drafter = speculation.drafter
    return drafter in ("history", "own") or (drafter == "ngram" and not _plain(speculation))


def _gate(prepared: Prepared, plan: DraftPlan) -> tuple[int, ...] | Elastic | None:
    speculation = plan.speculation
    if speculation.gate == "open":
        return None
    if isinstance(speculation.gate, Elastic):
        return speculation.gate
    context, most_sequences = typical_context_tokens(prepared.trace), prepared.limits.max_num_seqs
    gate = batch_gate(prepared.profile, plan.times, speculation.window.rule, context, most_sequences)
    return tuple(gate.tolist())


def _require_one_process(prepared: Prepared, speculation: Speculation) -> None:
    """Raise `InputError` for tensor parallelism: simrl's drafter runs in the loop's process, vLLM's workers in others."""
    if (tp := prepared.scenario.cluster.tp) > 1:
        raise InputError(
            f"speculation {speculation.label}: simrl's drafter needs the engine in one process, and cluster.tp is {tp}; "
            "set cluster.tp to 1, or choose vLLM's own drafters: ngram without gate and window, or draft_model"
        )


def _refuse(speculation: Speculation) -> None:
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
