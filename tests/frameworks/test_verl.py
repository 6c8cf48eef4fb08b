"""verl's own classes and simrl's rules decide alike on the same random events: PyPI's verl 0.9.1, without its heavy needs.

A store of the test's own stands for TransferQueue.
"""

import asyncio
import random
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from simrl.pipelines.buffered import buffered
from simrl.pipelines.streaming import Finished
from simrl.pipelines.verl_fully_async import budget, forget, max_concurrent, max_required
from simrl.pipelines.verl_v1 import batches_and_warmup, evicted, oldest_stamp_first, refill
from simrl.simulate.run import simulate_prepared
from tests.frameworks.stubs import driven
from tests.helpers import on_gpus, prepared
from tests.references.verl_v1 import SynchronousLooks, asynchronous_look

SEQUENCES = 1000
LENGTHS = {
    "prompts_per_step": 4,
    "group": 2,
    "cap_tokens": 2000,
    "mean_tokens": 500,
    "sigma": 1.2,
    "prompt_tokens": 20,
}


class Store:
    """TransferQueue's part of the test: prompts by name, each with its stamp, status and rewards."""

    def __init__(self, rng: random.Random, equal_share: float) -> None:
        self.rng, self.equal_share = rng, equal_share
        self.stamps: dict[str, int] = {}
        self.finished: dict[str, tuple[float, float]] = {}  # the rewards of two responses
        self.submitted = self.evicted = self.step = 0

    def submit(self, step: int, number: int) -> None:
        self.step = step
        for _ in range(number):
            self.stamps[f"p{self.submitted}"] = step
            self.submitted += 1

    def advance(self) -> None:
        """Let some prompts finish, at least one if any runs."""
        running = list(self.running)
        ends = [name for name in running if self.rng.random() < 0.3] or running[:1]
        for name in ends:
            self.finished[name] = (1.0, float(self.rng.random() < self.equal_share))

    def remove(self, names) -> None:
        for name in names:
            self.stamps.pop(name, None)
            self.finished.pop(name, None)

    @property
    def running(self) -> dict[str, int]:
        return {name: stamp for name, stamp in self.stamps.items() if name not in self.finished}

    def equal(self) -> set[str]:
        return {name for name, (one, other) in self.finished.items() if one == other}

    def kv_list(self):
        items = {}
        for name, stamp in self.stamps.items():
            status = (
                "finished" if name in self.finished else self.rng.choice(["pending", "running"])
            )
            items[name] = {"is_prompt": True, "status": status, "global_steps": stamp}
            if name in self.finished:
                items |= {f"{name}_{i}_0": {"seq_len": 1} for i in (0, 1)}
        return {"train": items}

    def kv_batch_get(self, keys, partition_id, select_fields):
        rewards = [self.finished[key.split("_")[0]][int(key.split("_")[1])] for key in keys]
        return {"extra_fields": [{"reward_extra_info": {"score": reward}} for reward in rewards]}

    def kv_clear(self, partition_id, keys) -> None:
        self.remove(keys)


@pytest.fixture
def buffers(monkeypatch):
    """Return verl's module of replay buffers, imported from its own file."""
    pytest.importorskip("numpy")
    spec = find_spec("verl")
    if spec is None:
        pytest.skip("verl is not installed: .ci/frameworks")
    alike = SimpleNamespace(annotate_tq=lambda **_: lambda method: method)
    stubs = {
        "transfer_queue": {"KVBatchMeta": lambda **fields: SimpleNamespace(**fields)},
        "omegaconf": {"DictConfig": dict},
        "verl.utils.skip": {"SkipManager": alike},
    }
    for name, names in stubs.items():
        stub = ModuleType(name)
        vars(stub).update(names)
        monkeypatch.setitem(sys.modules, name, stub)
    path = Path(spec.origin).parent / "trainer" / "ppo" / "v1" / "replay_buffer.py"
    of_file = spec_from_file_location("replay_buffer_of_verl", path)
    module = module_from_spec(of_file)
    of_file.loader.exec_module(module)
    return module


