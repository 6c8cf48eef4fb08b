"""Speculation, the third choice of a system: what drafts, how long, when to stop. A method is a
function that returns one.

Invariant: a `Speculation` states what a worker does, never how well it works: acceptance comes from
the trace's tokens or from the scenario's inputs (`simrl.speculation.inputs`).

`simrl speculation show NAME` prints a method's docstring. Defaults are the paper's or the public
code's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, validate_call

from simrl.errors import InputError, choose, refuse
from simrl.extensions import Extended
from simrl.speculation.choices import BegMab, Capture, Elastic, HistoryRule, Strategy, Toggle
from simrl.speculation.drafter import MOST_DRAFT_TOKENS, Drafter
from simrl.speculation.drafter_training import SpotTraining
from simrl.speculation.windows import Aimd, Fixed, Mimd, Window
from simrl.validation import call_error, with_parameters

Tokens = Annotated[int, Field(ge=1, le=255)]
DrafterKind = Literal["history", "ngram", "siblings", "old_response", "model", "own"]
EAGLE, MTP = "eagle", "mtp"  # drafters made of a model's own parts …
OLD_RESPONSE = "old_response"
QUANTISED = ("int4", "fp8")  # … and the model itself, in these precisions
NGRAM: Literal["ngram"] = "ngram"
SPECACTOR_DRAFTERS = (NGRAM, "qwen2.5-0.5b", "qwen2.5-1.5b")  # §5.1
# Tokens to verify are from TLT's Table 2; a deep and a shallow tree for each are assumed.
_TREES = ((64, (10, 6)), (48, (8, 6)), (32, (6, 4)), (16, (4, 3)))
TLT_STRATEGIES = tuple(Strategy(depth, 8, tokens) for tokens, depths in _TREES for depth in depths)


@dataclass(frozen=True)
class LengthBudget:
    """DAS: tokens to draft, by the quantile of the prompt's median response in the epoch before
    among all prompts."""

    quantiles: tuple[float, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Decoupled:
    """SpecActor: drafters on GPUs of their own. Algorithm 1 chooses what is None before the run, by
    the objective, for `requests` of a verifier (None: its share of a batch). `in_turns`: the
    drafter waits for each verification."""

    draft_gpus: int | None
    window: int | None
    objective: Literal["tgs", "renewal"]
    reconfigure_every: int
    in_turns: bool = False
    requests: int | None = None


@dataclass(frozen=True)
class ModelFree:
    """TLT: drafts from the group's other responses replace the learned drafter's under policy
    versions before `before_version`, and (`if_slower`) under versions for which its drafts are
    predicted to be slower."""

    before_version: int
    if_slower: bool


@dataclass(frozen=True)
class Speculation:
    """A worker's way to draft.

    `model` names a model drafter: `eagle`, `mtp`, one of `QUANTISED`, or a model of `simrl profile
    names`. `verify` and `bias` are of whole old responses (`spec_rl`). `follows`: its weights
    follow the policy that it drafts for, trained with it or made from it. `draft_vocab`: tokens
    of the vocabulary from which `eagle` drafts (0: the target's). `round_s` is the time of a round
    of its drafts outside its passes (None: the host's time between passes), `level_s` the time of
    each pass of `eagle` outside its kernels. Of `candidates`, models or `ngram`, the draft ladder
    chooses the drafter before the run; if drafting is coupled and `ladder_window` is set, it also
    chooses the window. `verifiers` are the tensor-parallel sizes that a worker may have.
    `make_drafter` makes the drafter of a method whose drafter is "own": a function of a module, so
    that other processes find it, too. `gate` decides when a worker drafts at all. With
    `strategies`, drafts are trees, chosen by BEG-MAB. `exact_match`: the method verifies by exact
    match only."""

    name: str
    drafter: DrafterKind
    paper: str
    window: Window = Fixed(tokens=4)  # noqa: RUF009 (frozen)
    gate: Literal["open", "batch"] | Elastic | Toggle = "open"
    model: str = ""
    verify: Literal["engine", "trainer"] = "engine"
    bias: float = 0.0
    follows: bool = False
    draft_vocab: int = 0
    history: HistoryRule = HistoryRule()  # noqa: RUF009 (frozen)
    epochs_back: int = 1
    budget: LengthBudget | None = None
    strategies: BegMab | None = None
    training: SpotTraining | None = None
    model_free: ModelFree | None = None
    graphs: Capture | None = None
    decoupled: Decoupled | None = None
    candidates: tuple[str, ...] = ()
    ladder_window: bool = False
    verifiers: tuple[int, ...] = ()
    round_s: float | None = None
    level_s: float = 0.0
    own_text: bool = False
    exact_match: bool = False
    make_drafter: Callable[[], Drafter] | None = None
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def is_trained(self) -> bool:
        """True if a model drafter is trained, and comes with the policy's weights."""
        return self.training.adaptive if self.training else self.follows and self.model == MTP

    @property
    def label(self) -> str:
        """The name with its given parameters."""
        return with_parameters(
            self.name, {key: value for key, value in self.parameters.items() if key != "name"}
        )


@validate_call
def histospec(
    window: Window | None = None,
    gate: Literal["open", "batch"] = "batch",
    branch: Literal["reward", "count"] = "reward",
    longest_match_tokens: Annotated[int, Field(ge=1, le=24)] = 7,
    shortest_match_tokens: Annotated[int, Field(ge=1, le=24)] = 3,
    prompt_tail_tokens: Annotated[int, Field(ge=0, le=16)] = 5,
    epochs_back: Annotated[int, Field(ge=1, le=100)] = 1,
) -> Speculation:
    """Draft from the prompt's responses of the epoch before, along the branch with the most reward (RhymeRL's paper).

    The last 7 tokens, else 6 to 3, are looked up in the responses of the prompt's last epoch. The prompt's last
    `prompt_tail_tokens` count as the beginning of each response, as in the public code; 0: generated tokens alone, as the paper
    may be read. The window starts at 2, grows by
    2 (up to 32) after a fully accepted draft, and resets to 2 otherwise. A worker stops drafting while its batch is too large
    for drafts to pay, judged from the profile and the recent acceptance rate. History workers build the indexes (scenario:
    speculation.history_workers) and send each to the host of the worker that gets a response to its prompt; until it is there,
    the prompt decodes without drafts, as all prompts do in the first epoch. An index without room in memory is evicted, or with
    compressed_bytes_per_token or swap_bytes_per_s compressed and swapped until its prompt runs. With `epochs_back` above 1,
    the indexes of all these epochs must be there.
    A group with a dropped response (over-sampling, RollPacker, evictions …) is indexed when the rest of it is finished, without
    unfinished responses. Not modelled: on a trace without token ids, the fewer drafts of such an index.
    """
    return Speculation(
        "histospec",
        "history",
        "RhymeRL, arXiv 2508.18588 §5",
        window or Aimd(),
        gate,
        history=HistoryRule(
            longest_match_tokens=longest_match_tokens,
            shortest_match_tokens=shortest_match_tokens,
            branch=branch,
            prompt_tail_tokens=prompt_tail_tokens,
        ),
        epochs_back=epochs_back,
    )


@validate_call
def histospec_code(
    window: Window | None = None,
    gate: Literal["open", "batch"] = "open",
    least_probability: Annotated[float, Field(ge=0, le=1)] = 0.1,
    prompt_tail_tokens: Annotated[int, Field(ge=0, le=16)] = 5,
    epochs_back: Annotated[int, Field(ge=1, le=100)] = 1,
) -> Speculation:
    """Like histospec, but as in its public code: branches by count, other windows, no gate.

    Matches of 7 to 4 tokens, the most frequent branch, drafts that end before their path's probability falls below
    `least_probability`. The window doubles after a fully accepted one and halves otherwise, from 2 to 16.
    Not modelled: as in histospec.
    """
    return Speculation(
        "histospec_code",
        "history",
        "RhymeRL's public code: verl recipe specRL/histoSpec",
        window or Mimd(),
        gate,
        history=HistoryRule(
            shortest_match_tokens=4,
            branch="count",
            least_probability=least_probability,
            prompt_tail_tokens=prompt_tail_tokens,
        ),
        epochs_back=epochs_back,
    )


@validate_call
def ngram(window: Window | None = None, gate: Literal["open", "batch"] = "open") -> Speculation:
    """Draft from the response's own text (n-gram, prompt lookup): the tokens after an earlier match of its last tokens.

    The last tokens of a response are looked up in its own text; the tokens after the earliest match are the draft.
    Not modelled: matches in the prompt, whose tokens a trace does not have.
    """
    return Speculation(
        "ngram", "ngram", "prompt lookup decoding, as in vLLM", window or Fixed(tokens=4), gate
    )


@validate_call
def siblings(
    window: Window | None = None,
    gate: Literal["open", "batch"] | Elastic = "open",
    own_text: bool = False,
) -> Speculation:
    """Draft from the other responses of the group that are, or were, on the same worker (TLT's model-free drafter).

    Running responses lend the tokens that they have so far. `own_text` also looks in the response itself. No text is sent to
    other workers, so where a dispatch spreads the responses of a group, there is little or nothing to draft from. On a trace
    without token ids, drafts are drawn from the run model of siblings, each from one of the group's other responses; where that
    one is not at the worker, there is no draft.
    Not modelled: on a trace without token ids, a text that several siblings have.
    """
    return Speculation(
        "siblings",
        "siblings",
        "Taming the Long Tail, arXiv 2511.16665 §5.3",
        window or Fixed(tokens=8),
        gate,
        own_text=own_text,
    )


@validate_call
def srt(window: Window | None = None, gate: Literal["open", "batch"] = "open") -> Speculation:
    """Draft from siblings and the response's own text: a tree for each prompt, updated while its responses run.

    Like siblings with `own_text`: every token that the group has generated on a worker can be drafted from at once there.
    Not modelled: responses of earlier epochs in the tree (see histospec).
    """
    return replace(siblings(window, gate, own_text=True), name="srt", paper="SRT, arXiv 2601.09083")


@validate_call
def das(
    budgets: tuple[Tokens, Tokens, Tokens] = (2, 8, 16),
    quantiles: tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(gt=0, lt=1)]] = (
        0.5,
        0.8,
    ),
    gate: Literal["open", "batch"] = "open",
) -> Speculation:
    """Draft from the epoch before, with larger budgets for responses that are expected to be long.

    The prompt's median response in the epoch before, compared with the `quantiles` of all prompts, selects one of the
    `budgets`: below the first quantile the first, and so on; the second budget if the median is not known. Both are assumed:
    the paper solves for budgets, and its numbers belong to its models.
    Not modelled: the paper's own solution for the budgets.
    """
    refuse((not quantiles[0] < quantiles[1], f"speculation das: quantiles {quantiles} must rise"))
    longest, rule, budget = (
        Fixed(tokens=max(budgets)),
        HistoryRule(branch="count"),
        LengthBudget(quantiles, budgets),
    )
    return Speculation(
        "das", "history", "DAS, arXiv 2511.13841", longest, gate, history=rule, budget=budget
    )


