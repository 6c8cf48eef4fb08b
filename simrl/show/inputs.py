"""The inputs of a run: all of them with value, kind and source (the report), and the main ones in
lines (a comparison).

Invariant: read from the result's metadata alone. Kinds are those in the metadata (recorded,
synthetic, measured, derived, assumed …). A parameter at its default has the kind "default": it is
assumed until the scenario sets it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from simrl.analysis.explanation import planned_drafting, pool_kinds
from simrl.engine.config import EngineConfig
from simrl.profile.metadata import ProfileMetadata, split_words
from simrl.profile.precision import FP8_EXPERTS
from simrl.scenario.calibration import open_lines
from simrl.scenario.model import JudgeConfig
from simrl.scenario.presets import Used, constants
from simrl.show.text import formatted, grouped, listed
from simrl.training.config import TrainingConfig, assumed_s, assumption, trained_by
from simrl.validation import in_words

SECTIONS: Mapping[str, type[BaseModel]] = {
    "training": TrainingConfig,
    "engine": EngineConfig,
    "judge": JudgeConfig,
}


class Input(NamedTuple):
    """One input of a run: its name, value, kind and source."""

    name: str
    value: str
    kind: str
    source: str


class SharedInput(NamedTuple):
    """An input and the runs that have it; no runs are named if all have it."""

    input: Input
    runs: tuple[str, ...]

    @property
    def parameter(self) -> bool:
        """True for a parameter of training or engine; the other inputs are in words."""
        return self.input.name.startswith(tuple(f"{section}." for section in SECTIONS))


Facts = Mapping[str, Any]


def shared(of_runs: Mapping[str, Facts]) -> list[SharedInput]:
    """Return the inputs of several runs by name: equal inputs once, in the order of the first run
    that has them."""
    runs_of = grouped(
        (entry, name) for name, metadata in of_runs.items() for entry in inputs(metadata)
    )
    order = list(dict.fromkeys(entry.name for entry in runs_of))
    rows = [
        SharedInput(entry, () if len(runs) == len(of_runs) else tuple(runs))
        for entry, runs in runs_of.items()
    ]
    return sorted(rows, key=lambda row: order.index(row.input.name))


def inputs(metadata: Facts) -> list[Input]:
    """Return the inputs of one run."""
    return [
        Input(*entry)
        for part in (_run, _times, _speculation, _drafter, _happened, _parameters)
        for entry in part(metadata)
    ]


Entries = Iterator[tuple[str, str, str, str]]


def _run(metadata: Facts) -> Entries:
    scenario, trace = metadata["scenario"], metadata["trace"]
    cluster, from_scenario = scenario["cluster"], ("given", "the scenario")
    yield "model", str(scenario["model"]), *from_scenario
    kinds, train = pool_kinds(cluster).split(" + "), metadata["train_gpus"]
    counts = [metadata["gpus"]] if len(kinds) == 1 else [metadata["gpus"] - train, train]
    gpus = (
        " + ".join(f"{n:,} {kind}" for n, kind in zip(counts, kinds, strict=True))
        + f", {split_words(cluster)}"
    )
    split = f"{metadata['rollout_workers']:,} rollout workers, {train:,} GPUs that train"
    yield (
        "cluster",
        f"{gpus}: {split}",
        "given",
        f"the scenario, and the system's split ({metadata['paper']})",
    )
    if links := metadata.get("links"):
        yield (
            "links",
            links,
            "given",
            "data sheets, and what the scenario's cluster has in their place",
        )
    yield (
        "updates",
        f"{scenario['steps']}, of which {scenario['warmup_steps']} are warm-up",
        *from_scenario,
    )
    yield "seed", str(scenario["seed"]), *from_scenario
    yield "simrl", str(metadata["simrl_version"]), "version", ""
    yield from (("calibration", line, "measured", "") for line in open_lines(scenario))
    cap = (
        f", responses of at most {trace['cap_tokens']:,} tokens" if trace.get("cap_tokens") else ""
    )
    yield (
        "rollouts (trace)",
        f"{trace['name']}{cap}{_repeated(metadata)}",
        str(trace["kind"]),
        "; ".join(filter(None, (source_words(trace["source"]), f"licence {trace['licence']}"))),
    )


def _times(metadata: Facts) -> Entries:
    scenario, profile, load_kind = (
        metadata["scenario"],
        metadata["profile"],
        str(metadata["load_weights_kind"]),
    )
    engine = scenario["engine"]
    if model_file := metadata.get("model_config"):
        yield "model", str(scenario["model"]), "given", str(model_file)
    derived = scenario["training"].get("mfu") is None
    source = ("derived", "rates of single kernels") if derived else ("given", "the scenario")
    yield "training time", trained_by(scenario), *source
    sources = [
        profile["source"],
        profile.get("notes"),
        formatted(profile.get("spread"), "repeats {:.1%} apart", ""),
        formatted(profile.get("held_out_error"), "held-out error {:.1%}", ""),
    ]
    corrections = f"; {', '.join(profile['corrections'])}" if profile["corrections"] else ""
    value = f"{profile['model']} on {profile['gpu']}, {split_words(profile)}{corrections}"
    yield "step times (profile)", value, str(profile["kind"]), "; ".join(filter(None, sources))
    computed = metadata.get("weight_sync") or "the model's bytes, the network, an overhead"
    yield (
        "loading weights at a worker",
        f"{metadata['load_weights_s']:.3g} s",
        load_kind,
        "training.load_s" if load_kind == "given" else computed,
    )
    if tau := metadata.get("tau"):
        yield "τ of ranking groups", "by length and workers", str(tau["kind"]), str(tau["source"])
    derived = engine["kv_cache_tokens"] is None
    memory = ("derived", "GPU memory by its data sheet, less weights and reserve")
    yield (
        "KV cache of a worker",
        f"{metadata['kv_cache_tokens_per_worker']:,} tokens",
        *(memory if derived else ("given", "engine.kv_cache_tokens")),
    )
    if (caching := metadata.get("prefix_caching")) is not None:
        default = engine.get("prefix_caching") is None
        source = (
            ("default", "as the system has it") if default else ("given", "engine.prefix_caching")
        )
        yield "prefix caching", "on" if caching else "off", *source


def _speculation(metadata: Facts) -> Entries:
    for _, facts in _drafters(metadata):
        acceptance, times, method = facts["acceptance"], facts["draft_times"], str(facts["method"])
        if isinstance(acceptance, str):
            acceptance = {"kind": "measured", "source": acceptance}
        yield "acceptance of drafts", method, str(acceptance["kind"]), str(acceptance["source"])
        yield "times of drafting", method, str(times["kind"]), str(times["source"])


def _drafter(metadata: Facts) -> Entries:
    """Yield the memory of draft strategies beside their graphs, and how the drafter was trained."""
    facts = metadata.get("speculation") or {}
    if tokens := facts.get("most_verified_tokens"):
        size = f"{facts['verification_bytes'] / 1e9:.3g} GB beyond a plain pass"
        yield "memory of verification", size, "derived", f"up to {tokens:,} tokens in a pass"
    if trained := metadata.get("drafter_training"):
        value = f"{trained['iterations']} iterations, {trained['packed_tokens']:,} tokens"
        yield (
            "training of the drafter",
            value,
            "derived",
            f"padded to the longest of a batch: {trained['padded_tokens']:,}; up to "
            f"{trained['buffer_bytes'] / 1e9:.3g} GB of hidden states on the hosts, "
            + (
                f"copied there in {trained['collecting_s']:.2g} s of the inference phases"
                if trained["collecting_s"]
                else "none copied there in inference phases"
            ),
        )


def _happened(metadata: Facts) -> Entries:
    if planned := metadata["scenario"]["faults"]:
        faults = "; ".join(source_words(json.dumps(fault)) for fault in planned)
        yield "faults", f"{len(metadata.get('faults') or [])} happened", "given", faults
    for key, value in (metadata.get("replay") or {}).items():
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            yield f"engines: {key.replace('_', ' ')}", str(value), "measured", "the replay"


def _parameters(metadata: Facts) -> Entries:
    presets = {used.key: used for used in _used(metadata)}
    for section, model in SECTIONS.items():
        values = metadata["scenario"].get(section) or {}
        for key, field in model.model_fields.items():
            value = values.get(key)
            if value is not None and key not in (
                "prefix_caching",
                "engine",
                "profile",
                "precision",
            ):  # `_times` has the first
                counts = isinstance(value, int | float) and not isinstance(value, bool)
                shown = f"{value:,.10g}" if counts else in_words(value)
                kind = "default" if value == field.default else "given"
                source = " ".join((field.description or "").split())
                if (used := presets.get(f"{section}.{key}")) is not None:
                    kind, source = used.constant.kind, f"{used.preset}: {used.constant.source}"
                yield f"{section}.{key}", shown, kind, source


def source_words(source: str) -> str:
    """Return a JSON object as a line of words; any other text unchanged."""
    try:
        parsed = json.loads(source)
    except (ValueError, RecursionError):
        return source
    return ", ".join(_flat(parsed)) if isinstance(parsed, dict) else source


def _flat(facts: Facts, within: str | None = None) -> Iterator[str]:
    """Yield facts as words; a fact two levels down, such as a model's tool, with the names above
    it."""
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, "" if within is None else f"{within}{key}.")
        elif value is not None:
            yield f"{within or ''}{key} {value}"


def _drafters(metadata: Facts) -> Iterator[tuple[str, Facts]]:
    """Yield the methods that drafted, each with its part of the rollout."""
    if metadata.get("speculation"):
        yield "Drafts", metadata["speculation"]
    if metadata.get("best_of_n"):
        yield from (
            ("Drafts of the tail", facts) for facts in metadata["best_of_n"]["drafters"].values()
        )


def _repeated(metadata: Facts) -> str:
    """Return a note on a trace that the run repeats, else an empty text."""
    steps, run_steps = metadata["trace_steps"], metadata["scenario"]["steps"]
    return "" if steps >= run_steps else f"; its {steps} steps repeat, the run has {run_steps}"


def _drafts(facts: Facts) -> str:
    """Return the sources of a method's acceptance and of its times."""
    acceptance, plan = facts["acceptance"], facts.get("plan")
    accepted = acceptance if isinstance(acceptance, str) else f"acceptance {_source(acceptance)}"
    planned = (
        f", {plan['draft_gpus']} draft GPU{'s' * (plan['draft_gpus'] > 1)} a worker and windows of {plan['window']}"
        if plan
        else ""
    )
    if str(facts["method"]).startswith("specactor"):
        planned = f" with {facts.get('first_drafter') or facts['model']}{planned}"
    if "scale" in facts:
        planned += f", loaded in {facts['scale']['load_s']:.2g} s"
    return f"{facts['method']}{planned}, {accepted}; drafting {_source(facts['draft_times'])}"


