"""Sources of profiles: one module a source, each returns a `simrl.profile.profile.TableProfile`.

`PROFILERS` has them by name, as functions of a model's shape, a GPU and a tensor-parallel size;
`simrl profile derive` takes their other parameters as KEY=VALUE.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from simrl.extensions import Extended
from simrl.profile.hardware import Gpu
from simrl.profile.model_shape import ModelShape
from simrl.profile.profile import TableProfile
from simrl.profile.profilers.roofline import roofline_profile


def _derived(package: str) -> Callable[..., TableProfile]:
    def derive(
        shape: ModelShape,
        gpu: Gpu,
        tp: int = 1,
        between_passes_s: float = 0.0,
        dp: int = 1,
        ep: int = 1,
        precision: Literal["bf16", "fp8", "fp8-block", "nvfp4", "int4", "w4a16_mxfp4"] = "bf16",
        kv_precision: Literal["bf16", "fp8"] = "bf16",
        routing: Literal["balanced", "power law 1.01", "power law 1.2"] = "power law 1.2",
    ) -> TableProfile:
        from simrl.profile.profilers import aiconfigurator, transformed
        from simrl.profile.profilers.setups import EngineSetup

        of_gpu = transformed.derive if gpu.name in transformed.BASES else aiconfigurator.derive
        setup = EngineSetup(tp, dp, ep, precision, kv_precision, routing, package=package)
        return of_gpu(shape, gpu.name, setup, between_passes_s)

    return derive


PROFILERS: Extended[TableProfile] = Extended(
    {
        "aiconfigurator": _derived("aiconfigurator"),
        "aisimulate": _derived("aisimulate"),
        "roofline": roofline_profile,
    },
    "simrl.profilers",
    "profiler",
    required=3,
)