def looking(base, store, looks):
    """Return a replay buffer that notes what it sees and decides at each look, and lets the store go on between looks."""

    class Looking(base):
        def _sync_metadata_from_transfer_queue(self):
            super()._sync_metadata_from_transfer_queue()
            looks.append(
                SimpleNamespace(
                    running=dict(store.running),
                    finished={name: store.stamps[name] for name in store.finished},
                    equal=store.equal() if self.filter_groups_metric else set(),
                    kept=store.submitted - store.evicted,
                    evicted=set(),
                    begins=0,
                    batch=None,
                )
            )

        def _evict_terminal_groups(self, *arguments):
            result = super()._evict_terminal_groups(*arguments)
            looks[-1].evicted = result[0]
            store.evicted += len(result[0])
            return result

        def _materialize_batch(self, partition, names, snapshot):
            looks[-1].batch = list(names)
            return super()._materialize_batch(partition, names, snapshot)

        def _wait_for_next_poll(self, partition_id, last_debug_time):
            store.advance()
            return last_debug_time

    return Looking


def a_buffer(
    module, mode, store, looks, refilled, threshold=8, strategy="drop", metric=None, **more
):
    base = module.ReplayBuffer if mode == "sync" else module.ReplayBufferAsync
    for name in ("kv_list", "kv_batch_get", "kv_clear"):
        setattr(module.tq, name, getattr(store, name))
    return looking(base, store, looks)(
        mode, {}, threshold, strategy, {}, refill_fn=refilled, filter_groups_metric=metric, **more
    )


def group(number, stamp, equal):
    rollouts = [SimpleNamespace(reward=1.0), SimpleNamespace(reward=1.0 if equal else 0.0)]
    return Finished(number, stamp, rollouts)


def stamps_of(names, look):
    """Return the stamps of a batch: which of equally old prompts it takes is the order of a set."""
    return None if names is None else sorted(look.finished[name] for name in names)


def test_the_asynchronous_buffer_evicts_refills_and_takes_as_the_words_say(buffers):
    tried = differing = 0
    for seed in range(SEQUENCES):
        rng = random.Random(seed)
        batch, updates, warmup = rng.randint(1, 4), rng.randint(1, 3), rng.choice([0, 0.5, 1, 2])
        threshold, strategy = rng.choice([None, 1, 2, 3]), rng.choice(["drop", "wait"])
        filters = rng.random() < 0.5
        if strategy == "wait" and threshold is not None:
            threshold += 1  # of 1, every prompt that runs holds the buffer back
        store, looks = Store(rng, 0.4), []

        def refilled(number: int, store: Store = store, looks: list = looks):
            looks[-1].begins = number
            store.submit(store.step, number)

        buffer = a_buffer(
            buffers, "colocate_async", store, looks, refilled, threshold, strategy,
            "score" if filters else None,
        )  # fmt: skip
        waits_at = threshold if strategy == "wait" else None
        longest = threshold if strategy == "drop" else None
        for step in range(1, rng.randint(3, 7)):
            stream = SimpleNamespace(
                noted_version=(step - 1) * updates,
                batch=batch,
                kept=store.submitted - store.evicted,
            )
            begins = batch * updates + (int(warmup * batch * updates) if step == 1 else 0)
            differing += batches_and_warmup(stream, updates=updates, warmup=warmup) != begins
            tried += 1
            store.submit(step, begins)
            for _ in range(updates):
                del looks[:]
                buffer.sample(step, "train", batch)
                for look in looks:
                    reference = asynchronous_look(
                        step, batch, look.running, look.finished, look.equal, threshold,
                        strategy == "wait",
                    )  # fmt: skip
                    stream.running = look.running
                    stream.buffer = [
                        group(number, stamp, name in look.equal)
                        for number, (name, stamp) in enumerate(look.finished.items())
                    ]
                    names = list(look.finished)
                    gone = [
                        one
                        for one in stream.buffer
                        if evicted(stream, one, updates=updates, longest=longest, filters=filters)
                    ]
                    stream.kept = look.kept - len(gone)
                    more = batches_and_warmup(stream, updates=updates, warmup=warmup)
                    taken = None if gone else oldest_stamp_first(
                        stream, updates=updates, waits_at=waits_at
                    )  # fmt: skip
                    words = (
                        {names[one.number] for one in gone},
                        more,
                        None if taken is None else sorted(one.version for one in taken),
                    )
                    theirs = (look.evicted, look.begins, stamps_of(look.batch, look))
                    alike = (reference.evicted, reference.begins, stamps_of(reference.batch, look))
                    differing += theirs != words or theirs != alike
                    tried += 1
    print(f"asynchronous looks and begins of steps: {tried}, differing {differing}")
    assert tried > 20_000 and not differing


