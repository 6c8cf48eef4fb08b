"""The histories of many prompts: indexed in the background, kept within a memory budget, saved and
opened again.

Invariant: no caller waits for an index. An index that is not built yet, or was evicted, is absent
(`index` returns None), and its prompt is decoded without drafts; an index that is present is whole
and never changes.

A prompt's responses of its last `epochs_kept` epochs make one index
(`simrl.speculation.history_index`), which also holds their tokens: when an epoch is added, or an
old one ends, it is built anew from them. Over the budget, prompts with the oldest newest responses
are evicted first, of equals the least recently used one. (An epoch meets every prompt once, so the
oldest prompts come soonest: `evict="newest"` evicts prompts of the newest epoch first.) With
`compress`, compressed tokens are kept with each index; they outlive it, are indexed again on
request (`prefetch` requests ahead), and are evicted last.

On disk a store is a folder: `prompts.parquet` has the prompts, their responses' epochs and rewards,
and the place of each index in `indexes.int32`, or their compressed tokens. A folder is replaced as
a whole, so a crash leaves the old one. Indexes are mapped into memory or read, and used only after
their checksum was verified.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Condition
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from simrl.errors import InputError, first_line
from simrl.files import write_whole_folder
from simrl.speculation.choices import LARGEST_TOKEN_ID
from simrl.speculation.drafter import Tokens
from simrl.speculation.history_index import build_index, text_of

MANIFEST = "files.txt"
_PROMPTS, _INDEXES = "prompts.parquet", "indexes.int32"
_FORMAT, _VERSION = b"simrl.history", b"2"
Evict = Literal["oldest", "newest"]
_ZSTD = pa.Codec("zstd", compression_level=1)
_SCHEMA = pa.schema(
    [
        ("prompt_id", pa.int64()),
        ("epochs", pa.list_(pa.field("element", pa.int32()))),  # of each response
        ("rewards", pa.list_(pa.field("element", pa.float32()))),  # NaN where unknown
        ("text_tokens", pa.int64()),
        ("index_begin", pa.int64()),  # in int32s; empty where the tokens are compressed
        ("index_size", pa.int64()),
        ("checksum", pa.uint32()),  # CRC-32 of the index, or of the compressed tokens
        ("compressed", pa.binary()),
    ],
    metadata={_FORMAT: _VERSION},
)


class _Learnt(NamedTuple):
    """Epoch and reward of each response, in the order of the text."""

    epochs: NDArray[np.int32]
    rewards: NDArray[np.float32]


class _Compressed(NamedTuple):
    """A compressed text."""

    data: bytes
    text_tokens: int


class _Prompt:
    """A prompt in the store: an index, its compressed tokens, both, or neither yet; and the
    responses to be added."""

    def __init__(self) -> None:
        self.learnt = _Learnt(np.empty(0, np.int32), np.empty(0, np.float32))
        self.index: Tokens | None = None
        self.compressed: _Compressed | None = None
        self.added: list[tuple[int, Tokens, float]] = []
        self.is_mapped = False  # the index is on disk
        self.unchecked: int | None = None  # the checksum that the mapped index should have
        self.in_work = False

    @property
    def newest_epoch(self) -> int:
        return int(self.learnt.epochs.max(initial=-1))

    @property
    def bytes(self) -> int:
        index_bytes = 0 if self.index is None or self.is_mapped else self.index.nbytes
        return index_bytes + (0 if self.compressed is None else len(self.compressed.data))


class HistoryStore:
    """The histories of many prompts, for one process; its methods may be called from any thread.

    `memory_bytes` bounds the indexes and compressed tokens that the store holds (None: no bound),
    without indexes mapped from disk, responses that wait to be indexed, and indexes that a drafter
    still uses. `threads` threads build.
    """

    def __init__(
        self,
        epochs_kept: int = 1,
        memory_bytes: int | None = None,
        compress: bool = False,
        evict: Evict = "oldest",
        threads: int = 1,
    ) -> None:
        if epochs_kept < 1 or threads < 1 or (memory_bytes is not None and memory_bytes < 0):
            raise ValueError(
                f"epochs_kept {epochs_kept}, threads {threads} and memory_bytes {memory_bytes} must be positive"
            )
        self._epochs_kept = epochs_kept
        self._memory_bytes = memory_bytes
        self._compress = compress
        self._evict_newest = evict == "newest"
        self._prompts: dict[int, _Prompt] = {}
        self._indexed: dict[
            int, OrderedDict[int, None]
        ] = {}  # by newest epoch: prompts, the latest used last
        self._shrunk: dict[
            int, OrderedDict[int, None]
        ] = {}  # like `_indexed`, of prompts with compressed tokens only
        self._bytes = 0
        self._pool = ThreadPoolExecutor(threads, "history")
        self._changed = Condition()
        self._working = 0
        self._folder: Path | None = None
        self._failed: BaseException | None = None

    def learn(
        self,
        prompt_id: int,
        epoch: int,
        token_ids: Sequence[ArrayLike],
        rewards: Sequence[float] | None = None,
    ) -> None:
        """Add responses to a prompt in an epoch and index them in the background; more of this
        epoch may follow.

        Responses of the epochs up to `epoch` - epochs_kept are then forgotten, and late ones are
        ignored. Raise `InputError` for ids outside any vocabulary, and unless every response has
        one reward, finite or NaN.
        """
        responses = [np.array(ids, dtype=np.int64).reshape(-1) for ids in token_ids]
        worth = (
            [float("nan")] * len(responses)
            if rewards is None
            else [float(reward) for reward in rewards]
        )
        if len(worth) != len(responses) or np.isinf(worth).any():
            raise InputError(
                f"history: prompt {prompt_id} has {len(responses)} responses; give each a finite reward"
            )
        for ids in responses:
            if ids.size and (ids.min() < 0 or ids.max() > LARGEST_TOKEN_ID):
                raise InputError(
                    f"history: prompt {prompt_id} has a token id that is not from 0 to {LARGEST_TOKEN_ID}"
                )
        with self._changed:
            self._raise_failure()
            prompt = self._prompts.setdefault(prompt_id, _Prompt())
            prompt.added += [
                (epoch, r.astype(np.int32), reward)
                for r, reward in zip(responses, worth, strict=True)
            ]
            self._work_on(prompt_id, prompt)

    def ready(self, prompt_id: int, epoch: int) -> bool:
        """Return whether there is an index of the prompt with responses of this epoch or a later
        one."""
        with self._changed:
            prompt = self._prompts.get(prompt_id)
            return prompt is not None and prompt.index is not None and prompt.newest_epoch >= epoch

    def pending(self, prompt_id: int) -> bool:
        """Return whether an index of the prompt is being built."""
        with self._changed:
            prompt = self._prompts.get(prompt_id)
            return prompt is not None and prompt.in_work

    def index(self, prompt_id: int) -> Tokens | None:
        """Return the prompt's index, which counts as a use; None where there is none. Compressed
        tokens are then indexed in the background. Raise `InputError` if an index mapped from disk
        was changed."""
        with self._changed:
            prompt = self._prompts.get(prompt_id)
            if prompt is None:
                return None
            if prompt.index is None:
                if prompt.compressed is not None:
                    self._work_on(prompt_id, prompt)
                return None
            if prompt.unchecked is not None:
                _check(prompt.index, prompt.unchecked, self._folder, prompt_id)
                prompt.unchecked = None
            if not prompt.is_mapped:
                self._indexed[prompt.newest_epoch].move_to_end(prompt_id)
            return prompt.index

    def prefetch(self, prompt_ids: Iterable[int]) -> None:
        """Build the indexes of these prompts, which are to run soon, from compressed tokens."""
        for prompt_id in prompt_ids:
            self.index(prompt_id)

    def wait(self) -> None:
        """Wait until all learnt responses are indexed. Raise the exception of a failed build."""
        with self._changed:
            self._changed.wait_for(lambda: self._working == 0)
            self._raise_failure()

    @property
    def memory_bytes(self) -> int:
        """The bytes that count against the budget."""
        return self._bytes

    def __len__(self) -> int:
        """Return the number of prompts that have an index, or compressed tokens for one."""
        with self._changed:
            return sum(
                p.index is not None or p.compressed is not None for p in self._prompts.values()
            )

    def close(self) -> None:
        """Stop: finish the running builds, and drop those that have not begun."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> HistoryStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def save(self, folder: str | Path, compressed: bool = False) -> None:
        """Wait until all is indexed and write the store; an earlier one of this name is replaced
        when the new one is whole.

        `compressed` writes the tokens only, a tenth of the size; an opened store then indexes
        prompts on request.
        """
        self.wait()
        with self._changed, write_whole_folder(Path(folder), MANIFEST) as temporary:
            rows, begin = list[dict[str, Any]](), 0
            kept: dict[str, Any]
            with (temporary / _INDEXES).open("wb") as file:
                for prompt_id, prompt in self._prompts.items():
                    index, packed = self.index(prompt_id), prompt.compressed
                    if index is not None and not compressed:
                        file.write(index.data)
                        kept = {
                            "index_begin": begin,
                            "index_size": len(index),
                            "checksum": zlib.crc32(index.data),
                        }
                        begin += len(index)
                    elif packed := packed or (
                        None if index is None else _compressed(text_of(index))
                    ):
                        kept = {"compressed": packed.data, "text_tokens": packed.text_tokens}
                        kept["checksum"] = zlib.crc32(packed.data)
                    else:
                        continue
                    rows.append({"prompt_id": prompt_id, **prompt.learnt._asdict(), **kept})
            table = pa.Table.from_pylist(rows, _SCHEMA)
            pq.write_table(table, temporary / _PROMPTS, write_page_checksum=True)

    @classmethod
    def open(cls, folder: str | Path, memory_map: bool = True, **parameters: Any) -> HistoryStore:
        """Open a saved store with the parameters of a new one. `memory_map` leaves the indexes on
        disk until they are used, outside the budget.

        Raise `InputError` for a folder that holds no store, is not whole, or was changed; mapped
        indexes are checked at their first use.
        """
        folder = Path(folder)
        table = _read_prompts(folder)
        indexes = _read_indexes(folder, table)
        store = cls(**parameters)
        store._folder = folder
        with store._changed:
            for row in table.to_pylist():
                prompt_id, prompt = row["prompt_id"], _Prompt()
                prompt.learnt = _Learnt(
                    np.array(row["epochs"], np.int32), np.array(row["rewards"], np.float32)
                )
                if row["compressed"] is not None:
                    if zlib.crc32(row["compressed"]) != row["checksum"]:
                        raise _broken(folder / _PROMPTS, prompt_id)
                    prompt.compressed = _Compressed(row["compressed"], row["text_tokens"])
                    store._shrunk.setdefault(prompt.newest_epoch, OrderedDict())[prompt_id] = None
                else:
                    mapped = indexes[row["index_begin"] : row["index_begin"] + row["index_size"]]
                    prompt.is_mapped = memory_map
                    prompt.index = mapped if memory_map else mapped.copy()
                    prompt.unchecked = row["checksum"]
                    if not memory_map:
                        _check(prompt.index, row["checksum"], folder, prompt_id)
                        prompt.unchecked = None
                        store._indexed.setdefault(prompt.newest_epoch, OrderedDict())[prompt_id] = (
                            None
                        )
                store._prompts[prompt_id] = prompt
                store._bytes += prompt.bytes
            store._evict()
        return store

    def _work_on(self, prompt_id: int, prompt: _Prompt) -> None:
        """Index the prompt in the background, one build at a time. Call it with the lock held."""
        if prompt.in_work:
            return
        prompt.in_work = True
        self._working += 1
        self._pool.submit(self._build, prompt_id, prompt).add_done_callback(self._done)

    def _done(self, future: Future[None]) -> None:
        with self._changed:
            self._working -= 1
            if not future.cancelled() and future.exception() is not None:
                self._failed = future.exception()
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _build(self, prompt_id: int, prompt: _Prompt) -> None:
        """Index the prompt's responses and the added ones, until none is left to add."""
        while prompt.in_work:
            try:
                if prompt.index is not None:
                    self.index(prompt_id)  # checks the checksum before building on it
                with self._changed:
                    added, prompt.added = prompt.added, []
                    learnt, old, compressed = prompt.learnt, prompt.index, prompt.compressed
                text = text_of(old) if old is not None else _text(compressed)
                learnt, responses = _joined(learnt, text, added, self._epochs_kept)
                index = build_index(responses, learnt.rewards)
                compressed = _compressed(text_of(index)) if self._compress else None
            except BaseException:
                prompt.in_work = False
                raise
            with self._changed:
                self._take_off_lists(prompt_id, prompt)
                self._bytes -= prompt.bytes
                prompt.learnt, prompt.index, prompt.compressed = learnt, index, compressed
                prompt.is_mapped = False
                self._bytes += prompt.bytes
                self._indexed.setdefault(prompt.newest_epoch, OrderedDict())[prompt_id] = None
                prompt.in_work = bool(prompt.added)
                self._evict()

    def _take_off_lists(self, prompt_id: int, prompt: _Prompt) -> None:
        for lists in (self._indexed, self._shrunk):
            prompts = lists.get(prompt.newest_epoch, OrderedDict())
            prompts.pop(prompt_id, None)
            if not prompts:
                lists.pop(prompt.newest_epoch, None)

    def _evict(self) -> None:
        """Bring the store within its budget. Call it with the lock held."""
        while self._memory_bytes is not None and self._bytes > self._memory_bytes:
            lists = self._indexed or self._shrunk
            prompt_id = next(iter(lists[max(lists) if self._evict_newest else min(lists)]))
            prompt = self._prompts[prompt_id]
            self._take_off_lists(prompt_id, prompt)
            self._bytes -= prompt.bytes
            if prompt.index is not None and prompt.compressed is not None:
                self._shrunk.setdefault(prompt.newest_epoch, OrderedDict())[prompt_id] = None
            elif prompt.in_work:
                prompt.learnt, prompt.compressed = _Prompt().learnt, None
            else:
                del self._prompts[prompt_id]
                continue
            prompt.index = None
            self._bytes += prompt.bytes


