"""A recorded run, whole: real engines, a real learner, and what is in its folder however it ends."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.command_line import environment
from tests.helpers import SMALL_RECORDED_RUN, rows, times_trained
from tests.replay.test_replay_faults import eventually

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from simrl.errors import InputError, StoppedError
from simrl.result.result import read_result
from simrl.trace.trace import read_trace
from simrl_replay.grpo.config import RunConfig, read_config
from simrl_replay.grpo.records import RunFolder
from tests.replay.test_replay_vllm import processes

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]


def config_file(folder: Path, system: dict, name: str = "small", **more: object) -> Path:
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"name": name, **SMALL_RECORDED_RUN, "system": system, **more}))
    return file


def start(file: Path, output: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "simrl_replay.grpo", str(file), "-o", str(output)]
    return subprocess.Popen(
        command,
        env=environment(),
        cwd=file.parent,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finished(file: Path, output: Path) -> str:
    run = start(file, output)
    _, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    return err


def responses(folder: RunFolder) -> Counter:
    return times_trained(folder.read()[0])


def every_response_once(epochs: int) -> Counter:
    prompts, group = (int(str(SMALL_RECORDED_RUN[name])) for name in ("prompts", "group"))
    return Counter((e, p, s) for e in range(epochs) for p in range(prompts) for s in range(group))


def test_a_synchronous_run_records_every_response_with_the_policy_that_trained_on_it(
    tmp_path: Path,
) -> None:
    file, out = config_file(tmp_path, {"name": "split"}), tmp_path / "out"
    err = finished(file, out)
    folder = RunFolder(out / "small")
    samples, facts = folder.read()
    assert responses(folder) == every_response_once(3)
    table = samples.to_pylist()
    for row in table:
        assert {segment["policy_version"] for segment in row["segments"]} == {row["step"]}
        assert (
            sum(segment["tokens"] for segment in row["segments"]) == len(row["response_ids"]) <= 48
        )
        assert row["response_ids"][-1] == 1 or len(row["response_ids"]) == 48
    task = read_config(file).task
    problems = task.make_prompts(0, 4)
    assert all(
        row["reward"] == task.reward(problems[row["prompt_id"]], row["response_ids"])
        for row in table
    )
    assert [kind for kind, _, _ in facts[0]["phases"]] == ["log_prob", "train", "publish"]
    part = read_result(folder.path / "parts" / "000")
    assert part.steps.num_rows == 6 and {row["kind"] for row in rows(part.spans)} >= {
        "rollout",
        "train",
        "load_weights",
    }
    trace = read_trace(folder.path / "trace.parquet")
    assert trace.table.num_rows == len(table) and trace.metadata.kind == "recorded"
    assert len((folder.path / "curve.csv").read_text().splitlines()) == 7
    assert "update 6 of 6" in err and folder.whole()
    left = {
        path: path.stat().st_mtime_ns
        for path in folder.path.iterdir()
        if path.name in ("trace.parquet", "curve.csv")
    }
    assert "update" not in finished(file, out).replace(
        "updates recorded", ""
    )  # it is finished: nothing runs again
    assert all(path.stat().st_mtime_ns == before for path, before in left.items())


def engine_of(run: subprocess.Popen) -> int:
    """The process of its first engine, which leads a group and prints to a log of its own."""
    leads = (pid for pid in processes(run.pid) if os.getpgid(pid) == pid)
    return next(
        pid for pid in leads if Path(f"/proc/{pid}/fd/1").readlink().name == "worker-000.log"
    )


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_also_without_its_engine_and_trains_every_response_once(
    tmp_path: Path,
) -> None:
    file, out = config_file(tmp_path, {"name": "areal", "eta": 2}, epochs=60), tmp_path / "out"
    folder = RunFolder(out / "small")
    run = start(file, out)
    eventually(lambda: folder.updates >= 2 or run.poll() is not None, 200.0)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    done = folder.updates
    assert 2 <= done < 110
    before = {
        path.name: path.read_bytes()
        for path in (folder.path / "updates").iterdir()
        if path.suffix == ".parquet"
    }
    run = start(file, out)
    eventually(lambda: folder.updates >= done + 6 or run.poll() is not None, 200.0)
    assert not folder.version(
        done
    ).exists()  # that it went on from: an engine that starts again does without it
    os.kill(engine_of(run), signal.SIGKILL)
    _, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    assert responses(folder) == every_response_once(60)  # also the slow ones of its end
    assert all(
        (folder.path / "updates" / name).read_bytes() == content for name, content in before.items()
    )
    samples, facts = folder.read()
    assert [fact["step"]["step"] for fact in facts] == [*range(done), *range(120 - done)]
    assert set(samples["part"].to_pylist()) == {0, done} and not folder.whole()
    part = read_result(folder.part(done))
    assert part.steps.num_rows == 120 - done and [
        lost["kind"] for lost in part.metadata["replay"]["happened"]
    ] == ["died"]
    for row in samples.to_pylist():
        assert all(
            row["step"] - 4 <= segment["policy_version"] <= row["step"]
            for segment in row["segments"]
        )


@pytest.mark.slow
def test_ctrl_c_leaves_a_run_that_goes_on_and_no_process(tmp_path: Path) -> None:
    file, out = config_file(tmp_path, {"name": "one_step_off"}, epochs=500), tmp_path / "out"
    run = start(file, out)
    folder = RunFolder(out / "small")
    eventually(lambda: folder.updates >= 1 or run.poll() is not None, 200.0)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1 and "the same command goes on from the last update" in err
    assert eventually(lambda: not processes(run.pid), 20.0)
    assert read_result(folder.part(0)).steps.num_rows == folder.updates


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    from simrl_replay.grpo.run import run

    config = read_config(config_file(tmp_path, {"name": "split"}))
    folder = RunFolder(tmp_path / "out" / "small")
    folder.path.mkdir(parents=True)
    other = config.model_dump(mode="json") | {"seed": 1}
    (folder.path / "config.yaml").write_text(yaml.safe_dump(other))
    with pytest.raises(
        InputError, match="a run with another configuration is here; name another --output"
    ):
        run(config, folder, tmp_path / "warm-ups")
    (folder.path / "config.yaml").write_bytes(b"name: \xff\n")
    with pytest.raises(InputError, match=r"config\.yaml: byte 6 is not UTF-8"):
        run(config, folder, tmp_path / "warm-ups")


def test_a_run_that_another_process_makes_is_refused(tmp_path: Path) -> None:
    from simrl_replay.grpo.run import run

    config = read_config(config_file(tmp_path, {"name": "split"}))
    folder = RunFolder(tmp_path / "out" / "small")
    with (
        folder.alone(),
        pytest.raises(InputError, match=r"out/small: another process is making this run"),
    ):
        run(config, folder, tmp_path / "warm-ups")


def test_a_learner_without_the_state_of_its_optimizer_does_not_begin_with_a_fresh_one(
    tmp_path: Path,
) -> None:
    from simrl_replay.grpo.learner import Learner
    from simrl_replay.grpo.policy import make_policy, save_policy

    config = read_config(config_file(tmp_path, {"name": "split"}))
    folder = RunFolder(tmp_path)
    for version in (0, 1):
        save_policy(
            make_policy(config.policy, config.task.vocabulary, config.most_tokens, 0),
            folder.model(version),
        )
    Learner(config, folder, 0)
    with pytest.raises(InputError, match=r"0001/optimizer\.pt: no state of an optimizer"):
        Learner(config, folder, 1)


def test_a_learner_that_never_answers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from simrl_replay.clock import WallClock
    from simrl_replay.grpo import trainer

    monkeypatch.setattr(trainer, "UPDATE_DEADLINE_S", 0.1)
    env, (here, _there) = WallClock(), multiprocessing.Pipe()
    link = SimpleNamespace(name="learner", connection=here, send=lambda commands: None)
    recorder = SimpleNamespace()
    learning = trainer.LearningTrainer(
        env, link, 0, recorder, 0, lambda sample: (), lambda *update: None, lambda: None
    )
    env.restart()
    with pytest.raises(StoppedError, match=r"learner: no update for 0\.1 s"):
        env.run(learning.train([]))


def test_every_engine_draws_by_a_seed_of_its_own_and_the_first_of_a_run_by_the_run_s() -> None:
    from simrl_replay.grpo.run import engine_seed

    starts = [
        (version, worker, restarts)
        for version in range(4)
        for worker in range(4)
        for restarts in range(4)
    ]
    assert engine_seed(7, 0, 0, 0) == 7
    assert len({engine_seed(seed, *start) for seed in (0, 7) for start in starts}) == 2 * len(
        starts
    )


@pytest.mark.slow
def test_engines_that_share_a_group_generate_it_without_a_double(tmp_path: Path) -> None:
    file, out = (
        config_file(tmp_path, {"name": "split"}, workers=2, group=4, epochs=1),
        tmp_path / "out",
    )
    finished(file, out)
    samples = RunFolder(out / "small").read()[0].to_pylist()
    assert {segment["worker"] for row in samples for segment in row["segments"]} == {0, 1}
    told = [
        (row["prompt_id"], *row["response_ids"]) for row in samples if len(row["response_ids"]) > 8
    ]
    assert len(told) > 8 and len(set(told)) == len(told)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"system": {"name": "split", "eta": 3}}, "areal has an eta"),
        ({"system": {"name": "areal"}}, "areal has an eta"),
        ({"prompts_per_step": 3}, "prompts is a multiple of prompts_per_step"),
        ({"grup": 3}, "unknown key grup"),
        ({"task": {"counts": [9]}}, "counts are of 2 to 6 numbers"),
        (
            {"engine": {"kv_cache_tokens": 63}},
            r"32 tokens in whole blocks do not hold a prompt and its response \(55\)",
        ),
        ({"engine": {"max_num_seqs": 512}}, "max_num_batched_tokens is at least max_num_seqs"),
        ({"seed": -1}, "seed is -1"),
        ({"update": {"seed": -1}}, r"update\.seed is -1"),
        ({"gpu": "abacus"}, "gpu is 'abacus': choose one of a100, a800, h100"),
        ({"name": "warm-ups"}, "the folder of the warm-ups is called so"),
        ({"name": "..", "system": {"name": "split"}}, "name is '..'"),
    ],
)
def test_a_configuration_that_cannot_be_says_why(
    tmp_path: Path, change: dict, message: str
) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(
        yaml.safe_dump({"name": "x", **SMALL_RECORDED_RUN, "system": {"name": "split"}, **change})
    )
    with pytest.raises(InputError, match=message) as error:
        read_config(file)
    assert str(file) in str(error.value)


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    file = config_file(tmp_path, {"name": "split"})
    file.write_text(f"{file.read_text()}epochs: 4\n")
    with pytest.raises(InputError, match="duplicate key epochs"):
        read_config(file)


def test_a_run_on_cuda_is_of_h100_unless_it_names_its_gpu() -> None:
    one = {"name": "a", **SMALL_RECORDED_RUN, "system": {"name": "split"}}
    named = [RunConfig.model_validate({**one, **more}).gpu for more in ({}, {"device": "cuda"})]
    assert named == ["cpu", "h100"]
    assert RunConfig.model_validate({**one, "device": "cuda", "gpu": "a100"}).gpu == "a100"


def test_runs_that_agree_in_what_comes_before_rl_share_a_warm_up() -> None:
    one = RunConfig.model_validate({"name": "a", **SMALL_RECORDED_RUN, "system": {"name": "split"}})
    other = one.model_copy(
        update={
            "name": "b",
            "epochs": 9,
            "update": one.update.model_copy(update={"learning_rate": 1.0}),
        }
    )
    assert one.warm_up_digest == other.warm_up_digest
    other = one.model_copy(update={"policy": one.policy.model_copy(update={"layers": 2})})
    assert one.warm_up_digest != other.warm_up_digest


def test_an_override_changes_one_value_of_a_run_and_leaves_the_rest(tmp_path: Path) -> None:
    file = config_file(tmp_path, {"name": "split"}, update={"minibatches": 3})
    changed = read_config(
        file, ["update.learning_rate=1e-3", "seed=7", "update.loss.clip_high=null"]
    )
    assert (changed.update.learning_rate, changed.update.minibatches, changed.seed) == (1e-3, 3, 7)
    assert changed.update.loss.clip_high is None and changed.update.loss.clip_low == 0.2
    assert changed.warm_up_digest == read_config(file).warm_up_digest
    with pytest.raises(InputError, match=r"unknown key update\.lerning_rate"):
        read_config(file, ["update.lerning_rate=1e-3"])