def _source(facts: Facts) -> str:
    """Return the kind of a number, and its source if that says more."""
    kind, source = facts["kind"], facts["source"]
    return kind if kind == source else f"{kind} ({source})"


def _used(metadata: Facts) -> list[Used]:
    """Return the constants of presets that a run used; none for an unknown preset, such as one of
    another version."""
    try:
        return list(
            constants(metadata["scenario"], ProfileMetadata.model_construct(**metadata["profile"]))
        )
    except ValueError:
        return []


def _presets(metadata: Facts) -> list[str]:
    """Return a line for each preset: its numeric constants, each with its range."""
    shown = grouped(
        (preset, f"{key}={constant.words}{' open' * (constant.kind == 'open')}")
        for preset, key, constant in _used(metadata)
        if type(constant.value) is float
    )
    return [f"Constants of {preset}: {', '.join(words)}" for preset, words in shown.items()]


def left_out_lines(of_results: Iterable[Facts]) -> list[str]:
    """Return the lines on what simulated runs leave out: parts that are not modelled, and settings
    without effect, each with the reason and, where others use it, the systems that do not."""
    simulated = [facts for facts in of_results if "replay" not in facts]
    distinct = list(
        dict.fromkeys(words for facts in simulated for words in facts.get("not_modelled") or ())
    )
    of_systems = grouped(
        (unused, facts["label"])
        for facts in simulated
        for unused in (facts.get("without_effect") or {}).items()
    )
    keys = grouped(
        (
            reason
            + f", in {listed(list(dict.fromkeys(systems)))}" * (len(systems) < len(simulated)),
            key,
        )
        for (key, reason), systems in of_systems.items()
    )
    return [
        *[f"Not modelled: {'; '.join(distinct)}"] * bool(distinct),
        *(f"Without effect: {', '.join(names)} ({reason})" for reason, names in keys.items()),
    ]


