"""The inputs of a run: in full with value, kind and source (the report), and the main ones in lines (a comparison).

Invariant: read from the result's metadata alone. Kinds are the metadata's own (recorded, synthetic, measured, derived, assumed
…); a parameter that has its default is "default": an assumption until it is given.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from simrl.analysis.explanation import pool_kinds
from simrl.engine.config import EngineConfig
from simrl.profile.metadata import split_words
from simrl.profile.precision import FP8_EXPERTS
from simrl.scenario.presets import Used, constants
from simrl.show.text import listed
from simrl.training.config import TrainingConfig, assumed_s, assumption, trained_by
from simrl.validation import in_words

SECTIONS: Mapping[str, type[BaseModel]] = {"training": TrainingConfig, "engine": EngineConfig}


class Input(NamedTuple):
    """One input of a run: its name, value, kind and source."""

    name: str
    value: str
    kind: str
    source: str


class SharedInput(NamedTuple):
    """An input and the runs that have it; none are named where all have it."""

    input: Input
    runs: tuple[str, ...]

    @property
    def parameter(self) -> bool:
        """Return whether it is a parameter of training or engine; the other inputs are words."""
        return self.input.name.startswith(tuple(f"{section}." for section in SECTIONS))


Facts = Mapping[str, Any]


def shared(of_runs: Mapping[str, Facts]) -> list[SharedInput]:
    """Return the inputs of several runs by name: equal inputs once, in the order of the first run that has them."""
    found: dict[Input, list[str]] = {}
    for name, metadata in of_runs.items():
        for entry in inputs(metadata):
            found.setdefault(entry, []).append(name)
    order = list(dict.fromkeys(entry.name for entry in found))
    rows = [SharedInput(entry, () if len(runs) == len(of_runs) else tuple(runs)) for entry, runs in found.items()]
    return sorted(rows, key=lambda row: order.index(row.input.name))


def inputs(metadata: Facts) -> list[Input]:
    """Return the inputs of one run."""
    return [Input(*entry) for part in (_run, _times, _speculation, _happened, _parameters) for entry in part(metadata)]


Entries = Iterator[tuple[str, str, str, str]]


def _run(metadata: Facts) -> Entries:
    scenario, trace = metadata["scenario"], metadata["trace"]
    cluster, given = scenario["cluster"], ("given", "the scenario")
    yield "model", str(scenario["model"]), *given
    kinds, train = pool_kinds(cluster).split(" + "), metadata["train_gpus"]
    counts = [metadata["gpus"]] if len(kinds) == 1 else [metadata["gpus"] - train, train]
    gpus = " + ".join(f"{n:,} {kind}" for n, kind in zip(counts, kinds, strict=True)) + f", {split_words(cluster)}"
    split = f"{metadata['rollout_workers']:,} rollout workers, {metadata['train_gpus']:,} GPUs that train"
    yield "cluster", f"{gpus}: {split}", "given", f"the scenario, and the system's split ({metadata['paper']})"
    if links := metadata.get("links"):
        yield "links", links, "given", "data sheets, and what the scenario's cluster has in their place"
    yield "updates", f"{scenario['steps']}, of which {scenario['warmup_steps']} are warm-up", *given
    yield "seed", str(scenario["seed"]), *given
    yield "simrl", str(metadata["simrl_version"]), "version", ""
    cap = f", responses of at most {trace['cap_tokens']:,} tokens" if trace.get("cap_tokens") else ""
    source = "; ".join(filter(None, (source_words(trace["source"]), f"licence {trace['licence']}")))
    yield "rollouts (trace)", f"{trace['name']}{cap}{_repeated(metadata)}", str(trace["kind"]), source


def _worker_gpus(metadata: Facts) -> int:
    cluster = metadata["scenario"]["cluster"]
    return int(cluster["tp"] * (cluster.get("dp") or 1))


def _times(metadata: Facts) -> Entries:
    if read := metadata.get("model_config"):
        yield "model", str(metadata["scenario"]["model"]), "given", str(read)
    profile, load_kind = metadata["profile"], str(metadata["load_weights_kind"])
    training = metadata["scenario"]["training"]
    kind, source = ("derived", "rates of single kernels") if training.get("mfu") is None else ("given", "the scenario")
    yield "training time", trained_by(metadata["scenario"]), kind, source
    known = [profile["source"], profile.get("notes")]
    for key, words in (("spread", "repeats {:.1%} apart"), ("held_out_error", "held-out error {:.1%}")):
        known.append(words.format(profile[key]) if profile.get(key) is not None else "")
    corrections = f"; {', '.join(profile['corrections'])}" if profile["corrections"] else ""
    value = f"{profile['model']} on {profile['gpu']}, {split_words(profile)}{corrections}"
    yield "step times (profile)", value, str(profile["kind"]), "; ".join(filter(None, known))
    source = metadata.get("weight_sync") or "the model's bytes, the network, an overhead"
    source = "training.load_s" if load_kind == "given" else source
    yield "loading weights at a worker", f"{metadata['load_weights_s']:.3g} s", load_kind, source
    derived = ("derived", "GPU memory by its data sheet, less weights and reserve")
    given = metadata["scenario"]["engine"]["kv_cache_tokens"] is not None
    cache = f"{metadata['kv_cache_tokens_per_worker']:,} tokens"
    yield "KV cache of a worker", cache, *(("given", "engine.kv_cache_tokens") if given else derived)
    if (caching := metadata.get("prefix_caching")) is not None:
        given = metadata["scenario"]["engine"].get("prefix_caching") is not None
        kind, source = ("given", "engine.prefix_caching") if given else ("default", "as the system has it")
        yield "prefix caching", "on" if caching else "off", kind, source


def _speculation(metadata: Facts) -> Entries:
    for _, facts in _drafters(metadata):
        acceptance, times, method = facts["acceptance"], facts["draft_times"], str(facts["method"])
        if isinstance(acceptance, str):
            acceptance = {"kind": "measured", "source": acceptance}
        yield "acceptance of drafts", method, str(acceptance["kind"]), str(acceptance["source"])
        yield "times of drafting", method, str(times["kind"]), str(times["source"])


def _happened(metadata: Facts) -> Entries:
    asked = metadata["scenario"]["faults"]
    if asked:
        faults = "; ".join(source_words(json.dumps(fault)) for fault in asked)
        yield "faults", f"{len(metadata.get('faults') or [])} happened", "given", faults
    for key, value in (metadata.get("replay") or {}).items():
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            yield f"engines: {key.replace('_', ' ')}", str(value), "measured", "the replay"


def _parameters(metadata: Facts) -> Entries:
    presets = {used.key: used for used in _used(metadata)}
    for section, model in SECTIONS.items():
        values = metadata["scenario"][section]
        for key, field in model.model_fields.items():
            value = values.get(key)
            if value is not None and key != "prefix_caching":  # which every run has
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
    """Yield facts as words; those two levels down, such as a model's tools, with the names above them."""
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, "" if within is None else f"{within}{key}.")
        elif value is not None:
            yield f"{within or ''}{key} {value}"


