"""Speculation methods on real engines: vLLM's `speculative_config`, and the setup of the drafter
beside its scheduler.

Invariant: a method runs as the simulator runs it, or is refused with a remedy; nothing of it is
dropped silently. What `replayed_form` changes is changed in the prediction, too, and named.

History, n-grams, siblings and external sources are drafted by `simrl_replay.proposer.Proposer`,
with simrl's windows and gates. Draft models and EAGLE heads are vLLM's own drafters; the proposer
calls them after every pass for as many tokens as to draft, so windows, gates, TLT's bandit and its
model-free drafter are simrl's. vLLM's `ngram` drafts up to `num_speculative_tokens` in every pass and serves the method
without window and gate; it reads prompts too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from simrl.errors import InputError, broken
from simrl.simulate.prepare import Prepared
from simrl.speculation.acceptance import ModelAcceptance, sample_key
from simrl.speculation.choices import Elastic, Toggle
from simrl.speculation.draft_times import text_drafts
from simrl.speculation.matching import LONGEST, SHORTEST
from simrl.speculation.methods import EAGLE, MTP, QUANTISED, Speculation
from simrl.speculation.plan import DraftPlan, draft_costs, plan_drafting
from simrl.speculation.specactor import reconfiguration_table
from simrl.speculation.windows import Fixed
from simrl.trace.trace import Response, Sample
from simrl_replay.ahead import AheadSetup, DrafterProcess
from simrl_replay.proposer import DrafterSetup, Forced
from simrl_replay.vllm_adapter import config_of

NO_DRAFTS = "simrl_replay.rank.NoDrafts"
TRAINED_FORM = "EagleLlamaForCausalLM"  # of heads that `simrl_replay.grpo.eagle` trains


@dataclass(frozen=True)
class DraftFolders:
    """The folders of draft models: of the models by name, and of any other one; a model's name may
    be its folder."""

    one: str | Path | None = None
    by_name: Mapping[str, Path] = field(default_factory=dict)

    def folder(self, speculation: Speculation) -> Path:
        """Return the folder of a method's draft model. Raise `InputError` if it has no config."""
        wants_eagle = speculation.model == EAGLE
        folder = Path(self.by_name.get(speculation.model, self.one or speculation.model))
        folder = folder.parent if folder.name == "config.json" else folder
        if not (folder / "config.json").is_file():
            wanted = (
                "an EAGLE head; name its folder with --draft-model"
                if wants_eagle
                else "give model: FOLDER"
            )
            raise InputError(
                f"speculation {speculation.label}: vLLM drafts with a model in a folder, {str(folder)!r} is none; {wanted} "
                "(a Hugging Face config.json and weights)"
            )
        return folder


def speculative_config(
    prepared: Prepared,
    draft_folder: str | Path | None = None,
    synthetic: bool = False,
    by_name: Mapping[str, Path] | None = None,
) -> dict[str, Any]:
    """Return vLLM's `speculative_config` for a scenario's method, and for the drafters that its
    workers may get in the tail of a rollout.

    `draft_folder` holds the draft model, unless the method names a folder; `by_name` has the folder
    of each draft model if there are several. With `synthetic`, for random weights, vLLM accepts a
    draft model's tokens at the scenario's acceptance rates, whatever they are (CUDA only). Raise
    `InputError` for a method that vLLM cannot run.
    """
    plan = _replayable(prepared)
    speculation, folders = plan.speculation, DraftFolders(draft_folder, by_name or {})
    most_tokens = max(
        setup.most_tokens for setup in drafter_setups(prepared, folders, None).values()
    )
    if synthetic and (plan.acceptance is None or prepared.tail or plan.decoupled):
        raise InputError(
            f"speculation {speculation.label}: random weights do not generate the trace's tokens, so there is nothing to "
            "draft from; choose draft_model, which is accepted as the scenario says, or give weights"
        )
    if in_turns := _models_in_turns(prepared):
        config = _model_drafter(in_turns[0], folders.folder(in_turns[0]), most_tokens)
        if synthetic and plan.acceptance is not None:
            return config | synthetic_acceptance(plan.acceptance, config["num_speculative_tokens"])
        return config
    if _drafts_itself(prepared, speculation):
        return own_config(most_tokens)
    lookup = {"prompt_lookup_min": SHORTEST, "prompt_lookup_max": LONGEST}
    return {"method": "ngram", "num_speculative_tokens": most_tokens, **lookup}


