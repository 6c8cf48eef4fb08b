"""AReaL 1.0.4: its `StalenessManager` and the order of its `BatchTaskDispatcher` decide as simrl's areal does."""

import threading
from typing import Any

import pytest

from tests.frameworks.events import SEQUENCES, Counts, compared, happened, rules_of, whole_runs
from tests.frameworks.stubs import driven

NEVER_USED = ("torch", "torchdata", "transformers", "requests", "aiofiles", "uvloop", "PIL")


@pytest.fixture(scope="module")
def package() -> Any:
    stubbed = (
        *NEVER_USED,
        "areal.utils",
        "areal.infra",
        "areal.api.alloc_mode",
        "areal.api.cli_args",
    )
    of_api = driven("areal.api.io_struct", ("areal", "areal.api"), stubbed)
    stubbed = (*NEVER_USED, "areal.api", "areal.utils", "areal.experimental", "areal.infra.rpc")
    stubbed += ("areal.infra.utils", "areal.infra.workflow_context")
    package = driven("areal.infra.workflow_executor", ("areal", "areal.infra"), stubbed)
    manager = package.StalenessManager
    manager.__init__.__globals__["RolloutStat"] = of_api.RolloutStat
    return package


class Areal:
    """Its manager and its dispatcher; its version is the weights' that the engines have."""

    def __init__(self, package: Any, eta: int, concurrent: int, batch: int) -> None:
        self.version = 0
        self.batch = batch
        self.manager = package.StalenessManager(self, concurrent, batch, eta)
        self.timed = package.TimedResult
        self.dispatcher = object.__new__(package.BatchTaskDispatcher)
        self.dispatcher._result_cv = threading.Condition()
        self.dispatcher._pending_results = {}
        self.dispatcher._active_task_ids = set()
        self.dispatcher._thread_exception = None
        self.dispatcher._check_thread_exception = lambda: None

    def get_version(self) -> int:
        return self.version

    def submitted(self, number: int) -> None:
        self.manager.on_rollout_enqueued()
        self.manager.on_rollout_submitted()

    def finished(self, number: int) -> None:
        self.manager.on_rollout_accepted()
        result = self.timed(create_time=number, data=number, task_id=number)
        self.dispatcher._pending_results[number] = result

    def rejected(self, number: int) -> None:
        self.manager.on_rollout_rejected()

    def updated(self, version: int) -> None:
        self.version = version

    def may_start(self) -> bool:
        return bool(self.manager.get_capacity() > 0)

    def next_batch(self) -> list[int] | None:
        taken = self.dispatcher.wait_results(self.batch, timeout=0, raise_timeout=False)
        return sorted(taken) or None


def test_its_manager_and_its_dispatcher_decide_as_simrl_does(package: Any) -> None:
    tried = differing = 0
    for seed in range(SEQUENCES):
        eta, concurrent, batch = seed % 5, 1 + seed % 17, 1 + seed % 4
        rules = rules_of("areal", eta=eta, max_concurrent=concurrent)
        one = compared(rules, Areal(package, eta, concurrent, batch), Counts(batch), seed)
        tried, differing = tried + one[0], differing + one[1]
    print(f"AReaL: {tried:,} decisions, {differing} differ")
    assert tried > 20 * SEQUENCES and differing == 0


@pytest.mark.parametrize("eta", [0, 1, 2, 4])
@pytest.mark.parametrize("concurrent", [1, 3, 8])
def test_a_run_in_which_its_classes_decide_is_simrls_own_run(
    package: Any, eta: int, concurrent: int
) -> None:
    parameters = {"eta": eta, "max_concurrent": concurrent}
    for seed in range(36):
        simrls, decided = whole_runs(
            "areal", parameters, lambda batch, _: Areal(package, eta, concurrent, batch), seed
        )
        assert happened(decided) == happened(simrls)


def test_a_run_in_which_they_allow_a_version_more_is_another_run(package: Any) -> None:
    parameters = {"eta": 1, "max_concurrent": 8}
    runs = [
        whole_runs("areal", parameters, lambda batch, _: Areal(package, 2, 8, batch), seed)
        for seed in range(12)
    ]
    assert any(happened(decided) != happened(simrls) for simrls, decided in runs)
