"""Parts for vLLM's workers, one process for each rank of an engine: a drafter that drafts nothing, one that
rests, and a correction of sampling on a CPU.

Where simrl drafts, it does so beside the scheduler (`simrl_replay.proposer`), once for all ranks.
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

    def mend_cpu_sampling(self) -> None:
        """Give sampling at a temperature equal distributions with and without drafts.

        On a CPU, vLLM (0.26 to 0.32, its issue 55005) expands the requests' temperatures, top-k and top-p over their draft
        tokens into an integer copy and drops it; logits are then divided by uninitialised memory. Greedy decoding is not
        affected.
        """
        from vllm.v1.sample import rejection_sampler

        rejection_sampler.expand_batch_to_tokens = expanded


def expanded(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """Return a value per token from a value per request, whose tokens end at `cu_num_tokens`; the signature is vLLM's."""
    tokens = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(tokens, output_size=num_tokens)
