"""The constants of operations, against what was measured on one H100 (experiments/gpu/h100_second/host_times.json)."""

import json
from pathlib import Path

import numpy as np
import pytest

from simrl.profile.hardware import GPUS
from simrl.profile.model_shape import model_shape
from simrl.training.config import TrainingConfig
from simrl.training.operations import LAUNCHES, LOGITS, MEMORY_SHARE, microbatches_s

ROOT = Path(__file__).parents[2]
MEASURED = json.loads((ROOT / "experiments/gpu/h100_second/host_times.json").read_text())
PASSES = {"forward": "forward", "training": "backward", "training, recomputed": "recomputed"}
H100 = GPUS["h100"]


def rows():
    """(model, passes, sequences, length, measured) of every micro-batch that was run."""
    for model, runs in MEASURED["models"].items():
        for name, times in runs.items():
            if isinstance(times, dict):  # and not out of memory
                kind, batch = name.rsplit(" ", 1)
                yield (model_shape(model), PASSES[kind], *map(int, batch.split("x")), times)


def test_the_operations_of_a_micro_batch_are_as_many_as_were_counted():
    counted = [row for row in rows() if "operations" in row[-1]]
    assert len(counted) == 9
    for model, passes, _, _, times in counted:
        launches = LAUNCHES["eager"][passes]
        of_layer = launches.of_layer + launches.of_query_norms * model.qk_norm
        assert of_layer * model.layers + launches.fixed == times["operations"]


def test_where_the_device_is_the_longer_one_its_operations_take_as_long_as_measured():
    errors = []
    for model, passes, sequences, length, times in rows():
        if sequences * length < 16384:
            continue
        config = TrainingConfig(recompute=passes == "recomputed")
        tokens = np.array([float(sequences * length)])
        attended = tokens * length / 2
        work = microbatches_s(model, H100, config, tokens, attended, passes != "forward")
        errors.append(work.layers_s[0] / times["device_s"] - 1)
    assert len(errors) == 11
    assert min(errors) > -0.05 and max(errors) < 0.2 and sorted(errors)[-2] < 0.125


def test_an_unfused_log_softmax_moves_the_bytes_that_its_seconds_say():
    def bytes_of(name: str) -> float:
        seconds = MEASURED["logits"][f"{name} 8192"]["device_s"]
        return float(seconds * MEMORY_SHARE * H100.memory_bytes_per_s / (8192 * 151_936))

    forward = bytes_of("log_softmax") + bytes_of("temperature")
    assert LOGITS["log_softmax"].forward == pytest.approx(forward, rel=0.03)
    backward = bytes_of("cross entropy and backward") - bytes_of("log_softmax")
    assert LOGITS["log_softmax"].backward == pytest.approx(backward, rel=0.03)