@validate_call
def spec_rl(
    verify: Literal["engine", "trainer"] = "engine",
    bias: Annotated[float, Field(ge=-100, le=100)] = 0.0,
) -> Speculation:
    """Verify the whole response of the epoch before, and decode from the first token that is not kept.

    `verify` says by what. `engine`: one prefill of prompt and old response. `trainer`, as the public code
    (ShopeeLLM/Spec-RL@97da99e): between update and rollout, the trainer computes log-probs of the next step's old responses
    on all its GPUs; the engine then prefills prompt and kept tokens. A token is kept while log U <= log p_new - log p_old -
    `bias` for a uniform U; 0 samples the policy exactly, the code's runs have -0.5. A trace has no log-probs: on token ids,
    the tokens that agree with the recorded response from the beginning are kept, so its text does not change (a lower bound,
    as the rule keeps more). With speculation.acceptance.old_response, the number kept is drawn: the rate at which a token is
    kept, which logs have (avg_cut_idx); a `bias` needs it. The old response is verified only if it has finished by then.
    Not modelled: that a response changes its length if other tokens are kept than it has; a response that is kept whole skips
    the engine in the public code, here it is prefilled once.
    """
    return Speculation(
        "spec_rl",
        "old_response",
        "SPEC-RL, arXiv 2509.23232",
        model=OLD_RESPONSE,
        verify=verify,
        bias=bias,
    )


