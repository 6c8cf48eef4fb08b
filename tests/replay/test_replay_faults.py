"""What goes wrong in a replay: engines that die, hang or do not start, whoever stops it, folders that must not be loaded.

First with doubles in processes of their own, then with real vLLM.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from simrl.dispatch.dispatcher import Dispatcher
from simrl.dispatch.rules import DISPATCHES
from simrl.errors import InputError, StoppedError
from simrl.result.result import Lane
from simrl.runtime.events import gather, on_fire
from simrl.runtime.recorder import Recorder
from simrl.trace.trace import Sample
from simrl_replay.clock import WallClock
from simrl_replay.host import REPORT_EVERY_S, Channel, DraftCall, Reached
from simrl_replay.link import (
    EngineLink,
    ProcessLink,
    device_variables,
    engine_link,
    start_all,
    wait_until_ready,
)
from simrl_replay.replayer import ReplayConfig, ReplayEngines, reset
from simrl_replay.vllm_adapter import (
    EngineSettings,
    check_model,
    check_weights,
    explained,
    vllm_version,
)
from simrl_replay.vllm_worker import MOST_RESTARTS, VllmWorker
from tests.command_line import ROOT
from tests.engine_double import VOCABULARY, EngineDouble, continuation, double_settings
from tests.helpers import RESPONSES, ROOMY, rows, sample, with_status
from tests.replay.test_vllm_worker import prompt_ids

STEP_S = 0.005
SETTINGS = double_settings(ROOMY)


def process_link(
    name: str, log: Path, settings: EngineSettings = SETTINGS, **double: float
) -> ProcessLink:
    return engine_link(
        name, settings, log, start=partial(EngineDouble, **{"step_s": STEP_S, **double})
    )  # type: ignore[arg-type]


def is_there(pid: int) -> bool:
    """A process that runs (not one that is dead and not yet waited for)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(holds: Callable[[], object], seconds: float = 60.0) -> bool:
    until_s = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True


@dataclass
class Stage:
    """Workers over doubles in processes, and a dispatcher over them."""

    env: WallClock
    fleet: ReplayEngines
    record: Recorder
    workers: list[VllmWorker]
    dispatcher: Dispatcher
    happened: list[dict] = field(default_factory=list)

    def pid(self, worker: int) -> int:
        pid = self.fleet.links[worker].process.pid  # type: ignore[attr-defined]
        assert pid is not None
        return pid

    def at(self, time_s: float, call: Callable[[], object]) -> None:
        on_fire(self.env.timeout(time_s), lambda _: call())

    def kill(self, worker: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid(worker), number)

    def finish(self, samples: Sequence[Sample]) -> list:
        """Generates them all; checks that nothing was lost or came twice."""
        events = self.dispatcher.submit(samples)
        rollouts = self.env.run(until=gather(self.env, events))
        self.check(rollouts)
        return rollouts

    def check(self, rollouts) -> None:
        for rollout in rollouts:
            length = RESPONSES[rollout.sample.uid].tokens
            assert rollout.done and rollout.tokens == length == len(rollout.token_ids)
            assert rollout.token_ids == tuple(
                continuation(prompt_ids(rollout.sample), length, "v0")
            )
        told = sum(worker.generated_total for worker in self.workers)
        assert told == sum(rollout.tokens for rollout in rollouts)

    def result(self):
        for worker in self.workers:
            worker.stop(self.env.now)
        return self.record.result(self.env.now, {})


@contextmanager
def stage(
    folder: Path,
    workers: int = 2,
    deadline_s: float = 30.0,
    start_deadline_s: float = 60.0,
    **double,
):
    start: list[Callable[[], EngineLink]] = [
        partial(process_link, f"worker {i}", folder / f"{i}.log", **double) for i in range(workers)
    ]
    with ReplayEngines(start) as fleet:
        env = WallClock()
        record = Recorder([Lane(f"rollout-{i:03d}", 1) for i in range(workers)])
        happened: list[dict] = []
        made = [
            VllmWorker(
                env,
                i,
                fleet.links[i],
                partial(fleet.restart, i),
                RESPONSES,
                prompt_ids,
                lambda version: f"v{version}",
                record,
                deadline_s,
                start_deadline_s,
                happened.append,
            )
            for i in range(workers)
        ]
        dispatcher = Dispatcher(env, made, DISPATCHES["least_requests"], record)
        for worker in made:
            worker.dispatcher = dispatcher
        yield Stage(env, fleet, record, made, dispatcher, happened)