def test_the_synchronous_buffer_credits_two_groups_for_each_that_it_filters(buffers):
    tried = differing = 0
    for seed in range(SEQUENCES):
        rng = random.Random(seed)
        batch, most = rng.randint(1, 4), rng.randint(1, 3)
        store, looks = Store(rng, 0.5), []

        def refilled(number: int, store: Store = store, looks: list = looks):
            looks[-1].begins = number
            store.submit(store.step, number)

        buffer = a_buffer(
            buffers, "sync", store, looks, refilled, metric="score",
            train_batch_size=batch, gen_batch_size=1, max_inflight_gen_batches=most,
        )  # fmt: skip
        for step in range(1, rng.randint(2, 5)):
            store.submit(step, batch)
            del looks[:]
            buffer.sample(step, "train", batch)
            assert not store.stamps  # the surplus is discarded
            rule, credit = SynchronousLooks(batch, most), 0
            for look in looks:
                good = [name for name in look.finished if name not in look.equal]
                reference = rule.look(list(look.running), good, look.equal)
                enough = len(good) >= batch
                more, credit = refill(
                    credit, len(look.equal), enough, len(look.running), most * batch
                )
                takes = enough and not look.running
                theirs = look.evicted, look.begins, look.batch is not None
                words = look.equal, more, takes
                alike = reference.evicted, reference.begins, reference.batch is not None
                differing += theirs != words or theirs != alike
                tried += 1
    print(f"synchronous looks: {tried}, differing {differing}")
    assert tried > 5_000 and not differing


class Deciding:
    """verl's asynchronous buffer as the word `ready` of a run: it sees the run's groups, evicts and takes."""

    def __init__(self, module, updates, threshold, strategy, filters):
        self.updates, self.groups, self.stream = updates, {}, None
        self.looked = 0
        deciding = self

        class Buffer(module.ReplayBufferAsync):
            def _select_prompt_uids(self, partition, names, batch):  # equally old ones by number
                return super()._select_prompt_uids(partition, sorted(names, key=int), batch)

            def _evict_terminal_groups(self, *arguments):
                result = super()._evict_terminal_groups(*arguments)
                deciding.gone = [deciding.groups[name] for name in result[0]]
                return result

            def _wait_for_next_poll(self, *_):
                raise TimeoutError

        for name in ("kv_list", "kv_batch_get", "kv_clear"):
            setattr(module.tq, name, getattr(self, name))
        metric = "score" if filters else None
        self.buffer = Buffer(
            "separate_async", {}, threshold, strategy, {},
            refill_fn=self.refilled, filter_groups_metric=metric,
        )  # fmt: skip

    def kv_list(self):
        self.groups = {str(group.number): group for group in self.stream.buffer}
        running = {str(number): ("running", stamp) for number, stamp in self.stream.running.items()}
        finished = {name: ("finished", group.version) for name, group in self.groups.items()}
        items = {
            name: {"is_prompt": True, "status": status, "global_steps": stamp}
            for name, (status, stamp) in (running | finished).items()
        }
        for name, group in self.groups.items():
            items |= {f"{name}_{i}_0": {"seq_len": 1} for i in range(len(group.rollouts))}
        return {"train": items}

    def kv_batch_get(self, keys, partition_id, select_fields):
        places = [key.split("_") for key in keys]
        rewards = [self.groups[name].rollouts[int(i)].reward for name, i, _ in places]
        return {"extra_fields": [{"reward_extra_info": {"score": reward}} for reward in rewards]}

    def kv_clear(self, partition_id, keys):
        pass  # the run takes and drops groups itself

    def refilled(self, number):
        assert number == len(self.gone)
        self.stream.drop(self.gone)  # whose room is refilled at once

    def ready(self, stream):
        self.stream, self.looked = stream, self.looked + 1
        try:
            batch, _ = self.buffer.sample(
                stream.noted_version // self.updates + 1, "train", stream.batch
            )
        except TimeoutError:
            return None
        names = dict.fromkeys(key.split("_")[0] for key in batch.keys)
        return [self.groups[name] for name in sorted(names, key=int)]