@validate_call
def draft_model(
    model: str = "qwen2.5-0.5b",
    window: Window | None = None,
    gate: Literal["open", "batch"] | Elastic = "open",
) -> Speculation:
    """Draft with a small model of the family on the worker's own GPUs; then the target verifies (vanilla, coupled).

    The drafter's weights and KV cache take memory of the worker, and it computes what the target prefills. Its acceptance is an
    input of the scenario (speculation.acceptance).
    Not modelled: attention in the drafter's prefill.
    """
    return Speculation(
        "draft_model",
        "model",
        "speculative decoding, arXiv 2211.17192",
        window or Fixed(tokens=4),
        gate,
        model,
    )


@validate_call
def tlt(
    adaptive: bool = True,
    threshold: Annotated[int, Field(ge=1, le=100_000)] = 32,
    patience: Annotated[int, Field(ge=1, le=100_000)] = 10,
    bandit: bool = True,
    bandit_rule: Literal["code", "paper"] = "code",
    bucketed_graphs: bool = True,
    epsilon: Annotated[float, Field(ge=0, le=1)] = 0.1,
    round_s: Annotated[float, Field(ge=0, le=1)] = 2e-3,
    level_s: Annotated[float, Field(ge=0, le=1)] = 0.0,
    drafter_from_update: Annotated[int, Field(ge=0, le=1_000_000)] = 0,
    model_free_if_slower: bool = True,
    training: SpotTraining | None = None,
    strategies: Annotated[tuple[Strategy, ...], Field(min_length=1)] | None = None,
) -> Speculation:
    """Draft trees with an EAGLE-type drafter once few responses are left, and train it on idle workers.

    A worker starts to speculate after `patience` consecutive decode passes with at most `threshold` running requests, and
    prefills the drafter for all running requests first. BEG-MAB chooses depth, top-k and tokens to verify by batch size
    (`bandit`; without it, always 8 levels and 48 tokens), among the trees of Table 2's sizes or the given `strategies` (of
    four sizes; the public scripts have [[8, 4, 48], [8, 4, 32], [8, 4, 16], [8, 4, 8]]). By the code's `bandit_rule` a tree
    has a window of rewards at each group of batch sizes, by the paper's a single one. A round of drafting takes `round_s`
    (assumed) in addition to the drafter's kernels, and `level_s` per level of the tree: host time and tree building. Workers
    without samples train the drafter until the rollout ends (`adaptive`), in every 10th step. An iteration takes packed
    responses from the buffer: those finished by then, and longer ones of the step before (none where no log-probs are
    computed); by default at random, as in the public code, with `training: {sampling: longest_first}` as in §4.2. Its time
    follows from their tokens, the drafter, and the workers that share it; checkpoints keep it waiting. `training` sets this
    and the rest (its keys are below). The buffer keeps hidden states in host memory: a step's states are copied there after
    its log-probs where the next rollout trains. Saved drafter weights arrive with the next policy weights, whose load their
    bytes prolong; an untrained drafter falls behind the policy. The drafter also computes what its target prefills from the
    moment it starts. Before policy version `drafter_from_update` there is no learned drafter (0: it was trained before the
    run, as in the paper): a worker then drafts from the group's other responses (method siblings). It also does so where
    siblings are predicted to be faster (`model_free_if_slower`), in tokens per second of one response of typical length:
    from the profile, the drafting times, the drifted acceptance of the learned drafter, and the scenario's run model of
    siblings (speculation.runs), as if whole groups were at a worker. The CUDA graphs of all strategies, captured in buckets
    or not, take memory of the KV cache, and so do the logits of the largest verification that buckets and threshold allow,
    as far as they exceed a plain pass of max_num_seqs. (The threshold bounds it only where all requests of a rollout come
    at its start: an open gate stays open, whatever comes after a turn or of another batch.)
    Not modelled: memory of the training on idle workers, and its way back to the host when it stops; copies of hidden states
    by the engine in rollouts that train; cache slots of a tree while it is drafted.
    """
    training = training or SpotTraining()
    strategies = (strategies or TLT_STRATEGIES) if bandit else TLT_STRATEGIES[2:3]
    thresholds = (1, 2, 5, 21) if bandit else (1,)
    return Speculation(
        "tlt",
        "model",
        "Taming the Long Tail, arXiv 2511.16665",
        Fixed(tokens=8),
        Elastic(threshold=threshold, patience=patience),
        EAGLE,
        strategies=BegMab(
            strategies=strategies,
            batch_thresholds=thresholds,
            epsilon=epsilon,
            rule=bandit_rule,
        ),
        training=training.model_copy(update={"adaptive": adaptive and training.adaptive}),
        model_free=ModelFree(drafter_from_update, model_free_if_slower),
        round_s=round_s,
        level_s=level_s,
        graphs="bucketed" if bucketed_graphs else "vanilla",
    )


