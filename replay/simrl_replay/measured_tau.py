"""RhymeRL's τ, measured: the seconds in which several engines generate a group of responses of one
length (arXiv 2508.18588 §6.4, "pre-profiling of the inference engine").

Invariant: a time is from the sending of all requests to the end of the last response, on the clock
of the host that the engines share. All engines run throughout, and those without a part of the
group are idle. A group's responses have equal lengths, as the paper's representative length has it;
where drafts are accepted, they are forced at a stated probability a token, and the table has the
accept length that this came to.
"""

from __future__ import annotations

import csv
import json
import platform
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import product
from multiprocessing.connection import wait
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from simrl.errors import InputError, StoppedError, choose, refuse
from simrl.files import temporary_folder, write_whole_file
from simrl.profile.hardware import GPUS
from simrl.profile.model_shape import model_shape
from simrl.profile.tau import AXES, FACTS
from simrl.speculation.acceptance import ModelAcceptance
from simrl.speculation.windows import Fixed
from simrl_replay.bench import Group, Seen
from simrl_replay.cli_measure import Wanted
from simrl_replay.host import Begin, Command, DraftCall, Ended
from simrl_replay.link import (
    EngineLink,
    GoneError,
    device_variables,
    engine_link,
    received,
    start_all,
)
from simrl_replay.measure import Journal
from simrl_replay.measured_profile import engine_of
from simrl_replay.proposer import DrafterSetup, Forced
from simrl_replay.vllm_adapter import EngineSettings, vllm_version

PROMPT_TOKENS = 16  # of each response; the paper's l is of responses
SILENCE_S = 600.0  # without a report, in which running engines report every 0.25 s
WARM_UP_TOKENS = 8


class TauPlan(NamedTuple):
    """The places of the table: tokens of a response, workers, responses of a group, and the
    probability at which a drafted token is accepted (empty: no drafts)."""

    lengths: Sequence[int]
    workers: Sequence[int]
    responses: Sequence[int]
    acceptances: Sequence[float] = ()

    @property
    def groups(self) -> list[Group]:
        """Return the places, the shortest lengths first."""
        places = product(self.lengths, self.workers, self.responses, self.acceptances or (0.0,))
        return [Group(*place) for place in places]


class TauRow(NamedTuple):
    """A row of the table; `spread` is the range of the repeats as a share of their median."""

    length_tokens: int
    workers: int
    responses: int
    accept_length: float
    seconds: float
    spread: float


class Engines:
    """The engines of all workers, which generate a group together. A context manager, which leaves
    no process."""

    def __init__(self, links: Sequence[EngineLink], settings: EngineSettings, draft_tokens: int):
        self._links, self._settings, self._draft_tokens = links, settings, draft_tokens
        self._numbers, self._acceptance = 0, 0.0
        self._random = random.Random(0)
        self(Group(WARM_UP_TOKENS, len(links), len(links), 0.0))

    def __call__(self, group: Group) -> Seen:
        """Return the seconds of a group, and the tokens a pass. Raise `StoppedError` if an engine
        dies or is silent."""
        if group.acceptance != self._acceptance:
            self._draft(group.acceptance)
        numbers = range(self._numbers, self._numbers + group.responses)
        self._numbers += group.responses
        links = {link.connection: link for link in self._links[: group.workers]}
        requests = [self._request(number, group.length_tokens) for number in numbers]
        began_s, ends = time.monotonic(), list[Ended]()
        for i, link in enumerate(links.values()):
            link.send(requests[i :: group.workers])
        last_s = began_s
        while len(ends) < group.responses:
            heard = wait(list(links), SILENCE_S)
            if not heard:
                raise StoppedError(f"engines: no report for {SILENCE_S:g} s; see their logs")
            for connection in heard:
                link = links[connection]  # type: ignore[index]
                for report in received(link):
                    if isinstance(report, Ended):
                        ends.append(report)
                        last_s = max(last_s, report.at_s - link.offset_s)
        tokens = group.length_tokens * group.responses
        passes = tokens - sum(end.drafts[3] - end.drafts[2] for end in ends)
        return Seen(group_s=(last_s - began_s,), accept_length=(tokens / passes,))

    def _draft(self, acceptance: float) -> None:
        """Let the engines draft tokens of which each is accepted with this probability; 0: none."""
        setup = DrafterSetup()
        if acceptance > 0.0:
            setup = DrafterSetup(
                kind="oracle",
                window=Fixed(tokens=self._draft_tokens),
                acceptance=ModelAcceptance(by_position=(acceptance,)),
            )
        self._acceptance = acceptance
        for link in self._links:
            link.send([DraftCall("configure", (setup,))])

    def _request(self, number: int, tokens: int) -> Command:
        prompt = tuple(self._random.randint(1, 100) for _ in range(PROMPT_TOKENS))
        forced = None
        if self._settings.recorded:
            forced = Forced(tuple(self._random.randint(1, 100) for _ in range(tokens)), number)
        return Begin(number, number, prompt, (), tokens, forced)

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for link in self._links:
            if kind is None:
                link.close()
            else:
                link.kill()


def measure_tau(
    wanted: Wanted,
    plan: TauPlan,
    output: Path,
    journal: Path,
    tell: Callable[[str, int, int], None] = lambda *_: None,
) -> list[TauRow]:
    """Measure τ at all places of the plan, and write the table to `output`; continue a measurement
    whose groups are in `journal`. Raise `InputError` for a plan that cannot be measured,
    `StoppedError` if an engine dies."""
    check_tau(wanted, plan)
    version = vllm_version()
    settings = replace(engine_of(wanted), recorded=bool(plan.acceptances))
    with temporary_folder() as logs, ExitStack() as running:

        @cache
        def engines() -> Engines:  # from the first group on: a complete journal needs none
            variables = device_variables(max(plan.workers), settings)
            links = start_all(
                [
                    partial(engine_link, f"engine {i}", settings, logs / f"{i}.log", variables=gpus)
                    for i, gpus in enumerate(variables)
                ],
                wanted.start_deadline_s,
            )
            return running.enter_context(Engines(links, settings, wanted.draft_tokens))

        try:
            return tau_with(
                lambda group: engines()(group), version, wanted, plan, output, journal, tell
            )
        except GoneError as error:
            raise StoppedError(
                f"{error}; measured groups are kept; run the command again to continue"
            ) from None


