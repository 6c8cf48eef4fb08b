"""The policy: a Qwen3 in float32 or bfloat16, the log-probs of tokens under it, and its folders,
which vLLM loads.

Invariant: values of tokens are flat, in float32, one per response token, in the order of the
responses; they do not depend on the batching. Sequences are padded on the right, where a causal
model never looks: no attention mask is needed. Temperature is 1 throughout, for log-probs of a
policy that samples at 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as nnf
from pydantic import BaseModel, Field, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from simrl.errors import InputError, StoppedError, first_line
from simrl.files import write_whole_folder

WEIGHTS = "model.safetensors"
# that pass the output head at once: 1.2 GB of logits in float32 for 152 thousand tokens
HEAD_POSITIONS = 2048
MANIFEST = "files.txt"
# transformers then makes no mask, and sdpa runs its causal kernel.
_CAUSAL = {"full_attention": None}

Weights = Mapping[str, torch.Tensor]  # a state_dict


class PolicyConfig(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Shape of the model. vLLM's attention takes heads of 32, 64, 96 … dimensions."""

    layers: int = Field(default=4, ge=1)
    hidden: int = Field(default=128, ge=1)
    heads: int = Field(default=4, ge=1)
    kv_heads: int = Field(default=2, ge=1)
    intermediate: int = Field(default=384, ge=1)

    @model_validator(mode="after")
    def _heads_fit(self) -> PolicyConfig:
        if self.hidden % (32 * self.heads) or self.heads % self.kv_heads:
            raise ValueError("hidden is a multiple of 32 × heads, heads one of kv_heads")
        return self


class TokenIds(NamedTuple):
    """A prompt and its response."""

    prompt: Sequence[int]
    response: Sequence[int]


class TokenValues(NamedTuple):
    """Flat values per response token: its log-prob, and the entropy of the distribution it was
    drawn from, in nat."""

    log_probs: torch.Tensor
    entropies: torch.Tensor


def make_policy(config: PolicyConfig, vocabulary: int, most_tokens: int, seed: int) -> Any:
    """Return a Qwen3ForCausalLM with random weights drawn from the seed, for prompts with responses
    up to `most_tokens`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(
            qwen3(**config.model_dump(), vocabulary=vocabulary, most_tokens=most_tokens)
        )


def qwen3(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocabulary: int,
    most_tokens: int,
    **others: Any,
) -> Any:
    """Return the configuration of a Qwen3, in float32 and with an output head of its own unless
    `others`, further fields of it, differ."""
    fields = {
        "head_dim": hidden // heads,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "architectures": ["Qwen3ForCausalLM"],
    }
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=most_tokens,
        **(fields | others),
    )


def save_policy(model: Any, folder: str | Path) -> Path:
    """Write config.json and model.safetensors, both or neither."""
    with write_whole_folder(Path(folder), MANIFEST) as temporary:
        model.config.save_pretrained(temporary)
        weights = {
            name: tensor.detach().contiguous() for name, tensor in model.named_parameters()
        }  # tied ones once
        save_file(weights, temporary / WEIGHTS, metadata={"format": "pt"})
    return Path(folder)


def load_weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """Return the weights in a folder: in the file of `save_policy`, or in several, as large models
    come. Raise `InputError` where there are none."""
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")) or [Path(folder) / WEIGHTS]:
        try:
            weights |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{file}: holds no weights ({first_line(error)}); name a folder of a policy"
            ) from error
    return weights


def load_policy(folder: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return the Qwen3 in a folder, with weights of this type. Raise `InputError` where there is
    none."""
    weights = load_weights(folder)
    try:
        config = Qwen3Config.from_pretrained(folder, local_files_only=True, dtype=dtype)
        # By its constructor, rotary frequencies stay in float32.
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        if model.config.tie_word_embeddings:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        model.load_state_dict(weights)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise InputError(
            f"{folder}: holds no policy ({first_line(error)}); name a folder of a policy"
        ) from error
    return model