def _joined(
    learnt: _Learnt, text: Tokens, added: list[tuple[int, Tokens, float]], epochs_kept: int
) -> tuple[_Learnt, list[Tokens]]:
    """Return the responses of the last epochs, old ones first, with their epochs and rewards."""
    ends = np.flatnonzero(text < 0)
    old = [
        text[begin:end]
        for begin, end in zip([0, *(ends + 1).tolist()], ends.tolist(), strict=False)
    ]
    responses = [*old, *(ids for _, ids, _ in added)]
    epochs = np.r_[learnt.epochs, np.array([epoch for epoch, _, _ in added], np.int32)]
    rewards = np.r_[learnt.rewards, np.array([reward for _, _, reward in added], np.float32)]
    kept = np.flatnonzero(epochs > epochs.max(initial=-1) - epochs_kept)
    return _Learnt(epochs[kept], rewards[kept]), [responses[i] for i in kept]


def _compressed(text: Tokens) -> _Compressed:
    return _Compressed(_ZSTD.compress(np.ascontiguousarray(text), asbytes=True), len(text))


def _text(compressed: _Compressed | None) -> Tokens:
    if compressed is None:
        return np.empty(0, np.int32)
    raw = _ZSTD.decompress(compressed.data, 4 * compressed.text_tokens, asbytes=True)
    return np.frombuffer(raw, np.int32)


