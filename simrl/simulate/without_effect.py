"""Settings that a scenario gives and that change nothing in it, each with the reason.

Invariant: a setting of the user's can change a result of its scenario, or is found here, or is
refused. A value that is the preset's, or the default without one, is not counted as the user's.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any, NamedTuple

from simrl.scenario.presets import constants, known_fields
from simrl.speculation.matching import has_token_ids
from simrl.speculation.methods import OLD_RESPONSE

if TYPE_CHECKING:
    from simrl.simulate.prepare import Prepared


# The settings of training.weight_sync's methods, without the time of a tensor.
WAYS_TO_SEND = " ".join(
    f"training.weight_sync_{key}"
    for key in ("offload", "delta_share", "precision", "overlap", "*_bytes_per_s")
)


class Unused(NamedTuple):
    """Settings that have no use where a condition holds, and why: patterns of dotted keys, with `*`
    and `?` as in a shell."""

    reason: str
    holds: bool
    patterns: str


def without_effect(prepared: Prepared) -> dict[str, str]:
    """Return the settings that change nothing in a prepared scenario, by key, and why."""
    scenario = prepared.scenario
    of_presets = {used.key for used in constants(scenario.model_dump(), prepared.profile.metadata)}
    in_place_of_presets = {f"training.{key}" for key in known_fields(scenario.framework)}
    changed = in_place_of_presets | set(_keys(scenario.model_dump(exclude_defaults=True)))
    changed -= of_presets
    unused: dict[str, str] = {}
    for reason, holds, patterns in _rules(prepared, of_presets):
        for pattern in patterns.split() if holds else ():
            keys = sorted(fnmatch.filter(changed - unused.keys(), pattern))
            unused |= dict.fromkeys(keys, reason)
    of_judge = without_effect(prepared.judge) if prepared.judge else {}
    sections = ("engine.", "profile.")  # a judge's own; it shares the rest with the scenario
    unused |= {f"judge.{key}": of_judge[key] for key in of_judge if key.startswith(sections)}
    return unused


def _keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of every value that is no section."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def _rules(prepared: Prepared, of_presets: Set[str]) -> list[Unused]:
    """Return the settings without a use, by reason. Of several reasons the first counts."""
    scenario, system, limits = prepared.scenario, prepared.system, prepared.limits
    training, engine, drafts = scenario.training, scenario.engine, prepared.drafts
    agents, history = scenario.agents, scenario.speculation.history_workers
    shared, method, load_s = prepared.colocated, training.weight_sync, training.load_s
    passes = system.log_probs + training.reference_passes
    drafter = drafts.speculation.drafter if drafts else ""
    verifies = drafter == OLD_RESPONSE  # by a log-prob pass, at the trainer
    decided = drafts is not None and not drafts.speculation.candidates  # by no ladder
    one_turn = not {"turn_tokens", "environment_s"} & set(prepared.trace.table.column_names)
    sized = training.sequences_per_microbatch or training.microbatches
    computed = training.mfu is None or (training.log_prob_mfu is None and passes > 0)
    model = drafts.speculation.model if drafts else ""
    unread = (name for name in scenario.speculation.acceptance if name != model)
    rhymerl = system.name == "rhymerl"
    chosen = {"minibatches": 1} | scenario.system.parameters
    lengths, judge = scenario.workload.synthetic, scenario.judge
    in_domain = prepared.train_gpus <= prepared.train_gpu.nvlink_domain
    one_domain = scenario.cluster.train is None and prepared.gpus <= prepared.gpu.nvlink_domain
    rules = [
        Unused(
            "rollout and training share the GPUs: no weights go over the network",
            shared,
            f"training.publish_s training.weight_sync {WAYS_TO_SEND}",
        ),
        Unused(
            "no tensors are loaded one by one",
            method in ("delta", "gather_broadcast", "file")
            if method and not shared
            else not prepared.model.experts,
            "training.weight_sync_tensor_s",
        ),
        Unused(
            "no method of training.weight_sync is given",
            method is None,
            WAYS_TO_SEND,
        ),
        Unused("training has GPUs of its own", not shared, "training.rollout_offload"),
        Unused(
            "training has GPUs of its own, and lends none",
            not (shared or "updates" in (system.elastic or "")),
            "training.offload training.offload_memory training.switch_transfer_s",
        ),
        Unused(
            "training has GPUs of its own, and none move",
            not (shared or prepared.is_elastic),
            "training.switch_s",
        ),
        Unused(
            "training.load_s is given",
            load_s is not None,
            "training.load_overhead_s training.rollout_offload",
        ),
        Unused(
            f"training.weight_sync is {method}, which takes its place",
            method is not None and not shared,
            "training.publish_s training.load_overhead_s",
        ),
        Unused(
            f"training.weight_sync is {method}, not delta",
            method != "delta",
            "training.weight_sync_delta_share",
        ),
        Unused(
            f"training.weight_sync is {method}, not broadcast",
            method != "broadcast",
            "training.weight_sync_precision training.weight_sync_overlap",
        ),
        Unused(
            f"training.weight_sync is {method}, neither broadcast nor delta",
            method not in ("broadcast", "delta"),
            "training.weight_sync_host_bytes_per_s",
        ),
        Unused(
            f"training.weight_sync is {method}, not file",
            method != "file",
            "training.weight_sync_storage_bytes_per_s",
        ),
        Unused(
            "no weights cross the network",
            one_domain or (method == "file" and in_domain),
            "training.weight_sync_node_bytes_per_s",
        ),
        Unused("training.offload is none", training.offload == "none", "training.offload_memory"),
        Unused(
            "the system has no log-prob pass", passes == 0 and not verifies, "training.log_prob_*"
        ),
        Unused(
            "there is no reference (extra_log_probs, reference_model)",
            training.reference_passes == 0,
            "training.reference_weights",
        ),
        Unused(
            "sequences are packed (microbatching, remove_padding)",
            training.microbatching != "fixed" or training.remove_padding,
            "training.padded_to",
        ),
        Unused(
            "training has no pipeline stages, in which micro-batches are padded to each other",
            training.microbatching == "padded" and training.pipeline_parallel == 1,
            "training.microbatching",
        ),
        Unused(
            "the micro-batches have a fixed number of sequences",
            training.microbatching == "fixed" and bool(sized),
            "training.tokens_per_microbatch training.log_prob_tokens_per_microbatch",
        ),
        Unused(
            f"{prepared.model.name} has no experts",
            not prepared.model.experts,
            "training.grouped_experts",
        ),
        Unused(
            "training.mfu was measured with it",
            not computed,
            "training.kernels training.logits training.attention training.grouped_experts",
        ),
        Unused(
            "training.sharding is optimizer, which gathers no weights",
            training.sharding == "optimizer",
            "training.gather_overlap",
        ),
        Unused(
            "the mini-batch is the whole batch",
            system.minibatches == 1 and training.balance == "batch",
            "training.balance",
        ),
        Unused(
            "no single controller has the batch",
            not system.controller,
            "training.controller_bytes_*",
        ),
        *(
            Unused(
                f"training.{phase}_{other} is not given",
                not getattr(training, f"{phase}_{other}"),
                f"training.{phase}_{key}",
            )
            for phase in ("checkpoint", "evaluate")
            for key, other in (("every", "s"), ("s", "every"))
        ),
        *(
            Unused(
                f"none is due in {scenario.steps} updates",
                getattr(training, f"{phase}_every") > scenario.steps,
                f"training.{phase}_*",
            )
            for phase in ("checkpoint", "evaluate")
        ),
        Unused(
            "engine.scheduler is vllm",
            not limits.sglang,
            "engine.schedule_* engine.clip_max_new_tokens engine.*mamba_*",
        ),
        Unused(
            f"{prepared.model.name} has no layers with states",
            not prepared.model.linear_layers,
            "engine.*mamba_*",
        ),
        Unused(
            "engine.kv_cache_tokens is given",
            engine.kv_cache_tokens is not None,
            "engine.gpu_memory_utilization engine.reserve_bytes",
        ),
        Unused(
            "the step times contain what log-probs take, and no engine.preset adds it",
            "engine.log_probs_s" not in of_presets,
            "engine.log_probs",
        ),
        Unused(
            "the step times contain what launches take, and no engine.preset adds it",
            "engine.layer_launch_s" not in of_presets and drafts is None,
            "engine.enforce_eager",
        ),
        Unused(
            "no GPUs prefill alone (cluster.prefill.gpus)",
            prepared.prefill is None,
            "cluster.prefill.dispatch",
        ),
        Unused(
            "no KV cache is sent (cluster.prefill.gpus)",
            prepared.prefill is None and prepared.tail is None,
            "cluster.prefill.link_bytes_per_s",
        ),
        Unused(
            "a worker has one GPU",
            scenario.cluster.worker_gpus == 1,
            "profile.roofline.link_efficiency",
        ),
        Unused(
            "plans read no τ (it is of ranking groups, rhymerl)",
            prepared.tau is None,
            "profile.tau",
        ),
        Unused("no speculation is set", drafts is None, "speculation.*"),
        Unused(
            "the temperature is recorded beside the acceptance, and no formula has it",
            True,
            "speculation.temperature",
        ),
        Unused(
            "the drafter keeps no history",
            decided and drafter != "history",
            "speculation.history_workers.*",
        ),
        Unused(
            "drafts come from text, not from a model",
            decided and drafter != "model",
            "speculation.draft_profile speculation.draft_round_s speculation.verification",
        ),
        Unused(
            f"the drafter is {model or drafter}",
            decided,
            " ".join(f"speculation.acceptance.{name}.*" for name in unread),
        ),
        Unused(
            "drafts are read from the trace's token ids",
            decided and has_token_ids(prepared.trace),
            "speculation.runs.*",
        ),
        Unused(
            "indexes are not compressed (compressed_bytes_per_token)",
            history.compressed_bytes_per_token is None,
            "speculation.history_workers.codec_tokens_per_s",
        ),
        Unused(
            "no index is out of memory (compressed_bytes_per_token, swap_bytes_per_s)",
            history.compressed_bytes_per_token is None and history.swap_bytes_per_s is None,
            "speculation.history_workers.prefetch",
        ),
        Unused(
            "responses have one turn",
            one_turn,
            "agents.kv_while_tool_runs agents.host_* agents.tool_slots",
        ),
        Unused(
            "no KV cache is offloaded (agents.kv_while_tool_runs)",
            agents.kv_while_tool_runs != "offload",
            "agents.host_*",
        ),
        Unused(
            "no worker is lost (faults)",
            not any(fault.kind == "lost" for fault in scenario.faults),
            "system.on_loss",
        ),
        Unused(
            "the mini-batch is the whole batch (minibatches)",
            rhymerl and bool(chosen.get("stream")) and chosen["minibatches"] == 1,
            "system.stream",
        ),
        Unused(
            "dynamic_sampling has dropped groups of equal rewards already",
            rhymerl and bool(chosen.get("dynamic_sampling") and chosen.get("filter_groups")),
            "system.filter_groups",
        ),
    ]
    if lengths:
        one_turn = lengths.cap_turns == 1 or (lengths.turns == 1 and lengths.turn_tokens is None)
        rules += [
            Unused(
                "no response stops early (early_stop_share)",
                lengths.early_stop_share == 0,
                "workload.synthetic.early_stop_factor",
            ),
            Unused(
                "all prompts have prompt_tokens (prompt_sigma)",
                lengths.prompt_sigma == 0,
                "workload.synthetic.prompt_cap_tokens",
            ),
            Unused(
                "no rule of the system reads rewards",
                not system.needs_rewards,
                "workload.synthetic.reward_*",
            ),
            Unused(
                "a response has one turn",
                one_turn,
                "workload.synthetic.cap_turns workload.synthetic.turn_sigma",
            ),
        ]
    if judge:
        rules += [
            Unused(
                "an engine of the judge has one GPU",
                judge.tp == 1,
                "judge.gpus_per_node judge.nvlink_domain judge.network_bytes_per_s",
            ),
            Unused(
                "all verdicts have response_tokens (response_sigma)",
                judge.response_sigma == 0,
                "judge.response_cap_tokens",
            ),
            Unused(
                "the judge writes no response (response_tokens)",
                judge.response_tokens == 0,
                "judge.response_sigma judge.response_cap_tokens",
            ),
        ]
    return rules
