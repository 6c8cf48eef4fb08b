"""Sources of profiles: one module a source, each returns a `simrl.profile.profile.TableProfile`.

`PROFILERS` has them by name, as functions of a model's shape, a GPU and a tensor-parallel size; `simrl profile derive` takes
their other parameters as KEY=VALUE.
"""

from __future__ import annotations

from simrl.extensions import Extended
from simrl.profile.hardware import Gpu
from simrl.profile.model_shape import ModelShape
from simrl.profile.profile import TableProfile
from simrl.profile.profilers.roofline import roofline_profile


def _aiconfigurator(shape: ModelShape, gpu: Gpu, tp: int = 1, between_passes_s: float = 0.0) -> TableProfile:
    from simrl.profile.profilers import aiconfigurator, transformed

    derive = transformed.derive if gpu.name in transformed.BASES else aiconfigurator.derive
    return derive(shape, gpu.name, tp, between_passes_s)


PROFILERS: Extended[TableProfile] = Extended(
    {"aiconfigurator": _aiconfigurator, "roofline": roofline_profile}, "simrl.profilers", "profiler", required=3
)