@pytest.mark.parametrize("name", ["verl_v1_colocate_async", "verl_v1_separate_async"])
@pytest.mark.parametrize(
    "threshold, strategy, filters",
    [(8, "drop", False), (1, "drop", True), (2, "drop", True), (2, "wait", False), (None, "drop", True)],
)  # fmt: skip
def test_a_run_that_verls_own_buffer_decides_updates_when_simrls_own_does(
    buffers, name, threshold, strategy, filters
):
    parameters = {"max_span": threshold, "on_stale": strategy, "filter_groups": filters}
    updates, steps, same = 1, 6, 0
    if name == "verl_v1_separate_async":
        parameters["sync_step"], updates, steps = 2, 2, 12
    for seed in range(3):
        changes = {"workload": {"synthetic": LENGTHS | {"steps": 4}}, "seed": seed, "steps": steps}
        ready = prepared(on_gpus(name, parameters, 2, **changes))
        words = ready.system.pipeline.keywords["rules"]
        decides = Deciding(buffers, updates, threshold, strategy, filters)
        rules = replace(words, ready=decides.ready, stale=None)
        theirs = replace(
            ready, system=replace(ready.system, pipeline=partial(buffered, rules=rules))
        )
        ours, other = simulate_prepared(ready), simulate_prepared(theirs)
        assert other.steps.equals(ours.steps)  # times, versions, tokens
        columns = ["uid", "trained_step"]
        assert other.samples.select(columns).equals(ours.samples.select(columns))
        same += ours.steps.num_rows
        assert decides.looked >= steps
    print(f"{name} {threshold} {strategy} {filters}: {same} updates alike")


class FullyAsynchronous:
    """verl's rollouter with samples of the test's own: which of them run, and how many wait in the queue."""

    def __init__(self, module, required, concurrent):
        self.submitted, self.queued, self.running = 0, 0, {}
        rollouter = self.rollouter = object.__new__(module.FullyAsyncRollouter)
        module.safe_create_task = self.task
        module.print = lambda *_: None
        vars(rollouter).update(
            lock=asyncio.Lock(),
            _resume_event=asyncio.Event(),
            pending_queue=asyncio.Queue(),
            active_tasks=set(),
            staleness_samples=0,
            paused=False,
            max_required_samples=required,
            max_concurrent_samples=concurrent,
            max_queue_size=required,
            message_queue_client=self,
            idle_start_time=0.0,
            step_start_time=0.0,
            _step_generated_samples=0,
            _completed_steps=0,
            _step_samples_history=[],
            _record_active_count=lambda: None,
            _compute_rollout_resource_utilization=lambda: 0.0,
            _process_single_sample_streaming=self.generated,
        )
        for number in range(1000):
            rollouter.pending_queue.put_nowait(SimpleNamespace(sample_id=number))

    def task(self, coroutine, name, task_set):
        self.submitted += 1
        task = asyncio.create_task(coroutine)
        task_set.add(task)
        return task

    async def generated(self, sample):
        self.running[sample.sample_id] = ends = asyncio.get_running_loop().create_future()
        await ends
        del self.running[sample.sample_id]
        self.queued += 1

    async def get_statistics(self):
        return {"queue_size": self.queued}

    async def get_queue_size(self):
        return self.queued