def calibration_lines(of_results: Iterable[Facts]) -> list[str]:
    """Return what the calibrations of these runs leave open, each line once."""
    return list(
        dict.fromkeys(line for facts in of_results for line in open_lines(facts["scenario"]))
    )


def provenance(of_results: Sequence[Facts]) -> list[str]:
    """Return the inputs behind the numbers, each once."""
    lines: list[str] = []
    links: list[str] = []
    for metadata in of_results:
        scenario, profile, trace = metadata["scenario"], metadata["profile"], metadata["trace"]
        engine = f"{profile['model']} on {profile['gpu']} {split_words(profile, '', ' ')}"
        passes = f"{engine}, {profile['kind']} ({profile['source']})"
        passes += (
            f"; {FP8_EXPERTS}"
            if profile.get("precision") == "fp8" and profile.get("routing")
            else ""
        )
        lines += [
            *_notable(metadata),
            f"Step times: {', '.join([passes, *profile['corrections']])}",
            f"Rollouts: {', '.join(dict.fromkeys((trace['name'], trace['kind'])))}{_repeated(metadata)}",
            f"Training: {trained_by(scenario)}",
            *_presets(metadata),
            *(
                f"τ of ranking groups: {_source(tau)}"
                for tau in filter(None, [metadata.get("tau")])
            ),
        ]
        links += (metadata.get("links") or "").split("; ")
        if sync := metadata.get("weight_sync"):
            lines.append(f"Weight sync: {sync}")
        training = scenario["training"]
        if offload := metadata.get("offload"):
            default = (
                "the scenario" if training.get("offload") != TrainingConfig().offload else "default"
            )
            source = {used.key: used.preset for used in _used(metadata)}.get(
                "training.offload", default
            )
            lines.append(f"Offload: {training['offload']} ({source}): {offload}")
        lines += [f"{part}: {_drafts(facts)}" for part, facts in _drafters(metadata)]
        lines += [
            f"{name.capitalize()}: {value} ({source})"
            for name, value, _, source in _drafter(metadata)
        ]
        lines += [
            f"Phases: {phase} {training[f'{phase}_s']:g} s every {training[f'{phase}_every']} updates"
            for phase in ("evaluate", "checkpoint")
            if training[f"{phase}_every"]
        ]
        if evaluation := scenario.get("evaluation"):
            rule = {key: value for key, value in evaluation.items() if value and key != "lengths"}
            lengths = (evaluation["lengths"] or {}).get("trace") or "synthetic"
            lines.append(
                f"Evaluations: {', '.join(f'{key} {value}' for key, value in rule.items())}; lengths: "
                f"{lengths if evaluation['lengths'] else 'of the workload'}"
            )
        if scenario["faults"]:
            happened = (
                "result.json lists those that happened"
                if metadata.get("faults")
                else "none happened before the end"
            )
            lines.append(f"Faults: as the scenario has them; {happened}")
    if distinct := dict.fromkeys(filter(None, links)):
        lines.append(f"Links: {'; '.join(distinct)}")
    return [
        *sorted(dict.fromkeys(lines), key=lambda line: not line.startswith("Step times:")),
        *_assumed(of_results),
    ]


