"""Drafting ahead with real processes: what a drafter is told, what it drafts, and what the verifier makes of it, with a
model that is a function of the tokens before."""

import os
import signal
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from simrl.engine.state import Limits
from simrl.speculation.windows import Fixed
from simrl_replay import drafting_ahead
from simrl_replay.ahead import (
    Ahead,
    AheadSetup,
    Drafted,
    DrafterGoneError,
    DrafterProcess,
    Follow,
    Forget,
    LoadModel,
    ModelLoaded,
    Verified,
)
from simrl_replay.drafting_ahead import draft_ahead
from simrl_replay.host import Channel, Close, errors_sent
from simrl_replay.link import WANT_OF_MEMORY, ProcessLink, engine_link, wait_until_ready
from simrl_replay.vllm_adapter import EngineSettings, Progress
from tests.engine_double import double_settings

ROOM = Limits(8, 64, 16, 4096)
WRONG = 5  # the drafter is wrong behind every text whose hash leaves no rest by this


def target(text: Sequence[int]) -> int:
    return zlib.crc32(repr(list(text)).encode()) % 50


def drafted(text: Sequence[int], wrong: int) -> int:
    token = target(text)
    return (
        token + 50 if wrong and zlib.crc32(repr(list(text)).encode()) // 50 % wrong == 0 else token
    )


@dataclass
class DraftDouble:
    """An engine whose model is `drafted`: one token a pass for every request that is not held."""

    settings: EngineSettings
    wrong: int = 0
    version: str = "double"
    vocabulary: int = 100
    kv_cache_tokens: int = 0
    held: set[str] = field(default_factory=set)
    texts: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.settings.model.startswith("wrong"):
            self.wrong = int(self.settings.model.removeprefix("wrong"))

    def warm_up(self) -> None:
        pass

    def add(self, request_id: str, prompt_ids: Sequence[int], tokens: int) -> None:
        assert request_id not in self.texts and tokens > 0
        self.texts[request_id] = list(prompt_ids)

    def abort(self, request_id: str) -> None:
        del self.texts[request_id]

    def step(self) -> list[Progress]:
        progress = []
        for request_id, text in self.texts.items():
            if request_id not in self.held:
                text.append(drafted(text, self.wrong))
                progress.append(Progress(request_id, text[-1:], False))
        return progress

    def load_weights(self, folder: str) -> None:
        self.wrong = int(folder.removeprefix("wrong"))

    def recompute_running(self) -> None:
        pass


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ProcessLink]]:
    """Two processes of a drafter that is sometimes wrong."""
    folder = tmp_path_factory.mktemp("drafters")
    settings = replace(double_settings(ROOM), model=f"wrong{WRONG}")
    started = [
        engine_link(f"drafter {i}", settings, folder / str(i), work=draft_ahead, start=DraftDouble)
        for i in range(2)
    ]
    wait_until_ready(started, 60.0)
    yield started
    for line in started:
        line.close()


def setup(wrong: int = WRONG, every: int = 0, windows: int = 1, coupled: int = 0) -> AheadSetup:
    process = DrafterProcess(SimpleNamespace(model=f"wrong{wrong}"))
    return AheadSetup(process, every, (windows,) * 101, (coupled,) * 101, loads=True)


@dataclass
class Verifier:
    """A pass of the target's engine after another, over the requests that are not held."""

    ahead: Ahead
    texts: dict[str, list[int]]
    length: int
    passes: list[list[str]] = field(default_factory=list)
    most: int = 99
    counts: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def run(self) -> None:
        prompts = {name: len(text) for name, text in self.texts.items()}
        for name, text in self.texts.items():
            self.ahead.begins(name, text, ())
        running = list(self.texts)
        while running:
            drafts = self.ahead.windows(self.most)
            batch = [name for name in running if name not in self.ahead.held]
            if not batch:
                self.ahead.wait()
                continue
            verified = []
            for name in batch:
                text, draft, sampled = self.texts[name], drafts.get(name, []), []
                known = len(text)
                for token in [*draft, None]:
                    sampled.append(target([*text, *sampled]))
                    if sampled[-1] != token:
                        break
                most = prompts[name] + self.length
                decoded = known > prompts[name]
                verified.append(Verified(name, known, most, decoded, len(draft), sampled))
                text += sampled[: most - known]
            self.ahead.ran(verified)
            self.passes.append(batch)
            for name in [
                name for name in batch if len(self.texts[name]) == prompts[name] + self.length
            ]:
                running.remove(name)
                self.counts[name] = self.ahead.counts(name)
                self.ahead.ends(name)


