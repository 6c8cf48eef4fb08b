"""Records: the files of a recorded run, update by update, from which it continues after a kill.

    versions/0007/          the policy after seven updates: model/ (safetensors, for engines too), optimizer.pt
    updates/0006.parquet    the samples that the seventh update trained on: tokens, reward, segments, times; in its metadata the
                            phases of the update, the rewarder's, and the statistics of the update
    parts/000/              times: the Result of the run from one start to its end; numbered by the part's
                            first update. It is written at intervals, so a kill loses the last updates of it
    lock                    held by the process that makes the run

Invariant: a file or folder is complete or absent, and a version exists before the update that made it is recorded. So
the run continues from the last recorded update: every update is recorded once, and unrecorded work is repeated.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from simrl.errors import InputError, first_line
from simrl.files import write_whole_file, write_whole_folder
from simrl.result.result import Result
from simrl.runtime.rollout import Rollout
from simrl.trace.trace import Trace, TraceMetadata

KEPT_VERSIONS = 4  # engines are never more versions behind
MANIFEST = "files.txt"
FACTS = b"simrl.update"
SEGMENT = pa.struct(
    {
        "worker": pa.int32(),
        "policy_version": pa.int32(),
        "tokens": pa.int32(),
        "started_s": pa.float64(),
        "ended_s": pa.float64(),
    }
)
COLUMNS = pa.schema(
    {
        "step": pa.int32(),
        "epoch": pa.int32(),
        "prompt_id": pa.int64(),
        "sample": pa.int32(),
        "prompt_tokens": pa.int32(),
        "response_ids": pa.list_(pa.int32()),
        "reward": pa.float32(),
        "first_token_s": pa.float64(),
        "segments": pa.list_(SEGMENT),
        "part": pa.int32(),
        "uid": pa.int64(),
    }
)


class Group(NamedTuple):
    """A prompt in an epoch: the unit of training."""

    epoch: int
    prompt_id: int


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run. A sample's `uid` is unique in its part, a part in its run: a part
    begins with an unrecorded update."""

    path: Path

    def version(self, number: int) -> Path:
        return self.path / "versions" / f"{number:04d}"

    def model(self, version: int) -> Path:
        """Return the folder of a version that engines load."""
        return self.version(version) / "model"

    def part(self, first_update: int) -> Path:
        return self.path / "parts" / f"{first_update:03d}"

    def update(self, number: int) -> Path:
        return self.path / "updates" / f"{number:04d}.parquet"

    @property
    def updates(self) -> int:
        """Number of recorded updates."""
        return sum(file.stem.isdigit() for file in (self.path / "updates").glob("*.parquet"))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the run's lock meanwhile. Raise `InputError` if another process holds it."""
        with ExitStack() as held:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                file = held.enter_context((self.path / "lock").open("w"))
                fcntl.flock(
                    file, fcntl.LOCK_EX | fcntl.LOCK_NB
                )  # released when the process ends, in any way
            except BlockingIOError:
                raise InputError(
                    f"{self.path}: another process is making this run; wait for its end, or name another --output"
                ) from None
            except OSError as error:
                raise InputError(
                    f"{self.path}: cannot be written ({first_line(error)}); name another --output"
                ) from error
            yield

    def resume(self) -> int:
        """Remove unfinished files of a killed run; return the number of the next update. Raise
        `InputError` if a file is missing."""
        done = self.updates
        missing = [number for number in range(done) if not self.update(number).exists()]
        if missing or not self.model(done).exists():
            what = self.update(missing[0]) if missing else self.version(done)
            raise InputError(
                f"{what}: missing, though {done} updates are recorded; begin anew in another --output"
            )
        for folder in ("versions", "updates", "parts"):
            for left in (self.path / folder).glob(
                ".[0-9]*"
            ):  # the names of unfinished files in `simrl.files`
                _remove(left)
        for number, version in self._versions():
            if number > done:
                shutil.rmtree(version)
        return done

    def whole(self) -> bool:
        """Return whether one part made all updates: its times are then the run's. Without
        `updates`, the rows of the curve count."""
        steps, curve = self.part(0) / "steps.parquet", self.path / "curve.csv"
        updates = self.updates
        if not updates and curve.exists():
            updates = len(curve.read_text(encoding="utf-8").splitlines()) - 1
        return steps.exists() and pq.read_metadata(steps).num_rows == updates

    def record(
        self, number: int, part: int, rollouts: Sequence[Rollout], facts: dict[str, Any]
    ) -> None:
        """Write an update and the samples it trained on; steps and versions of a part count from
        its first update."""
        rows = [
            {
                **{
                    name: getattr(r.sample, name)
                    for name in ("epoch", "prompt_id", "sample", "prompt_tokens", "uid")
                },
                "step": number,
                "response_ids": list(r.token_ids or ()),
                "reward": r.reward,
                "first_token_s": r.first_token_s,
                "segments": [
                    s._replace(policy_version=s.policy_version + part)._asdict() for s in r.segments
                ],
                "part": part,
            }
            for r in rollouts
        ]
        table = pa.Table.from_pylist(rows, schema=COLUMNS).replace_schema_metadata(
            {FACTS: json.dumps(facts)}
        )
        with write_whole_file(self.update(number)) as temporary:
            pq.write_table(table, temporary, compression="zstd")

    def write_part(self, part: int, result: Result) -> None:
        with write_whole_folder(self.part(part), MANIFEST) as temporary:
            result.write(temporary)

    def forget_versions(self, newest: int) -> None:
        """Remove versions that no process loads any more."""
        for number, version in self._versions():
            if 0 < number <= newest - KEPT_VERSIONS:
                shutil.rmtree(version)

    def _versions(self) -> list[tuple[int, Path]]:
        folders = (
            path
            for path in (self.path / "versions").iterdir()
            if path.is_dir() and path.name.isdigit()
        )
        return [(int(path.name), path) for path in folders]

    def read(self) -> tuple[pa.Table, list[dict[str, Any]]]:
        """Return all trained samples, and the facts of each update."""
        found = [self._read(number) for number in range(self.updates)]
        return pa.concat_tables([samples for samples, _ in found]), [facts for _, facts in found]

    def trained(self) -> set[Group]:
        """Return the groups of the recorded updates."""
        if not self.updates:
            return set()
        table, _ = self.read()
        return {
            Group(*group)
            for group in zip(
                table["epoch"].to_pylist(), table["prompt_id"].to_pylist(), strict=True
            )
        }

    def _read(self, number: int) -> tuple[pa.Table, dict[str, Any]]:
        try:
            table = pq.read_table(self.update(number))
            return table.cast(COLUMNS), json.loads((table.schema.metadata or {})[FACTS])
        except (OSError, pa.ArrowException, KeyError, ValueError) as error:
            raise InputError(
                f"{self.update(number)}: not the record of an update ({first_line(error)})"
            ) from error


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def as_trace(samples: pa.Table, per_step: int, metadata: TraceMetadata) -> Trace:
    """Return the generated responses in schedule order (`per_step` responses a step, whichever
    update trained on them): the run's workload, to simulate under any schedule or to draft from.
    Sorted by epoch first: a response lost with its engine or its run is generated again under a
    later number. In old records a repeated prompt may stand in for a slow one: its step is after
    the step of its earlier epoch."""
    samples = samples.sort_by([("epoch", "ascending"), ("part", "ascending"), ("uid", "ascending")])
    ids = samples["response_ids"].to_pylist()
    columns: dict[str, Any] = {
        name: samples[name].to_pylist()
        for name in ("epoch", "prompt_id", "sample", "prompt_tokens", "reward")
    }
    steps: list[int] = []
    epoch_at: dict[tuple[int, int], int] = {}  # by step and prompt
    for i, (epoch, prompt) in enumerate(zip(columns["epoch"], columns["prompt_id"], strict=True)):
        step = i // per_step
        while epoch_at.setdefault((step, prompt), epoch) != epoch:
            step += 1
        steps.append(step)
    columns |= {
        "step": steps,
        "response_tokens": [len(response) for response in ids],
        "response_ids": ids,
        "policy_version": [row[-1]["policy_version"] for row in samples["segments"].to_pylist()],
    }
    return Trace.from_columns(columns, metadata)
