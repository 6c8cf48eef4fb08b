"""Recipes that differ from verl colocated by their speculation. Their dispatch is that of verl 0.4: SpecActor and TLT are built
on a verl whose workers have whole groups assigned to them (SpecActor §1, §2.2; TLT's SGLang in SPMD)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simrl.pipelines.best_of_n import best_of_n as best_of_n_batch
from simrl.pipelines.full_batch import full_batch
from simrl.speculation.best_of_n import BestOfN
from simrl.speculation.gates import Elastic
from simrl.speculation.methods import draft_model, ngram, siblings
from simrl.speculation.methods import specactor as specactor_drafting
from simrl.speculation.methods import tlt as tlt_drafting
from simrl.speculation.windows import Fixed
from simrl.systems.on_policy import in_turns
from simrl.systems.system import GROUPS, Count, DraftTokens, System, recipe


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
    model: str = "qwen2.5-0.5b",
    decoupled: bool = True,
    objective: Literal["tgs", "renewal"] = "tgs",
    reconfigure: bool = True,
    draft_gpus: Annotated[int, Field(ge=1, le=1024)] | None = None,
    window: DraftTokens | None = None,
    best_of_n: bool = True,
    b_max: Count = 8,
    drafters: tuple[str, ...] = ("ngram", "qwen2.5-0.5b", "qwen2.5-1.5b"),
    assignment: Literal["by_drafter", "by_request"] = "by_drafter",
    kv: Literal["recompute", "transfer"] = "recompute",
) -> System:
    """verl colocated with decoupled speculation: GPUs reserved for drafting draft while workers verify; on-policy.

    As verl_colocated, with the method specactor: the verifier has the worker's tp; Algorithm 1 plans how many GPUs draft for it
    and how many tokens ahead (`decoupled`); Algorithm 2 gives responses with low acceptance rates their own window and mode
    (`reconfigure`). In the tail of the rollout, each freed worker gets one of the `drafters`, coupled, on its own tp GPUs. It
    generates copies of at most `b_max` unfinished requests with low acceptance rates, continuing from the tokens generated so
    far (`best_of_n`). Requests are assigned by Algorithm 3, or request by request in the order of the draft ladder
    ("fastest-of-N"; `assignment`). A request is done when its first copy is; tokens of the other copies are duplicates. A copy
    recomputes its KV cache, or receives it over the network (`kv`). The default of b_max is assumed. All `drafters` are
    resident, so their weights shrink the KV cache of every worker.
    Not modelled: as verl_colocated, and the method specactor; the choice of the first drafter by the ladder (it is `model`);
    copies with decoupled drafting; recomputing the head of a KV cache while its tail is transferred; correlated acceptance of
    different drafters.
    """
    rule = BestOfN(drafters, b_max, assignment, kv) if best_of_n and drafters else None
    return in_turns(
        collector=best_of_n_batch if rule else full_batch,
        best_of_n=rule,
        paper="SpecActor, arXiv 2511.16193",
        speculation=specactor_drafting(model, decoupled, draft_gpus, window, objective, reconfigure),
    )


@recipe("dispatch", *GROUPS, dispatch="even_split")
def tlt(adaptive: bool = True, bandit: bool = True, bucketed_graphs: bool = True, threshold: Count = 32) -> System:
    """verl colocated with an EAGLE-type drafter for the tail of the rollout, trained on idle workers; on-policy.

    As verl_colocated 0.4, with the method tlt: a worker decodes with draft trees once at most `threshold` of its responses are
    running; BEG-MAB chooses the trees (`bandit`); idle workers train the drafter (`adaptive`).
    Not modelled: as verl_colocated, and the method tlt.
    """
    return in_turns(
        paper="Taming the Long Tail, arXiv 2511.16665",
        speculation=tlt_drafting(
            adaptive=adaptive, bandit=bandit, bucketed_graphs=bucketed_graphs, threshold=threshold
        ),
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