def _drafters(metadata: Facts) -> Iterator[tuple[str, Facts]]:
    """Yield the methods that drafted, with what they drafted for."""
    if metadata.get("speculation"):
        yield "Drafts", metadata["speculation"]
    if metadata.get("best_of_n"):
        yield from (("Drafts of the tail", facts) for facts in metadata["best_of_n"]["drafters"].values())


def _repeated(metadata: Facts) -> str:
    """Return that the run repeats its trace, if it does."""
    steps, asked = metadata["trace_steps"], metadata["scenario"]["steps"]
    return "" if steps >= asked else f"; its {steps} steps repeat, the run has {asked}"


def _drafts(facts: Facts) -> str:
    """Return where a method's acceptance and its times come from."""
    acceptance, plan = facts["acceptance"], facts.get("plan")
    found = acceptance if isinstance(acceptance, str) else f"acceptance {_source(acceptance)}"
    planned = f", {plan['draft_gpus']} draft GPUs a worker and windows of {plan['window']}" if plan else ""
    return f"{facts['method']}{planned}, {found}; drafting {_source(facts['draft_times'])}"


def _source(facts: Facts) -> str:
    """Return the kind of a number, and its source if that says more."""
    kind, source = facts["kind"], facts["source"]
    return kind if kind == source else f"{kind} ({source})"


def _used(metadata: Facts) -> list[Used]:
    """Return the constants of presets that a run used; none where a preset is not known, as those of other versions."""
    try:
        return list(constants(metadata["scenario"], metadata["profile"]["kind"]))
    except ValueError:
        return []


def _presets(metadata: Facts) -> list[str]:
    """Return a line for each preset: its constants that are numbers, with the range of each."""
    shown: dict[str, list[str]] = {}
    for preset, key, constant in _used(metadata):
        if type(constant.value) is float:
            shown.setdefault(preset, []).append(f"{key}={constant.words}{' open' * (constant.kind == 'open')}")
    return [f"Constants of {preset}: {', '.join(words)}" for preset, words in shown.items()]