async def settle():
    for _ in range(30):
        await asyncio.sleep(0)


async def fully_asynchronous(module, rng, forgets):
    """Return how many decisions were tried, and how many differ, in one random sequence of events."""
    batch, sync_step = rng.randint(1, 4), rng.randint(1, 3)
    staleness, replicas, per_replica = (
        rng.choice([0, 0.1, 0.5, 1, 2]),
        rng.randint(1, 2),
        rng.randint(1, 6),
    )
    bound = {"staleness": staleness, "sync_step": sync_step, "per_replica": per_replica}
    required = max_required(batch, 1, staleness, sync_step)
    theirs = FullyAsynchronous(module, required, max_concurrent(replicas, per_replica, required))
    dispatcher = SimpleNamespace(active=list(range(replicas)))
    stream = SimpleNamespace(
        batch=batch, kept=0, taken_before_sync=0, running=set(), facts={},
        run=SimpleNamespace(dispatcher=dispatcher),
    )  # fmt: skip
    worker = asyncio.create_task(theirs.rollouter._processor_worker())
    tried = differing = taken = 0

    def admit():
        while budget(stream, **bound) > 0:
            stream.running.add(stream.kept)
            stream.kept += 1

    async def finish():
        number = rng.choice(sorted(theirs.running))
        theirs.running[number].set_result(None)
        stream.running.discard(number)

    for _ in range(60):
        await settle()
        admit()
        tried += 1
        if theirs.submitted != stream.kept:
            differing += 1
            break
        event = rng.random()
        if event < 0.6 and theirs.running:
            await finish()
        elif event < 0.8 and theirs.queued >= batch:
            theirs.queued -= batch
            taken += batch
        elif event > 0.9:
            if forgets:
                forget(stream, **bound)
            stream.taken_before_sync = taken
            reset = asyncio.create_task(theirs.rollouter.reset_staleness())
            await settle()
            if not reset.done():  # it waits for the lock that a waiting sample holds
                await finish()
            await reset
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)
    for ends in theirs.running.values():
        ends.cancel()
    await settle()
    return tried, differing


def test_the_fully_asynchronous_rollouter_submits_as_the_words_say_and_forgets_a_sample(capsys):
    verl = "verl.experimental.fully_async_policy"
    module = driven(
        f"{verl}.fully_async_rollouter",
        bare=["verl", "verl.experimental", verl],
        stubbed=[
            *("ray", "torch", "omegaconf", "tensordict", "transfer_queue"),
            *(
                "verl.protocol",
                "verl.single_controller",
                "verl.trainer",
                "verl.utils",
                "verl.workers",
            ),
            *("verl.experimental.agent_loop", "verl.experimental.separation"),
            *(f"{verl}.detach_utils", f"{verl}.message_queue"),
        ],
    )
    counts = {}
    for forgets in (True, False):
        sequences = [
            asyncio.run(fully_asynchronous(module, random.Random(seed), forgets))
            for seed in range(SEQUENCES)
        ]
        counts[forgets] = tuple(map(sum, zip(*sequences, strict=True)))
    print(f"with the forgotten sample {counts[True]}, without {counts[False]}")
    assert counts[True][0] > 40_000 and counts[True][1] == 0 < counts[False][1]