def _read_prompts(folder: Path) -> pa.Table:
    path = folder / _PROMPTS
    if not path.is_file():
        raise InputError(
            f"{folder}: holds no history ({_PROMPTS} is missing); name a folder that a history was saved to"
        )
    try:
        table = pq.ParquetFile(path, page_checksum_verification=True).read()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: cannot be read as Parquet ({first_line(error)}); is it whole?"
        ) from error
    found = (table.schema.metadata or {}).get(_FORMAT)
    if found != _VERSION or not table.schema.remove_metadata().equals(_SCHEMA.remove_metadata()):
        raise InputError(
            f"{path}: is no history of this version (format {found!r}, not {_VERSION!r}); save it again"
        )
    return table


def _read_indexes(folder: Path, table: pa.Table) -> Tokens:
    """Return all indexes, mapped; copy-on-write, without any write, so that compiled code sees
    ordinary arrays."""
    path = folder / _INDEXES
    expected = 4 * sum(size or 0 for size in table.column("index_size").to_pylist())
    try:
        found = path.stat().st_size
        if found != expected:
            raise InputError(
                f"{path}: has {found} bytes, {_PROMPTS} lists {expected}; the copy is not whole, save it again"
            )
        return np.asarray(np.memmap(path, np.int32, mode="c")) if found else np.empty(0, np.int32)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); save the history again"
        ) from error


def _check(index: Tokens, checksum: int, folder: Path | None, prompt_id: int) -> None:
    if zlib.crc32(index.data) != checksum:
        raise _broken(Path(folder or "") / _INDEXES, prompt_id)


def _broken(path: Path, prompt_id: int) -> InputError:
    return InputError(
        f"{path}: prompt {prompt_id}: the checksum is wrong, the file was changed; save the history again"
    )
