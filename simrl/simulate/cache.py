"""Traces and profiles of scenarios, each read or made once.

Invariant: an entry is kept under all of its inputs (file or length model and seed; file or
roofline, model, GPU and tp), so scenarios that share a cache are prepared as if each read its own
files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simrl.errors import InputError
from simrl.profile.advice import advice
from simrl.profile.derived_layouts import derived_profile, in_layout
from simrl.profile.hardware import GPUS, Gpu
from simrl.profile.metadata import ProfileMetadata, split_words
from simrl.profile.model_shape import ModelShape
from simrl.profile.profile import TableProfile, read_profile
from simrl.profile.profilers.roofline import roofline_profile
from simrl.profile.shipped import PROFILES, file_name
from simrl.scenario.model import Scenario
from simrl.scenario.presets import host_times, passes_preset
from simrl.trace.synthesis import synthesise
from simrl.trace.trace import Trace, latest, read_trace

MOST_TRACES, MOST_PROFILES = 4, 32  # kept
HOST_FIELDS = ("between_passes_s", "sequence_overhead_s", "least_pass_s", "least_sequence_s")


class InputCache:
    """Traces and profiles of the most recently prepared scenarios. A scenario whose workload names
    the trace `opened` gets it, and no file is read."""

    def __init__(self, opened: Trace | None = None) -> None:
        self._opened = opened
        self._traces: dict[str, Trace] = {}
        self._profiles: dict[str, TableProfile] = {}

    def trace(self, scenario: Scenario) -> Trace:
        """Return the scenario's trace. Raise `InputError` for a file that holds none."""
        workload, seed = scenario.workload, scenario.seed
        if self._opened is not None and workload.trace == self._opened.metadata.name:
            return self._opened
        key = f"{workload.model_dump_json()} {seed if workload.synthetic is not None else ''}"

        def make() -> Trace:
            if workload.synthetic is not None:
                return synthesise(workload.synthetic, seed)
            assert workload.trace is not None
            return read_trace(workload.trace)

        return latest(self._traces, MOST_TRACES, key, make)

    def profile(self, scenario: Scenario, model: ModelShape, kind: Gpu) -> TableProfile:
        """Return the scenario's profile. Raise `InputError` for a file of another model, GPU or
        tp."""
        of_host = {"preset", "enforce_eager", "async_scheduling", "log_probs"}
        host = scenario.engine.model_dump_json(include=of_host)
        split = (
            scenario.cluster.model_dump_json(include={"tp", "dp", "ep"})
            + scenario.precision.model_dump_json()
        )
        hardware = f"{model.model_dump_json()} {kind.model_dump_json()} {split}"
        key = f"{scenario.profile.model_dump_json()} {host} {hardware}"
        return latest(self._profiles, MOST_PROFILES, key, lambda: _profile(scenario, model, kind))


def _words(has: ProfileMetadata) -> str:
    """Return a profile's GPUs and split in words, and its precisions if they are not bfloat16."""
    precisions = [has.precision] * (has.precision != "bf16") + [f"kv-{has.kv_precision}"] * (
        has.kv_precision != "bf16"
    )
    return " ".join([has.gpu, split_words(has.model_dump(), "", " "), *precisions])


def _profile(scenario: Scenario, model: ModelShape, kind: Gpu) -> TableProfile:
    config, wanted = scenario.profile, scenario.wanted_profile
    if config.roofline is not None:
        layout = {
            key: getattr(wanted, key) for key in ("tp", "dp", "ep", "precision", "kv_precision")
        }
        profile = roofline_profile(
            model, kind, **layout, **config.roofline.model_dump(exclude_none=True)
        )
    else:
        assert config.path is not None
        profile = _of_path(config.path, wanted, model, kind, scenario.model)
    return profile.with_corrections(
        config.forward_correction, **_host_times(scenario, profile, model.layers)
    )


def _of_path(
    written: str, wanted: ProfileMetadata, model: ModelShape, kind: Gpu, named: str
) -> TableProfile:
    """Return the profile of a file; a shipped one that does not exist is derived. If a worker of
    the cluster spans link domains and the profile's did not, its times are carried over. Raise
    `InputError` for a file of another model or layout."""
    path = Path(written)
    if not path.exists():
        if path.name == file_name(wanted) and path.parent.resolve() == PROFILES.resolve():
            return derived_profile(wanted, model, kind)
        beside = "" if path.is_absolute() else " (paths in a scenario are relative to its file)"
        raise InputError(
            f"{path}: no such profile{beside}; {advice(wanted, model, written, named)}"
        )
    profile = read_profile(written)
    has, gpus = profile.metadata, wanted.tp * wanted.dp
    if file_name(has) != file_name(wanted):
        raise InputError(
            f"{path}: a profile of {has.model} on {_words(has)}, the scenario has {model.name} on "
            f"{_words(wanted)}; name the profile that belongs to it: {advice(wanted, model, file_name(wanted), named)}"
        )
    if (
        has.kind == "derived"
        and kind.nvlink_domain < gpus <= GPUS.get(kind.name, kind).nvlink_domain
    ):
        return in_layout(profile, wanted, model, kind)
    return profile


def _host_times(scenario: Scenario, profile: TableProfile, layers: int) -> dict[str, Any]:
    """Return the times around passes of `TableProfile.with_corrections`, and who gives the pause:
    the scenario, its engine's preset, or the profile."""
    data, has, pause_s = scenario.model_dump(), profile.metadata, profile.tables.between_passes_s
    of_preset = host_times(data, has, layers)
    times: dict[str, Any] = of_preset | {
        key: data["profile"][key]
        for key in HOST_FIELDS
        if key not in of_preset and data["profile"][key] is not None
    }
    preset = passes_preset(scenario.engine.preset, has.kind)
    if "between_passes_s" in of_preset and preset is not None:
        times["giver"] = f"engine {preset.name}"
    elif has.own_times and pause_s and "between_passes_s" not in times:
        times |= {"between_passes_s": pause_s, "giver": "the profile's own"}
    return times
