"""Measured serving and drafting that profiles of experts and fp8 are held against: the errors that the pages state."""

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from simrl.profile.profilers.aiconfigurator import PACKAGES

ROOT = Path(__file__).parents[2]


def experiment(monkeypatch: pytest.MonkeyPatch, name: str, *packages: str) -> ModuleType:
    for package in packages:
        pytest.importorskip(f"{PACKAGES[package]}.sdk.engine", reason="the extra is not installed")
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module(f"experiments.{name}")


def test_speed_ups_by_draft_shape_are_consistent_within_15_percent(monkeypatch, shared_data):
    """No prediction: the host's pauses a round and the GPUs of one target were chosen on these rows."""
    eagle3 = experiment(monkeypatch, "eagle3", "aiconfigurator")
    shapes = eagle3.by_shape(eagle3.predicted(eagle3.read_rows(shared_data)))
    assert len(shapes) == 10 and set(shapes.model) == {"llama-3.1-8b", "qwen3-30b-a3b"}
    assert shapes.error.abs().max() < 0.15


@pytest.mark.slow
def test_served_mixtures_of_experts_and_fp8_are_within_their_bars(monkeypatch, shared_data):
    validate = experiment(monkeypatch, "validate_profiles", "aiconfigurator", "aisimulate")
    points = [
        p
        for p in validate.read_points(shared_data)[0]
        if p.backend == "vllm" and p.precision != "bf16"
    ]
    rows, _ = validate.predict_all(points, {})
    assert not any(row.point.calibrates for row in rows)
    for bar, chosen in (
        (0.15, [row for row in rows if validate.MODELS[row.point.served.name].experts]),
        (0.12, [row for row in rows if row.point.precision == "fp8"]),
    ):
        assert np.median([abs(row.with_preset_s / row.point.tpot_s - 1) for row in chosen]) < bar
