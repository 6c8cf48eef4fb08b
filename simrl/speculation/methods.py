"""Speculation, the third choice of a system: what drafts, how long, when to stop. A method is a function that returns one.

Invariant: a `Speculation` says what a worker does, never how well it works out: acceptance comes from the trace's tokens or
from the scenario's inputs (`simrl.speculation.inputs`).

The docstrings are what `simrl systems show` prints of a method. Defaults are the paper's or the public code's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, validate_call

from simrl.errors import InputError, meant
from simrl.extensions import Extended
from simrl.speculation.bandit import BegMab, Strategy
from simrl.speculation.drafter import MOST_DRAFT_TOKENS, Drafter
from simrl.speculation.drafter_training import SpotTraining
from simrl.speculation.gates import Elastic
from simrl.speculation.graph_memory import GraphMemory
from simrl.speculation.history_index import HistoryRule
from simrl.speculation.windows import Aimd, Fixed, Mimd, Window
from simrl.validation import call_error

Tokens = Annotated[int, Field(ge=1, le=255)]
DrafterKind = Literal["history", "ngram", "siblings", "old_response", "model", "own"]
EAGLE = "eagle"
# Tokens to verify are those of TLT's Table 2; that each has a deep and a shallow tree to choose from is assumed.
_TREES = ((64, (10, 6)), (48, (8, 6)), (32, (6, 4)), (16, (4, 3)))
TLT_STRATEGIES = tuple(Strategy(depth, 8, tokens) for tokens, depths in _TREES for depth in depths)


@dataclass(frozen=True)
class LengthBudget:
    """DAS: how many tokens to draft by what a prompt's responses were in the epoch before, beside those of all prompts."""

    quantiles: tuple[float, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Decoupled:
    """SpecActor: drafter GPUs of their own. What is None, Algorithm 1 chooses before the run, by the objective."""

    draft_gpus: int | None
    window: int | None
    objective: Literal["tgs", "renewal"]
    reconfigure_every: int


@dataclass(frozen=True)
class ModelFree:
    """TLT: drafts from the group's other responses take the place of the learned drafter's under policy versions before
    `before_version`, and (`if_slower`) under those for which its drafts are predicted to be slower."""

    before_version: int
    if_slower: bool


@dataclass(frozen=True)
class Speculation:
    """What a worker drafts with. `model` names a model drafter: `eagle`, or a model that `simrl.hardware` knows; `round_s` is
    what a round of its drafts takes beside its passes, `level_s` what each pass of `eagle` takes beside its kernels.
    `make_drafter` makes the drafter of a method whose drafter is "own": a function of a module, so that other processes find
    it, too. `gate` says when it drafts at all. With `strategies` drafts are trees, chosen by BEG-MAB. `exact_match`: the method
    needs it."""

    name: str
    drafter: DrafterKind
    paper: str
    window: Window = field(default_factory=lambda: Fixed(tokens=4))
    model: str = ""
    history: HistoryRule = field(default_factory=HistoryRule)
    epochs_back: int = 1
    gate: Literal["open", "batch"] | Elastic = "open"
    budget: LengthBudget | None = None
    strategies: BegMab | None = None
    training: SpotTraining | None = None
    model_free: ModelFree | None = None
    graphs: GraphMemory | None = None
    decoupled: Decoupled | None = None
    round_s: float = 0.0
    level_s: float = 0.0
    own_text: bool = False
    exact_match: bool = False
    make_drafter: Callable[[], Drafter] | None = None
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name with the parameters that were given."""
        given = ", ".join(f"{key}={value}" for key, value in self.parameters.items() if key != "name")
        return f"{self.name}({given})" if given else self.name


@validate_call
def histospec(
    window: Window | None = None,
    gate: Literal["open", "batch"] = "batch",
    branch: Literal["reward", "count"] = "reward",
    longest_match_tokens: Annotated[int, Field(ge=1, le=24)] = 7,
    shortest_match_tokens: Annotated[int, Field(ge=1, le=24)] = 3,
    epochs_back: Annotated[int, Field(ge=1, le=100)] = 1,
) -> Speculation:
    """Drafts from the prompt's responses of the epoch before, along the branch with the most reward (RhymeRL's paper).

    The last 7 tokens, else 6 to 3, are looked up in the responses of the prompt's last epoch; the window starts at 2,
    grows by 2
    when all of it was accepted, up to 32, and falls back to 2. Workers whose batch is larger than pays, by the profile and
    the
    acceptance of late, decode without drafts. Indexes are built by history workers (scenario: speculation.history_workers); a
    prompt whose index is not ready decodes without drafts, as all do in the first epoch.
    With `epochs_back` of more than one, all of these epochs' indexes have to be there.
    Not modelled: the way of an index (megabytes) to its worker; indexes that come while a sample runs; indexes of a part of a
    group: a prompt of which a response was dropped (RollPacker, APRIL …) decodes without drafts in the next epoch.
    """
    rule = HistoryRule(
        longest_match_tokens=longest_match_tokens, shortest_match_tokens=shortest_match_tokens, branch=branch
    )
    return Speculation(
        name="histospec",
        drafter="history",
        paper="RhymeRL, arXiv 2508.18588 §5",
        window=window or Aimd(),
        history=rule,
        epochs_back=epochs_back,
        gate=gate,
    )


@validate_call
def histospec_code(
    window: Window | None = None,
    gate: Literal["open", "batch"] = "open",
    least_probability: Annotated[float, Field(ge=0, le=1)] = 0.1,
    epochs_back: Annotated[int, Field(ge=1, le=100)] = 1,
) -> Speculation:
    """As histospec, but as its public code has it: branches by count, other windows, no gate.

    Matches of 7 to 4 tokens, the most frequent branch, drafts that end before their path's probability falls under
    `least_probability`; windows double when a whole one was accepted and halve otherwise, from 2 to 16.
    Not modelled: as histospec.
    """
    rule = HistoryRule(shortest_match_tokens=4, branch="count", least_probability=least_probability)
    return Speculation(
        name="histospec_code",
        drafter="history",
        paper="RhymeRL's public code: verl recipe specRL/histoSpec",
        window=window or Mimd(),
        history=rule,
        epochs_back=epochs_back,
        gate=gate,
    )


@validate_call
def ngram(window: Window | None = None, gate: Literal["open", "batch"] = "open") -> Speculation:
    """Drafts from the response's own text (n-gram, prompt lookup): what followed the same last tokens before.

    The last tokens of a response are looked up in it; what followed the earliest match is the draft.
    Not modelled: matches in the prompt, whose tokens a trace does not have.
    """
    return Speculation(
        name="ngram",
        drafter="ngram",
        paper="prompt lookup decoding, as in vLLM",
        window=window or Fixed(tokens=4),
        gate=gate,
    )


@validate_call
def siblings(
    window: Window | None = None, gate: Literal["open", "batch"] | Elastic = "open", own_text: bool = False
) -> Speculation:
    """Drafts from the other responses of the group that are, or were, at the same worker (TLT's model-free drafter).

    Also from those that are still running, as far as they are. `own_text` looks in the response itself as well. On a trace
    without token ids, what the run model says of siblings stands for it.
    Not modelled: siblings at other workers; on a trace without token ids, that siblings may be at other workers.
    """
    return Speculation(
        name="siblings",
        drafter="siblings",
        paper="Taming the Long Tail, arXiv 2511.16665 §5.3",
        window=window or Fixed(tokens=8),
        gate=gate,
        own_text=own_text,
    )


@validate_call
def srt(window: Window | None = None, gate: Literal["open", "batch"] = "open") -> Speculation:
    """A tree for each prompt, updated while its responses run: drafts from siblings and the response's own text.

    As siblings with `own_text`: whatever the group has generated at a worker so far can be drafted from at once.
    Not modelled: what the tree keeps of earlier epochs (that is histospec), and siblings at other workers.
    """
    return Speculation(
        name="srt",
        drafter="siblings",
        paper="SRT, arXiv 2601.09083",
        window=window or Fixed(tokens=8),
        gate=gate,
        own_text=True,
    )


@validate_call
def das(
    budgets: tuple[Tokens, Tokens, Tokens] = (2, 8, 16),
    quantiles: tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(gt=0, lt=1)]] = (0.5, 0.8),
    gate: Literal["open", "batch"] = "open",
) -> Speculation:
    """Drafts from the epoch before, with larger budgets for responses that are expected to be long.

    A prompt whose median response of the epoch before is under the first of the `quantiles` of all prompts drafts the
    first of
    the `budgets`, and so on; the second where nothing is known. Both are assumed: the paper solves for budgets, and its
    numbers
    belong to its models.
    Not modelled: the paper's own solution for the budgets.
    """
    if not quantiles[0] < quantiles[1]:
        raise InputError(f"speculation das: quantiles {quantiles} must rise")
    return Speculation(
        name="das",
        drafter="history",
        paper="DAS, arXiv 2511.13841",
        window=Fixed(tokens=max(budgets)),
        history=HistoryRule(branch="count"),
        gate=gate,
        budget=LengthBudget(quantiles, budgets),
    )


@validate_call
def spec_rl() -> Speculation:
    """Verifies the whole response of the epoch before with the prompt, and decodes on from where it stands (lenience 0).

    One prefill of prompt and old response; what agrees from the beginning on is kept, so nothing that is generated changes.
    Needs a trace with token ids. The old response is verified only if it is finished by then.
    Not modelled: lenience, which accepts tokens that the policy would not have sampled.
    """
    return Speculation(name="spec_rl", drafter="old_response", paper="SPEC-RL, arXiv 2509.23232")


@validate_call
def draft_model(
    model: str = "qwen2.5-0.5b",
    window: Window | None = None,
    gate: Literal["open", "batch"] | Elastic = "open",
) -> Speculation:
    """A small model of the family drafts on the worker's own GPUs, then the target verifies (vanilla, coupled).

    Its weights and KV cache come out of the worker's memory. Its acceptance is an input of the scenario
    (speculation.acceptance).
    Not modelled: its prefill of prompts.
    """
    return Speculation(
        name="draft_model",
        drafter="model",
        paper="speculative decoding, arXiv 2211.17192",
        window=window or Fixed(tokens=4),
        model=model,
        gate=gate,
    )


@validate_call
def tlt(
    adaptive: bool = True,
    threshold: Annotated[int, Field(ge=1, le=100_000)] = 32,
    patience: Annotated[int, Field(ge=1, le=100_000)] = 10,
    bandit: bool = True,
    bucketed_graphs: bool = True,
    epsilon: Annotated[float, Field(ge=0, le=1)] = 0.1,
    round_s: Annotated[float, Field(ge=0, le=1)] = 2e-3,
    level_s: Annotated[float, Field(ge=0, le=1)] = 0.0,
    drafter_from_update: Annotated[int, Field(ge=0, le=1_000_000)] = 0,
    model_free_if_slower: bool = True,
    training: SpotTraining | None = None,
    strategies: Annotated[tuple[Strategy, ...], Field(min_length=1)] | None = None,
) -> Speculation:
    """An EAGLE-type drafter with draft trees once few responses are left, trained on idle workers.

    A worker speculates once it has had at most `threshold` running requests for `patience` decode passes in a row,
    after a prefill of all that runs. BEG-MAB chooses depth, top-k and tokens to verify by batch (`bandit`; otherwise
    always the strategy of 8 levels and 48 tokens), among the trees of Table 2's sizes or those given (`strategies`, of
    four sizes; the public scripts have [[8, 4, 48], [8, 4, 32], [8, 4, 16], [8, 4, 8]]). A round of drafting takes
    `round_s` (assumed) beside the drafter's kernels, and `level_s` a level of the tree in use: host time, and the
    building of trees. Workers that have no samples train the drafter until the rollout ends (`adaptive`), in every 10th
    step (`training` has this and all else of it: every_updates, iteration_s, recovery_iterations, idle_workers, join …);
    what was saved comes with the next weights. Otherwise it falls behind the policy. Before policy version
    `drafter_from_update` there is no learned drafter (0: one that was trained before, as the paper has it): a worker
    drafts from the group's other responses there (method siblings), and where these are predicted to be faster
    (`model_free_if_slower`): tokens a second of one response of typical length, by the profile, the times of drafting,
    the learned drafter's acceptance as far as it has drifted, and what the scenario says of siblings
    (speculation.runs). The graphs of all strategies, captured in buckets or not, come out of the KV cache.
    Not modelled: the drafter's prefill beside the target's; the drafter's optimizer states on the GPUs that train it;
    what its training data take of the inference phase.
    """
    training = training or SpotTraining()
    strategies = (strategies or TLT_STRATEGIES) if bandit else TLT_STRATEGIES[2:3]
    thresholds = (1, 2, 5, 21) if bandit else (1,)
    return Speculation(
        name="tlt",
        drafter="model",
        paper="Taming the Long Tail, arXiv 2511.16665",
        model=EAGLE,
        window=Fixed(tokens=8),
        gate=Elastic(threshold=threshold, patience=patience),
        strategies=BegMab(strategies=strategies, batch_thresholds=thresholds, epsilon=epsilon),
        training=training.model_copy(update={"adaptive": adaptive and training.adaptive}),
        model_free=ModelFree(drafter_from_update, model_free_if_slower),
        round_s=round_s,
        level_s=level_s,
        graphs=GraphMemory(capture="bucketed" if bucketed_graphs else "vanilla"),
    )


@validate_call
def specactor(
    model: str = "qwen2.5-0.5b",
    decoupled: bool = True,
    draft_gpus: Annotated[int, Field(ge=1, le=1024)] | None = None,
    window: Tokens | None = None,
    objective: Literal["tgs", "renewal"] = "tgs",
    reconfigure: bool = True,
) -> Speculation:
    """A draft model on GPUs of its own that drafts ahead while windows are verified, planned by Algorithm 1.

    The verifier is the worker's tp; Algorithm 1 chooses the drafter GPUs beside it and the window, by the published TGS or by
    the renewal rate of what is executed (`objective`). Where `draft_gpus` or `window` is set, it chooses the other alone.
    Every 1,000 tokens a response whose acceptance is under its worker's mean gets its own window and mode (`reconfigure`,
    Algorithm 2). A miss throws away what was drafted ahead. The drafter's weights, the target's (which drafter GPUs keep, too,
    a worker's share each) and the KV cache of its requests at their typical length must fit a drafter GPU.
    `decoupled=False` drafts on the worker's own GPUs, in turns with verification.
    Not modelled: the drafter's prefill, the messages between drafter and verifier; that drafters have no room for longer
    requests than typical ones; verifiers of another size than the worker's tp, which Algorithm 1 compares as well.
    """
    plan = Decoupled(draft_gpus, window, objective, 1000 if reconfigure else 0) if decoupled else None
    return Speculation(
        name="specactor",
        drafter="model",
        paper="SpecActor, arXiv 2511.16193",
        model=model,
        window=Fixed(tokens=window or 4),
        decoupled=plan,
        exact_match=True,
    )


_OWN: dict[str, Callable[..., Speculation]] = {
    method.__name__: method
    for method in (
        histospec, histospec_code, ngram, siblings, srt, das, spec_rl, draft_model, tlt, specactor,
    )
}  # fmt: skip
METHODS: Extended[Speculation] = Extended(_OWN, "simrl.speculation", "speculation")


def make_speculation(asked: str | dict[str, Any]) -> Speculation | None:
    """A method by its name, or `{name: histospec, gate: open}`; None for `none`. Raises `InputError` as `make_system` does."""
    given: dict[str, Any] = {"name": asked} if isinstance(asked, str) else dict(asked)
    name = given.pop("name", None)
    if name == "none" and not given:
        return None
    if name not in METHODS:
        named = f"speculation is {name!r}{meant(name, METHODS)}"
        said = named if name is not None else f"speculation {asked!r} has no name"
        raise InputError(f"{said}; give none, or one of {', '.join(METHODS)}, or {{name: histospec, gate: open}}")
    try:
        made = METHODS[name](**given)
    except ValidationError as error:
        raise InputError(f"speculation {name}: {call_error(error, signature(METHODS[name]).parameters)}") from error
    if not isinstance(made, Speculation):
        raise InputError(f"speculation {name}: its function gives {type(made).__name__}; let it give a Speculation")
    if (made.drafter == "own") != (made.make_drafter is not None):
        raise InputError(f'speculation {name}: drafter "own" and make_drafter come together; give both or none')
    made = replace(made, parameters=given)
    longest = made.window.rule.most_tokens
    if made.drafter != "model" and longest > MOST_DRAFT_TOKENS:
        raise InputError(
            f"speculation {name}: a window of {longest} tokens; texts are drafted up to {MOST_DRAFT_TOKENS}"
        )
    return made