@validate_call
def specactor(
    model: str | None = None,
    decoupled: bool = True,
    disaggregated: bool = False,
    draft_gpus: Annotated[int, Field(ge=1, le=1024)] | None = None,
    window: Tokens | None = None,
    objective: Literal["tgs", "renewal"] = "tgs",
    reconfigure: bool = True,
    drafters: tuple[str, ...] = SPECACTOR_DRAFTERS,
    verifiers: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = (),
) -> Speculation:
    """Draft ahead with a model on GPUs of its own while windows are verified, planned by Algorithm 1.

    Without a `model`, the draft ladder chooses one of the `drafters`: the one that is fastest in turns with the target at a
    worker's share of a batch, at its acceptance rate in the scenario. An `ngram` then drafts in turns, on the worker. For a
    model, Algorithm 1 chooses the number of drafter GPUs and the window, by the published TGS or by the renewal rate of the
    loops as executed (`objective`). If `draft_gpus` or `window` is set, it chooses only the other. With `verifiers` it also
    chooses the worker's tp (the set of verifiers' GPUs), each with its shipped profile. Every 1,000 tokens, a response whose
    acceptance is below its worker's mean gets its own window and mode (`reconfigure`, Algorithm 2). A miss discards the tokens
    drafted ahead. A drafter GPU must hold the drafter's weights, a worker's share of the target's weights (drafter GPUs keep
    them too) and the KV cache of its requests at typical length. It prefills a response's context before it drafts for it, and
    each window takes two messages. `decoupled=False` drafts in turns with verification, on the worker's own GPUs, or on drafter
    GPUs (`disaggregated`).
    Not modelled: drafters that have no room for requests longer than typical; drafting while messages travel.
    """
    refuse(
        (
            model is None and not drafters,
            "speculation specactor: neither a model nor drafters; name one",
        ),
        (
            decoupled and disaggregated,
            "speculation specactor: disaggregated is true, which is for drafts in turns, and so is decoupled; add decoupled: "
            "false, or leave it out",
        ),
        (
            draft_gpus is not None and not (decoupled or disaggregated),
            f"speculation specactor: draft_gpus is {draft_gpus}, and with decoupled: false a worker drafts on its own GPUs; "
            "leave it out, or add disaggregated: true",
        ),
    )
    apart = Decoupled(
        draft_gpus, window, objective, 1000 if reconfigure and decoupled else 0, not decoupled
    )
    return Speculation(
        "specactor",
        "model",
        "SpecActor, arXiv 2511.16193",
        Fixed(tokens=window or 4),
        model=model or "",
        candidates=()
        if model
        else tuple(name for name in drafters if name != NGRAM or draft_gpus is None),
        ladder_window=window is None and model is None,
        verifiers=verifiers,
        decoupled=apart if decoupled or disaggregated else None,
        exact_match=True,
    )


