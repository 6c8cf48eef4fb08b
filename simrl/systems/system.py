"""System: a pipeline, a dispatch rule, a speculation, and the parameters that recipes share.

A recipe is a function from a system's own parameters to a `System`. Its arguments are its
ablations, its defaults the paper's or the public code's, its docstring what `simrl systems show`
prints: a line for the list, the rule, and what is not modelled. Invariant: a parameter that several
recipes take is declared once, in `Shared`, and set in one place, `Shared.set_in`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BeforeValidator, Field, validate_call

from simrl.dispatch.rules import DISPATCHES, Dispatch
from simrl.errors import InputError
from simrl.pipelines.context import DynamicSampling, Pipeline
from simrl.runtime.worker import RECOMPUTE, OnUpdate
from simrl.speculation.best_of_n import BestOfN
from simrl.speculation.methods import Speculation, make_speculation
from simrl.validation import Model, with_parameters

Plain = Literal[
    "even_split",
    "least_requests",
    "round_robin",
    "round_robin_groups",
    "programs",
    "streamrl",
    "seer",
]
Version = Annotated[Literal["0.4", "0.7"], BeforeValidator(str)]  # of verl; YAML reads a number
Share = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=100_000)]
Factor = Annotated[float, Field(ge=1, le=100)]
DraftTokens = Annotated[int, Field(ge=1, le=64)]
NotNegative = Annotated[int, Field(ge=0, le=1_000_000)]

OF_VERSION = {"0.4": "even_split", "0.7": "least_requests"}  # the dispatch of verl
MOST_ROUNDS = 10  # of dynamic sampling for one batch, as in verl's recipe

assert set(Plain.__args__) == set(DISPATCHES)  # type: ignore[attr-defined]


Filter = bool | Literal["after_log_probs"]


@dataclass(frozen=True, kw_only=True)
class System:
    """The product of a recipe.

    `schedule` is the label of the pipeline; `off_policyness` is the upper bound for a trained token
    (None: no bound). `rollout_share` is the share of GPUs that only roll out; None means colocated,
    and then `extra_rollout_gpus` times as many GPUs roll out in addition. `controller`: batches go
    through one process. `host_buffer`: workers load weights from their own host. `pauses`: workers
    that load weights stop when their publication begins. `on_update`: what a load does to requests,
    where the pipeline leaves it to the system. `filter_groups`: groups with equal rewards
    are not trained; `after_log_probs`: theirs are computed; `polled`: the pipeline drops them.
    `prefix_caching`: its engines cache prefixes, unless the scenario says otherwise. `critic`: a
    critic is trained, too (`TrainingCosts`). `elastic`: its pipeline moves GPUs between rollout and
    training, the trainer's between "updates" or any between "minibatches". `tp_sizes`:
    tensor-parallel sizes that rollout may have in place of the cluster's. `evaluates`: when
    evaluations run, unless the scenario says otherwise (None: workers load one by one, and there
    is no instant for it). `reads_tau`: its plans read τ (`simrl.profile.tau`).
    """

    name: str = ""
    pipeline: Pipeline
    schedule: str
    paper: str
    off_policyness: int | None
    dispatch: Dispatch = DISPATCHES["least_requests"]
    rollout_share: float | None = None
    minibatches: int = 1
    log_probs: int = 1
    controller: bool = False
    host_buffer: bool = False
    pauses: bool = False
    on_update: OnUpdate = RECOMPUTE
    extra_rollout_gpus: float = 0.0
    speculation: Speculation | None = None
    best_of_n: BestOfN | None = None
    dynamic_sampling: DynamicSampling | None = None
    filter_groups: Filter | Literal["polled"] = False
    prefix_caching: bool = True
    critic: Literal["serial", "fused"] | None = None
    adapt_split_every: int = 0
    elastic: Literal["updates", "minibatches", "updates and minibatches"] | None = None
    tp_sizes: tuple[int, ...] = ()
    evaluates: Literal["between_steps", "beside_training"] | None = "between_steps"
    reads_tau: bool = False
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def needs_rewards(self) -> bool:
        return bool(self.filter_groups) or self.dynamic_sampling is not None

    @property
    def label(self) -> str:
        """Name with the given parameters, such as `areal(eta=4)`."""
        return with_parameters(self.name, self.parameters)


class Shared(Model):
    """The parameters that recipes share (`simrl systems show` says what each means). A recipe names
    the ones it takes, and may have other defaults."""

    rollout_share: Share = 0.75
    dispatch: Plain | None = "least_requests"  # None: of the recipe's version
    minibatches: Count = 1
    log_probs: NotNegative = 1  # passes: old policy, proximal policy
    # elsewhere, their tokens are prefilled again
    on_loss: Literal["elsewhere", "wait"] = "elsewhere"
    adapt_split_every: NotNegative = 0  # updates (`simrl.dispatch.elastic`); 0 keeps the split
    # a round, in batches (`simrl.pipelines.dynamic_sampling`)
    dynamic_sampling: Factor | None = None
    filter_groups: Filter = False
    speculation: str | dict[str, Any] | None = None  # a method, "none", or None: the recipe's own

    def set_in(self, system: System, taken: frozenset[str]) -> System:
        """Return the system with the parameters that its recipe takes."""
        values: dict[str, Any] = self.model_dump(
            include={"rollout_share", "minibatches", "log_probs"} & taken
        )
        dispatch = (
            DISPATCHES[self.dispatch] if "dispatch" in taken and self.dispatch else system.dispatch
        )
        values |= {
            "dispatch": replace(dispatch, on_loss=self.on_loss),
            "adapt_split_every": self.adapt_split_every,
        }
        if self.speculation is not None:
            values["speculation"] = make_speculation(self.speculation)
        if self.filter_groups:
            values["filter_groups"] = self.filter_groups
        if self.dynamic_sampling is not None:
            values |= {
                "dynamic_sampling": DynamicSampling(self.dynamic_sampling, MOST_ROUNDS),
                "schedule": f"{system.schedule}, dynamic sampling",
            }
        return replace(system, **values)


TRAINING = ("minibatches", "log_probs")
ALWAYS = ("on_loss", "speculation")
OWN_GPUS = (
    "rollout_share",
    "adapt_split_every",
)  # rollout and training have GPUs of their own and overlap
GROUPS = ("dynamic_sampling", "filter_groups")  # an update trains whole batches of groups
_KINDS = get_type_hints(Shared, include_extras=True)
_DEFAULTS = {key: info.default for key, info in Shared.model_fields.items()}


class Recipe:
    """A function and the shared parameters that it takes; a call makes a `System`. A shared
    parameter that the function also declares is passed to it, with the function's default.
    `__signature__` has all parameters: the function's up to its last own one, then the shared
    ones."""

    def __init__(
        self, function: Callable[..., System], takes: tuple[str, ...], defaults: Mapping[str, Any]
    ) -> None:
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        declared = signature(function, eval_str=True).parameters
        passed = {key: parameter.default for key, parameter in declared.items() if key in takes}
        self._passed = tuple(passed)
        self._takes = frozenset(takes)
        self._defaults = {**_DEFAULTS, **defaults, **passed}
        first = list(declared)
        while first and first[-1] in takes:
            first.pop()
        shared = [
            Parameter(key, Parameter.KEYWORD_ONLY, default=self._defaults[key], annotation=kind)
            for key, kind in _KINDS.items()
            if key in takes and key not in first
        ]
        self.__signature__ = Signature(
            [declared[key].replace(kind=Parameter.KEYWORD_ONLY) for key in first] + shared
        )

    def __call__(self, **parameters: Any) -> System:
        """Raise pydantic's `ValidationError` for a value out of range, `InputError` if the function
        makes no `System`."""
        own_parameters = {key: value for key, value in parameters.items() if key not in self._takes}
        shared = Shared.model_validate(
            self._defaults
            | {key: parameters[key] for key in parameters.keys() - own_parameters.keys()}
        )
        system = self.__wrapped__(
            **own_parameters, **{key: getattr(shared, key) for key in self._passed}
        )
        if not isinstance(system, System):
            made = type(system).__name__
            raise InputError(
                f"system {self.__name__}: its function returns {made}, not a System; correct it"
            )
        return shared.set_in(system, self._takes)


def recipe(
    *takes: str, without: str = "", **defaults: Any
) -> Callable[[Callable[..., System]], Recipe]:
    """Make a function a recipe that takes `TRAINING`, `ALWAYS` and `takes`, `without` one of them;
    values by name replace the shared defaults."""

    def decorate(function: Callable[..., System]) -> Recipe:
        taken = tuple(key for key in (*TRAINING, *ALWAYS, *takes) if key != without)
        return Recipe(validate_call(function), taken, defaults)

    return decorate


def recipe_of(name: str, function: Callable[..., System]) -> Recipe:
    """Return a function of an installed package as a recipe. Without the decorator, it sets its
    `System` itself and takes only the shared parameters of all systems, and `adapt_split_every` if
    it has a `rollout_share`."""
    if isinstance(function, Recipe):
        return function
    adapts = ("adapt_split_every",) if "rollout_share" in signature(function).parameters else ()
    made = Recipe(function, (*ALWAYS, *adapts), {})
    made.__name__ = name
    return made
