"""A profile from a measurement: starts the engines, measures, and says in the profile what was measured, where and how well."""

from __future__ import annotations

import json
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from replay.bench import Facts, RemoteBench, Scene, Seen
from replay.measure import Journal, Measured, Plan, check, measure
from replay.profile_fit import Reach
from replay.speculative import own_config
from replay.vllm_adapter import EngineSettings, vllm_version
from simrl.errors import InputError, meant
from simrl.hardware import GPUS, model_shape
from simrl.profile import ProfileMetadata, TableProfile, write_profile


@dataclass(frozen=True)
class Wanted:
    """What is to be measured: names as in vLLM, as far as they are its."""

    model: Path
    device: Literal["cpu", "cuda"] = "cuda"
    gpu: str | None = None
    dummy: bool = False
    dtype: str = "auto"
    tp: int = 1
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    max_model_len: int = 1024
    block_size: int = 32
    kv_cache_tokens: int | None = None
    temperature: float = 1.0
    draft_tokens: int = 0
    neighbours: int = 0
    repeats: int = 5
    tolerance: float = 0.02
    budget_s: float = 60.0
    start_deadline_s: float = 600.0

    @property
    def engine(self) -> EngineSettings:
        blocks = None if self.kv_cache_tokens is None else self.kv_cache_tokens // self.block_size
        if blocks is None and self.device == "cpu":
            longest = self.max_model_len + 2 * self.draft_tokens
            blocks = self.max_num_seqs * -(-longest // self.block_size)
        return EngineSettings(
            model=str(self.model),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.block_size,
            max_model_len=self.max_model_len + 2 * self.draft_tokens,  # what a drafter needs beyond the longest sample
            kv_blocks=blocks,
            tp=self.tp,
            device=self.device,
            dtype=self.dtype,
            dummy_weights=self.dummy,
            temperature=self.temperature,
            speculative=own_config(self.draft_tokens) if self.draft_tokens else None,
        )


def measure_profile(
    wanted: Wanted, output: Path, journal: Path, tell: Callable[[str, int, int], None] = lambda *_: None
) -> Measured:
    """Measures, and writes the profile to `output`; goes on with a measurement whose points are in the file `journal`. Raises
    `InputError` for limits and models with which nothing can be measured, `StoppedError` if an engine dies."""
    version = vllm_version()
    with tempfile.TemporaryDirectory(prefix="simrl-measure-") as logs:
        engines = _Started(wanted, Path(logs))
        try:
            measured = measure_with(engines, version, wanted, output, journal, tell)
        except BaseException:
            engines.kill()
            raise
        engines.close()
    return measured


def measure_with(
    engines: Callable[[Scene], Seen],
    version: str,
    wanted: Wanted,
    output: Path,
    journal: Path,
    tell: Callable[[str, int, int], None] = lambda *_: None,
) -> Measured:
    """The same with given engines, of a vLLM version. The journal is finished when the profile is written, and not before:
    whatever is refused until then costs no measurement."""
    shape = model_shape(wanted.model)
    if wanted.gpu is not None and wanted.gpu not in GPUS:
        raise InputError(f"--gpu {wanted.gpu}{meant(wanted.gpu, GPUS)}: choose one of {', '.join(GPUS)}")
    if wanted.draft_tokens and wanted.tp > 1:
        raise InputError(
            f"--draft-tokens {wanted.draft_tokens}: simrl's drafter needs the engine in one process, and --tp is {wanted.tp}; "
            "leave one of them out"
        )
    reach = Reach(wanted.max_num_seqs, wanted.max_num_batched_tokens, wanted.max_model_len)
    settings = {**json.loads(json.dumps(asdict(wanted), default=str)), "vllm": version, "host": platform.node()}
    for name in ("budget_s", "start_deadline_s", "gpu"):
        del settings[name]  # with more time it goes on, and a GPU is what it is, whatever it is called

    blocks = wanted.engine.kv_blocks
    plan = Plan(
        reach,
        reach.max_model_len if blocks is None else blocks * wanted.block_size,  # vLLM starts with no less than that
        wanted.draft_tokens,
        None if wanted.dummy else str(wanted.model),
        wanted.repeats,
        wanted.tolerance,
        wanted.budget_s,
    )
    check(plan)
    book = Journal(journal, settings, engines)
    facts = dict(book(Facts()).facts)
    card = wanted.gpu or _card(facts["device"], wanted.device)
    if blocks is None:
        plan = plan._replace(kv_cache_tokens=int(facts["kv_cache_tokens"]) // wanted.block_size * wanted.block_size)
    measured = measure(book, plan, tell)
    beside = f", beside {wanted.neighbours} engines that generate" if wanted.neighbours else ""
    metadata = ProfileMetadata(
        model=shape.name,
        gpu=card,
        tp=wanted.tp,
        kind="measured",
        source=f"simrl measure: turns of a replay's loop around vLLM {facts['vllm']} on {facts['device']}{beside}",
        created=time.strftime("%Y-%m-%d", time.gmtime()),
        notes="" if measured.load_s is not None else "weight loads not measured: dummy weights have no files",
        host=f"{platform.node()}: {facts['device']}, {platform.system()} {platform.release()}",
        versions={name: facts[name] for name in facts if name not in ("device", "dtype", "kv_cache_tokens")},
        model_shape=shape.model_dump(),
        settings={
            **{name: value for name, value in settings.items() if name not in ("model", "vllm", "host")},
            "kv_cache_tokens": int(facts["kv_cache_tokens"]),
        },
        repeats=wanted.repeats,
        spread=measured.spread,
        held_out_error=measured.held_out_error,
        request_s=measured.request_s,
        load_weights_s=measured.load_s,
        drafts=measured.drafts,
    )
    profile = TableProfile(measured.tables, metadata, origin=f"measurement of {shape.name}")
    profile.require_covers(reach.max_num_batched_tokens, reach.max_num_seqs, reach.max_model_len)
    write_profile(profile, output)
    book.finish()
    return measured


class _Started:
    """Engines that start when the first scene is asked for: a journal may have them all."""

    def __init__(self, wanted: Wanted, logs: Path) -> None:
        self._wanted = wanted
        self._logs = logs
        self._bench: RemoteBench | None = None

    def __call__(self, scene: Scene) -> Seen:
        if self._bench is None:
            w = self._wanted
            traffic = max(w.max_num_seqs // 2, 1)
            self._bench = RemoteBench(w.engine, w.neighbours, traffic, self._logs, w.start_deadline_s)
        return self._bench(scene)

    def close(self) -> None:
        if self._bench is not None:
            self._bench.close()

    def kill(self) -> None:
        if self._bench is not None:
            self._bench.kill()


def _card(device: str, kind: str) -> str:
    """The name under which simrl knows a device."""
    if kind == "cpu":
        return "cpu"
    words = device.lower().replace("-", " ").split()
    known = [name for name in GPUS if name in words]
    if not known:
        raise InputError(
            f"{device} is no GPU that simrl knows; say with --gpu which of {', '.join(GPUS)} it is nearest to"
        )
    return known[0]