@validate_call
def eagle3(
    steps: Tokens = 3,
    topk: Annotated[int, Field(ge=1, le=64)] = 1,
    tokens: Annotated[int, Field(ge=2, le=4096)] | None = None,
    draft_vocab: Annotated[int, Field(ge=0, le=1_000_000)] = 32_000,
    gate: Literal["open", "batch"] = "open",
) -> Speculation:
    """Draft with an EAGLE-3 head in every pass: chains of `steps` tokens, or trees of one shape.

    As SGLang's EAGLE3 (speculative-num-steps, -eagle-topk, -num-draft-tokens: `tokens` verified, the last known one among
    them; null: steps + 1) and vLLM's method eagle3. The head has one layer and a vocabulary of its own (`draft_vocab`; 0: the
    target's). It was trained before the run and stays as it is. Acceptance is an input of the scenario
    (speculation.acceptance.eagle), also as the accept length that an engine logs for a shape (accept_length, draft_shape).
    Not modelled: choosing the branches of a tree and building its mask on the GPU; the host's pauses within a round, unless
    speculation.draft_round_s has them.
    """
    refuse(
        (
            topk == 1 and tokens not in (None, steps + 1),
            f"speculation eagle3: tokens is {tokens}: with topk=1, all {steps} drafted ones and the last known one are "
            "verified; leave it out, or give a larger topk",
        )
    )
    tree = Strategy(steps, topk, tokens or steps + 1)
    return Speculation(
        "eagle3",
        "model",
        "EAGLE-3, arXiv 2503.01840",
        Fixed(tokens=steps),
        gate,
        EAGLE,
        draft_vocab=draft_vocab,
        strategies=BegMab(strategies=(tree,), batch_thresholds=(1,)) if topk > 1 else None,
    )