def _model_drafter(speculation: Speculation, folder: Path, most_tokens: int) -> dict[str, Any]:
    """Return the configuration of vLLM's drafter with the model in `folder`."""
    wants_eagle, file = speculation.model == EAGLE, folder / "config.json"
    architectures = architectures_of(folder)
    method = "draft_model"
    if any("eagle" in name.lower() for name in architectures):
        method = "eagle3" if any("eagle3" in name.lower() for name in architectures) else "eagle"
    if wants_eagle != (method != "draft_model"):
        raise InputError(
            f"speculation {speculation.label}: {file} has the architectures {architectures}; name a folder with "
            + (
                "an EAGLE head (such as EagleLlamaForCausalLM)"
                if wants_eagle
                else "a language model, or choose tlt"
            )
        )
    return {"method": method, "model": str(folder), "num_speculative_tokens": most_tokens}


def architectures_of(folder: Path) -> list[str]:
    """Return the names that a model's config has of its form. Raise `InputError` without a
    config."""
    names = config_of(folder).get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def replayed_form(prepared: Prepared) -> tuple[Prepared, list[str]]:
    """Return a scenario without what real engines lack and a replay can do without, and what was
    changed, for the user: both the prediction and the replay are of the scenario returned."""
    changes = []
    if prepared.system.dispatch.kv_pool:
        dispatch = replace(prepared.system.dispatch, kv_pool=False)
        prepared = replace(prepared, system=replace(prepared.system, dispatch=dispatch))
        changes.append(
            "vLLM has no pool of KV cache for several workers: a chunk computes it again, but for what its worker finds"
        )
    if prepared.tail is not None and prepared.tail.rule.fetched_share > 0:
        rule = replace(prepared.tail.rule, kv="recompute", fetched_share=0.0)
        prepared = replace(prepared, tail=replace(prepared.tail, rule=rule))
        changes.append("vLLM sends no KV cache to another engine: a copy computes all of it again")
    if prepared.drafts is not None and prepared.drafts.speculation.drafter == "history":
        prepared, of_history = _history_form(prepared, prepared.drafts)
        changes += of_history
    if prepared.drafts is not None and prepared.drafts.speculation.strategies is not None:
        speculation = prepared.drafts.speculation
        if not _are_chains(speculation):
            drafts = plan_drafting(
                _chains_of(speculation),
                prepared.scenario.speculation,
                prepared,
                prepared.rollout_gpus,
            )
            prepared = replace(prepared, drafts=drafts)
            changes.append(
                "vLLM verifies no trees; chains as long as these are deep take their place"
            )
    return prepared, changes


def _history_form(prepared: Prepared, drafts: DraftPlan) -> tuple[Prepared, list[str]]:
    """Return a scenario whose history is in memory or lost, as an engine's is here, and what was
    changed, or is predicted alone."""
    history, changes = drafts.inputs.history_workers, []
    if {history.compressed_bytes_per_token, history.swap_bytes_per_s} != {None}:
        here = {"compressed_bytes_per_token": None, "swap_bytes_per_s": None}
        history = history.model_copy(update=here)
        inputs = drafts.inputs.model_copy(update={"history_workers": history})
        prepared = replace(prepared, drafts=replace(drafts, inputs=inputs))
        changes.append("no index is compressed or swapped: one without room is lost")
    changed = history.model_dump(exclude_defaults=True)
    elsewhere = ("workers", "tokens_per_s", "bytes_per_token", "link_bytes_per_s")
    if names := [name for name in elsewhere if name in changed]:
        changes.append(
            f"each engine builds its own indexes, with the sizes and times that they have; speculation.history_workers has "
            f"{', '.join(names)} for the prediction alone"
        )
    return prepared, changes


def _chains_of(speculation: Speculation) -> Speculation:
    """Return a method with a chain in place of each tree, in the same bucket of batch sizes."""
    assert speculation.strategies is not None
    chains = dict.fromkeys(arm._replace(topk=1) for arm in speculation.strategies.strategies)
    strategies = speculation.strategies.model_copy(update={"strategies": tuple(chains)})
    return replace(speculation, strategies=strategies)


def _are_chains(speculation: Speculation) -> bool:
    assert speculation.strategies is not None
    return all(arm.topk == 1 for arm in speculation.strategies.strategies)


def own_config(most_tokens: int) -> dict[str, Any]:
    """Return the `speculative_config` of simrl's drafter, which is beside the scheduler, for
    windows up to `most_tokens`."""
    return {"method": "custom_class", "model": NO_DRAFTS, "num_speculative_tokens": most_tokens}