def samples(count: int, tokens: int = 60) -> list[Sample]:
    return [sample(uid, 6, tokens + uid % 5) for uid in range(count)]


def test_samples_of_an_engine_that_is_killed_go_on_elsewhere_from_their_last_token(tmp_path):
    with stage(tmp_path) as real:
        real.at(2 * REPORT_EVERY_S, lambda: real.kill(0))
        rollouts = real.finish(samples(8, 200))
        [event] = real.happened
        assert (event["kind"], event["worker"]) == ("died", 0)
        assert (
            event["message"].startswith("worker 0: killed by signal 9")
            and "memory" in event["message"]
        )
        moved = [r for r in rollouts if {s.worker for s in r.segments} == {0, 1}]
        assert moved  # with their tokens: what was generated twice would be counted twice
        spans = rows(real.result().spans)
        assert any(s["kind"] == "lost" and s["lane"] == "rollout-000" for s in spans)


@pytest.mark.slow
def test_a_killed_engine_starts_again_gets_the_last_weights_and_takes_samples(tmp_path):
    with stage(tmp_path) as real:
        first = real.pid(0)
        real.at(0.15, lambda: real.kill(0))
        real.at(0.3, lambda: [worker.load_weights(2) for worker in real.workers])
        real.env.run(until=real.env.timeout(0.5))
        assert real.dispatcher.lost == [0]
        real.env.run(until=real.dispatcher.activated(0))
        assert real.dispatcher.lost == [] and real.pid(0) != first and not is_there(first)
        assert [worker.policy_version for worker in real.workers] == [2, 2]
        each = samples(4)
        [_, *rollouts] = real.env.run(
            until=gather(real.env, [real.env.timeout(0), *real.dispatcher.submit(each)])
        )
        assert {s.worker for r in rollouts for s in r.segments} == {0, 1}
        assert all(
            r.token_ids == tuple(continuation(prompt_ids(r.sample), r.tokens, "v2"))
            for r in rollouts
        )


@pytest.mark.slow
def test_an_engine_that_dies_while_it_comes_back_is_no_worker_until_it_is_back(tmp_path):
    with stage(tmp_path, start_s=0.5) as real:
        again: list[int] = []

        def kill_the_next() -> None:
            again.append(real.pid(0))
            real.kill(0)

        real.at(0.1, lambda: real.kill(0))
        real.at(0.6, kill_the_next)
        everything = real.finish(samples(6, 200))
        assert len(everything) == 6 and [event["kind"] for event in real.happened] == [
            "died",
            "died",
        ]
        if 0 not in real.dispatcher.active:
            real.env.run(until=real.dispatcher.activated(0))
        assert real.pid(0) not in again
        spans = [
            s
            for s in rows(real.result().spans)
            if s["lane"] == "rollout-000" and s["kind"] == "lost"
        ]
        assert len(spans) == 1  # one loss, however often its process died


@pytest.mark.slow
def test_an_engine_that_does_nothing_but_die_stops_the_replay(tmp_path):
    with stage(tmp_path) as real:

        def die_again(_) -> None:
            real.kill(0)
            on_fire(real.dispatcher.activated(0), die_again)

        def after_the_loss(_) -> None:
            on_fire(real.dispatcher.activated(0), lambda _: killing())

        def killing() -> None:
            real.kill(0)
            on_fire(real.dispatcher.loss(), after_the_loss)

        real.at(0.05, killing)
        with pytest.raises(
            StoppedError, match=f"worker 0: killed by signal 9.*lost {MOST_RESTARTS + 1} times"
        ):
            real.env.run(until=real.env.event())
        pids = [real.pid(i) for i in range(2)]
    assert not any(is_there(pid) for pid in pids)


@pytest.mark.slow
def test_an_engine_that_hangs_is_named_killed_and_started_again(tmp_path):
    with stage(tmp_path, deadline_s=1.0) as real:
        hung = real.pid(1)
        real.at(0.2, lambda: real.kill(1, signal.SIGSTOP))
        real.finish(samples(6, 100))
        [event] = real.happened
        assert (event["kind"], event["worker"]) == ("hung", 1)
        assert (
            event["message"].startswith("worker 1: no step ended for")
            and "killed" in event["message"]
        )
        assert not is_there(hung)


