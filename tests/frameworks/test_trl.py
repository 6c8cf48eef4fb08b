"""TRL 1.16.0: AsyncGRPO's loop of generation and its queue of rollouts decide as simrl's trl_async does.

The loop starts responses while it has free slots, group after group; responses end when the test says so. The queue's dataset
drops samples that are too stale when the trainer takes them.
"""

import asyncio
import itertools
import queue
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from simrl.pipelines.streaming import GroupStream
from tests.frameworks import events
from tests.frameworks.events import SEQUENCES, Counts, compared, happened, rules_of, whole_runs
from tests.frameworks.stubs import driven

NEVER_USED = ("torch", "accelerate", "datasets", "transformers", "aiohttp", "peft", "trackio")
NEVER_USED += ("trl.trainer", "trl.import_utils", "trl.chat_template_utils")
BESIDE = ("packing", "vllm_client", "weight_transfer", "async_grpo_config")
SETTLED = 6  # turns of the event loop after which every task waits


@pytest.fixture(scope="module")
def package() -> Any:
    folder = "trl.experimental.async_grpo"
    bare = ("trl", "trl.experimental", folder)
    stubbed = (*NEVER_USED, *(f"{folder}.{name}" for name in BESIDE))
    trainer = driven(f"{folder}.async_grpo_trainer", bare, stubbed)
    return trainer


class EmptyError(Exception):
    """The queue has nothing; the trainer would wait."""


class Trl:
    """Its generation loop, and the dataset of its queue. A group is its number."""

    def __init__(self, package: Any, staleness: int, inflight: int, group: int, batch: int) -> None:
        self.version, self.group, self.samples = 0, group, batch * group
        self.stamps: list[int] = []  # of the groups that have begun
        self.running: list[tuple[int, asyncio.Future[None]]] = []
        self.begun = self.taken = 0  # groups that simrl has begun, samples of the next batch
        self.sample = package.RolloutSample
        self.queue: queue.Queue[Any] = queue.Queue(1024)
        self.dataset = package.RolloutQueueDataset(
            self.queue, lambda: self.version, self._empty, 1, defaultdict(list), staleness, 0.0
        )
        self.dataset._traces_per_log = 10**9
        self.batch: list[int] = []
        worker_loop = package.AsyncRolloutWorker.__init__.__globals__["_AsyncRolloutLoop"]
        self.worker = object.__new__(worker_loop)
        self.worker.__dict__.update(
            max_inflight_tasks=inflight,
            num_generations=group,
            environment_factories=None,
            tools=[],
            _standalone_tools=[],
            _multi_environment=False,
            _env_reward_types=(),
            _heartbeat_value=SimpleNamespace(value=0.0),
            _model_version_value=SimpleNamespace(value=0),
            _total_completion_tokens=0,
            _groups_to_score=asyncio.Queue(),
            _dataset_iter=itertools.repeat({"prompt": []}),
            _generate_one=self._generate_one,
        )
        self.loop = asyncio.new_event_loop()
        self.task = self.loop.create_task(self.worker._generate_loop(asyncio.Event()))
        self._settle()

    async def _generate_one(self, prompt: Any, group_id: int, **_: Any) -> tuple[Any, ...]:
        if group_id == len(self.stamps):
            self.stamps.append(self.worker.model_version)
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running.append((group_id, end))
        await end
        return prompt, [], [], 0, 0, None

    def _empty(self, _: float) -> None:
        raise EmptyError

    def _settle(self) -> None:
        for _ in range(SETTLED):
            self.loop.run_until_complete(asyncio.sleep(0))

    def close(self) -> None:
        self.task.cancel()
        self._settle()
        self.loop.close()

    def end(self, which: int = 0) -> None:
        """Let one of the running responses end."""
        _, end = self.running.pop(which)
        end.set_result(None)
        self._settle()

    def end_group(self, number: int) -> None:
        for _ in range(self.group):
            self.end(next(i for i, (group, _) in enumerate(self.running) if group == number))

    def submitted(self, number: int) -> None:
        self.begun = number + 1

    def finished(self, number: int) -> None:
        for _ in range(self.group):
            sample = (None, None, None, None, None, 0.0, self.stamps[number], number, {})
            self.queue.put_nowait(self.sample(*sample))

    def rejected(self, number: int) -> None:
        raise NotImplementedError

    def updated(self, version: int) -> None:
        self.version = self.worker._model_version_value.value = version

    def may_start(self) -> bool:
        return len(self.stamps) > self.begun

    def next_batch(self) -> list[int] | None:
        rows: Iterator[dict[str, Any]] = iter(self.dataset)
        try:
            while len(self.batch) < self.samples:
                self.batch.append(next(rows)["group_id"])
        except EmptyError:
            return None
        batch, self.batch = self.batch, []
        return list(dict.fromkeys(batch))


@dataclass
class Slots:
    """Dispatcher as a word sees it: the free ones of `most` slots."""

    counts: Counts
    most: int
    group: int

    @property
    def free(self) -> int:
        return max(self.most - self.group * len(self.counts.running), 0)


class WholeGroups(Trl):
    """The responses of a group end together."""

    def finished(self, number: int) -> None:
        self.end_group(number)
        super().finished(number)


def test_its_loop_and_its_queue_decide_as_simrl_does(package: Any) -> None:
    tried = differing = 0
    for seed in range(SEQUENCES):
        staleness, group, batch = seed % 4, 1 + seed % 3, 1 + seed % 4
        inflight = 1 + seed % 11
        rules = rules_of("trl_async", max_staleness=staleness, max_inflight_tasks=inflight)
        trl, counts = WholeGroups(package, staleness, inflight, group, batch), Counts(batch)
        counts.run = SimpleNamespace(dispatcher=Slots(counts, inflight, group))
        one = compared(rules, trl, counts, seed, greedy=True)
        trl.close()
        tried, differing = tried + one[0], differing + one[1]
    print(f"TRL: {tried:,} decisions, {differing} differ")
    assert tried > 20 * SEQUENCES and differing == 0


class DecidingByResponse(events.Deciding):
    """Tells TRL's loop of each response that ends, too."""

    ended: int = 0

    def tell(self, stream: GroupStream) -> None:
        super().tell(stream)
        trl, dispatcher = self.framework, stream.run.dispatcher
        assert isinstance(trl, Trl)
        unfinished = dispatcher.in_flight + len(dispatcher._waiting.outside)
        while self.ended < self.submitted * trl.group - unfinished:
            self.ended += 1
            trl.end()


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("inflight", [3, 8, 24])
def test_a_run_in_which_its_loop_and_its_queue_decide_is_simrls_own_run(
    package: Any, staleness: int, inflight: int
) -> None:
    parameters = {"max_staleness": staleness, "max_inflight_tasks": inflight}
    made: list[Trl] = []

    def trl(batch: int, group: int) -> Trl:
        made.append(Trl(package, staleness, inflight, group, batch))
        return made[-1]

    for seed in range(36):
        with patch.object(events, "Deciding", DecidingByResponse):
            simrls, decided = whole_runs(
                "trl_async", parameters, trl, seed, lambda stream: stream.syncs
            )
        assert happened(decided) == happened(simrls)
    for one in made:
        one.close()
