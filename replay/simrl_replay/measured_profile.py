"""Profile from a measurement: starts the engines, measures, and writes the profile with its
provenance and error."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from simrl.errors import InputError, StoppedError, choose
from simrl.files import temporary_folder
from simrl.profile.hardware import GPUS
from simrl.profile.model_shape import ModelShape, model_shape
from simrl.profile.profile import ProfileMetadata, TableProfile, read_profile, write_profile
from simrl.profile.shipped import shipped_profile
from simrl.scenario.presets import KERNELS_ALONE, Constant, Preset, write_presets
from simrl_replay.bench import Facts, RemoteBench, Scene, Seen, start_bench
from simrl_replay.cli_measure import Wanted
from simrl_replay.link import GoneError
from simrl_replay.measure import Journal, MeasuredEngine, MeasurePlan, check, measure
from simrl_replay.profile_fit import Reach, host_seconds
from simrl_replay.speculative import own_config
from simrl_replay.vllm_adapter import EngineSettings, vllm_version


def engine_of(wanted: Wanted) -> EngineSettings:
    """Return the settings of the measured engine."""
    drafts = 2 * wanted.draft_tokens  # room that a drafter needs beyond the longest sample
    blocks = None if wanted.kv_cache_tokens is None else wanted.kv_cache_tokens // wanted.block_size
    if blocks is None and wanted.device == "cpu":
        blocks = wanted.max_num_seqs * -(-(wanted.max_model_len + drafts) // wanted.block_size)
    return EngineSettings(
        model=str(wanted.model),
        max_num_seqs=wanted.max_num_seqs,
        max_num_batched_tokens=wanted.max_num_batched_tokens,
        block_size=wanted.block_size,
        max_model_len=wanted.max_model_len + drafts,
        kv_blocks=blocks,
        tp=wanted.tp,
        device=wanted.device,
        dtype=wanted.dtype or ("float32" if wanted.device == "cpu" else "auto"),
        dummy_weights=wanted.dummy,
        temperature=wanted.temperature,
        speculative=own_config(wanted.draft_tokens) if wanted.draft_tokens else None,
    )


def measure_profile(
    wanted: Wanted,
    output: Path,
    journal: Path,
    tell: Callable[[str, int, int], None] = lambda *_: None,
    preset: Path | None = None,
) -> MeasuredEngine:
    """Measure, and write the profile to `output` and, if given, the engine to `preset`; continue a
    measurement whose points are in `journal`. Raise `InputError` for limits and models that cannot
    be measured, `StoppedError` if an engine dies."""
    version = vllm_version()
    with temporary_folder() as logs, ExitStack() as running:

        @cache
        def engines() -> RemoteBench:  # from the first scene on: a complete journal needs none
            traffic = max(wanted.max_num_seqs // 2, 1)
            return running.enter_context(
                start_bench(
                    engine_of(wanted), wanted.neighbours, traffic, logs, wanted.start_deadline_s
                )
            )

        try:
            return measure_with(
                lambda scene: engines()(scene), version, wanted, output, journal, tell, preset
            )
        except GoneError as error:
            raise StoppedError(
                f"{error}; measured points are kept; run the command again to continue"
            ) from None


def measure_with(
    engines: Callable[[Scene], Seen],
    version: str,
    wanted: Wanted,
    output: Path,
    journal: Path,
    tell: Callable[[str, int, int], None] = lambda *_: None,
    preset: Path | None = None,
) -> MeasuredEngine:
    """Measure with given engines of a vLLM version, and write the profile. The journal is finished
    after the files are written: an error before that loses no measurement."""
    shape = model_shape(wanted.model)
    if wanted.gpu is not None and wanted.gpu not in GPUS:
        raise InputError(f"--gpu {wanted.gpu}{choose(wanted.gpu, GPUS, 'simrl profile names')}")
    reach = Reach(wanted.max_num_seqs, wanted.max_num_batched_tokens, wanted.max_model_len)
    engine = engine_of(wanted)
    settings = json.loads(json.dumps({**asdict(wanted), "dtype": engine.dtype}, default=str))
    settings |= {"vllm": version, "host": platform.node()}
    for name in ("budget_s", "start_deadline_s", "gpu"):
        del settings[name]  # may change between starts of one measurement

    blocks = engine.kv_blocks
    plan = MeasurePlan(
        reach,
        reach.max_model_len if blocks is None else blocks * wanted.block_size,  # vLLM's minimum
        wanted.draft_tokens,
        None if wanted.dummy else str(wanted.model),
        wanted.repeats,
        wanted.tolerance,
        wanted.budget_s,
    )
    check(plan)
    book = Journal(journal, settings, engines)
    facts = dict(book(Facts()).facts)
    card = wanted.gpu or gpu_name(facts["device"], wanted.device)
    if blocks is None:
        plan = plan._replace(
            kv_cache_tokens=int(facts["kv_cache_tokens"]) // wanted.block_size * wanted.block_size
        )
    kernels = _kernels(shape.name, card, wanted.tp) if preset is not None else None
    plan = plan._replace(graph_tokens=int(facts.get("graph_tokens", 0)))
    measured = measure(book, plan, tell)
    beside = f", beside {wanted.neighbours} engines that generate" if wanted.neighbours else ""
    metadata = ProfileMetadata(
        model=shape.name,
        gpu=card,
        tp=wanted.tp,
        kind="measured",
        source=f"simrl measure: turns of a replay's loop around vLLM {facts['vllm']} on {facts['device']}{beside}",
        created=time.strftime("%Y-%m-%d", time.gmtime()),
        notes=""
        if measured.load_s is not None
        else "weight loads not measured: dummy weights have no files",
        host=f"{platform.node()}: {facts['device']}, {platform.system()} {platform.release()}",
        versions={
            name: facts[name]
            for name in facts
            if name not in ("device", "dtype", "kv_cache_tokens", "graph_tokens")
        },
        model_shape=shape.model_dump(),
        settings={
            **{
                name: value
                for name, value in settings.items()
                if name not in ("model", "vllm", "host")
            },
            "kv_cache_tokens": int(facts["kv_cache_tokens"]),
            "graph_tokens": plan.graph_tokens,
        },
        repeats=wanted.repeats,
        spread=measured.spread,
        held_out_error=measured.held_out_error,
        request_s=measured.request_s,
        load_weights_s=measured.load_s,
        drafts=measured.drafts,
    )
    profile = TableProfile(measured.tables, metadata, origin=f"measurement of {shape.name}")
    profile.require_covers(reach.max_num_batched_tokens, reach.max_num_seqs, reach.max_model_len)
    write_profile(profile, output)
    if preset is not None and kernels is not None:
        made = engine_preset(measured, metadata, kernels, None if blocks is not None else shape)
        write_presets(preset, {made.name: made}, "Written by simrl measure")
    book.finish()
    return measured


def _kernels(model: str, card: str, tp: int) -> TableProfile:
    """Return the shipped profile of kernels, without the host's time."""
    path = shipped_profile(model, card, tp)
    if path is None or (found := read_profile(path)).metadata.kind not in KERNELS_ALONE:
        raise InputError(
            f"--preset: no profile of {model} on {card} tp{tp} is shipped, and the host's time is what a pass takes beyond its "
            "kernels; measure a model of profiles/, or leave it out"
        )
    return found