@pytest.mark.slow
def test_an_idle_engine_does_not_hang_nor_one_that_loads_for_long(tmp_path):
    with stage(tmp_path, deadline_s=0.6, load_s=1.5) as real:
        real.env.run(until=real.env.timeout(1.6))
        loads = gather(real.env, [worker.load_weights(1) for worker in real.workers])
        real.env.run(until=loads)
        assert real.happened == []


@pytest.mark.slow
def test_an_engine_that_does_not_come_back_in_time_counts_as_lost_again(tmp_path):
    with stage(tmp_path, start_deadline_s=0.6) as real:

        def stop_it() -> None:
            real.kill(0)
            on_fire(
                real.dispatcher.loss(), lambda _: real.at(0.0, lambda: real.kill(0, signal.SIGSTOP))
            )

        real.at(0.1, stop_it)
        until = real.env.event()

        def look():
            while len(real.happened) < 2:
                yield real.env.timeout(0.1)
            until.succeed()

        real.env.process(look())
        real.env.run(until=until)
        assert [event["kind"] for event in real.happened] == ["died", "hung"]
        assert "it was not up for" in real.happened[1]["message"]


@pytest.mark.slow
def test_what_fails_in_an_engine_surfaces_with_its_cause(tmp_path):
    with stage(tmp_path) as real:
        real.workers[0]._weights = lambda version: "broken"
        real.dispatcher.submit(samples(4))
        real.at(0.1, lambda: real.workers[0].load_weights(1))
        with pytest.raises(
            StoppedError, match="worker 0: RuntimeError: these weights are broken"
        ) as caught:
            real.env.run(until=real.env.event())
        assert "load_weights" in str(caught.value.__cause__)
        result = real.result()
        assert len(with_status(result, "in_flight")) == 4  # what there is by then can be read


@pytest.mark.slow
def test_who_waits_for_a_lost_engine_is_answered(tmp_path):
    with stage(tmp_path, workers=1, load_s=5.0) as real:
        [worker], each = real.workers, sample(0, 4, 1000)
        stay = worker.submit(each)
        real.env.run(until=real.env.timeout(2 * REPORT_EVERY_S))
        real.kill(0)
        load, progress, abort = worker.load_weights(3), worker.progress([each]), worker.abort(each)
        real.env.run(until=gather(real.env, [stay, load, progress, abort]))
        assert load.value.version == 3 and progress.value == [None]
        assert stay.value == abort.value and not stay.value.done and 0 < stay.value.tokens < 1000
        late = worker.submit(each, stay.value)
        assert real.env.run(until=late) == stay.value  # comes back at once, as it is


@pytest.mark.slow
def test_a_loss_that_a_scenario_asks_for_lasts_until_it_ends_it(tmp_path):
    with stage(tmp_path) as real:
        first, back = real.pid(0), []

        def lose() -> None:
            real.dispatcher.retire(0, lost=True)
            real.workers[0].fail()

        def restore() -> None:
            assert not is_there(first) and real.dispatcher.lost == [0]
            on_fire(real.workers[0].restore(), lambda event: back.append(event.value))
            real.workers[0].load_weights(4)

        real.at(0.1, lose)
        real.at(0.6, restore)
        real.finish(samples(6))
        assert real.happened == []  # the scenario tells of it
        while not back:
            real.env.run(until=real.env.timeout(0.1))
        assert back[0].version == real.workers[0].policy_version == 4
        assert is_there(real.pid(0)) and real.pid(0) != first
        assert real.env.run(until=real.workers[0].restore()) is None  # it is not away


@pytest.mark.slow
def test_a_loss_that_a_scenario_asks_for_holds_back_an_engine_that_was_coming_back(tmp_path):
    with stage(tmp_path) as real:
        real.at(0.1, lambda: real.kill(0))

        def lose() -> None:
            real.dispatcher.retire(0, lost=True)
            real.workers[0].fail()

        on_fire(real.dispatcher.loss(), lambda _: real.at(0.1, lose))
        real.finish(samples(4))
        real.env.run(until=real.env.timeout(3.0))
        assert real.dispatcher.lost == [0] and not is_there(real.pid(0))


