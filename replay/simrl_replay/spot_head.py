"""TLT's spot training in a replay: a head is really trained, iteration by iteration, when the
schedule's spot trainer says so, and comes to the engines with the next policy weights.

Invariant: the schedule decides what is trained and when: its `SpotTrainer`, the object that was
simulated, draws the batches, and its sessions last as long as predicted. The real iterations run in
a process of their own, as they come; a load of weights waits for those that its version's head is
made of. Every engine gets equal heads for equal policy versions.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from simrl.errors import StoppedError
from simrl.files import temporary_folder
from simrl.result.result import Result
from simrl.runtime.rollout import Rollout
from simrl.runtime.spot_trainer import SpotTrainer
from simrl.trace.trace import Sample
from simrl_replay.clock import WallClock
from simrl_replay.host import Channel, Failed
from simrl_replay.link import ProcessLink, raise_death, wait_until_ready


class Text(NamedTuple):
    """A prompt and its response."""

    prompt: Sequence[int]
    response: Sequence[int]


class Iterate(NamedTuple):
    """Order to train on these responses of the policy in a folder, each on its last `window`
    tokens; None: on all."""

    target: str
    batch: tuple[Text, ...]
    window: int | None


class Publish(NamedTuple):
    """Order to write the weights of the head as they are."""

    folder: str


class Iterated(NamedTuple):
    """Report of an iteration: its loss a token, the share of tokens that head and target agree on
    (greedily, before the step), its tokens, and its seconds."""

    loss: float
    agreement: float
    tokens: int
    seconds: float


class Published(NamedTuple):
    """Report that a folder has weights, and the seconds that it took."""

    folder: str
    seconds: float


class SpotHead:
    """The head in training. `prompt_ids` gives the tokens of a prompt, `weights` the folder of a
    policy version."""

    def __init__(
        self,
        env: WallClock,
        link: ProcessLink,
        spot: SpotTrainer,
        prompt_ids: Callable[[Sample], tuple[int, ...]],
        weights: Callable[[int], str],
        folder: Path,
    ) -> None:
        self._link, self._spot, self._prompt_ids = link, spot, prompt_ids
        self._weights, self._window, self._folder = weights, spot.window_tokens, folder
        self._version = 0  # of the rollout whose responses are in `_now`
        self._now: list[Text] = []
        self._before: list[Text] = []
        self._orders: deque[int] = deque()  # not answered yet: the version that each is for
        self._news = False  # iterations since the last head was published
        self._last, self._folders = "", dict[int, str]()
        self._reports: dict[int, list[Iterated]] = defaultdict(
            list
        )  # by version that they train for
        gone = partial(raise_death, link)
        env.listen(link.connection, self._hear, gone, lambda: bool(self._orders))
        spot.on_iteration = self._iterate

    def finished(self, rollout: Rollout) -> None:
        """Record a finished response."""
        self._look()
        if rollout.done:
            text = Text(self._prompt_ids(rollout.sample), rollout.token_ids or ())
            self._now.append(text)

    def head(self, version: int) -> str:
        """Return the folder of the head that comes with a policy version, which may be in writing;
        "" for the head that training began with."""
        if self._news and version not in self._folders:
            self._last, self._news = str(self._folder / f"head-{version}"), False
            self._order(Publish(self._last), version)
        return self._folders.setdefault(version, self._last)

    def facts(self) -> dict[str, Any]:
        """Return what was trained, by the policy version that the head came with."""
        return {
            "drafter_training": [
                {
                    "version": version,
                    "iterations": len(reports),
                    "tokens": sum(each.tokens for each in reports),
                    "seconds": sum(each.seconds for each in reports),
                    "loss": [reports[0].loss, reports[-1].loss],
                    "agreement": [reports[0].agreement, reports[-1].agreement],
                }
                for version, reports in sorted(self._reports.items())
            ]
        }

    def _look(self) -> None:
        version = len(self._spot.behind) - 1
        if version != self._version:
            self._before, self._now, self._version = self._now, [], version

    def _iterate(self, batch: Sequence[int]) -> None:
        """Train on responses of these lengths, as far as an iteration looks at them."""
        self._look()
        pool, chosen = [*self._now, *self._before], []
        for tokens in batch:
            trained = [min(len(ids.response), self._window or len(ids.response)) for ids in pool]
            if tokens in trained:  # else its response was dropped with its step
                chosen.append(pool.pop(trained.index(tokens)))
        if chosen:
            self._news = True
            target = self._weights(self._version)
            self._order(Iterate(target, tuple(chosen), self._window), self._version + 1)

    def _order(self, order: Iterate | Publish, version: int) -> None:
        self._orders.append(version)
        self._link.send([order])

    def _hear(self, reports: Sequence[Any]) -> None:
        for report in reports:
            if isinstance(report, Failed):
                raise StoppedError(f"{self._link.name}: {report.message}")
            version = self._orders.popleft()
            if isinstance(report, Iterated):
                self._reports[version].append(report)


def _train(channel: Channel, folder: str, learning_rate: float, device: str) -> None:
    from simrl_replay.grpo.eagle import serve_head_trainer  # torch is for its process alone

    serve_head_trainer(channel, folder, learning_rate, device)


@contextmanager
def head_trainer(
    folder: Path, learning_rate: float, device: str, variables: dict[str, str], deadline_s: float
) -> Iterator[tuple[ProcessLink, Path]]:
    """Run the process that trains the head in a folder; give the line to it, and a folder for the
    heads that it writes, which ends with it."""
    with temporary_folder() as place:
        life = partial(_train, folder=str(folder), learning_rate=learning_rate, device=device)
        link = ProcessLink("drafter's trainer", life, place / "log.txt", variables)
        try:
            wait_until_ready([link], deadline_s)
            yield link, place
        finally:
            link.kill()


def accept_lengths(result: Result) -> dict[int, float]:
    """Return the tokens of a pass with drafts, by the policy version that a sample began with, for
    versions that had such passes."""
    sums: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    segments = result.segments.to_pydict()
    began = dict(zip(reversed(segments["uid"]), reversed(segments["policy_version"]), strict=True))
    columns = ("uid", "verifications", "verified_tokens")
    table = result.samples.to_pydict()
    for uid, passes, tokens in zip(*(table[name] for name in columns), strict=True):
        if passes:
            sums[began[uid]][0] += passes
            sums[began[uid]][1] += tokens
    return {version: tokens / passes for version, (passes, tokens) in sorted(sums.items())}