def engine_preset(
    measured: MeasuredEngine,
    metadata: ProfileMetadata,
    kernels: TableProfile,
    shape: ModelShape | None,
) -> Preset:
    """Return the engine as a preset: the host's time beyond the kernels of a profile, and the
    memory that neither weights nor KV cache have, if the engine of this `shape` filled its GPU."""
    engine, settings = (
        f"vLLM {metadata.versions['vllm']} on {metadata.host}",
        dict[str, Any](metadata.settings),
    )
    source = f"{len(measured.points)} passes of {metadata.model} tp{metadata.tp}, {engine}, beyond {kernels.metadata.source}"
    found = {
        key: Constant(value=value, low=low, high=high, kind="measured", source=source)
        for key, (value, low, high) in host_seconds(measured.points, kernels.tables).items()
    }
    found["async_scheduling"] = Constant(
        value=False, kind="stated", source="simrl measure schedules no pass ahead"
    )
    if shape is not None and settings["dtype"] in ("auto", "bfloat16"):
        kv_bytes = (
            settings["kv_cache_tokens"]
            * shape.kv_bytes_per_token
            / min(metadata.tp, shape.kv_heads)
        )
        memory = GPUS[metadata.gpu].memory_bytes * EngineSettings.gpu_memory_utilization
        reserve = max(memory - shape.weight_bytes / metadata.tp - kv_bytes, 0.0)
        found["reserve_bytes"] = Constant(
            value=reserve, kind="measured", source=f"KV cache of {metadata.model}, {engine}"
        )
    return Preset(
        name=f"vllm-{metadata.versions['vllm']}-measured",
        about=f"{engine}, measured",
        constants=found,
    )


def gpu_name(device: str, kind: str) -> str:
    """Return simrl's name of a device of this kind. Raise `InputError` for one that it does not
    know."""
    if kind == "cpu":
        return "cpu"
    words = device.lower().replace("-", " ").split()
    known = [name for name in GPUS if name in words]
    if not known:
        raise InputError(
            f"{device} is unknown to simrl; name the most similar of {', '.join(GPUS)} with --gpu"
        )
    return known[0]
