"""The store of many prompts' histories: what it keeps, and what comes back from disk."""

import threading

import numpy as np
import pytest

from simrl.errors import InputError
from simrl.speculation.history_index import build_index, text_of
from simrl_replay import history_store
from simrl_replay.history_store import HistoryStore
from tests.token_traces import draft


def responses_of(prompt_id, epoch, group=3, tokens=200):
    rng = np.random.default_rng([prompt_id, epoch])
    return [rng.integers(0, 1000, tokens).astype(np.int32) for _ in range(group)]


def filled(prompts=4, epoch=0, **parameters):
    store = HistoryStore(**parameters)
    for prompt_id in range(prompts):
        store.learn(prompt_id, epoch, responses_of(prompt_id, epoch), [0.0, 1.0, 0.5])
        store.wait()
    return store


def test_what_was_learnt_is_indexed_in_the_background():
    with filled() as store:
        expected = build_index(responses_of(2, 0), [0.0, 1.0, 0.5])
        assert np.array_equal(store.index(2), expected)
        assert store.ready(2, 0) and not store.ready(2, 1) and not store.pending(2)
        assert store.memory_bytes == sum(store.index(p).nbytes for p in range(4))
        assert store.index(99) is None and not store.ready(99, 0)


def test_nobody_waits_for_an_index_that_is_being_built(monkeypatch):
    may_build = threading.Event()

    def slow(*arguments):
        may_build.wait(10)
        return build_index(*arguments)

    with filled(1) as store:
        old = store.index(0)
        monkeypatch.setattr(history_store, "build_index", slow)
        store.learn(0, 1, responses_of(0, 1))
        store.learn(5, 1, responses_of(5, 1))
        assert store.index(0) is old and store.index(5) is None
        assert store.pending(0) and store.pending(5) and not store.ready(0, 1)
        may_build.set()
        store.wait()
        assert store.ready(0, 1) and store.ready(5, 1)


def test_an_epoch_takes_the_place_of_the_one_before_and_more_of_an_epoch_is_added():
    with filled(1) as store:
        store.learn(0, 1, responses_of(0, 1))
        store.learn(0, 1, responses_of(0, 7))
        store.learn(0, 0, responses_of(0, 8))  # too late
        store.wait()
        expected = build_index(responses_of(0, 1) + responses_of(0, 7))
        assert np.array_equal(store.index(0), expected)


def test_several_epochs_are_kept_if_asked_for():
    with HistoryStore(epochs_kept=2, threads=2) as store:
        for epoch in range(3):
            store.learn(0, epoch, responses_of(0, epoch), [0, 1, epoch])
        store.wait()
        expected = build_index(responses_of(0, 1) + responses_of(0, 2), [0, 1, 1, 0, 1, 2])
        assert np.array_equal(store.index(0), expected)


def test_over_the_budget_the_oldest_epoch_goes_first_then_what_was_used_least_recently():
    size = filled(1).memory_bytes
    with HistoryStore(memory_bytes=int(3.5 * size)) as store:
        for prompt_id, epoch in ((0, 1), (1, 0), (2, 1), (0, 1), (3, 1)):
            if store.index(prompt_id) is None:
                store.learn(prompt_id, epoch, responses_of(prompt_id, epoch), [0.0, 1.0, 0.5])
                store.wait()
        assert [p for p in range(4) if store.ready(p, 0)] == [0, 2, 3]  # 1 is of an older epoch
        store.learn(4, 1, responses_of(4, 1), [0.0, 1.0, 0.5])
        store.wait()
        assert [p for p in range(5) if store.ready(p, 0)] == [0, 3, 4]  # 0 was used after 2
        assert store.memory_bytes <= 3.5 * size and len(store) == 3


def test_evicting_the_newest_keeps_what_the_next_epoch_meets_and_evicting_the_oldest_does_not():
    size = filled(1).memory_bytes
    hits = {}
    for evict in ("oldest", "newest"):
        with HistoryStore(memory_bytes=int(2.5 * size), evict=evict) as store:
            met = []
            for epoch in range(3):
                for prompt_id in range(4):
                    met.append(store.index(prompt_id) is not None)
                    store.learn(prompt_id, epoch, responses_of(prompt_id, epoch), [0.0, 1.0, 0.5])
                    store.wait()
        hits[evict] = met[4:]
    assert hits["oldest"] == [False] * 8
    assert hits["newest"] == [False, False, True, True] * 2


