"""The laws of reading a launch: each key is in one list, and nothing is run."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from simrl.launch import shell
from simrl.launch.settings import read_launch
from simrl.launch.translate import NO_EFFECT, NOT_UNDERSTOOD, UNDERSTOOD, translate

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=8"
SLIME = "python3 train.py --rollout-batch-size 32 --n-samples-per-prompt 8 --actor-num-nodes 1"
SCRIPTS = {
    "a key that simrl does not know": f"{VERL} trainer.no_such_key=1 +new.key=x",
    "an option without a value": f"{SLIME} --colocate --no-such-option --use-kl-loss",
    "a value that only a run knows": f"{VERL} trainer.nnodes=$NODES data.train_batch_size=$(nproc)",
    "an empty and a null value": f"{VERL} trainer.nnodes= data.train_batch_size=null",
    "a note's key": f"{VERL} algorithm.adv_estimator=gae critic.optim.lr=1e-5",
}


def read(folder: Path, script: str) -> Any:
    path = folder / "run.sh"
    path.write_text(script, encoding="utf-8")
    return read_launch(path)


@pytest.mark.parametrize("source", [*SCRIPTS, "verl_grpo.sh", "prime_rl.toml"])
def test_every_key_that_a_launch_writes_is_in_one_list(source, tmp_path):
    """I39: no key is lost, none is counted twice."""
    launch = (
        read(tmp_path, SCRIPTS[source]) if source in SCRIPTS else read_launch(EXAMPLES / source)
    )
    translation = translate(launch, {})
    assert sorted(key.key for key in translation.keys) == sorted(launch.settings)
    lists = (UNDERSTOOD, NO_EFFECT, NOT_UNDERSTOOD)
    assert sum(len(translation.of(name)) for name in lists) == len(launch.settings) > 1
    assert all(key.field for key in translation.of(UNDERSTOOD))
    assert all(key.becomes for key in translation.of(NO_EFFECT))


def test_no_command_of_a_launch_is_run_and_no_environment_is_read(tmp_path, monkeypatch):
    """I40: the only program that is started is the parser."""
    started = []
    run = subprocess.run
    monkeypatch.setattr(
        shell.subprocess, "run", lambda words, *a, **k: started.append(words) or run(words, *a, **k)
    )
    monkeypatch.setenv("NODES", "9")
    marker = tmp_path / "marker"
    launch = read(
        tmp_path,
        f"touch {marker}; X=$(touch {marker}); `touch {marker}`; eval 'touch {marker}'\n"
        f"if touch {marker}; then :; fi; trap 'touch {marker}' EXIT; echo $(( $(touch {marker}) ))\n"
        f'{VERL} trainer.nnodes=${{NODES:-2}} trainer.name="$(touch {marker})" data.seed=$NODES\n',
    )
    assert not marker.exists()
    assert [Path(words[0]).name for words in started] == ["shfmt"]
    assert (launch.settings["trainer.nnodes"], launch.settings["data.seed"]) == (2, "$NODES")