@pytest.mark.slow
def test_commands_to_an_engine_that_reads_nothing_keep_nobody_waiting(tmp_path):
    with stage(tmp_path, workers=1, deadline_s=1.0) as real:
        real.kill(0, signal.SIGSTOP)
        big = sample(0, 500_000, 4)  # more than a pipe holds
        stay = real.workers[0].submit(big)
        assert real.env.run(until=stay).tokens == 0
        assert [event["kind"] for event in real.happened] == ["hung"]


@pytest.mark.slow
def test_an_engine_that_cannot_be_made_says_why_and_leaves_no_other(tmp_path):
    links: list[ProcessLink] = []

    def start(i: int, model: str) -> ProcessLink:
        links.append(process_link(f"worker {i}", tmp_path / "log", double_settings(ROOMY, model)))
        return links[-1]

    with pytest.raises(InputError, match="worker 1: broken: no engine can be made of this"):
        start_all([partial(start, 0, "v0"), partial(start, 1, "broken")], 60.0)
    assert not any(is_there(link.process.pid) for link in links)


def test_an_engine_that_is_not_up_in_time_is_named_and_none_is_left(tmp_path):
    links: list[ProcessLink] = []

    def start() -> ProcessLink:
        links.append(process_link("worker 0", tmp_path / "log", start_s=60.0))
        return links[-1]

    with pytest.raises(StoppedError, match=r"worker 0: not up after 1 s.*--start-deadline"):
        start_all([start], 1.0)
    assert not is_there(links[0].process.pid)


def test_an_engine_that_dies_before_it_is_up_says_so(tmp_path):
    link = process_link("worker 0", tmp_path / "log", start_s=60.0)
    with pytest.raises(
        StoppedError,
        match=r"worker 0: killed by signal 9, perhaps for want of memory.*before it was up",
    ):
        start_all([lambda: link.process.kill() or link], 60.0)


def with_a_helper(engine: EngineDouble, channel: Channel) -> None:
    """The work of an engine that has another process, as one with tensor parallelism has; it is told of."""
    helper = subprocess.Popen(["sleep", "600"])
    channel.send([Reached(helper.pid, 0.0)])
    channel.poll(None)


@pytest.mark.slow
@pytest.mark.parametrize("dies_before", [False, True])
def test_the_processes_of_an_engine_end_with_it(tmp_path, dies_before):
    link = engine_link("worker 0", SETTINGS, tmp_path / "log", with_a_helper, EngineDouble)
    wait_until_ready([link], 60.0)
    [told] = link.connection.recv()
    assert is_there(told.key)
    if dies_before:
        os.kill(link.process.pid, signal.SIGKILL)
        assert "killed by signal 9" in link.death()
    link.kill()
    assert eventually(lambda: not is_there(told.key), 5.0)
    assert link.connection.poll(5.0)
    with pytest.raises((EOFError, OSError)):
        link.connection.recv()


@pytest.mark.slow
def test_a_fleet_whose_engine_died_in_one_replay_has_a_new_one_in_the_next(tmp_path):
    config = ReplayConfig(Path("v0"), start_deadline_s=60.0)
    with ReplayEngines(
        [partial(process_link, f"worker {i}", tmp_path / f"{i}.log") for i in range(2)]
    ) as fleet:
        dead = fleet.links[1].process.pid
        fleet.links[1].kill()
        assert reset(fleet, config, None) == VOCABULARY
        assert fleet.links[1].process.pid != dead and all(
            is_there(link.process.pid) for link in fleet.links
        )
        fleet.links[0].send([DraftCall("nothing of the kind", ())])
        with pytest.raises(StoppedError, match="worker 0: AttributeError"):
            reset(fleet, config, None)
        assert reset(fleet, config, None) == VOCABULARY


@pytest.mark.slow
def test_parent_that_was_stopped_for_a_while_takes_no_busy_engine_for_hung(tmp_path):
    with stage(tmp_path, deadline_s=0.6) as real:
        real.at(0.1, lambda: time.sleep(1.5))
        real.finish(samples(4, 300))
        assert real.happened == []


def cuda(tp: int) -> EngineSettings:
    return replace(SETTINGS, device="cuda", tp=tp)


