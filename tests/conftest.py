"""What several test files share."""

import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from simrl.result.result import Result
from simrl.scenario.model import Scenario
from simrl.simulate.run import simulate
from tests.command_line import CommandLine
from tests.helpers import FEW_EXAMPLES

# A first example may have to compile: no test is too slow for that. A run by default tries equal examples anywhere. A thorough
# one, as every night, draws others each time, keeps what failed in .hypothesis, and prints how to try it again.
settings.register_profile("thorough", deadline=None, print_blob=True)
settings.register_profile("simrl", deadline=None, max_examples=FEW_EXAMPLES, derandomize=True)
settings.load_profile("simrl")


def pytest_configure(config: pytest.Config) -> None:
    """Hear Ctrl-C, also where the shell that started pytest ignores it (nohup, a job in the background)."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--renew-golden",
        action="store_true",
        help="write tests/golden anew from what the code computes now; then read the diff",
    )


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real measurements beside the checkout. They are no part of the project: without them, tests are skipped."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(
            "the measurements that nobody in this project made are not beside this checkout (../shared/data)"
        )
    return folder


@pytest.fixture(scope="session")
def small_run() -> Callable[..., Result]:
    """simulate() of a small model on 8 GPUs, 6 steps of which the first 2 are warm-up, by system and its parameters."""

    @cache
    def run(system: str, **parameters: object) -> Result:
        workload = {
            "steps": 6,
            "prompts_per_step": 8,
            "group": 4,
            "cap_tokens": 2000,
            "mean_tokens": 400,
            "sigma": 0.9,
        }
        return simulate(
            Scenario.model_validate(
                {
                    "name": "small",
                    "seed": 5,
                    "steps": 6,
                    "warmup_steps": 2,
                    "model": "qwen3-0.6b",
                    "cluster": {"gpu": "h100", "gpus": 8, "tp": 1},
                    "workload": {"synthetic": {**workload, "prompt_share": 0.5}},
                    "profile": {"roofline": {}},
                    "system": {"name": system, **parameters},
                    "variant": "cluster.gpus=8",
                }
            )
        )

    return run


@pytest.fixture
def simrl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[CommandLine]:
    """The command line in an empty folder with a small scenario."""
    command_line = CommandLine(tmp_path, capsys, monkeypatch)
    yield command_line
    command_line.end()
