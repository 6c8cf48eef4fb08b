"""Recipes that differ from verl colocated by their speculation. Their dispatch is that of verl 0.4:
SpecActor and TLT are built on a verl whose workers have whole groups assigned to them (SpecActor
§1, §2.2; TLT's SGLang in SPMD)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simrl.dispatch.rules import DISPATCHES
from simrl.pipelines.best_of_n import best_of_n as best_of_n_batch
from simrl.pipelines.full_batch import full_batch
from simrl.speculation.best_of_n import BestOfN
from simrl.speculation.choices import Elastic, Toggle
from simrl.speculation.drafter_training import SpotTraining
from simrl.speculation.methods import (
    SPECACTOR_DRAFTERS,
    draft_model,
    efficient_rollout as quantised_self,
    ngram,
    siblings,
    specactor as specactor_drafting,
    tlt as tlt_drafting,
)
from simrl.speculation.windows import Fixed
from simrl.systems.on_policy import in_turns
from simrl.systems.system import (
    GROUPS,
    OF_VERSION,
    Count,
    DraftTokens,
    System,
    Version,
    recipe,
)


@recipe("dispatch", *GROUPS, dispatch="even_split")
def verl_draft_model(model: str = "qwen2.5-0.5b", draft_tokens: DraftTokens = 4) -> System:
    """verl colocated with speculative decoding by a small draft model on every worker; on-policy.

    As verl_colocated 0.4; a worker drafts `draft_tokens` tokens for each running response, then verifies them (vanilla
    speculative decoding).
    Not modelled: as verl_colocated, and the method draft_model.
    """
    return in_turns(
        paper="verl with vanilla speculative decoding, as compared in SpecActor, arXiv 2511.16193 §5",
        speculation=draft_model(model, Fixed(tokens=draft_tokens)),
    )


@recipe("dispatch", *GROUPS, dispatch="even_split")
def verl_ngram(draft_tokens: DraftTokens = 4) -> System:
    """verl colocated with n-gram drafts from each response's own text; on-policy.

    As verl_colocated 0.4; where a response repeats itself, a worker drafts up to `draft_tokens` tokens.
    Not modelled: as verl_colocated, and the method ngram.
    """
    return in_turns(
        paper="verl with n-gram speculation, as compared in SpecActor, arXiv 2511.16193 §5",
        speculation=ngram(Fixed(tokens=draft_tokens)),
    )


@recipe("dispatch", *GROUPS, dispatch="even_split")
def specactor(
    model: str | None = None,
    decoupled: bool = True,
    disaggregated: bool = False,
    objective: Literal["tgs", "renewal"] = "tgs",
    reconfigure: bool = True,
    draft_gpus: Annotated[int, Field(ge=1, le=1024)] | None = None,
    verifiers: tuple[Count, ...] = (),
    window: DraftTokens | None = None,
    best_of_n: bool = True,
    b_max: Count = 8,
    drafters: tuple[str, ...] = SPECACTOR_DRAFTERS,
    assignment: Literal["by_drafter", "by_request"] = "by_drafter",
    copies: Literal["decoupled", "coupled"] = "decoupled",
    kv: Literal["mixed", "recompute", "transfer"] = "mixed",
) -> System:
    """verl colocated with decoupled speculation: GPUs reserved for drafting draft while workers verify; on-policy.

    As verl_colocated 0.4, with the method specactor: the draft ladder chooses the first drafter among the `drafters`, unless
    `model` names it; Algorithm 1 plans how many GPUs draft for a verifier and how many tokens ahead (`decoupled`), and which of
    the `verifiers` (tensor-parallel sizes; none: the worker's) it is; Algorithm 2 gives responses with low acceptance rates
    their own window and mode (`reconfigure`). `decoupled=False` drafts in turns, with `disaggregated` on GPUs of its own. In
    the tail of the rollout, each freed worker gets one of the `drafters`. It generates copies of at most `b_max` unfinished
    requests with low acceptance rates, continuing from the tokens generated so far (`best_of_n`), on its own GPUs; a model
    drafts ahead on the worker's drafter GPUs (`copies`). Requests are assigned by Algorithm 3, or request by request in the
    order of the draft ladder ("fastest-of-N"; `assignment`). A request is done when its first copy is; tokens of the other
    copies are duplicates. A copy receives the tail of its KV cache over the network while it recomputes the head, or only one
    of both (`kv`). The default of b_max is assumed. The `drafters` wait in the hosts' memory: a freed worker loads its drafter
    before its copies begin, and has that much less KV cache; the first drafter stays where it is (§4.3).
    Not modelled: as verl_colocated, and the method specactor; correlated acceptance of different drafters.
    """
    rule = BestOfN(drafters, b_max, assignment, kv, copies) if best_of_n and drafters else None
    return in_turns(
        collector=best_of_n_batch if rule else full_batch,
        best_of_n=rule,
        paper="SpecActor, arXiv 2511.16193",
        speculation=specactor_drafting(
            model=model,
            decoupled=decoupled,
            disaggregated=disaggregated,
            draft_gpus=draft_gpus,
            window=window,
            objective=objective,
            reconfigure=reconfigure,
            drafters=drafters or SPECACTOR_DRAFTERS,
            verifiers=verifiers,
        ),
    )


@recipe("dispatch", *GROUPS, dispatch="even_split")
def tlt(
    adaptive: bool = True,
    bandit: bool = True,
    bandit_rule: Literal["code", "paper"] = "code",
    bucketed_graphs: bool = True,
    threshold: Count = 32,
    train_every: Count = 10,
    packing: bool = True,
    data_buffer: bool = True,
    save_every_iterations: Count = 100,
    asynchronous_saves: bool = True,
    selective_saves: bool = True,
) -> System:
    """verl colocated with an EAGLE-type drafter for the tail of the rollout, trained on idle workers; on-policy.

    As verl_colocated 0.4, with the method tlt: a worker decodes with draft trees once at most `threshold` of its responses
    are running; BEG-MAB chooses the trees (`bandit`), by the windows of its public code or of the paper (`bandit_rule`); idle
    workers train the drafter (`adaptive`), in every `train_every`th step, on packed responses (`packing`), long ones of the
    step before among them (`data_buffer`): drawn at random, as in the public code, or by `sampling: longest_first` of the
    method's `training` as in §4.2, the longest first. Every `save_every_iterations` it is saved, in the background
    (`asynchronous_saves`), without its frozen layers (`selective_saves`).
    Not modelled: as verl_colocated, and the method tlt.
    """
    return in_turns(
        paper="Taming the Long Tail, arXiv 2511.16665",
        speculation=tlt_drafting(
            adaptive=adaptive,
            bandit=bandit,
            bandit_rule=bandit_rule,
            bucketed_graphs=bucketed_graphs,
            threshold=threshold,
            training=SpotTraining(
                every_updates=train_every,
                packing=packing,
                data_buffer=data_buffer,
                save_every_iterations=save_every_iterations,
                asynchronous_saves=asynchronous_saves,
                selective_saves=selective_saves,
            ),
        ),
    )


@recipe("dispatch", *GROUPS, dispatch=None)
def efficient_rollout(toggle: Toggle | None = None, version: Version = "0.7") -> System:
    """verl colocated with the policy in 4 bits as its own drafter, in each worker once it pays; on-policy.

    As verl_colocated (EfficientRollout's code is built on verl 0.7), with the method efficient_rollout: a worker begins to
    draft when the profile says that a round of drafts is worth its time at the running requests; all workers draft more or
    fewer tokens by the acceptance of the last two rollouts.
    Not modelled: as verl_colocated, and the method efficient_rollout.
    """
    return in_turns(
        paper="EfficientRollout, arXiv 2606.18967",
        speculation=quantised_self(gate=toggle),
        dispatch=DISPATCHES[OF_VERSION[version]],
    )


@recipe("dispatch", *GROUPS, dispatch="even_split")
def tlt_base(threshold: Count = 32, draft_tokens: DraftTokens = 8) -> System:
    """TLT without its learned drafter: drafts from the other responses of the group in the tail; on-policy.

    As tlt, but with the method siblings instead of the learned drafter (TLT-Base in the paper's evaluation).
    Not modelled: as verl_colocated, and the method siblings.
    """
    return in_turns(
        paper="Taming the Long Tail, arXiv 2511.16665 §6.1",
        speculation=siblings(Fixed(tokens=draft_tokens), Elastic(threshold=threshold)),
    )