def tau_with(
    engines: Callable[[Group], Seen],
    version: str,
    wanted: Wanted,
    plan: TauPlan,
    output: Path,
    journal: Path,
    tell: Callable[[str, int, int], None] = lambda *_: None,
) -> list[TauRow]:
    """Measure with given engines of a vLLM version, and write the table."""
    settings = json.loads(json.dumps({**asdict(wanted), **plan._asdict()}, default=str))
    settings |= {"tau": True, "vllm": version, "host": platform.node()}
    for name in ("budget_s", "tolerance", "start_deadline_s", "gpu", "neighbours"):
        del settings[name]  # without effect, or may change between starts of one measurement
    book = Journal(journal, settings, engines)  # type: ignore[arg-type]
    groups = plan.groups
    seen: dict[Group, list[Seen]] = {group: [] for group in groups}
    for repeat in range(wanted.repeats):  # over all: a slow minute affects one repeat of each
        for i, group in enumerate(groups):
            tell("groups", repeat * len(groups) + i, wanted.repeats * len(groups))
            seen[group].append(book(group))  # type: ignore[arg-type]
    yields = {
        acceptance: round(
            mean(
                value
                for group, all_seen in seen.items()
                for each in all_seen
                for value in each.accept_length
                if group.acceptance == acceptance
            ),
            4,
        )
        for acceptance in {group.acceptance for group in groups}
    }
    times: dict[tuple[int, int, int, float], list[float]] = {}
    for group, all_seen in seen.items():  # acceptances that yield the same are one place
        place = group.length_tokens, group.workers, group.responses, yields[group.acceptance]
        times.setdefault(place, []).extend(value for each in all_seen for value in each.group_s)
    rows = [
        TauRow(*place, middle := median(seconds), (max(seconds) - min(seconds)) / middle)
        for place, seconds in times.items()
    ]
    _write(wanted, version, rows, output, bool(plan.acceptances))
    book.finish()
    return rows


def check_tau(wanted: Wanted, plan: TauPlan) -> None:
    """Raise `InputError` for a plan that cannot be measured, or makes no table."""
    longest = PROMPT_TOKENS + max(plan.lengths, default=0)
    for option, numbers in (
        ("--lengths", plan.lengths),
        ("--workers", plan.workers),
        ("--responses", plan.responses),
    ):
        words = ",".join(map(str, numbers)) or "''"
        refuse((min(numbers, default=0) < 1, f"{option} {words}: give numbers of 1 or more"))
    refuse(
        (
            wanted.device == "cuda" and wanted.gpu is None,
            "measure --tau: name the GPU of the table with --gpu (h100, h200 …)",
        ),
        (
            wanted.gpu not in (None, *GPUS),
            f"--gpu {wanted.gpu}{choose(wanted.gpu, GPUS, 'simrl profile names')}",
        ),
        (
            len(set(plan.lengths)) < 2 or len(set(plan.workers)) < 2,
            f"--lengths {','.join(map(str, plan.lengths))}, --workers {','.join(map(str, plan.workers))}: τ needs two lengths "
            "and two numbers of workers or more",
        ),
        (
            longest > wanted.max_model_len,
            f"--lengths {max(plan.lengths)}: with a prompt of {PROMPT_TOKENS} tokens, {longest} are more than --max-model-len "
            f"{wanted.max_model_len}; raise it",
        ),
        (
            min(plan.responses) < max(plan.workers),
            f"--responses {min(plan.responses)}: fewer than {max(plan.workers)} workers; give one to each",
        ),
        (
            bool(plan.acceptances) != bool(wanted.draft_tokens),
            "--acceptance and --draft-tokens belong together: tokens of a draft, and how likely each is accepted",
        ),
        (
            any(not 0 <= acceptance < 1 for acceptance in plan.acceptances),
            f"--acceptance {','.join(map(str, plan.acceptances))}: give probabilities from 0 to below 1",
        ),
    )


def numbers_of(option: str, text: str, kind: Callable[[str], float]) -> list[float]:
    """Return the numbers of an option such as `1,2,4`. Raise `InputError` for another text."""
    try:
        return sorted({kind(part) for part in text.split(",") if part.strip()})
    except ValueError as error:
        raise InputError(f"{option} {text}: give numbers with commas between, 1,2,4") from error


def _write(
    wanted: Wanted, version: str, rows: Sequence[TauRow], output: Path, drafted: bool
) -> None:
    """Write the table as `simrl.profile.tau` reads it."""
    source = (
        f"simrl measure --tau: vLLM {version} on {platform.node()} ({wanted.device}), median of {wanted.repeats}, "
        f"equal lengths after {PROMPT_TOKENS} prompt tokens"
    )
    facts = (model_shape(wanted.model).name, wanted.gpu or "cpu", wanted.tp, source)
    axes = [axis for axis in AXES if drafted or axis != "accept_length"]
    with write_whole_file(output) as temporary, temporary.open("w", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([*FACTS, *axes, "seconds"])
        for row in rows:
            named = row._asdict()
            table.writerow([*facts, *(named[axis] for axis in axes), f"{row.seconds:.6g}"])
