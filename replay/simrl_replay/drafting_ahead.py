"""Drafting ahead on a real engine: the process of a draft model that works while its verifier does
(decoupled drafting, SpecActor, arXiv 2511.16193, §4.1).

Invariant: it drafts for a request as far as the verifier lets it, and nothing beyond; the verifier
alone decides what stands. A text that was corrected is drafted from the correction on.

The process runs a plain vLLM engine of the draft model (`engine_link(…, work=draft_ahead)`). A text
is a request of that engine: prompt, tokens of the response, drafted tokens. A pass drafts one token
for every text that may have more; the others stay in the engine's batch without a token
(`VllmEngine.held`). When a window turns out right, the request just goes on. After a rejection it is
withdrawn and submitted again with the correction: the engine's prefix cache has all its full blocks,
so that rolling back costs the tokens since the last one.

The verifier's side is `simrl_replay.ahead`, which has the messages. Both sides exchange lists of them
over the pipe of an `EngineLink`: the verifier sends one list after each of its passes, the drafter one after
each pass in which a window is complete.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from simrl_replay.ahead import Drafted, DrafterProcess, Follow, Forget, LoadModel, ModelLoaded
from simrl_replay.host import Channel, Close
from simrl_replay.link import ProcessLink, engine_link, wait_until_ready


class DraftEngine(Protocol):
    """The engine, as the drafter's process needs it."""

    held: set[str]
    settings: Any

    def add(self, request_id: str, prompt_ids: Sequence[int], tokens: int) -> None:
        """Add a request."""

    def abort(self, request_id: str) -> None:
        """End a request."""

    def step(self) -> Sequence[Any]:
        """Run a pass, and return its progress."""

    def load_weights(self, folder: str) -> None:
        """Load weights."""

    def recompute_running(self) -> None:
        """Forget all KV cache."""


@dataclass
class _Text:
    attempt: int
    token_ids: list[int]
    until: int
    window: int
    request_id: str = ""  # of its request at the engine; "" without one
    unreported: int = 0  # drafted tokens at its end

    @property
    def may(self) -> bool:
        return len(self.token_ids) < self.until


class _Drafter:
    """The loop of the drafter's process."""

    def __init__(self, engine: DraftEngine, channel: Any) -> None:
        self._engine, self._channel = engine, channel
        self._texts: dict[int, _Text] = {}
        self._of_request: dict[str, int] = {}
        self._begun = 0
        self.closed = False

    def run(self) -> None:
        while not self.closed:
            drafts = any(text.may for text in self._texts.values())
            self._take_messages(wait=not drafts)
            if not self.closed and any(text.may for text in self._texts.values()):
                self._pass()

    def _take_messages(self, wait: bool) -> None:
        while not self.closed and self._channel.poll(None if wait else 0.0):
            for message in self._channel.recv():
                self._take(message)
            wait = False

    def _take(self, message: Any) -> None:
        match message:
            case Follow():
                self._follow(message)
            case Forget(number):
                self._withdraw(self._texts.pop(number))
            case LoadModel(folder):
                for text in self._texts.values():
                    self._withdraw(text)
                self._texts.clear()
                if folder is not None:
                    self._engine.load_weights(folder)
                    self._engine.recompute_running()
                self._channel.send([ModelLoaded()])
            case Close():
                self.closed = True

    def _follow(self, message: Follow) -> None:
        text = self._texts.get(message.number)
        if text is None:
            text = self._texts[message.number] = _Text(-1, [], 0, 1)
        if text.attempt != message.attempt:
            self._withdraw(text)
            text.token_ids[message.keep :] = message.token_ids
            text.attempt, text.unreported = message.attempt, 0
        text.until, text.window = message.until, message.window

    def _withdraw(self, text: _Text) -> None:
        if text.request_id:
            self._engine.abort(text.request_id)
            del self._of_request[text.request_id]
            text.request_id = ""

    def _pass(self) -> None:
        """Draft one token for every text that may have more, and report complete windows."""
        for number, text in self._texts.items():
            if text.may and not text.request_id:
                self._begun += 1
                text.request_id = f"{number}.{self._begun}"
                self._of_request[text.request_id] = number
                most = self._engine.settings.max_model_len - len(text.token_ids)
                self._engine.add(text.request_id, tuple(text.token_ids), most)
        self._engine.held = {
            text.request_id for text in self._texts.values() if text.request_id and not text.may
        }
        for progress in self._engine.step():
            text = self._texts[self._of_request[progress.request_id]]
            text.token_ids += progress.token_ids
            text.unreported += len(progress.token_ids)
            if progress.finished:
                del self._of_request[text.request_id]
                text.request_id = ""
        self._report()

    def _report(self) -> None:
        drafted = []
        for number, text in self._texts.items():
            if text.unreported and (text.unreported >= text.window or not text.may):
                tokens = tuple(text.token_ids[-text.unreported :])
                drafted.append(Drafted(number, text.attempt, tokens))
                text.unreported = 0
        if drafted:
            self._channel.send(drafted)


def draft_ahead(engine: DraftEngine, channel: Channel) -> None:
    """Run the loop of a drafter's process."""
    _Drafter(engine, channel).run()


def start_drafters(processes: Sequence[DrafterProcess]) -> list[list[ProcessLink]]:
    """Start the drafters of a worker, of one model after another, which may share GPUs; wait until
    all are up. Raise as `wait_until_ready` does. They end with this process."""
    visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    started = []
    for process in processes:
        links = []
        for i in range(process.number):
            gpu = visible[process.first_gpu + i : process.first_gpu + i + 1]
            name = f"drafter {i} ({Path(process.settings.model).name})"
            log = Path(tempfile.mkdtemp()) / "log"  # in the worker's own folder, which ends with it
            variables = {"CUDA_VISIBLE_DEVICES": gpu[0]} if gpu else {}
            links.append(
                engine_link(name, process.settings, log, work=draft_ahead, variables=variables)
            )
        started.append(links)
        # In turn: vLLM takes what a neighbour of its GPU allocates meanwhile for its own.
        wait_until_ready(links, process.start_deadline_s)
    return started
