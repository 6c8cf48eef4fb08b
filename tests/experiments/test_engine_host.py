"""The arithmetic of an engine's measured host, without an engine."""

import time

import pytest

from experiments.host.engine_host import Clock, line


def test_a_line_goes_through_rows_that_are_one_and_weighs_each_by_its_share():
    exact = {n: 6e-4 + 1.5e-5 * n for n in (1, 8, 64, 512)}
    assert line(exact) == pytest.approx({"pass_s": 6e-4, "sequence_s": 1.5e-5})
    bent = line({**exact, 512: 1.2 * exact[512]})
    assert bent["pass_s"] == pytest.approx(6e-4, rel=0.1), "few sequences count as much as many"


class Engine:
    """A step whose kernels are a part of the worker's time."""

    def worker(self) -> None:
        _spin(0.01)
        self.kernels()

    def kernels(self) -> None:
        _spin(0.02)


def _spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_part_in_another_one_is_not_counted_in_that_one():
    clock, engine = Clock(), Engine()
    for part in ("worker", "kernels"):
        clock.wrap(engine, part, part)
    engine.worker()
    spent = clock.take()
    assert spent["kernels"] == pytest.approx(0.02, rel=0.2)
    assert spent["worker"] == pytest.approx(0.01, rel=0.2)
    assert clock.take()["worker"] == 0.0, "taken once"
