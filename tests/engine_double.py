"""An engine as small as can be that does what vLLM does: the reference engine's passes, and a model whose next token depends on
every token before it and on the weights under which each one's KV cache was computed."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import simpy

from simrl.engine.state import Limits
from simrl.errors import InputError
from simrl.profile.profile import Tables
from simrl.runtime.events import call_at
from simrl.runtime.worker import EngineLoad
from simrl_replay.host import Command, Host, Report
from simrl_replay.vllm_adapter import EngineCounters, EngineSettings, PassWork, Progress
from tests.helpers import one_second_a_pass
from tests.references.engine import ReferenceEngine, Request

VOCABULARY = 1000


def double_settings(limits: Limits, model: str = "v0") -> EngineSettings:
    """`model` names the first weights."""
    return EngineSettings(
        model=model,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=limits.block_size,
        max_model_len=limits.kv_blocks * limits.block_size,
        kv_blocks=limits.kv_blocks,
        prefix_caching=limits.prefix_caching,
    )


def next_token(cache: int, weights: str) -> int:
    """After what is in the cache, under these weights."""
    return zlib.crc32(f"{cache},{weights}".encode()) % VOCABULARY


def computed(cache: int, token_ids: Sequence[int], weights: str) -> int:
    """The cache with more tokens in it, computed under these weights."""
    for token in token_ids:
        cache = zlib.crc32(f"{cache},{token},{weights}".encode())
    return cache


def continuation(prompt_ids: Sequence[int], tokens: int, weights: str) -> list[int]:
    """What is generated after a prompt if nothing happens."""
    ids, cache = list(prompt_ids), computed(0, prompt_ids, weights)
    while len(ids) < len(prompt_ids) + tokens:
        ids.append(next_token(cache, weights))
        cache = computed(cache, ids[-1:], weights)
    return ids[len(prompt_ids) :]


@dataclass(eq=False)
class _TextRequest(Request):
    """A request with its tokens, and how many of them are in its cache. As in vLLM, a block is found by the tokens up to its
    end."""

    ids: list[int] = field(default_factory=list)
    cached: int = 0
    cache: int = 0
    recorded: Sequence[int] = ()
    salt: int | None = None

    def name(self, block: int, size: int) -> Hashable:
        return self.salt, *self.ids[: (block + 1) * size]


class _Passes(ReferenceEngine):
    work = PassWork()

    def gain(self, plan: list[tuple[Request, int]]) -> None:
        decoding = [each.computed + 1 for each, new in plan if each.computed and new == 1]
        query = sum(new for _, new in plan)
        chunks = [(each.computed, new) for each, new in plan if not (each.computed and new == 1)]
        work = sum(new * (computed + 0.5 * new) for computed, new in chunks)
        prefill = query - len(decoding)
        self.work = PassWork(query, len(plan), prefill, work, len(decoding), sum(decoding))
        super().gain(plan)

    def lose(self, request: _TextRequest) -> None:
        super().lose(request)
        request.cached = request.cache = 0  # what it finds again counts as computed again


class EngineDouble:
    """What `VllmEngine` can do. Every pass takes `step_s` (or what `tables` say), a load `load_s`; `wait` lets that time pass.

    Weights are known by the names of their folders; folders called "broken" cannot be loaded.
    """

    version = "double"
    drafter = None
    graph_tokens = 0
    vocabulary = VOCABULARY
    last_pass: PassWork | None = None

    def __init__(
        self,
        settings: EngineSettings,
        tables: Tables | None = None,
        step_s: float = 1.0,
        load_s: float = 0.0,
        start_s: float = 0.0,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        if settings.model == "broken":
            raise InputError("broken: no engine can be made of this")
        assert settings.kv_blocks is not None
        limits = Limits(
            settings.max_num_seqs,
            settings.max_num_batched_tokens,
            settings.block_size,
            settings.kv_blocks,
            prefix_caching=settings.prefix_caching,
        )
        self.settings = settings
        self._load_s = load_s
        self._wait = wait
        self._weights = Path(settings.model).name
        self._passes = _Passes(tables or of_seconds(step_s), limits)
        self._requests: dict[str, _TextRequest] = {}
        self._before = np.zeros(6, dtype=np.int64)
        if start_s:
            wait(start_s)

    def warm_up(self) -> None:
        pass

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        tokens: int,
        recorded: Sequence[int] = (),
        salt: int | None = None,
    ) -> None:
        assert request_id not in self._requests and tokens > 0
        request = _TextRequest(len(prompt_ids), tokens, ids=list(prompt_ids), recorded=recorded)
        request.salt = salt
        self._passes.queue.append(request)
        self._requests[request_id] = request

    def abort(self, request_id: str) -> None:
        self._passes.abort(self._requests.pop(request_id))

    def step(self) -> list[Progress]:
        before_s, passes = self._passes.now_s, self._passes
        had = {request_id: request.generated for request_id, request in self._requests.items()}
        passes.iterate()
        self.last_pass = passes.work if passes.work.query_tokens else None
        passes.stops.clear()
        self._wait(passes.now_s - before_s)
        progress = []
        for request_id, request in list(self._requests.items()):
            gained = request.generated - had[request_id]
            reach = len(request.ids) if gained else request.computed
            request.cache = computed(
                request.cache, request.ids[request.cached : reach], self._weights
            )
            request.cached = reach
            if gained:
                place = request.generated - 1
                follows = place < len(request.recorded)
                request.ids.append(
                    request.recorded[place] if follows else next_token(request.cache, self._weights)
                )
                stopped = request.ids[-1] == self.settings.stop_token
                finished = request.generated == request.response or stopped
                progress.append(Progress(request_id, request.ids[-1:], finished))
                if finished:
                    del self._requests[request_id]
                if stopped and request.generated < request.response:
                    passes.abort(request)
        return progress

    def settle(self) -> list[Progress]:
        return []

    def load_weights(self, folder: str) -> None:
        if Path(folder).name == "broken":
            raise RuntimeError("these weights are broken")
        self._weights = Path(folder).name
        if self._load_s:
            self._wait(self._load_s)

    def recompute_running(self) -> None:
        self._passes.recompute_running()

    def admit(self, admitting: bool) -> None:
        self._passes.admitting = admitting

    @property
    def unfinished(self) -> int:
        return len(self._requests)

    @property
    def running(self) -> int:
        return len(self._passes.running)

    @property
    def kv_cache_tokens(self) -> int:
        return self._passes.limits.kv_blocks * self._passes.limits.block_size

    @property
    def passes(self) -> int:
        return self._passes.passes

    def counters(self) -> EngineCounters:
        p = self._passes
        since_start = np.array([p.passes, p.preemptions, p.lookup_tokens, p.hit_tokens, 0, 0])
        return EngineCounters(*(since_start - self._before).tolist())

    def load(self) -> EngineLoad:
        usage = 1.0 - self._passes.free_blocks / self._passes.limits.kv_blocks
        waiting = self.unfinished - self.running
        preemptions = self.counters().preemptions
        return EngineLoad(self.kv_cache_tokens, usage, self.running, waiting, preemptions)

    def time_sampling(self) -> None:
        pass

    def sampling_s(self, sequences: int) -> list[float]:
        return [sequences * 1e-6]

    def sleep(self, level: int = 1) -> None:
        assert not self._requests

    def wake(self) -> None:
        pass

    def reset_counters(self) -> None:
        self._before = self._before + self.counters()


def of_seconds(step_s: float) -> Tables:
    """Every pass takes so long."""
    tables = one_second_a_pass()
    return tables._replace(dense_s=tables.dense_s * step_s)


class LogicalClock(simpy.Environment):
    """What a `VllmWorker` wants of a clock, on simulated time."""

    monotonic_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.listeners: dict[Any, tuple[Callable[[Any], None], Callable[[], None]]] = {}

    def wall_s(self) -> float:
        return self.now

    def listen(
        self,
        connection: Any,
        on_message: Callable[[Any], None],
        on_end: Callable[[], None],
        awaits: Callable[[], bool],
    ) -> None:
        self.listeners[connection] = (on_message, on_end)

    def forget(self, connection: Any) -> None:
        self.listeners.pop(connection, None)

    def tell(self, connection: Any, message: Any) -> None:
        if connection in self.listeners:
            self.listeners[connection][0](message)

    def check(self, call: Callable[[], None]) -> None:
        pass


class LogicalLink:
    """A line to a real `Host` around a double on simulated time, and the host's channel at once: its loop runs in a thread,
    which has its turn while simulated time stands still, and gives it back to sleep, or to wait for commands. To be used with
    the module `time` of `simrl_replay.host` replaced by this: `monotonic`, `thread_time` and `sleep` are here."""

    offset_s = 0.0
    name = "worker 0"

    def __init__(self, clock: LogicalClock) -> None:
        self.connection: Any = self
        self.reports: list[Report] = []
        self._clock = clock
        self._inbox: list[list[Command]] = []
        self._wake = clock.event()
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._sleeps_s: float | None = None  # None: until somebody sends something
        self._failed: BaseException | None = None
        self._over = False
        self._most_s: float | None = None  # that it waits for commands; None: for ever

    def run(self, engine: EngineDouble) -> None:
        """Runs the loop around the engine, and the clock until nothing happens any more."""
        thread = threading.Thread(target=self._host, args=(engine,))
        self._clock.process(self._live())
        thread.start()
        try:
            self._clock.run()
        finally:
            self._over = True
            self._turn.release()
            thread.join()

    def send(self, messages: Sequence[Any]) -> None:
        """Of the worker: commands; of the host: reports."""
        if threading.current_thread() is threading.main_thread():
            self._inbox.append(list(messages))
            if not self._wake.triggered:
                self._wake.succeed()
            return
        told = list(messages)
        self.reports += told
        call_at(self._clock, self._clock.now, lambda: self._clock.tell(self, told))

    def _live(self) -> simpy.events.ProcessGenerator:
        while True:
            self._turn.release()
            self._back.acquire()
            if self._failed is not None:
                raise self._failed
            if self._sleeps_s is None:
                if not self._inbox:
                    self._wake = self._clock.event()
                    within = [] if self._most_s is None else [self._clock.timeout(self._most_s)]
                    yield self._clock.any_of([self._wake, *within])
            else:
                yield self._clock.timeout(self._sleeps_s)

    # In the host's thread.

    def _host(self, engine: EngineDouble) -> None:
        self._turn.acquire()
        try:
            if not self._over:
                Host(engine, self).run()  # type: ignore[arg-type]
        except EOFError:
            return
        except BaseException as error:
            self._failed = error
            self._back.release()

    def _give_turn(self, sleeps_s: float | None) -> None:
        self._sleeps_s = sleeps_s
        self._back.release()
        self._turn.acquire()
        if self._over:
            raise EOFError

    def sleep(self, seconds: float) -> None:
        self._give_turn(seconds)

    def monotonic(self) -> float:
        return self._clock.now

    def thread_time(self) -> float:
        return self.monotonic()

    def poll(self, timeout_s: float | None) -> bool:
        if timeout_s != 0.0:
            self._most_s = timeout_s
            self._give_turn(None)
        return bool(self._inbox)

    def recv(self) -> list[Command]:
        return self._inbox.pop(0)
