"""Small random models for replays: Qwen3 in shape, untrained, whose responses can still be drafted
from their history.

Invariant: a model is a pure function of its arguments; a folder is written whole or not at all.

A random transformer either repeats one token or never repeats a context. Three changes give a
middle ground:

- The head is scaled by 14 × √(128 / hidden): the entropy of the next token falls with that factor.
- The output of attention is scaled by 0.06 / layers. Next tokens then depend on the last ones and a
  little on all before; with a larger factor, fewer places of an old response predict a new one.
- The head has no component along a token's own output direction, so that no token predicts itself.

Measured with the defaults and a nudge between epochs (6 prompts of 16 random tokens, 4 responses of
300 tokens an epoch; seeds 0 and 1; acceptance is HistoSpec's, accepted / drafted tokens,
teacher-forced on the second epoch):

    layers, hidden, vocab   entropy at T=1   different tokens in 300   acceptance at T=1   acceptance, greedy
    2, 128,  512            0.50, 0.49 nat   134, 134                  0.49, 0.52          0.59, 0.75
    2, 128, 2048            0.55, 0.54       219, 217                  0.48, 0.49          0.68, 0.71
    4, 256,  512            0.45, 0.42       152, 148                  0.52, 0.50          0.61, 0.80
    4, 256, 2048            0.53, 0.54       231, 232                  0.48, 0.48          0.55, 0.83

No token followed itself. Entropy does not drift with the length. Greedy responses run into loops of
tens of tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

from simrl.errors import InputError
from simrl.files import write_whole_folder

INITIALIZER_RANGE = 0.08
MOST_TOKENS = 8192


def make_model(
    folder: str | Path,
    layers: int = 2,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 512,
    seed: int = 0,
) -> Path:
    """Write a random model, float32, as a Hugging Face folder (config.json, model.safetensors); see
    the top of the module. Raise `InputError` for an invalid shape."""
    if hidden % (2 * heads) or heads % kv_heads or min(layers, vocab - 1) < 1:
        raise InputError(
            f"{layers} layers of {hidden} with {heads} heads, {kv_heads} of keys, and {vocab} tokens are no model; "
            "let hidden be an even multiple of heads, heads a multiple of kv_heads, vocab at least 2"
        )
    import torch
    from transformers import Qwen3ForCausalLM

    from simrl_replay.grpo.policy import qwen3, save_policy

    sizes = (layers, hidden, heads, kv_heads, 3 * hidden)
    config = qwen3(*sizes, vocab, MOST_TOKENS, initializer_range=INITIALIZER_RANGE)
    model = Qwen3ForCausalLM(config)
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() < 2:  # weights of a norm
                weights.fill_(1.0)
                continue
            weights.normal_(0.0, INITIALIZER_RANGE, generator=draws)
            if name.endswith("o_proj.weight"):
                weights.mul_(0.06 / layers)
        alone = model.model(torch.arange(vocab)[:, None]).last_hidden_state[:, 0]
        head = model.lm_head.weight
        head.sub_(
            (head * alone).sum(1, keepdim=True) / (alone * alone).sum(1, keepdim=True) * alone
        )
        head.mul_(14.0 * (128 / hidden) ** 0.5)
    return save_policy(model, folder)


def nudge(folder: str | Path, out: str | Path, scale: float = 0.01, seed: int = 1) -> Path:
    """Write a model after a small random update, as the next policy version: each matrix gets noise
    of `scale` times its own standard deviation. Raise `InputError` for a folder without a model."""
    import torch

    from simrl_replay.grpo.policy import load_policy, save_policy

    model = load_policy(folder)
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() >= 2:
                weights.add_(
                    torch.randn(weights.shape, generator=draws), alpha=scale * float(weights.std())
                )
    return save_policy(model, out)


def make_drafter(folder: str | Path, out: str | Path, eagle: bool = False) -> Path:
    """Write a drafter of the model in `folder`: a model of its first layer alone, or an EAGLE head
    with that layer, which draws nothing from the target's hidden states. Such models accept most of
    its tokens, as attention adds little to a token's own next ones. Raise `InputError` for a folder
    without a model."""
    import torch
    from safetensors.torch import save_file

    from simrl_replay.grpo.policy import MANIFEST, WEIGHTS, load_weights

    every, source = load_weights(folder), Path(folder)
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | {
        "num_hidden_layers": 1
    }
    config.pop("layer_types", None)
    weights = {
        name: value
        for name, value in every.items()
        if not name.startswith("model.layers.") or name.startswith("model.layers.0.")
    }
    if eagle:
        config |= {"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama"}
        without = ("lm_head.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight")
        weights = {
            name.removeprefix("model."): value
            for name, value in weights.items()
            if name not in without and not name.endswith(("q_norm.weight", "k_norm.weight"))
        }
        own = torch.eye(config["hidden_size"])
        weights["fc.weight"] = torch.cat((own, torch.zeros_like(own)), dim=1)
    with write_whole_folder(Path(out), MANIFEST) as temporary:
        (temporary / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        save_file(
            {name: value.contiguous() for name, value in weights.items()}, temporary / WEIGHTS
        )
    return Path(out)