def micro_batches(lengths: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    """Yield the indices of sequences in batches of at most `most_tokens` tokens with padding, the
    longest first. A longer sequence gets a batch of its own."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    start = 0
    while start < len(order):
        size = max(1, most_tokens // max(1, lengths[order[start]]))
        yield order[start : start + size]
        start += size


def token_values(
    model: Any, sequences: Sequence[TokenIds], weights: Weights | None = None
) -> TokenValues:
    """Run one forward pass over all sequences, with gradients of the log-probs unless they are
    switched off; `weights` replace the model's own. The output head takes `HEAD_POSITIONS` at once:
    logits would fill a GPU."""
    device = next(model.parameters()).device
    ids = pad_sequence(
        [torch.tensor([*each.prompt, *each.response]) for each in sequences], batch_first=True
    ).to(device)
    belongs = [
        torch.arange(1, len(prompt) + len(response)) >= len(prompt)
        for prompt, response in sequences
    ]
    # Positions whose next token belongs to a response, counted here: a GPU would have to be waited
    # for.
    predicts = pad_sequence(belongs, batch_first=True).flatten().nonzero()[:, 0].to(device)
    named = {"input_ids": ids[:, :-1], "attention_mask": _CAUSAL, "use_cache": False}
    if weights is None:
        hidden, head = model.model(**named).last_hidden_state, model.lm_head.weight
    else:
        body = {
            name.removeprefix("model."): value
            for name, value in weights.items()
            if name.startswith("model.")
        }
        hidden = torch.func.functional_call(model.model, body, (), named).last_hidden_state
        head = weights["lm_head.weight"]
    parts = zip(
        hidden.flatten(0, 1).split(HEAD_POSITIONS),
        ids[:, 1:].flatten().split(HEAD_POSITIONS),
        strict=True,
    )
    values = [_values(positions, head, chosen) for positions, chosen in parts]
    return TokenValues(
        *(torch.cat(each).index_select(0, predicts) for each in zip(*values, strict=True))
    )


def _values(hidden: torch.Tensor, head: torch.Tensor, chosen: torch.Tensor) -> TokenValues:
    likely = nnf.linear(hidden, head).float().log_softmax(-1)
    with torch.no_grad():
        entropies = -(likely.exp() * likely).sum(-1)
    return TokenValues(likely.gather(-1, chosen[:, None])[:, 0], entropies)


def log_probs(
    model: Any,
    sequences: Sequence[TokenIds],
    micro_batch_tokens: int,
    weights: Weights | None = None,
) -> torch.Tensor:
    """Return the log-prob of each response token, flat, without gradients. Shape: (response tokens
    of all sequences,)."""
    out = torch.empty(sum(len(each.response) for each in sequences))
    places = token_places([len(each.response) for each in sequences])
    with torch.no_grad():
        for batch in micro_batches(
            [len(s.prompt) + len(s.response) for s in sequences], micro_batch_tokens
        ):
            values = token_values(model, [sequences[i] for i in batch], weights)
            out[np.concatenate([places[i] for i in batch])] = values.log_probs.cpu()
    return out


def clip_gradient(weights: Iterable[torch.Tensor], most: float) -> float:
    """Clip the gradient to the norm `most`; return its norm before. Raise `StoppedError` if it is
    not finite."""
    norm = float(torch.nn.utils.clip_grad_norm_(weights, most))
    if not math.isfinite(norm):
        raise StoppedError(
            f"the gradient is not finite (its length is {norm}); a lower learning_rate may help"
        )
    return norm


def token_places(lengths: Sequence[int]) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Return for each response the indices of its tokens in a flat array of all responses."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    most_tokens: int,
    eos: int,
    temperature: float = 1.0,
    seed: int = 0,
    at_once: int = 256,
) -> list[list[int]]:
    """Return a response to each prompt, up to its end or to `most_tokens`; temperature 0 is greedy.
    Prompts of equal length are batched, up to `at_once`. For evaluation and tests: the rollouts of
    a run come from vLLM."""
    draws = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    responses: list[list[int]] = [[] for _ in prompts]
    for length in sorted({len(prompt) for prompt in prompts}):
        same = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        for start in range(0, len(same), at_once):
            running, cache = same[start : start + at_once], None
            ids = torch.tensor([list(prompts[i]) for i in running], device=draws.device)
            with torch.no_grad():
                for _ in range(most_tokens):
                    out = model(input_ids=ids, past_key_values=cache, use_cache=True)
                    cache, logits = out.past_key_values, out.logits[:, -1]
                    ids = logits.argmax(-1, keepdim=True)
                    if temperature > 0:
                        ids = torch.multinomial(
                            (logits / temperature).softmax(-1), 1, generator=draws
                        )
                    for i, token in zip(running, ids[:, 0].tolist(), strict=True):
                        responses[i].append(token)
                    running = [i for i in running if responses[i][-1] != eos]
                    if not running:
                        break
                    if len(running) < len(ids):
                        going = (ids[:, 0] != eos).nonzero()[:, 0]
                        ids = ids[going]
                        cache.batch_select_indices(going)
    return responses
