"""SkyRL 0.3.0: its staleness manager and its collection of a mini-batch decide as simrl's skyrl_async does."""

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from tests.frameworks.events import SEQUENCES, Counts, compared, happened, rules_of, whole_runs
from tests.frameworks.stubs import driven

NEVER_USED = ("torch", "torchdata", "loguru", "tqdm")


@pytest.fixture(scope="module")
def package() -> Any:
    stubbed = ("skyrl.backends", "skyrl.train.generators", "skyrl.train.trainer")
    stubbed += ("skyrl.train.utils", *NEVER_USED)
    return driven("skyrl.train.fully_async_trainer", ("skyrl", "skyrl.train"), stubbed)


class SkyRL:
    """Its manager and its trainer's collection; a group is its number."""

    def __init__(self, package: Any, staleness: int, workers: int, batch: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.manager = package._AsyncStalenessManager(workers, batch, staleness)
        self.collect = package.FullyAsyncRayPPOTrainer._collect_generation_mini_batch
        self.buffer: asyncio.Queue[int] = asyncio.Queue(batch * (staleness + 1))
        self.trainer = SimpleNamespace(
            mini_batch_size=batch, sample_full_batch=False, all_timings={}
        )

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    def submitted(self, number: int) -> None:
        self.call(asyncio.wait_for(self.manager.acquire_submission_slot(), 1))

    def finished(self, number: int) -> None:
        self.buffer.put_nowait(number)  # raises if it is full, as SkyRL does
        self.call(self.manager.on_rollout_accepted())

    def rejected(self, number: int) -> None:
        self.call(self.manager.on_rollout_rejected())

    def updated(self, version: int) -> None:
        self.call(self.manager.notify_capacity_change(version + 1))

    def may_start(self) -> bool:
        return bool(self.manager._compute_capacity_unlocked() > 0)

    def next_batch(self) -> list[int] | None:
        if self.buffer.qsize() < self.trainer.mini_batch_size:
            return None  # it would wait here
        kept, _, _ = self.call(self.collect(self.trainer, self.buffer, asyncio.Event()))
        return list(kept)


def test_its_manager_and_its_collection_decide_as_simrl_does(package: Any) -> None:
    tried = differing = 0
    for seed in range(SEQUENCES):
        staleness, workers, batch = seed % 5, 1 + seed % 17, 1 + seed % 4
        rules = rules_of(
            "skyrl_async", max_staleness_steps=staleness, num_parallel_generation_workers=workers
        )
        one = compared(rules, SkyRL(package, staleness, workers, batch), Counts(batch), seed)
        tried, differing = tried + one[0], differing + one[1]
    print(f"SkyRL: {tried:,} decisions, {differing} differ")
    assert tried > 20 * SEQUENCES and differing == 0


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("workers", [4, 8, 20])
def test_a_run_in_which_its_classes_decide_is_simrls_own_run(
    package: Any, staleness: int, workers: int
) -> None:
    def taken(batch: int) -> int:
        """Return the next number of workers that SkyRL takes."""
        return min(max(workers, batch), batch * (staleness + 1))

    def parameters(batch: int) -> dict[str, int]:
        return {
            "max_staleness_steps": staleness,
            "num_parallel_generation_workers": taken(batch),
        }

    for seed in range(36):
        simrls, decided = whole_runs(
            "skyrl_async",
            parameters,
            lambda batch, _: SkyRL(package, staleness, taken(batch), batch),
            seed,
            lambda stream: stream.syncs,  # it notes a step once its weights are loaded
        )
        assert happened(decided) == happened(simrls)
