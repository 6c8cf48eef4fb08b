"""verl's own classes and simrl's rules decide alike on the same random events: PyPI's verl 0.9.1, without its heavy needs.

A store of the test's own stands for TransferQueue.
"""

import random
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from simrl.pipelines.streaming import Finished
from simrl.pipelines.verl_v1 import batches_and_warmup, evicted, oldest_stamp_first, refill
from tests.references.verl_v1 import SynchronousLooks, asynchronous_look

SEQUENCES = 1000


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
