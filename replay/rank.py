"""What vLLM's workers, one process for each rank of an engine, are given: a drafter that drafts nothing, and one that rests.

Where simrl drafts, it does so beside the scheduler (`replay.proposer`), once for all ranks.
"""

from __future__ import annotations

from typing import Any


class NoDrafts:
    """vLLM's custom drafter (`method: custom_class`) where simrl drafts: it drafts nothing."""

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, *arguments: Any, **named: Any) -> None: ...

    def propose(self, sampled_token_ids: list[list[int]], *arguments: Any, **named: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


class Rank:
    """Methods of vLLM's worker (its `worker_extension_cls`)."""

    model_runner: Any

    def let_drafter_rest(self) -> None:
        """Let a draft model run no pass when it is to draft nothing: vLLM's would keep its KV cache up to date, a pass for each
        of the target's. It gets its cache when the running requests recompute theirs."""
        drafter = self.model_runner.drafter
        propose = drafter.propose

        def rested(num_speculative_tokens: int, **named: Any) -> Any:
            if num_speculative_tokens == 0:
                return named["next_token_ids"].new_empty((len(named["next_token_ids"]), 0))
            return propose(num_speculative_tokens=num_speculative_tokens, **named)

        drafter.propose = rested