def test_compressed_tokens_outlive_the_index_and_are_indexed_again_when_asked_for():
    size = filled(1).memory_bytes
    with filled(compress=True, memory_bytes=2 * size) as store:
        assert len(store) == 4 and store.memory_bytes <= 2 * size
        assert store.index(0) is None and store.pending(0)
        store.wait()
        assert np.array_equal(store.index(0), build_index(responses_of(0, 0), [0.0, 1.0, 0.5]))
        store.prefetch([2])
        store.wait()
        assert store.ready(2, 0)
    with filled(compress=True, memory_bytes=size // 5) as store:
        assert 0 < len(store) < 4  # in the end, the compressed ones go too


def test_what_is_prefetched_stays_until_it_is_used_where_the_newest_go_first():
    size = filled(1).memory_bytes
    with filled(prompts=8, compress=True, evict="newest", memory_bytes=4 * size) as store:
        for epoch in range(1, 4):
            for prompt_id in np.random.default_rng(epoch).permutation(8).tolist():
                store.prefetch([prompt_id])
                store.wait()
                assert store.ready(prompt_id, epoch - 1)
                store.learn(prompt_id, epoch, responses_of(prompt_id, epoch), [0.0, 1.0, 0.5])
                store.wait()
                assert store.memory_bytes <= 4 * size


def test_a_budget_of_nothing_keeps_nothing():
    with filled(memory_bytes=0) as store:
        assert len(store) == 0 and store.memory_bytes == 0 and store.index(0) is None


@pytest.mark.parametrize("memory_map", [True, False])
def test_a_store_comes_back_from_disk(tmp_path, memory_map):
    with filled() as store:
        store.save(tmp_path / "history")
    with HistoryStore.open(tmp_path / "history", memory_map=memory_map, epochs_kept=2) as opened:
        assert (opened.memory_bytes == 0) == memory_map and len(opened) == 4
        for prompt_id in range(4):
            assert np.array_equal(opened.index(prompt_id), store.index(prompt_id))
        opened.learn(1, 1, responses_of(1, 1), [2.0, 2.0, 2.0])
        opened.wait()
        rewards = [0.0, 1.0, 0.5, 2.0, 2.0, 2.0]
        assert np.array_equal(
            opened.index(1), build_index(responses_of(1, 0) + responses_of(1, 1), rewards)
        )
        opened.save(tmp_path / "history")  # over the one that is mapped
        assert np.array_equal(opened.index(3), store.index(3))
    with HistoryStore.open(tmp_path / "history") as again:
        assert again.ready(1, 1) and len(again) == 4


def test_a_compressed_store_is_smaller_and_is_indexed_when_asked_for(tmp_path):
    with filled() as store:
        store.save(tmp_path / "whole")
        store.save(tmp_path / "small", compressed=True)
    sizes = [
        sum(f.stat().st_size for f in (tmp_path / name).iterdir()) for name in ("whole", "small")
    ]
    assert sizes[1] < sizes[0] / 3
    with HistoryStore.open(tmp_path / "small") as opened:
        assert opened.index(2) is None
        opened.wait()
        assert np.array_equal(opened.index(2), store.index(2))


def test_a_crash_while_saving_leaves_the_old_store(tmp_path, monkeypatch):
    with filled(2) as store:
        store.save(tmp_path / "history")
        store.learn(0, 1, responses_of(0, 1))
        store.wait()
        monkeypatch.setattr(history_store.zlib, "crc32", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.save(tmp_path / "history")
        monkeypatch.undo()
    with HistoryStore.open(tmp_path / "history") as opened:
        assert np.array_equal(text_of(opened.index(0))[:200], responses_of(0, 0)[0])
    assert [p.name for p in tmp_path.iterdir()] == ["history"]


def changed(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


def test_what_was_changed_on_disk_is_told_in_a_line(tmp_path):
    folder = tmp_path / "history"
    with filled() as store:
        store.save(folder)
        changed(folder / "indexes.int32", 100)
        with HistoryStore.open(folder) as opened:
            with pytest.raises(InputError, match=r"indexes.int32: prompt 0: the checksum is wrong"):
                opened.index(0)
            assert opened.index(1) is not None
            opened.learn(0, 1, responses_of(0, 1))
            with pytest.raises(InputError, match="prompt 0"):
                opened.wait()
        with pytest.raises(InputError, match="prompt 0"):
            HistoryStore.open(folder, memory_map=False)
        (folder / "indexes.int32").write_bytes((folder / "indexes.int32").read_bytes()[:-4])
        with pytest.raises(InputError, match="not whole"):
            HistoryStore.open(folder)
        (folder / "indexes.int32").unlink()
        with pytest.raises(InputError, match="cannot be read"):
            HistoryStore.open(folder)
        store.save(tmp_path / "small", compressed=True)


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("at", range(0, 1200, 60))
def test_no_changed_byte_of_the_table_goes_unnoticed_or_crashes(tmp_path, compressed, at):
    with filled(2) as store:
        store.save(tmp_path / "history", compressed=compressed)
    changed(tmp_path / "history" / "prompts.parquet", at)
    try:
        opened = HistoryStore.open(tmp_path / "history")
    except InputError as error:
        assert "\n" not in str(error)
        return
    with opened:  # a byte that says nothing of the content
        opened.prefetch(range(2))
        opened.wait()
        for prompt_id in range(2):
            assert np.array_equal(opened.index(prompt_id), store.index(prompt_id))


def test_a_folder_that_is_no_history_is_told(tmp_path):
    with pytest.raises(InputError, match="holds no history"):
        HistoryStore.open(tmp_path)
    (tmp_path / "prompts.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(InputError, match="cannot be read as Parquet"):
        HistoryStore.open(tmp_path)


def test_what_no_vocabulary_has_is_refused_where_it_is_learnt():
    with HistoryStore() as store:
        with pytest.raises(InputError, match="token id"):
            store.learn(0, 0, [[1, -1]])
        with pytest.raises(InputError, match="token id"):
            store.learn(0, 0, [[1, 2**31]])
        with pytest.raises(InputError, match="finite reward"):
            store.learn(0, 0, [[1]], [float("inf")])
        with pytest.raises(InputError, match="2 responses"):
            store.learn(0, 0, [[1], [2]], [1.0])
        store.learn(0, 0, [[], [1]])
        store.wait()
        assert store.ready(0, 0) and draft(store.index(0), np.array([1]), 5).size == 0


def test_many_threads_may_ask_and_learn_at_once():
    with HistoryStore(memory_bytes=30_000, compress=True, threads=3) as store:

        def work(seed):
            rng = np.random.default_rng(seed)
            for epoch in range(10):
                for prompt_id in rng.permutation(8).tolist():
                    store.learn(prompt_id, epoch, responses_of(prompt_id, epoch, tokens=30))
                    store.index(int(rng.integers(0, 8)))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.wait()
        assert 0 < store.memory_bytes <= 30_000
        assert store.memory_bytes == sum(prompt.bytes for prompt in store._prompts.values())
