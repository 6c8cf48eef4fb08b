"""Parts for vLLM's workers, one process for each rank of an engine: a drafter that drafts nothing,
one that drafts when it is called, sampling that follows recorded tokens, and a correction of sampling on a CPU.

Where simrl drafts, it does so beside the scheduler (`simrl_replay.proposer`), once for all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Recorded(NamedTuple):
    """Tokens that a request will sample, once it has `after_tokens` tokens, those of its prompt
    included."""

    after_tokens: int
    token_ids: np.ndarray[Any, np.dtype[np.int32]]


class NoDrafts:
    """vLLM's custom drafter (`method: custom_class`) where simrl drafts: it drafts nothing."""

    def __init__(self, vllm_config: Any) -> None:
        """Take what vLLM gives to a drafter."""

    def load_model(self, *arguments: Any, **named: Any) -> None:
        """Load nothing."""

    def propose(
        self, sampled_token_ids: list[list[int]], *arguments: Any, **named: Any
    ) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


class Rank:
    """Methods of vLLM's worker (its `worker_extension_cls`)."""

    model_runner: Any

    def draft_when_called(self) -> None:
        """Let a draft model draft when `draft` is called after a pass, not within it: how many
        tokens it is to draft follows from what the pass has accepted."""
        runner = self.model_runner
        propose, runner.to_draft = runner.drafter.propose, None

        def held_back(num_speculative_tokens: int, **named: Any) -> Any:
            names = list(runner.input_batch.req_ids)
            runner.to_draft = names, partial(propose, **named)
            return named["next_token_ids"].new_empty((len(named["next_token_ids"]), 0))

        runner.drafter.propose = held_back

    def draft(self, tokens: int) -> dict[str, list[int]]:
        """Draft `tokens` tokens after the last pass for each of its requests; return them by vLLM's
        ids. With 0 the drafter computes its KV cache of what the pass has computed, no more."""
        import torch

        names, propose = self.model_runner.to_draft
        with torch.inference_mode():
            drafted = propose(num_speculative_tokens=tokens)
        return dict(zip(names, drafted.tolist(), strict=True))

    def load_drafter(self, folder: str) -> None:
        """Load weights of the drafter in place, as vLLM reloads a target's; weights that the
        folder lacks (those that it shares with its target) stay."""
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        runner = self.model_runner
        model = runner.drafter.model
        weights = {
            name: value
            for file in sorted(Path(folder).glob("*.safetensors"))
            for name, value in load_file(file).items()
        }
        with set_current_vllm_config(runner.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights(iter(weights.items()))
            finalize_layerwise_reload(model, runner.speculative_config.draft_model_config)

    def time_sampling(self) -> None:
        """Time each sampling from now on, with the device idle before and after it."""
        import torch

        runner = self.model_runner
        sample, runner.sampled = runner._sample, []
        settle = torch.accelerator.synchronize if torch.accelerator.is_available() else lambda: None

        def timed(logits: Any, spec_decode_metadata: Any) -> Any:
            settle()
            began_s = time.monotonic()
            output = sample(logits, spec_decode_metadata)
            settle()
            runner.sampled.append((len(output.sampled_token_ids), time.monotonic() - began_s))
            return output

        runner._sample = timed

    def sampling_s(self, sequences: int) -> list[float]:
        """Return the seconds of each timed sampling of this number of sequences."""
        return [seconds for rows, seconds in self.model_runner.sampled if rows == sequences]

    def follow_recorded(self) -> None:
        """Let requests sample the tokens that `record` has of them. The sampler runs as ever; then
        its draws are replaced, and drafts stand as far as they are the recorded tokens. So weights
        may be random, and every pass is the recorded one's."""
        runner = self.model_runner
        sample, runner.recorded = runner._sample, {}

        def followed(logits: Any, spec_decode_metadata: Any) -> Any:
            output = sample(logits, spec_decode_metadata)
            output.sampled_token_ids = as_recorded(
                output.sampled_token_ids, runner.input_batch, runner.recorded
            )
            return output

        runner._sample = followed

    def record(self, request_id: str, after_tokens: int, token_ids: list[int]) -> None:
        """Give a request its tokens."""
        self.model_runner.recorded[request_id] = Recorded(
            after_tokens, np.array(token_ids, dtype=np.int32)
        )

    def forget(self, request_ids: list[str]) -> None:
        """Drop the tokens of requests that are over."""
        for request_id in request_ids:
            self.model_runner.recorded.pop(request_id, None)

    def mend_cpu_sampling(self) -> None:
        """Give sampling at a temperature equal distributions with and without drafts.

        On a CPU, vLLM (0.26 to 0.32, its issue 55005) expands the requests' temperatures, top-k and
        top-p over their draft tokens into an integer copy and drops it; logits are then divided by
        uninitialised memory. Greedy decoding is not affected.
        """
        from vllm.v1.sample import rejection_sampler

        rejection_sampler.expand_batch_to_tokens = expanded


def as_recorded(sampled: Any, batch: Any, recorded: Mapping[str, Recorded]) -> Any:
    """Return the sampled tokens (requests, most tokens of a pass; -1 where there is none), those of
    recorded requests as recorded. A request goes on with zeros where its record ends."""
    rows, width = sampled.shape
    records = [recorded.get(request_id.rpartition("-")[0]) for request_id in batch.req_ids[:rows]]
    if not any(records):
        return sampled
    token_ids = np.full((rows, width), -1, dtype=np.int32)
    for row, record in enumerate(records):
        if record is None:
            continue
        have = int(batch.num_tokens_no_spec[row]) - record.after_tokens
        coming = record.token_ids[have : have + width]
        stand, drafts = 0, batch.spec_token_ids[row] if width > 1 else ()
        while stand < len(drafts) and drafts[stand] == (
            coming[stand] if stand < len(coming) else 0
        ):
            stand += 1
        token_ids[row, : stand + 1] = 0
        token_ids[row, : min(stand + 1, len(coming))] = coming[: stand + 1]
    following = sampled.new_tensor(token_ids)
    if all(records):
        return following
    follows = sampled.new_tensor([[record is not None] for record in records], dtype=bool)
    return following.where(follows, sampled)


def expanded(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Any:
    """Return a value per token from a value per request, whose tokens end at `cu_num_tokens`; the
    signature is vLLM's."""
    tokens = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(
        tokens, output_size=num_tokens
    )
