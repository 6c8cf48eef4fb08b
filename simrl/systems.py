"""Systems: recipes that name a pipeline, a dispatch rule and the training phases a published system uses.

A recipe is a function from the system's own parameters to a `System`. Its ablations are its arguments; defaults are the
paper's or the public code's. (Speculation, the third choice of a system, is plain decoding in all of them so far.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, validate_call

from simrl.dispatch import PLACEMENTS
from simrl.errors import InputError
from simrl.pipelines import Pipeline
from simrl.pipelines.areal import Areal
from simrl.pipelines.one_step_off import one_step_off as one_step_off_pipeline
from simrl.pipelines.synchronous import synchronous

Dispatch = Literal["even_split", "least_requests", "round_robin"]
Share = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]

assert set(Dispatch.__args__) == set(PLACEMENTS)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class System:
    """What a recipe yields. `rollout_share` is the share of GPUs that only roll out; None means colocated."""

    name: str
    pipeline: Pipeline
    dispatch: str
    rollout_share: float | None
    minibatches: int
    log_probs: int
    paper: str
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name with the parameters that were given."""
        given = ", ".join(f"{key}={value}" for key, value in self.parameters.items())
        return f"{self.name}({given})" if given else self.name


@validate_call
def verl_colocated(dispatch: Dispatch = "least_requests", minibatches: Count = 1, log_probs: NotNegative = 1) -> System:
    """Every GPU rolls out the whole batch, then the same GPUs train; switching costs between the phases; on-policy."""
    return System(
        name="verl_colocated",
        pipeline=synchronous,
        dispatch=dispatch,
        rollout_share=None,
        minibatches=minibatches,
        log_probs=log_probs,
        paper="HybridFlow, arXiv 2409.19256",
    )


@validate_call
def split(
    rollout_share: Share = 0.75,
    dispatch: Dispatch = "least_requests",
    minibatches: Count = 1,
    log_probs: NotNegative = 1,
) -> System:
    """Two disjoint sets of GPUs without overlap: one idles while the other works; on-policy."""
    return System(
        name="split",
        pipeline=synchronous,
        dispatch=dispatch,
        rollout_share=rollout_share,
        minibatches=minibatches,
        log_probs=log_probs,
        paper="Open-R1 (Hugging Face), as described in RhymeRL, arXiv 2508.18588 §2",
    )


@validate_call
def one_step_off(
    rollout_share: Share = 0.75,
    dispatch: Dispatch = "least_requests",
    minibatches: Count = 1,
    log_probs: NotNegative = 1,
) -> System:
    """The rollout of a batch overlaps the training of the one before; off-policyness exactly 1."""
    return System(
        name="one_step_off",
        pipeline=one_step_off_pipeline,
        dispatch=dispatch,
        rollout_share=rollout_share,
        minibatches=minibatches,
        log_probs=log_probs,
        paper="verl one_step_off recipe; DeepScaleR pipeline",
    )


@validate_call
def areal(
    eta: NotNegative = 8,
    rollout_share: Share = 0.75,
    interruptible: bool = True,
    max_concurrent: Count | None = None,
    on_stale: Literal["train", "drop"] = "train",
    dispatch: Dispatch = "round_robin",
    minibatches: Count = 4,
    log_probs: NotNegative = 1,
) -> System:
    """Fully asynchronous, staleness bounded by η at admission, weights updated in flight.

    `max_concurrent` groups run at once (None: one training batch, as in the code). `interruptible=False` lets running
    responses end before an update (the paper's ablation, §7.5). `on_stale` says what happens to a group with a token
    older than η. Four PPO mini-batches and the proximal log-probs are the paper's (§5.2, Table 3).
    """
    return System(
        name="areal",
        pipeline=Areal(eta, interruptible, max_concurrent, on_stale),
        dispatch=dispatch,
        rollout_share=rollout_share,
        minibatches=minibatches,
        log_probs=log_probs,
        paper="AReaL, arXiv 2505.24298",
    )


RECIPES: dict[str, Callable[..., System]] = {
    "verl_colocated": verl_colocated,
    "split": split,
    "one_step_off": one_step_off,
    "areal": areal,
}


def make_system(name: str, parameters: dict[str, Any]) -> System:
    """The system of a recipe. Raises `InputError` for an unknown recipe, an unknown parameter or a value out of range."""
    if name not in RECIPES:
        raise InputError(f"system {name!r} is unknown; choose one of {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    known = list(signature(recipe).parameters)
    for key in parameters:
        if key not in known:
            raise InputError(f"system {name}: unknown parameter {key!r}; it has {', '.join(known)}")
    try:
        system = recipe(**parameters)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(f"system {name}: {place} is {first['input']!r}: {first['msg']}") from error
    return System(**{**vars(system), "parameters": dict(parameters)})