@validate_call
def mtp(
    draft_tokens: Tokens = 1, trained: bool = False, gate: Literal["open", "batch"] = "open"
) -> Speculation:
    """Draft with the model's own layers for multi-token prediction (DeepSeek-V3, GLM-4.5, Qwen3-Next, MiMo …).

    As vLLM's method mtp and SGLang's NEXTN. Each head is a layer like the model's last, behind a projection that joins the
    hidden state with the next token's embedding, and before the model's output head. Heads draft one after another, a token
    each; with more `draft_tokens` than heads, the last one goes on with its own hidden state. A head's pass is a layer's
    share of the profile, with the output head. Its weights and KV cache take memory of the worker, and it computes what the
    target prefills. Acceptance by depth is an input of the scenario (speculation.acceptance.mtp), as engines log it:
    accepted_per_position. `trained`: the trainer trains the heads with the policy (slime --enable-mtp-training, AReaL, verl),
    on detached hidden states: their passes lengthen each update, their weights come with the policy's, and acceptance does
    not drift. Otherwise they stay as they were, and acceptance falls with each update (drift_per_update).
    Not modelled: optimizer states of the heads; states of linear layers for drafted tokens.
    """
    return Speculation(
        "mtp",
        "model",
        "vLLM's method mtp; DeepSeek-V3, arXiv 2412.19437 §2.2",
        Fixed(tokens=draft_tokens),
        gate,
        MTP,
        follows=trained,
    )


@validate_call
def efficient_rollout(
    precision: Literal["int4", "fp8"] = "int4",
    gate: Literal["open"] | Toggle | None = None,
    draft_tokens: Tokens | None = None,
) -> Speculation:
    """Draft with the policy itself, its weights quantised, once it pays (EfficientRollout).

    Quantised anew at each load of weights, the drafter follows the policy; it reads and writes the policy's KV cache, shares
    embeddings and output head, and its layers' weights take memory beside the policy's. A worker starts a rollout without
    drafts, and is armed once more than `ramp` requests run. Drafts are on, to the end of the rollout, when the accept length
    of its last rollout, over the time of a round by the time of a plain pass at the running requests' mean length, is at
    least 1.05: both by the scenario's profile. After two rollouts with 94 % of all workers' drafted tokens accepted (or at
    most 85 %) all draft more (less) tokens: 5, 7, 9 or 11. `gate` sets these; `open` always drafts `draft_tokens` (7 if not
    given). A drafter's passes take the profile's times, carried over to `precision` by data sheets.
    Not modelled: CUDA graphs of each number of draft tokens; the arithmetic of quantising, whose bytes alone are counted.
    """
    rule = gate or Toggle()
    ladder = [] if isinstance(rule, str) else list(rule.ladder)
    refuse(
        (
            ladder != sorted({*ladder}),
            f"speculation efficient_rollout: ladder is {ladder}; give numbers of draft tokens that rise",
        ),
        (
            ladder and draft_tokens is not None,
            f"speculation efficient_rollout: draft_tokens is {draft_tokens}, and its gate has a ladder of them; give "
            "gate=open, or the gate's ladder",
        ),
    )
    return Speculation(
        "efficient_rollout",
        "model",
        "EfficientRollout, arXiv 2606.18967",
        Fixed(tokens=max(ladder, default=draft_tokens or 7)),
        rule,
        precision,
        follows=True,
    )