def synthetic_acceptance(acceptance: ModelAcceptance, most_tokens: int) -> dict[str, Any]:
    """Return vLLM's synthetic acceptance: for each drafted position, how often it and all before it
    are accepted."""
    rates = np.exp(-acceptance.log_acceptances(most_tokens)).tolist()
    return {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}


def drafter_setup(
    prepared: Prepared, folders: DraftFolders | None = None, process: DrafterProcess | None = None
) -> DrafterSetup | None:
    """Return the setup of simrl's drafter for a scenario's method; None if vLLM's own n-grams are
    used. A batch gate comes from the scenario's profile; `process` is a drafter's that works ahead,
    whose model is put in. Raise `InputError` as `speculative_config` does."""
    plan = _replayable(prepared)
    if plan.speculation.drafter == "ngram" and not _drafts_itself(prepared, plan.speculation):
        return None
    return _setup_of(prepared, plan, folders or DraftFolders(), process)


def drafter_setups(
    prepared: Prepared, folders: DraftFolders, process: DrafterProcess | None
) -> dict[str | None, DrafterSetup]:
    """Return the setups of the drafter that workers begin with (None), and of those that they may
    get in the tail of a rollout, by name. Raise `InputError` for one that no engine here
    supports."""
    plan = _replayable(prepared)
    in_turns = {each.model for each in _models_in_turns(prepared)}
    if len(in_turns) > 1:
        raise InputError(
            f"{prepared.system.label}: workers would draft in turns with {', '.join(sorted(in_turns))}, and a vLLM engine "
            "holds one draft model: name one of them as model or in drafters"
            + (", or let copies be decoupled" if plan.decoupled else ", or let decoupled be true")
        )
    return {
        name: _setup_of(prepared, each, folders, process) for name, each in _plans(prepared).items()
    }


def models_ahead(prepared: Prepared) -> set[str]:
    """Return the models that draft ahead at a worker, each in processes of its own."""
    tail = prepared.tail.plans.values() if prepared.tail else ()
    plans = [plan for plan in (_plan(prepared), *tail) if plan.decoupled is not None]
    return {plan.speculation.model for plan in plans}


def _models_in_turns(prepared: Prepared) -> list[Speculation]:
    """Return the methods with a model that drafts in the verifier's engine."""
    return [
        plan.speculation
        for plan in _plans(prepared).values()
        if plan.speculation.drafter == "model" and plan.decoupled is None
    ]


def _setup_of(
    prepared: Prepared, plan: DraftPlan, folders: DraftFolders, process: DrafterProcess | None
) -> DrafterSetup:
    speculation = plan.speculation
    window, gate = speculation.window, _gate(prepared, plan)
    match speculation.drafter:
        case "model" if plan.decoupled is not None:
            return _ahead(prepared, plan, folders, process)
        case "model":
            return DrafterSetup(
                "engine",
                window,
                gate,
                bandit=speculation.strategies,
                seed=prepared.scenario.seed,
                model_free=plan.first_version > 0 or plan.siblings_faster_beyond < np.inf,
            )
        case "history":
            return DrafterSetup(
                "history",
                window,
                gate,
                speculation.history,
                speculation.epochs_back,
                int(plan.inputs.history_workers.memory_bytes),
            )
        case "siblings":
            return DrafterSetup("siblings", window, gate, own_text=speculation.own_text)
        case "own":
            return DrafterSetup("own", window, gate, make=speculation.make_drafter)
        case _:
            return DrafterSetup("ngram", window, gate)


def _ahead(
    prepared: Prepared, plan: DraftPlan, folders: DraftFolders, process: DrafterProcess | None
) -> DrafterSetup:
    """Return the setup of a draft model in a process of its own, with the plan's window and its
    table of reconfigurations."""
    method, decoupled = plan.speculation.decoupled, plan.decoupled
    assert method is not None and decoupled is not None
    windows, coupled = reconfiguration_table(decoupled, method.objective)
    folder = str(folders.folder(plan.speculation))
    if process is not None:
        settings = replace(process.settings, model=folder)
        process = replace(process, settings=settings, number=decoupled.draft_gpus)
    return DrafterSetup(
        "ahead",
        Fixed(tokens=decoupled.window),
        ahead=AheadSetup(
            process or DrafterProcess(None),
            method.reconfigure_every,
            tuple(windows.tolist()),
            tuple(coupled.tolist()),
            plan.load_s > 0,
        ),
    )


