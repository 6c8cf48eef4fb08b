"""Records: what a recorded run leaves in its folder, update by update, and where it goes on from after a kill.

    versions/0007/          the policy after seven updates: model/ (safetensors, for engines too), optimizer.pt
    updates/0006.parquet    the samples that the seventh update trained on: tokens, reward, segments, times; in its metadata the
                            phases of the update, the rewarder's, and what the update told of itself
    parts/000/              times: the Result of the run from one start to what ended it; its number is that of the part's
                            first update. It is written now and then, so a kill leaves it some updates short
    lock                    held by the process that makes the run

Invariant: a file or folder is there whole or not at all, and a version is there before the update that made it is recorded. So
the run goes on from the last update that is recorded: what was trained is recorded once, what was not begins anew.
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
from simrl.result import Result
from simrl.rollout import Rollout, Segment
from simrl.trace import Trace, TraceMetadata

KEPT_VERSIONS = 4  # engines are never further behind
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
    """A prompt in an epoch: what is trained once."""

    epoch: int
    prompt_id: int


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run. A sample's `uid` is unique in its part, a part in its run: one begins with no update that was
    recorded before."""

    path: Path

    def version(self, number: int) -> Path:
        return self.path / "versions" / f"{number:04d}"

    def model(self, version: int) -> Path:
        """The folder that engines load."""
        return self.version(version) / "model"

    def part(self, first_update: int) -> Path:
        return self.path / "parts" / f"{first_update:03d}"

    def update(self, number: int) -> Path:
        return self.path / "updates" / f"{number:04d}.parquet"

    @property
    def updates(self) -> int:
        """How many updates are recorded."""
        return sum(file.stem.isdigit() for file in (self.path / "updates").glob("*.parquet"))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else makes the run meanwhile. Raises `InputError` if somebody does."""
        with ExitStack() as held:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                file = held.enter_context((self.path / "lock").open("w"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is lifted when the process ends, however that be
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
        """The number of the update that comes next. What a kill left unfinished is removed. Raises `InputError` for a folder
        in which something is missing."""
        done = self.updates
        missing = [number for number in range(done) if not self.update(number).exists()]
        if missing or not self.model(done).exists():
            what = self.update(missing[0]) if missing else self.version(done)
            raise InputError(f"{what}: missing, though {done} updates are recorded; begin anew in another --output")
        for folder in ("versions", "updates", "parts"):
            for left in (self.path / folder).glob(".[0-9]*"):  # as `simrl.files` calls what is not whole yet
                _remove(left)
        for number, version in self._versions():
            if number > done:
                shutil.rmtree(version)
        return done

    def whole(self) -> bool:
        """All updates were made in one part, whose times are then the run's. Also of what a reader needs of a finished run,
        without `updates`: its curve has a row an update."""
        steps, curve = self.part(0) / "steps.parquet", self.path / "curve.csv"
        updates = self.updates
        if not updates and curve.exists():
            updates = len(curve.read_text(encoding="utf-8").splitlines()) - 1
        return steps.exists() and pq.read_metadata(steps).num_rows == updates

    def record(self, number: int, part: int, rollouts: Sequence[Rollout], facts: dict[str, Any]) -> None:
        """An update and the samples it trained on, in a part whose steps and versions count from its first update."""
        rows = [
            {
                "step": number,
                "epoch": r.sample.epoch,
                "prompt_id": r.sample.prompt_id,
                "sample": r.sample.sample,
                "prompt_tokens": r.sample.prompt_tokens,
                "response_ids": list(r.token_ids or ()),
                "reward": r.reward,
                "first_token_s": r.first_token_s,
                "segments": [s._replace(policy_version=s.policy_version + part)._asdict() for s in r.segments],
                "part": part,
                "uid": r.sample.uid,
            }
            for r in rollouts
        ]
        table = pa.Table.from_pylist(rows, schema=COLUMNS).replace_schema_metadata({FACTS: json.dumps(facts)})
        with write_whole_file(self.update(number)) as temporary:
            pq.write_table(table, temporary, compression="zstd")

    def write_part(self, part: int, result: Result) -> None:
        with write_whole_folder(self.part(part), MANIFEST) as temporary:
            result.write(temporary)

    def forget_versions(self, newest: int) -> None:
        """Those that nobody loads any more."""
        for number, version in self._versions():
            if 0 < number <= newest - KEPT_VERSIONS:
                shutil.rmtree(version)

    def _versions(self) -> list[tuple[int, Path]]:
        """Those that are there."""
        folders = (path for path in (self.path / "versions").iterdir() if path.is_dir() and path.name.isdigit())
        return [(int(path.name), path) for path in folders]

    def read(self) -> tuple[pa.Table, list[dict[str, Any]]]:
        """All samples that were trained, and the facts of each update."""
        found = [self._read(number) for number in range(self.updates)]
        return pa.concat_tables([samples for samples, _ in found]), [facts for _, facts in found]

    def trained(self) -> set[Group]:
        """The groups that some update was made with."""
        if not self.updates:
            return set()
        table, _ = self.read()
        return {Group(*group) for group in zip(table["epoch"].to_pylist(), table["prompt_id"].to_pylist(), strict=True)}

    def _read(self, number: int) -> tuple[pa.Table, dict[str, Any]]:
        try:
            table = pq.read_table(self.update(number))
            return table.cast(COLUMNS), json.loads((table.schema.metadata or {})[FACTS])
        except (OSError, pa.ArrowException, KeyError, ValueError) as error:
            raise InputError(f"{self.update(number)}: not the record of an update ({first_line(error)})") from error


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def segments_of(row: dict[str, Any]) -> list[Segment]:
    """Those of a row of `RunFolder.read`."""
    return [Segment(**segment) for segment in row["segments"]]


def as_trace(samples: pa.Table, per_step: int, metadata: TraceMetadata) -> Trace:
    """What was generated, in the order in which it was to be (`per_step` responses a step, whichever update trained on them):
    the workload that the run was, to simulate under any schedule or to draft from. By epoch first: a response lost with
    its engine, or with the run, is made under a later number. Records from before a run ended with its prompts may have one
    that came again instead of a slow one: it has a step after that of its epoch before."""
    samples = samples.sort_by([("epoch", "ascending"), ("part", "ascending"), ("uid", "ascending")])
    ids = samples["response_ids"].to_pylist()
    columns: dict[str, Any] = {
        name: samples[name].to_pylist() for name in ("epoch", "prompt_id", "sample", "prompt_tokens", "reward")
    }
    steps: list[int] = []
    epoch_at: dict[tuple[int, int], int] = {}  # by step and prompt
    for i, (epoch, prompt) in enumerate(zip(columns["epoch"], columns["prompt_id"], strict=True)):
        step = i // per_step
        while epoch_at.setdefault((step, prompt), epoch) != epoch:
            step += 1
        steps.append(step)
    columns["step"] = steps
    columns["response_tokens"] = [len(response) for response in ids]
    columns["response_ids"] = ids
    columns["policy_version"] = [row[-1]["policy_version"] for row in samples["segments"].to_pylist()]
    return Trace.from_columns(columns, metadata)