def _notable(metadata: Facts) -> list[str]:
    """Return the lines on a model that was read from a file, and on rules of scheduling that are
    not vLLM's."""
    scenario, file = metadata["scenario"], metadata.get("model_config")
    scheduler, policy = map(scenario["engine"].get, ("scheduler", "schedule_policy"))
    return [
        *[f"Model: {scenario['model']}, {file}"] * bool(file),
        *(f"SpecActor: {words}" for words in filter(None, [planned_drafting(metadata)])),
        *(
            f"Evaluations: none is due; evaluation.every is {rule['every']}, and the run has {scenario['steps']} updates"
            for rule in filter(None, [scenario.get("evaluation")])
            if rule["every"] >= scenario["steps"] and not rule["at_start"]
        ),
        *[f"Scheduler: {scheduler} (engine.scheduler), {policy}"] * (scheduler == "sglang"),
    ]


def rests_on(of_results: Sequence[Facts]) -> list[str]:
    """Return lines on the sources of the numbers, and on the options that show all of them."""
    times, rollouts = (
        listed(list(dict.fromkeys(words(metadata) for metadata in of_results)))
        for words in (_step_times, lambda metadata: metadata["trace"]["kind"])
    )
    presets = dict.fromkeys(used.preset for metadata in of_results for used in _used(metadata))
    constants_of = f", constants of {listed(list(presets))}" if presets else ""
    missing = len(
        {words for metadata in of_results for words in metadata.get("not_modelled") or ()}
    )
    unused = [metadata.get("without_effect") or {} for metadata in of_results]
    nowhere = [key for key in unused[0] if all(key in keys for keys in unused)]
    return [
        *[f"Without effect here: {', '.join(nowhere)} (--inputs says why)"] * bool(nowhere),
        *dict.fromkeys(line for metadata in of_results for line in _notable(metadata)),
        f"Rests on step times {times}, rollouts {rollouts}, training computed{constants_of}.",
        *_assumed(of_results),
        f"--inputs lists all inputs, and {missing} thing{'s' * (missing != 1)} not modelled; --explain-columns, what the "
        "columns mean.",
    ]


def _step_times(metadata: Facts) -> str:
    """Return the kind of the step times, their source if it says more, and corrections beyond the
    measured range."""
    profile = metadata["profile"]
    source = "" if profile["kind"] in ("measured", "derived") else f" ({profile['source']})"
    return ", ".join(
        [f"{profile['kind']}{source}", *(c for c in profile["corrections"] if "beyond" in c)]
    )


def _assumed(of_results: Iterable[Facts]) -> list[str]:
    """Return the line of the assumed seconds of these runs; none where none are assumed."""
    assumed: dict[tuple[str, float], None] = {}
    for metadata in of_results:
        cluster = metadata["scenario"]["cluster"]
        rollout_gpus = metadata["rollout_workers"] * cluster["tp"] * (cluster.get("dp") or 1)
        colocated = rollout_gpus + metadata["train_gpus"] > metadata["gpus"]
        known = {used.key.removeprefix("training.") for used in _used(metadata)}
        of_run = assumed_s(metadata["scenario"]["training"], colocated, known) | metadata.get(
            "extrapolated", {}
        )
        assumed |= dict.fromkeys(of_run.items())
    return [assumption(assumed)] if assumed else []
