"""A broadcast of weights between real processes (gloo): what arrives, and what is predicted for it."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from simrl.errors import StoppedError  # noqa: E402
from simrl.profile.hardware import GPUS  # noqa: E402
from simrl.training.weight_sync import HOST_BYTES_PER_S, PAUSE_S, TENSOR_S  # noqa: E402
from simrl_replay.grpo import weight_broadcast as module  # noqa: E402
from simrl_replay.grpo.weight_broadcast import METHODS, broadcast, predict, tensor_shapes  # noqa: E402
from simrl_replay.prove_plan import sizes, write_config  # noqa: E402

pytestmark = pytest.mark.vllm  # what it needs comes with it
SHAPES = [
    (64, 32),
    (32,),
    (7, 3),
    (500,),
]  # an odd number of values, and one that fills a bucket alone


def test_two_processes_end_with_the_bytes_of_the_first_both_ways_in_positive_seconds():
    seconds = broadcast(SHAPES, 2, "cpu", bucket_bytes=900)
    assert list(seconds) == list(METHODS) and all(0 < each < 10 for each in seconds.values())


def lose_a_tensor(rank: int, *arguments: object) -> None:
    """Run a process that leaves out the third tensor of each broadcast."""
    timed = module._timed
    module._timed = lambda way, weights, bucket: timed(way, weights[:2] + weights[3:], bucket)
    module._rank(rank, *arguments)


def fail_second(rank: int, *_: object) -> None:
    if rank == 1:
        raise ValueError("no such GPU")


def test_a_tensor_that_does_not_arrive_stops_the_broadcast(monkeypatch):
    spawn = module.spawn
    monkeypatch.setattr(
        module, "spawn", lambda _, *rest, **named: spawn(lose_a_tensor, *rest, **named)
    )
    with pytest.raises(StoppedError, match="other bytes arrived than were sent"):
        broadcast(SHAPES, 2, "cpu")


def test_a_process_that_fails_is_named_with_its_reason_in_a_line(monkeypatch):
    spawn = module.spawn
    monkeypatch.setattr(
        module, "spawn", lambda _, *rest, **named: spawn(fail_second, *rest, **named)
    )
    with pytest.raises(StoppedError, match=r"^rank 1: ValueError: no such GPU$"):
        broadcast(SHAPES, 2, "cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_tensors_of_a_model_are_those_that_the_prediction_counts(device, tmp_path: Path):
    shape = sizes(device).small
    write_config(shape, tmp_path, "bfloat16")
    shapes = tensor_shapes(tmp_path)
    assert len(shapes) == shape.tensors
    assert 2 * sum(torch.Size(each).numel() for each in shapes) == pytest.approx(
        shape.weight_bytes, rel=0.01
    )


def test_a_broadcast_is_predicted_by_the_link_and_in_buckets_by_the_hosts_of_both_ends_too():
    model, card = sizes("cuda").small, GPUS["h100"]
    phases = predict(model, card, 8)
    link_s = model.weight_bytes / card.link_bytes_per_s
    hosts_s = TENSOR_S * model.tensors + model.weight_bytes / HOST_BYTES_PER_S["broadcast"]
    hosts_s += PAUSE_S  # all of it fits one bucket, so that nothing goes on beside
    assert phases["tensor by tensor"]["predicted_s"] == pytest.approx(link_s)
    assert phases["in buckets"]["predicted_s"] == pytest.approx(link_s + hosts_s)
    assert "link rates of the data sheet alone" in phases["tensor by tensor"]["rests_on"]
    assert "pause by qwen3-0.6b" in phases["in buckets"]["rests_on"]