def test_each_engine_of_a_machine_has_gpus_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-7,6")
    visible = [each["CUDA_VISIBLE_DEVICES"] for each in device_variables(2, cuda(2))]
    assert visible == ["4,5", "GPU-7,6"]
    with pytest.raises(
        InputError, match=r"3 engines with cluster\.tp 2 need 6 GPUs, this machine shows 4"
    ):
        device_variables(3, cuda(2))
    assert device_variables(3, SETTINGS) == [{}, {}, {}]  # on a CPU


def test_engines_share_a_gpu_if_they_should_and_each_starts_when_the_one_before_is_up(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    visible = [
        each["CUDA_VISIBLE_DEVICES"] for each in device_variables(5, cuda(1), engines_per_gpu=2)
    ]
    assert visible == ["4", "4", "5", "5", "6"]
    with pytest.raises(
        InputError, match=r"7 engines with cluster\.tp 1 need 4 GPUs, this machine shows 3"
    ):
        device_variables(7, cuda(1), engines_per_gpu=2)
    starts: list[float] = []

    def start(name: str) -> EngineLink:
        starts.append(time.monotonic())
        return process_link(name, tmp_path / name, start_s=0.5)

    links = start_all([partial(start, "0"), partial(start, "1")], 60.0, in_turn=True)
    assert starts[1] - starts[0] > 0.5
    for link in links:
        link.close()


def test_gpus_are_counted_by_the_driver_where_no_variable_names_them(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [each["CUDA_VISIBLE_DEVICES"] for each in device_variables(2, cuda(1))] == [
        "0",
        "1",
    ]  # nobody counts
    driver = tmp_path / "nvidia-smi"
    driver.write_text(
        "#!/bin/sh\necho 'GPU 0: H100 (UUID: GPU-a)'\necho '  MIG 1g Device 0'\necho 'GPU 1: H100 (UUID: GPU-b)'\n"
    )
    driver.chmod(0o755)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in device_variables(2, cuda(1))] == ["0", "1"]
    with pytest.raises(InputError, match="need 4 GPUs, this machine shows 2"):
        device_variables(2, cuda(2))


def its_variable(engine: EngineDouble, channel: Channel) -> None:
    channel.send([Reached(int(os.environ["CUDA_VISIBLE_DEVICES"]), 0.0)])


def test_an_engines_variables_are_those_of_its_process_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    link = engine_link(
        "worker 0",
        SETTINGS,
        tmp_path / "log",
        its_variable,
        EngineDouble,
        {"CUDA_VISIBLE_DEVICES": "3"},
    )
    wait_until_ready([link], 60.0)
    assert link.connection.recv()[0].key == 3 and "CUDA_VISIBLE_DEVICES" not in os.environ
    link.close()


def leaves_a_file(engine: EngineDouble, channel: Channel) -> None:
    """The work of an engine that makes a temporary file and leaves it, as vLLM does."""
    handle, name = tempfile.mkstemp(prefix="vllm_dist_")
    os.close(handle)
    channel.send([Reached(len(list(Path(name).parent.iterdir())), 0.0)])
    channel.poll(None)


@pytest.mark.parametrize("end", ["close", "kill"])
def test_temporary_files_that_an_engine_leaves_end_with_it(tmp_path, monkeypatch, end):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = dict(os.environ)
    link = engine_link("worker 0", SETTINGS, tmp_path / "log", leaves_a_file, EngineDouble)
    wait_until_ready([link], 60.0)
    assert link.connection.recv()[0].key == 1 and os.environ == before
    getattr(link, end)()
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_neither_ctrl_c_nor_sigterm_ends_an_engine_but_the_end_of_its_line_does(tmp_path):
    with stage(tmp_path, workers=1) as real:
        for number in (signal.SIGINT, signal.SIGTERM):
            real.kill(0, number)
        real.finish(samples(2))
        assert real.happened == []
        pid, link = real.pid(0), real.fleet.links[0]
        link._out.put(None)  # nobody writes
        real.env.forget(link.connection)
        link.connection.close()  # nor reads
        assert eventually(lambda: not is_there(pid))


@pytest.mark.slow
def test_an_engine_ends_with_whoever_started_it_even_while_it_starts(tmp_path):
    """The process between is killed, and can close nothing."""
    code = f"""
import sys
sys.path[:0] = {[str(ROOT), str(ROOT / "replay")]!r}
from pathlib import Path
from tests.replay.test_replay_faults import process_link
if __name__ == "__main__":
    link = process_link("worker 0", Path({str(tmp_path / "log")!r}), start_s=600.0)
    print(link.process.pid, flush=True)
    link.process.join()
"""
    file = tmp_path / "between.py"
    file.write_text(code)
    between = subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, text=True)
    assert between.stdout is not None
    pid = int(between.stdout.readline())
    time.sleep(3.0)  # it imports, and then starts its engine for ten minutes
    assert is_there(pid)
    between.kill()
    between.wait()
    assert eventually(lambda: not is_there(pid))


