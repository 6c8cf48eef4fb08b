"""Sources of profiles: one module a source, each returns a `simrl.profile.profile.TableProfile`.

`PROFILERS` has them by name, as functions of a model's shape, a GPU and a tensor-parallel size;
`simrl profile derive` takes their other parameters as KEY=VALUE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, product
from typing import Literal

from simrl.errors import InputError, refuse
from simrl.extensions import Extended
from simrl.profile.derived_layouts import LAYOUT, apart, derived_profile, in_layout
from simrl.profile.hardware import GIB, GPUS, Gpu
from simrl.profile.metadata import ProfileMetadata
from simrl.profile.model_shape import ModelShape
from simrl.profile.precision import Weights, require_precision, weight_bytes_per_gpu
from simrl.profile.profile import TableProfile
from simrl.profile.profilers import aiconfigurator
from simrl.profile.profilers.roofline import roofline_profile
from simrl.profile.profilers.setups import PRECISIONS, SYSTEMS, EngineSetup, MissingKernelsError

BACKENDS = ("vllm", "sglang", "trtllm")


def _derived(package: str) -> Callable[..., TableProfile]:
    def derive(
        shape: ModelShape,
        gpu: Gpu,
        tp: int = 1,
        between_passes_s: float = 0.0,
        dp: int = 1,
        ep: int = 1,
        precision: Weights = "bf16",
        kv_precision: Literal["bf16", "fp8"] = "bf16",
        routing: Literal["balanced", "power law 1.01", "power law 1.2"] = "power law 1.2",
        backend: Literal["vllm", "sglang", "trtllm"] = "vllm",
    ) -> TableProfile:
        require_weights_fit(shape, gpu, tp, dp, ep, precision)
        setup = EngineSetup(tp, dp, ep, precision, kv_precision, routing, backend, package)
        try:
            return aiconfigurator.derive(shape, gpu.name, setup, between_passes_s)
        except MissingKernelsError as error:
            return estimated(shape, gpu, setup, between_passes_s, str(error))

    return derive


def estimated(
    shape: ModelShape, gpu: Gpu, setup: EngineSetup, between_passes_s: float, missing: str
) -> TableProfile:
    """Return the profile of kernels that a database lacks, as its message `missing` says, from the
    nearest ones that it has, else from a shipped profile or the data sheet."""
    fields = {key: value for key, value in setup._asdict().items() if key in LAYOUT}
    wanted = ProfileMetadata(model=shape.name, gpu=gpu.name, kind="", source="", **fields)
    for name, near in _neighbours(gpu, setup):
        with suppress(InputError):
            base = aiconfigurator.derive(shape, name, near, between_passes_s)
            kind = "another back-end" if near.backend != setup.backend else ""
            profile = in_layout(base, wanted, shape, gpu, kind)
            break
    else:
        profile = derived_profile(wanted, shape, gpu)
    metadata = profile.metadata.model_copy(
        update={"notes": f"estimated, as {missing}; {profile.metadata.notes}"}
    )
    return TableProfile(profile.tables, metadata, profile.origin)


def require_weights_fit(
    shape: ModelShape, gpu: Gpu, tp: int, dp: int, ep: int, precision: str
) -> None:
    """Raise `InputError` for a precision that a GPU or a model does not have, and for weights that
    are larger than a GPU's memory."""
    require_precision(precision, gpu, shape)
    held = weight_bytes_per_gpu(shape, tp, dp, ep, precision)
    refuse(
        (
            held > gpu.memory_bytes,
            f"{shape.name} on {tp * dp} {gpu.name}: its weights take {held / GIB:.0f} GiB of a GPU, which has "
            f"{gpu.memory_bytes / GIB:.0f} GiB; use a larger tp, or fewer bits",
        )
    )


def _neighbours(gpu: Gpu, setup: EngineSetup) -> Iterator[tuple[str, EngineSetup]]:
    """Yield the GPUs and setups of the databases that may stand for one, the nearest first: another
    back-end, precision or split, then precisions on other splits, then other GPUs by their data
    sheets."""
    gpus = sorted(SYSTEMS, key=lambda name: apart(GPUS[name], gpu))
    here, one = [gpu.name] * (gpu.name in SYSTEMS), [setup.backend]
    same, split = [setup.precision], [(setup.tp, setup.dp, setup.ep)]
    splits = [(1, 8, 8), *chain.from_iterable(((n, 1, n), (n, 1, 1)) for n in (8, 4, 2, 1))]
    splits.sort(key=lambda other: abs(other[0] - setup.tp) + abs(other[1] - setup.dp))
    for near in (
        (here, BACKENDS, same, split),
        (here, one, PRECISIONS, split),
        (here, one, same, splits),
        (here, one, PRECISIONS, splits),
        (gpus, one, same, split),
        (gpus, one, PRECISIONS, split),
        (gpus, one, same, splits),
    ):
        for name, backend, precision, (tp, dp, ep) in product(*near):
            package = "aisimulate" if precision == "fp8-block" else "aiconfigurator"
            yield (
                name,
                EngineSetup(
                    tp, dp, ep, precision, setup.kv_precision, setup.routing, backend, package
                ),
            )


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
