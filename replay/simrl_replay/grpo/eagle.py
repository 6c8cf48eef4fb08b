"""An EAGLE head, and a process that trains it on what the target generates.

Invariant: the head's weights depend on the head that training began with, and on the iterations in
their order alone. The target is never changed. The head has the target's embedding and output head
unless its folder has others; neither is trained or written. A folder of weights is whole before its report is sent.

The head (EAGLE, arXiv 2401.15077, §4) reads the target's last hidden state at a token and the next
token's embedding, and predicts the next hidden state: a layer like Llama's, without its first norm,
behind a linear map of both (as `EagleLlamaForCausalLM` of vLLM 0.32). Its loss, the paper's, is
the smooth L1 distance to the target's next hidden state, and `CLASSIFICATION` times the
cross-entropy of the two distributions of the token after it. The target's states come from a pass
over prompt and response, as TLT's inference phase has them (arXiv 2511.16665, §4.1).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as nnf
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from simrl.errors import first_line
from simrl.files import write_whole_folder
from simrl_replay.grpo.policy import MANIFEST, WEIGHTS, load_weights
from simrl_replay.host import Channel, Ready, answer_each, errors_sent
from simrl_replay.spot_head import Iterate, Iterated, Publish, Published, Text

CLASSIFICATION = 0.1  # weight of the second loss (EAGLE §4.2)
SHARED = ("embed_tokens", "lm_head")  # what a head may have of its own
BETAS, GRAD_NORM = (0.9, 0.95), 0.5  # of AdamW, and of a longer gradient (EAGLE §5)


class EagleHead(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """The head. `forward` takes embeddings of the next tokens and hidden states of the present
    ones, both (tokens, hidden), from the first token on."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        config._attn_implementation = "sdpa"
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        layers = [LlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        layers[0].input_layernorm = torch.nn.Identity()
        self.layers = torch.nn.ModuleList(layers)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        states = self.fc(torch.cat((embedded, hidden), dim=-1))[None]
        places = torch.arange(states.shape[1], device=states.device)[None]
        rotation = self.rotary(states, places)
        for layer in self.layers:
            states = layer(states, position_ids=places, position_embeddings=rotation)
        return states[0]


def load_head(folder: str | Path) -> EagleHead:
    """Return the head in a folder, in float32. Raise `InputError` for a folder without weights, and
    `RuntimeError` for weights of another form."""
    head = EagleHead(LlamaConfig.from_pretrained(folder, local_files_only=True))
    names = head.state_dict()
    weights = {name: value for name, value in load_weights(folder).items() if name in names}
    head.load_state_dict(weights)
    head.float()
    return head


def save_head(head: EagleHead, folder: str | Path) -> Path:
    """Write the weights that are trained, as safetensors, whole or not at all."""
    with write_whole_folder(Path(folder), MANIFEST) as temporary:
        weights = {name: value.detach().cpu() for name, value in head.state_dict().items()}
        save_file(weights, temporary / WEIGHTS)
    return Path(folder)


class HeadTrainer:
    """A head, its optimizer, and the target that it learns from, on one thread."""

    def __init__(self, folder: str, learning_rate: float, device: str = "cpu") -> None:
        torch.set_num_threads(1)
        self._device, self._of = device, ""
        self.head = load_head(folder).to(device)
        self._own = {name: load_weights(folder).get(f"{name}.weight") for name in SHARED}
        self._optimizer = torch.optim.AdamW(
            self.head.parameters(), lr=learning_rate, betas=BETAS, weight_decay=0.0
        )

    def carry_out(self, order: Iterate | Publish) -> Iterated | Published:
        began_s = time.monotonic()
        if isinstance(order, Publish):
            save_head(self.head, order.folder)
            return Published(order.folder, time.monotonic() - began_s)
        if order.target != self._of:
            model = AutoModelForCausalLM.from_pretrained(
                order.target, local_files_only=True, trust_remote_code=False, dtype="float32"
            )
            self._adopt(model.to(self._device).requires_grad_(False))
            self._of = order.target
        self._optimizer.zero_grad()
        tokens = sum(_trained(ids, order.window) for ids in order.batch)
        loss, agreed = 0.0, 0
        for ids in order.batch:
            losses, agreements = self._losses(ids, order.window)
            (losses / tokens).backward()
            loss, agreed = loss + float(losses.detach()), agreed + agreements
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), GRAD_NORM)
        self._optimizer.step()
        return Iterated(loss / tokens, agreed / tokens, tokens, time.monotonic() - began_s)

    def _adopt(self, target: Any) -> None:
        """Take a target, and its embedding and output head where the head has none of its own. As
        in vLLM (0.32), equal ones are the target's, and follow it from then on."""
        shared = (target.get_input_embeddings().weight, target.get_output_embeddings().weight)
        for name, weights in zip(SHARED, shared, strict=True):
            kept = self._own[name]
            if kept is not None and not self._of and torch.equal(kept, weights.cpu()):
                self._own[name] = None
        self._target = target
        self._embedding, self._output = (
            weights if kept is None else kept.to(self._device)
            for kept, weights in zip(self._own.values(), shared, strict=True)
        )

    def _losses(self, ids: Text, window: int | None) -> tuple[torch.Tensor, int]:
        """Return the sum of the losses of a response's tokens, and how many of them head and target
        agree on. A token's own is the loss of its hidden state."""
        text = torch.tensor([*ids.prompt, *ids.response], device=self._device)
        with torch.no_grad():
            hidden = self._target.model(text[None]).last_hidden_state[0]
            embedded = self._embedding[text]
        places = slice(-_trained(ids, window), None)
        predicted = self.head(embedded[1:], hidden[:-1])[places]
        known = hidden[1:][places]
        with torch.no_grad():
            wanted = self._target.get_output_embeddings()(known)
        logits = nnf.linear(predicted, self._output)
        distance = nnf.smooth_l1_loss(predicted, known, reduction="none").mean(1).sum()
        crossed = nnf.cross_entropy(logits, wanted.softmax(1), reduction="sum")
        agreed = int((logits.argmax(1) == wanted.argmax(1)).sum())
        return distance + CLASSIFICATION * crossed, agreed


def _trained(ids: Text, window: int | None) -> int:
    """Return the number of a response's tokens that are trained on; a first one without a prompt
    has nothing before it."""
    tokens = len(ids.response) - (not ids.prompt)
    return tokens if window is None else min(tokens, window)


def serve_head_trainer(channel: Channel, folder: str, learning_rate: float, device: str) -> None:
    """Run the process of a head's training. An error is sent before the process ends."""
    with errors_sent(channel, first_line):
        trainer = HeadTrainer(folder, learning_rate, device)
        channel.send([Ready(os.getpid(), torch.__version__, 0, 0, time.monotonic())])
        answer_each(channel, trainer.carry_out)
