"""The source of a profile: what it was made from, for which engine, and what only a measurement
knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field, model_serializer

from simrl.validation import Model

METADATA_KEY = b"simrl.profile"
MAY_BE_ABSENT = ("dp", "ep", "precision", "kv_precision", "routing", "own_times")
# What is left of an engine's time around passes if all else of it goes on beside the kernels: the
# sampler on the GPU, for a pass and for a decoding sequence.
SAMPLER = ("between_passes_s", "sequence_overhead_s")


class DraftRounds(Model):
    """The measured extra time of a pass with drafts over one with as many plain positions:
    `round_s` + drafted tokens × `step_s`, by the number of drafting `sequences`. It is the host's
    work of handing drafts over and verifying them; each sequence drafted equally many arbitrary
    tokens. The drafter's own work is not included."""

    sequences: tuple[float, ...]
    round_s: tuple[float, ...]
    step_s: tuple[float, ...]
    source: str


class ProfileMetadata(Model):
    """The source of a profile, so that every number can be traced. Fields that only a measurement
    knows default to None."""

    model: str
    gpu: str
    tp: int = Field(gt=0)
    dp: int = Field(
        default=1, gt=0, description="attention ranks, each of tp GPUs: an engine has tp × dp GPUs"
    )
    ep: int = Field(
        default=1,
        gt=0,
        description="GPUs that share the experts: 1 (each is split over all) or tp × dp",
    )
    precision: str = Field(
        default="bf16", description="of weights, or of experts alone where the others are bf16"
    )
    kv_precision: str = "bf16"
    routing: str = Field(
        default="", description="how tokens are spread over experts; empty for a dense model"
    )
    kind: str = Field(
        description="measured, derived (from measured kernels) or assumed (from data sheets)"
    )
    source: str = Field(description="what it was made from, with versions")
    created: str = ""
    licence: str = "Apache-2.0"
    notes: str = ""
    host: str | None = Field(
        default=None, description="the machine: its name, processor and GPU, operating system"
    )
    versions: dict[str, str] = Field(
        default={}, description="versions of the software that ran: vllm, torch, python …"
    )
    model_shape: dict[str, int | bool | str] = Field(
        default={}, description="fields of ModelShape: layers, hidden, heads …"
    )
    settings: dict[str, int | float | str | bool | None] = Field(
        default={}, description="settings of the measured engine"
    )
    repeats: int | None = Field(default=None, description="how often each point was measured")
    spread: float | None = Field(
        default=None,
        description="spread of a point's repeats: median over the points of IQR / median",
    )
    held_out_error: float | None = Field(
        default=None,
        description="median |predicted / measured - 1| of passes that were measured and not fitted",
    )
    request_s: float | None = Field(
        default=None,
        ge=0,
        description="seconds of an engine's work for starting and ending a request, passes excluded",
    )
    load_weights_s: float | None = Field(
        default=None,
        ge=0,
        description="seconds in which an engine loads weights from a folder, as in a replay: no transfer from a trainer",
    )
    drafts: DraftRounds | None = None
    own_times: tuple[str, ...] = Field(
        default=(),
        description="constants of an engine's preset that the step times of kernels have already",
    )

    @model_serializer(mode="wrap")
    def _without_defaults(
        self, serialize: Callable[[ProfileMetadata], dict[str, Any]]
    ) -> dict[str, Any]:
        """Leave out fields at their defaults that only mixtures of experts, other precisions and
        imported kernels set."""
        fields = type(self).model_fields
        return {
            k: v
            for k, v in serialize(self).items()
            if k not in MAY_BE_ABSENT or v != fields[k].default
        }


def split_words(of: Mapping[str, Any], gap: str = " ", between: str = ", ") -> str:
    """Return how a worker's GPUs share a model, `tp 2, ep 2`, from a cluster or a profile's
    metadata; results of earlier versions have the tp alone."""
    shown = [key for key in ("tp", "dp", "ep") if key == "tp" or (of.get(key) or 1) > 1]
    return between.join(f"{key}{gap}{of[key]}" for key in shown)


def setting_differences(metadata: ProfileMetadata, settings: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each engine setting that differs from the measured one. Settings
    without a measured value are left out."""
    return [
        f"profile was measured with {name} {metadata.settings[name]}, the engine has {value}; "
        f"simrl measure --{name.replace('_', '-')} {value} makes one for it"
        for name, value in settings.items()
        if name in metadata.settings and metadata.settings[name] != value
    ]