def not_modelled_lines(of_results: Iterable[Facts]) -> list[str]:
    """Return the line that lists what simulated runs have that is not modelled; none where nothing applies."""
    each = (words for facts in of_results if "replay" not in facts for words in facts.get("not_modelled") or ())
    distinct = list(dict.fromkeys(each))
    return [f"Not modelled: {'; '.join(distinct)}"] * bool(distinct)


def provenance(of_results: Sequence[Facts]) -> list[str]:
    """Return the inputs behind the numbers, each once."""
    lines: list[str] = []
    links: list[str] = []
    for metadata in of_results:
        profile, trace, training = metadata["profile"], metadata["trace"], metadata["scenario"]["training"]
        engine = f"{profile['model']} on {profile['gpu']} {split_words(profile, '', ' ')}"
        passes = f"{engine}, {profile['kind']} ({profile['source']})"
        passes += f"; {FP8_EXPERTS}" if profile.get("precision") == "fp8" and profile.get("routing") else ""
        read = metadata.get("model_config")
        lines += [
            *([f"Model: {metadata['scenario']['model']}, {read}"] if read else []),
            f"Step times: {', '.join([passes, *profile['corrections']])}",
            f"Rollouts: {', '.join(dict.fromkeys((trace['name'], trace['kind'])))}{_repeated(metadata)}",
            f"Training: {trained_by(metadata['scenario'])}",
        ]
        links += (metadata.get("links") or "").split("; ")
        lines += _presets(metadata)
        lines += [f"Weight sync: {metadata['weight_sync']}"] if metadata.get("weight_sync") else []
        presets = {used.key: used.preset for used in _used(metadata)}
        whose = "the scenario" if training.get("offload") != TrainingConfig().offload else "default"
        whose = presets.get("training.offload", whose)
        lines += (
            [f"Offload: {training['offload']} ({whose}): {offload}"] if (offload := metadata.get("offload")) else []
        )
        lines += [f"{what}: {_drafts(facts)}" for what, facts in _drafters(metadata)]
        for phase in ("evaluate", "checkpoint"):
            if training[f"{phase}_every"]:
                lines.append(f"Phases: {phase} {training[f'{phase}_s']:g} s every {training[f'{phase}_every']} updates")
        if metadata["scenario"]["faults"]:
            lines.append("Faults: as the scenario has them; result.json lists those that happened")
    lines += [f"Links: {'; '.join(known_links)}"] if (known_links := dict.fromkeys(filter(None, links))) else []
    found = sorted(dict.fromkeys(lines), key=lambda line: not line.startswith("Step times:"))
    return [*found, *_assumed(of_results)]


def rests_on(of_results: Sequence[Facts]) -> list[str]:
    """Return in two lines where the numbers come from, and how to see it all."""
    times, rollouts = (
        listed(list(dict.fromkeys(words(metadata) for metadata in of_results)))
        for words in (_step_times, lambda metadata: metadata["trace"]["kind"])
    )
    presets = dict.fromkeys(used.preset for metadata in of_results for used in _used(metadata))
    constants_of = f", constants of {listed(list(presets))}" if presets else ""
    missing = len({words for metadata in of_results for words in metadata.get("not_modelled") or ()})
    return [
        *(line for line in provenance(of_results) if line.startswith("Model: ")),
        f"Rests on step times {times}, rollouts {rollouts}, training computed{constants_of}.",
        *_assumed(of_results),
        f"--inputs lists all inputs, and {missing} things not modelled; --explain-columns, what the columns mean.",
    ]


def _step_times(metadata: Facts) -> str:
    """Return the kind of the step times, and how far they are off where they are beyond what was measured or derived."""
    profile = metadata["profile"]
    source = [] if profile["kind"] in ("measured", "derived") else [f"({profile['source']})"]
    return ", ".join(
        [" ".join([profile["kind"], *source]), *(each for each in profile["corrections"] if "beyond" in each)]
    )


def _assumed(of_results: Iterable[Facts]) -> list[str]:
    """Return the line of the assumed seconds of these runs; none where nothing is assumed."""
    assumed: dict[tuple[str, float], None] = {}
    for metadata in of_results:
        rollout_gpus = metadata["rollout_workers"] * _worker_gpus(metadata)
        colocated = rollout_gpus + metadata["train_gpus"] > metadata["gpus"]
        known = {used.key.removeprefix("training.") for used in _used(metadata)}
        of_run = assumed_s(metadata["scenario"]["training"], colocated, known) | metadata.get("extrapolated", {})
        assumed |= dict.fromkeys(of_run.items())
    return [assumption(assumed)] if assumed else []