# Folders, versions, messages.


def model_folder(folder: Path, config: object = None, *files: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3"} if config is None else config)
    )
    for file in files:
        (folder / file).touch()
    return folder


def test_a_folder_is_refused_in_a_line_before_anything_starts(tmp_path):
    def refused(folder: Path, dummy: bool = False) -> str:
        with pytest.raises(InputError) as caught:
            check_model(folder, dummy)
        assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
        return str(caught.value)

    assert "not a model's config" in refused(tmp_path / "nowhere")
    assert "no JSON object" in refused(model_folder(tmp_path / "list", []))
    assert "no *.safetensors" in refused(model_folder(tmp_path / "bare"))
    pickled = model_folder(tmp_path / "pickled", None, "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle" in refused(pickled)
    own_code = {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}
    assert "auto_map" in refused(model_folder(tmp_path / "code", own_code, "model.safetensors"))
    assert "auto_map" in refused(model_folder(tmp_path / "code2", own_code), dummy=True)
    check_model(model_folder(tmp_path / "good", None, "model.safetensors"), False)
    check_model(model_folder(tmp_path / "dummy"), True)
    with pytest.raises(InputError, match=r"no \*.safetensors"):
        check_weights(tmp_path / "bare")


def test_vllm_that_is_missing_or_unknown_says_what_to_install(monkeypatch):
    monkeypatch.setattr("simrl_replay.vllm_adapter._installed", lambda: None)
    with pytest.raises(
        InputError,
        match=r"separate environment.*pip install vllm==.*/whl/cpu.*requirements-vllm-cpu",
    ):
        vllm_version()
    monkeypatch.setattr("simrl_replay.vllm_adapter._installed", lambda: ("vllm", "0.11.2"))
    with pytest.raises(InputError, match=r"vllm 0.11.2 is installed.*pip install vllm==0.26.0"):
        vllm_version()
    monkeypatch.setattr("simrl_replay.vllm_adapter._installed", lambda: ("vllm-cpu", "0.32.0+cpu"))
    assert vllm_version() == "0.32.0+cpu"


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "kv_cache_tokens"),
        (RuntimeError("CUDA out of memory. Tried to allocate 20 GiB"), "kv_cache_tokens"),
        (MemoryError(), "kv_cache_tokens"),
        (ValueError("No available memory for the cache blocks. Try increasing it"), "cluster.tp"),
        (ValueError("To serve (1 GiB KV cache is needed, which is larger than the available KV cache"), "cap of the"),
        (ValueError("Free memory on device is less than desired GPU memory utilization (0.9)"), "gpu_memory_util"),
        (ValueError("1 validation error\n  max_model_len (9) is greater than the derived max_model_len"), "context"),
    ],
)  # fmt: skip
def test_want_of_memory_says_what_to_lower(said, remedy):
    for error in (said, wrapped(said)):
        message = explained(error, SETTINGS)
        assert remedy in message and "\n" not in message
        assert "samples of 16000 tokens, a KV cache of 16000 tokens, 64 samples at once" in message


def wrapped(cause: Exception) -> Exception:
    error = RuntimeError("engine core initialization failed\nsee above")
    error.__cause__ = cause
    return error


def test_another_failure_is_told_by_its_first_line_and_the_one_that_began_it():
    assert explained(KeyError("what"), SETTINGS) == "KeyError: 'what'"
    assert explained(RuntimeError("first\nsecond"), SETTINGS) == "RuntimeError: first"
    message = explained(wrapped(ImportError("no module named what\nand more")), SETTINGS)
    assert (
        message
        == "RuntimeError: engine core initialization failed (from ImportError: no module named what)"
    )