def continued(prompt: Sequence[int], tokens: int) -> list[int]:
    text = list(prompt)
    for _ in range(tokens):
        text.append(target(text))
    return text


PROMPTS = {"a": [1, 2, 3], "b": [4], "c": [5, 6]}


@pytest.mark.parametrize("window", [1, 3, 5])
@pytest.mark.parametrize("always_right", [False, True])
def test_a_text_is_the_targets_whatever_is_drafted_ahead(
    lines: list[ProcessLink], window: int, always_right: bool
) -> None:
    ahead = Ahead(Fixed(tokens=window).rule, setup(0 if always_right else WRONG), lines)
    verifier = Verifier(ahead, {name: list(ids) for name, ids in PROMPTS.items()}, 60)
    verifier.run()
    assert verifier.texts == {name: continued(ids, 60) for name, ids in PROMPTS.items()}
    for name in PROMPTS:
        drafts, accepted, verifications, yielded, unverified = verifier.counts[name]
        assert yielded == 59  # all but the first token came of windows
        assert drafts - unverified == verifications * window
        assert (accepted == 59) == always_right and accepted > 20
        assert verifications == -(-59 // window) if always_right else verifications >= 59 // window
        assert 0 <= unverified <= drafts


def test_the_counts_are_those_of_the_written_rule(lines: list[ProcessLink]) -> None:
    """Windows and verdicts depend on the tokens alone; what is drafted ahead and dropped depends on the time too."""
    window = 4
    verifier = Verifier(Ahead(Fixed(tokens=window).rule, setup(), lines), {"a": [7, 8]}, 120)
    verifier.run()
    text, verifications, accepted = [7, 8, target([7, 8])], 0, 0
    while len(text) < 122:
        draft = list(text)
        for _ in range(window):
            draft.append(drafted(draft, WRONG))
        right = 0
        while right < window and draft[len(text) + right] == target(draft[: len(text) + right]):
            right += 1
        verifications += 1
        accepted += min(right, 122 - len(text))
        text = continued(text, min(right + (right < window), 122 - len(text)))
    assert verifier.counts["a"][1:3] == (accepted, verifications)


def test_a_request_of_low_acceptance_gets_the_window_and_the_mode_of_the_plan(
    lines: list[ProcessLink],
) -> None:
    """After 30 tokens those below the mean draft one token in turns; a pass then yields two where it is right."""
    ahead = Ahead(Fixed(tokens=4).rule, setup(every=30, windows=1, coupled=1), lines)
    verifier = Verifier(ahead, {name: list(ids) for name, ids in PROMPTS.items()}, 200)
    verifier.run()
    assert verifier.texts == {name: continued(ids, 200) for name, ids in PROMPTS.items()}
    drafted_in_windows = {
        name: (count[0] - count[4]) / count[2] for name, count in verifier.counts.items()
    }
    assert min(drafted_in_windows.values()) < 4 >= max(drafted_in_windows.values())


def test_a_pass_that_has_room_for_a_part_of_a_window_loses_no_token(
    lines: list[ProcessLink],
) -> None:
    ahead = Ahead(Fixed(tokens=5).rule, setup(0), lines)
    verifier = Verifier(ahead, {"a": [3]}, 50, most=2)
    verifier.run()
    assert verifier.texts["a"] == continued([3], 50)
    assert verifier.counts["a"][2] > 50 // 5


class Pipe:
    """A channel without a process: what the verifier would send, and what it would get."""

    def __init__(self, *messages: list[object]) -> None:
        self.inbox, self.sent = list(messages), list[object]()

    def poll(self, timeout_s: float | None) -> bool:
        return bool(self.inbox) and (timeout_s is None or len(self.inbox) > 0)

    def recv(self) -> list[object]:
        return self.inbox.pop(0)

    def send(self, messages: Sequence[object]) -> None:
        self.sent += messages


def test_a_drafter_goes_no_further_than_it_may_and_begins_anew_behind_a_correction() -> None:
    engine = DraftDouble(double_settings(ROOM))
    engine.settings = replace(engine.settings, model="v0")
    text = continued([1, 2], 8)

    class Script(Pipe):
        """Sends the next list when the drafter waits."""

        def poll(self, timeout_s: float | None) -> bool:
            return timeout_s is None and bool(self.inbox)

    pipe = Script(
        [LoadModel(None)],
        [Follow(1, 0, 0, (1, 2), 6, 2)],
        [Follow(1, 0, 0, (), 8, 2)],
        [Follow(1, 1, 4, (9,), 7, 2)],
        [Forget(1)],
        [Close()],
    )
    draft_ahead(engine, pipe)  # type: ignore[arg-type]
    corrected = [*text[:4], 9]
    expected = continued(corrected, 2)
    assert pipe.sent == [
        ModelLoaded(),
        Drafted(1, 0, tuple(text[2:4])),
        Drafted(1, 0, tuple(text[4:6])),
        Drafted(1, 0, tuple(text[6:8])),
        Drafted(1, 1, tuple(expected[5:7])),
    ]
    assert engine.texts == {}


def test_a_worker_ends_with_its_drafter_and_says_how_that_died(tmp_path: Path) -> None:
    settings = double_settings(ROOM)
    line = engine_link("drafter 0", settings, tmp_path / "log", work=draft_ahead, start=DraftDouble)
    wait_until_ready([line], 60.0)
    ahead = Ahead(Fixed(tokens=2).rule, AheadSetup(DrafterProcess(None)), [line])
    line.process.kill()
    line.process.join()
    pipe = Pipe()
    with (
        pytest.raises(SystemExit) as ended,
        errors_sent(pipe, str),  # type: ignore[arg-type]
    ):
        ahead.windows(9)
    assert str(ended.value.__cause__) == "the drafter is gone: killed by signal 9" + WANT_OF_MEMORY
    assert pipe.sent == []  # so that its controller starts the worker again
    line.kill()


def two_drafters(channel: Channel, folder: Path, number: int) -> None:
    """The life of a worker with two drafters, one of which gets a signal while a request waits."""
    settings = double_settings(ROOM)
    lines = [
        engine_link(f"drafter {i}", settings, folder / str(i), work=draft_ahead, start=DraftDouble)
        for i in range(2)
    ]
    wait_until_ready(lines, 60.0)
    with errors_sent(channel, str):
        process = DrafterProcess(None, step_deadline_s=0.3)
        ahead = Ahead(Fixed(tokens=2).rule, AheadSetup(process), lines)
        for line, name in zip(lines, "ba", strict=True):  # numbers are dealt to the lines
            pid = line.process.pid
            assert pid is not None
            ahead.begins(name, (1, 2), ())
            channel.send([name, pid])  # type: ignore[list-item]
        os.kill(pid, number)
        ahead.ran([Verified(name, 2, 99, False, 0, [3]) for name in "ab"])
        while True:
            for name in ahead.windows(9):
                if name not in ahead.held:
                    ahead.ends(name)
            ahead.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_worker_ends_though_one_of_its_drafters_lives_or_hangs(
    tmp_path: Path, number: signal.Signals
) -> None:
    life = partial(two_drafters, folder=tmp_path, number=number)
    worker = ProcessLink("worker", life, tmp_path / "log")
    drafters = [worker.connection.recv()[1] for _ in range(2)]
    worker.process.join(30.0)
    code = worker.process.exitcode
    worker.kill()
    assert code == 1
    message = "the drafter is gone" if number == signal.SIGKILL else "a drafter hangs: it drafted"
    assert message in (tmp_path / "log").read_text()
    for pid in drafters:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_drafter_that_loads_no_weights_in_time_hangs(tmp_path: Path) -> None:
    settings = double_settings(ROOM)
    line = engine_link("drafter 0", settings, tmp_path / "log", work=draft_ahead, start=DraftDouble)
    wait_until_ready([line], 60.0)
    assert line.process.pid is not None
    os.kill(line.process.pid, signal.SIGSTOP)
    process = DrafterProcess(None, start_deadline_s=0.2)
    with pytest.raises(DrafterGoneError, match=r"it loaded no weights for 0\.2 s"):
        Ahead(Fixed(tokens=2).rule, AheadSetup(process), [line])
    line.kill()


@pytest.mark.parametrize("visible", ["4,5,6", ""])
def test_drafters_of_two_models_share_gpus_and_start_in_turn(
    monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    happened: list[tuple[str, str]] = []

    def start(name: str, *_: object, variables: dict[str, str], **more: object) -> str:
        happened.append((name, variables.get("CUDA_VISIBLE_DEVICES", "")))
        return name

    monkeypatch.setattr(drafting_ahead, "engine_link", start)
    waits = lambda links, deadline_s: happened.append(("up", links[-1]))  # noqa: E731
    monkeypatch.setattr(drafting_ahead, "wait_until_ready", waits)
    models = [replace(double_settings(ROOM), model=name) for name in ("one", "two")]
    drafting_ahead.start_drafters([DrafterProcess(each, number=2) for each in models])
    gpus = ("5", "6") if visible else ("", "")
    assert happened == [
        event
        for name in ("one", "two")
        for event in (
            (f"drafter 0 ({name})", gpus[0]),
            (f"drafter 1 ({name})", gpus[1]),
            ("up", f"drafter 1 ({name})"),
        )
    ]