def forced(prepared: Prepared) -> Prepared:
    """Return the scenario for a replay with forced acceptance: its model drafter becomes an oracle
    on the CPU, with the costs of a text drafter and without GPU memory. Simulate and replay this
    scenario."""
    drafts = replace(
        _plan(prepared),
        times=text_drafts(prepared.profile),
        weight_bytes=0.0,
        kv_bytes_per_token=0.0,
    )
    return replace(prepared, drafts=drafts)


def answers_of(prepared: Prepared, responses: Mapping[int, Response]) -> Callable[[Sample], Forced]:
    """Return the trace's tokens by sample, and for a model drafter the key and hardness of the
    simulated engine's draws."""
    acceptance = prepared.drafts.acceptance if prepared.drafts else None
    ids, seed = prepared.trace.table["response_ids"], prepared.scenario.seed

    def answer(sample: Sample) -> Forced:
        response = responses[sample.uid]
        recorded = tuple(ids[response.row].as_py())
        if acceptance is None:
            return Forced(recorded, 0)
        key = sample_key(seed, sample.prompt_id, sample.epoch, sample.sample)
        return Forced(recorded, key, acceptance.hardness(key, response.tokens))

    return answer


def forced_setup(prepared: Prepared) -> DrafterSetup:
    """Return a setup that accepts exactly as the scenario's model drafter: an oracle has the
    recorded greedy responses, and drafts them wrong where the simulated engine's draws reject.
    Raise `InputError` for a method without a model drafter."""
    plan = _plan(prepared)
    speculation = plan.speculation
    if (
        plan.acceptance is None
        or speculation.strategies is not None
        or speculation.decoupled is not None
    ):
        raise InputError(
            f"speculation {speculation.label}: acceptance is forced for chains of a draft model; choose draft_model"
        )
    return DrafterSetup(
        "oracle", speculation.window, _gate(prepared, plan), acceptance=plan.acceptance
    )


def _plan(prepared: Prepared) -> DraftPlan:
    if prepared.drafts is None:
        raise InputError(
            f"{prepared.scenario.file}: the scenario drafts nothing; choose a --speculation"
        )
    return prepared.drafts


def _plans(prepared: Prepared) -> dict[str | None, DraftPlan]:
    """Return the plan of the drafter that workers begin with (None), and of those that they may get
    in the tail of a rollout, by name."""
    plans: dict[str | None, DraftPlan] = {None: _plan(prepared)}
    plans.update(prepared.tail.plans if prepared.tail else {})
    return plans


def draft_models(prepared: Prepared) -> set[str]:
    """Return the names of the models that draft."""
    if prepared.drafts is None:
        return set()
    drafting = [plan.speculation for plan in _plans(prepared).values()]
    return {each.model for each in drafting if each.drafter == "model"}


def _replayable(prepared: Prepared) -> DraftPlan:
    """Return the plan; raise `InputError` for a method that no engine here supports."""
    plan = _plan(prepared)
    speculation, models = plan.speculation, draft_models(prepared)
    if wrong := broken(
        (
            speculation.strategies is not None and not _are_chains(speculation),
            "vLLM verifies chains, not trees; give chains, strategies with a topk of 1",
        ),
        (
            speculation.decoupled is not None and speculation.decoupled.in_turns,
            "drafters with GPUs of their own draft ahead here, not in turns; leave out disaggregated, or set decoupled: true",
        ),
        (
            speculation.drafter == "old_response",
            "vLLM verifies no whole old response with the prompt; choose histospec",
        ),
        (
            isinstance(speculation.gate, Toggle),
            "a toggle and its ladder of draft tokens are not replayed; choose draft_model",
        ),
        (
            not models.isdisjoint(QUANTISED),
            "engines here draft with a model of its own, not with the policy in fewer bits; choose draft_model",
        ),
        (
            MTP in models,
            "engines here draft with a model of its own, not with layers of the policy; choose draft_model",
        ),
    ):
        raise InputError(f"speculation {speculation.label}: {wrong}")
    return plan


def _drafts_itself(prepared: Prepared, speculation: Speculation) -> bool:
    """Return whether simrl's drafter drafts; n-grams with a fixed window and without a gate are
    vLLM's, unless another drafter may take their place."""
    plain = speculation.window.kind == "fixed" and speculation.gate == "open"
    return speculation.drafter != "ngram" or not plain or prepared.tail is not None


def _gate(prepared: Prepared, plan: DraftPlan) -> tuple[int, ...] | Elastic | None:
    speculation = plan.speculation
    if speculation.gate == "open":
        return None
    if isinstance(speculation.gate, Elastic):
        return speculation.gate
    return tuple(draft_costs(plan, prepared, prepared.limits.max_num_seqs).largest_batch.tolist())
