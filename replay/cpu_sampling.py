"""Temperatures that reach vLLM's rejection sampler on a CPU.

Invariant: after `mend`, what vLLM samples at a temperature with drafts is distributed as without.

On a CPU, vLLM (0.26 to 0.32, its issue 55005) spreads the requests' temperatures, top-k and top-p over their draft tokens into
an integer copy that it drops; logits are then divided by whatever was in that memory. Greedy decoding does not come by.
"""

from __future__ import annotations

from typing import Any


def mend() -> None:
    """Puts a right function in the place of the wrong one, in this process."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expanded


def expanded(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """One value a token from one value a request, whose tokens end at `cu_num_tokens`; as vLLM's own, signature and all."""
    tokens = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(tokens, output_size=num_tokens)