_OWN = (
    *(histospec, histospec_code, ngram, siblings, srt, das, spec_rl, draft_model, tlt, specactor),
    *(eagle3, mtp, efficient_rollout),
)
METHODS: Extended[Speculation] = Extended(
    {method.__name__: method for method in _OWN}, "simrl.speculation", "speculation"
)


# What other engines and papers call a drafter, as a pattern, and simrl's name for it.
OTHER_NAMES = {
    r"eagle.?[12]?": "an EAGLE drafter is eagle3, or tlt, which drafts in the tail of a rollout and trains it",
    r"deepseek.mtp|nextn|.*_mtp": "a model's own layers that predict further tokens are mtp",
    r"medusa|hydra": "such heads are not modelled; the closest is mtp, a model's own layers that predict further tokens",
    r"quant(ised|ized)?.?self|self.?spec.*": "the policy in fewer bits that drafts for itself is efficient_rollout",
    r"suffix.*|arctic.*": "suffix matching is histospec, in the epoch before, or srt, in the group's running responses",
    r"prompt.?lookup.*|pld|ngram.*|n.gram.*": "a lookup in the response's own text is ngram",
    r"lookahead.*": "lookahead decoding is not modelled; the closest is ngram, a lookup in the response's own text",
    r"spec(ulative)?(.?decod.*)?|draft(er|.?models?)?|vanilla": "a small model that drafts is draft_model",
}


def make_speculation(choice: str | dict[str, Any]) -> Speculation | None:
    """Return a method by its name, or by `{name: histospec, gate: open}`; None for `none`. Raise
    `InputError` for an unknown name or parameter, and for a value that the method does not take."""
    parameters: dict[str, Any] = {"name": choice} if isinstance(choice, str) else dict(choice)
    name = parameters.pop("name", None)
    if name == "none" and not parameters:
        return None
    if name not in METHODS:
        if name is None:
            raise InputError(
                f"speculation {choice!r} has no name; give one, such as {{name: histospec, gate: open}}"
            )
        raise unknown_method(name)
    try:
        made = METHODS[name](**parameters)
    except ValidationError as error:
        raise InputError(
            f"speculation {name}: {call_error(error, signature(METHODS[name], eval_str=True).parameters)}"
        ) from error
    if not isinstance(made, Speculation):
        raise InputError(
            f"speculation {name}: its function gives {type(made).__name__}; let it give a Speculation"
        )
    longest = made.window.rule.most_tokens
    refuse(
        (
            (made.drafter == "own") != (made.make_drafter is not None),
            f'speculation {name}: drafter "own" and make_drafter come together; give both or none',
        ),
        (
            made.drafter != "model" and longest > MOST_DRAFT_TOKENS,
            f"speculation {name}: a window of {longest} tokens; texts are drafted up to {MOST_DRAFT_TOKENS}",
        ),
    )
    return replace(made, parameters=parameters)


def unknown_method(name: object) -> InputError:
    """Return the error for a name that no method has, with the method that another program's name
    means."""
    written = str(name).lower().replace("-", "_")
    meaning = next(
        (words for other, words in OTHER_NAMES.items() if re.fullmatch(other, written)), None
    )
    near = (
        f": {meaning}; simrl speculation lists all"
        if meaning
        else choose(name, METHODS, "simrl speculation")
    )
    return InputError(f"speculation is {name!r}{near}")
