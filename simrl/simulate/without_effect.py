"""Settings that a scenario gives and that change nothing in it, each with the reason.

Invariant: a setting of the user's can change a result of its scenario, or is found here, or is
refused. What a preset gives is not the user's, and a value that is already the default says
nothing.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any, NamedTuple

from simrl.scenario.presets import constants
from simrl.speculation.matching import has_token_ids
from simrl.speculation.methods import OLD_RESPONSE

if TYPE_CHECKING:
    from simrl.simulate.prepare import Prepared


class Unused(NamedTuple):
    """Settings that have no use where a condition holds: dotted keys, `*` and `?` as in a shell."""

    holds: bool
    keys: str


def without_effect(prepared: Prepared) -> dict[str, str]:
    """Return the settings that change nothing in a prepared scenario, by key, and why."""
    scenario = prepared.scenario
    of_presets = {used.key for used in constants(scenario.model_dump(), prepared.profile.metadata)}
    changed = set(_keys(scenario.model_dump(exclude_defaults=True))) - of_presets
    unused: dict[str, str] = {}
    for reason, (holds, patterns) in _rules(prepared, of_presets).items():
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


def _rules(prepared: Prepared, of_presets: Set[str]) -> dict[str, Unused]:
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
    rules = {
        "rollout and training share the GPUs, and no weights are sent": Unused(
            shared,
            "training.publish_s training.weight_sync training.weight_sync_[dohpns]*",
        ),
        "no tensors are loaded one by one": Unused(
            method in ("delta", "gather_broadcast", "file")
            if method and not shared
            else not prepared.model.experts,
            "training.weight_sync_tensor_s",
        ),
        "no method of training.weight_sync is given": Unused(
            method is None, "training.weight_sync_[dohpns]*"
        ),
        "training has GPUs of its own": Unused(not shared, "training.rollout_offload"),
        "training has GPUs of its own, and lends none": Unused(
            not (shared or "updates" in (system.elastic or "")),
            "training.offload training.offload_memory training.switch_transfer_s",
        ),
        "training has GPUs of its own, and none move": Unused(
            not (shared or prepared.is_elastic), "training.switch_s"
        ),
        "training.load_s is given": Unused(
            load_s is not None, "training.load_overhead_s training.rollout_offload"
        ),
        f"training.weight_sync is {method}, which takes its place": Unused(
            method is not None and not shared, "training.publish_s training.load_overhead_s"
        ),
        f"training.weight_sync is {method}, not delta": Unused(
            method != "delta", "training.weight_sync_delta_share"
        ),
        f"training.weight_sync is {method}, not broadcast": Unused(
            method != "broadcast", "training.weight_sync_precision training.weight_sync_overlap"
        ),
        f"training.weight_sync is {method}, neither broadcast nor delta": Unused(
            method not in ("broadcast", "delta"), "training.weight_sync_host_bytes_per_s"
        ),
        f"training.weight_sync is {method}, not file": Unused(
            method != "file", "training.weight_sync_storage_bytes_per_s"
        ),
        "no weights cross the network": Unused(
            one_domain or (method == "file" and in_domain), "training.weight_sync_node_bytes_per_s"
        ),
        "training.offload is none": Unused(training.offload == "none", "training.offload_memory"),
        "the system has no log-prob pass": Unused(
            passes == 0 and not verifies, "training.log_prob_*"
        ),
        "there is no reference (extra_log_probs, reference_model)": Unused(
            training.reference_passes == 0, "training.reference_weights"
        ),
        "sequences are packed (microbatching, remove_padding)": Unused(
            training.microbatching != "fixed" or training.remove_padding, "training.padded_to"
        ),
        "the micro-batches have a fixed number of sequences": Unused(
            training.microbatching == "fixed" and bool(sized),
            "training.tokens_per_microbatch training.log_prob_tokens_per_microbatch",
        ),
        f"{prepared.model.name} has no experts": Unused(
            not prepared.model.experts, "training.grouped_experts"
        ),
        "training.mfu was measured with it": Unused(
            not computed,
            "training.kernels training.logits training.attention training.grouped_experts",
        ),
        "training.sharding is optimizer, which gathers no weights": Unused(
            training.sharding == "optimizer", "training.gather_overlap"
        ),
        "the mini-batch is the whole batch": Unused(
            system.minibatches == 1 and training.balance == "batch", "training.balance"
        ),
        "no single controller has the batch": Unused(
            not system.controller, "training.controller_bytes_*"
        ),
        **{
            f"training.{phase}_every and {phase}_s are needed together": Unused(
                not (getattr(training, f"{phase}_every") and getattr(training, f"{phase}_s")),
                f"training.{phase}_every training.{phase}_s",
            )
            for phase in ("checkpoint", "evaluate")
        },
        "engine.scheduler is vllm": Unused(
            not limits.sglang,
            "engine.schedule_* engine.clip_max_new_tokens engine.*mamba_*",
        ),
        f"{prepared.model.name} has no layers with states": Unused(
            not prepared.model.linear_layers, "engine.*mamba_*"
        ),
        "engine.kv_cache_tokens is given": Unused(
            engine.kv_cache_tokens is not None, "engine.gpu_memory_utilization engine.reserve_bytes"
        ),
        "the step times contain it, and no engine.preset adds it": Unused(
            "engine.log_probs_s" not in of_presets, "engine.log_probs"
        ),
        "the step times contain what launches take, and no engine.preset adds it": Unused(
            "engine.layer_launch_s" not in of_presets and drafts is None, "engine.enforce_eager"
        ),
        "no GPUs prefill alone (cluster.prefill.gpus)": Unused(
            prepared.prefill is None, "cluster.prefill.dispatch"
        ),
        "no KV cache is sent (cluster.prefill.gpus)": Unused(
            prepared.prefill is None and prepared.tail is None, "cluster.prefill.link_bytes_per_s"
        ),
        "a worker has one GPU": Unused(
            scenario.cluster.worker_gpus == 1, "profile.roofline.link_efficiency"
        ),
        "plans read no τ (it is of ranking groups, rhymerl)": Unused(
            prepared.tau is None, "profile.tau"
        ),
        "the system drafts nothing (speculation)": Unused(drafts is None, "speculation.*"),
        "it is recorded only": Unused(True, "speculation.temperature"),
        "the drafter has no history": Unused(
            decided and drafter != "history", "speculation.history_workers.*"
        ),
        "the drafter is no model": Unused(
            decided and drafter != "model",
            "speculation.draft_profile speculation.draft_round_s speculation.verification",
        ),
        f"the drafter is {model or drafter}": Unused(
            decided, " ".join(f"speculation.acceptance.{name}.*" for name in unread)
        ),
        "drafts are read from the trace's token ids": Unused(
            decided and has_token_ids(prepared.trace), "speculation.runs.*"
        ),
        "indexes are not compressed (compressed_bytes_per_token)": Unused(
            history.compressed_bytes_per_token is None,
            "speculation.history_workers.codec_tokens_per_s",
        ),
        "no index is out of memory (compressed_bytes_per_token, swap_bytes_per_s)": Unused(
            history.compressed_bytes_per_token is None and history.swap_bytes_per_s is None,
            "speculation.history_workers.prefetch",
        ),
        "responses have one turn": Unused(one_turn, "agents.[!dm]*"),
        "no KV cache is offloaded (agents.kv_while_tool_runs)": Unused(
            agents.kv_while_tool_runs != "offload", "agents.host_*"
        ),
        "no programs are admitted (dispatch)": Unused(
            not system.dispatch.programs, "agents.acting_token_weight"
        ),
        "no worker is lost (faults)": Unused(
            not any(fault.kind == "lost" for fault in scenario.faults), "system.on_loss"
        ),
        "the mini-batch is the whole batch (minibatches)": Unused(
            rhymerl and bool(chosen.get("stream")) and chosen["minibatches"] == 1, "system.stream"
        ),
        "dynamic_sampling drops groups of equal rewards, too": Unused(
            rhymerl and bool(chosen.get("dynamic_sampling") and chosen.get("filter_groups")),
            "system.filter_groups",
        ),
    }
    if lengths:
        one_turn = lengths.cap_turns == 1 or (lengths.turns == 1 and lengths.turn_tokens is None)
        rules |= {
            "no response stops early (early_stop_share)": Unused(
                lengths.early_stop_share == 0, "workload.synthetic.early_stop_factor"
            ),
            "all prompts have prompt_tokens (prompt_sigma)": Unused(
                lengths.prompt_sigma == 0, "workload.synthetic.prompt_cap_tokens"
            ),
            "no rule of the system reads rewards": Unused(
                not system.needs_rewards, "workload.synthetic.reward_*"
            ),
            "a response has one turn": Unused(
                one_turn, "workload.synthetic.cap_turns workload.synthetic.turn_sigma"
            ),
        }
    if judge:
        rules |= {
            "an engine of the judge has one GPU": Unused(
                judge.tp == 1,
                "judge.gpus_per_node judge.nvlink_domain judge.network_bytes_per_s",
            ),
            "all verdicts have response_tokens (response_sigma)": Unused(
                judge.response_sigma == 0, "judge.response_cap_tokens"
            ),
            "the judge writes no response (response_tokens)": Unused(
                judge.response_tokens == 0, "judge.response_sigma judge.response_cap_tokens"
            ),
        }
    return rules
