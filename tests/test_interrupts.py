"""Ctrl-C: ignored or made to wait within a block, and heard again after it."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import typer

from simrl.interrupts import ctrl_c_ignored, ctrl_c_waits, hear_again
from simrl_replay.grpo import __main__ as recorded_run


def press():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def python_hears_ctrl_c(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_ignored_within_the_block_and_heard_after_it():
    with ctrl_c_ignored():
        press()
    with pytest.raises(KeyboardInterrupt):
        press()


def test_a_process_started_meanwhile_never_hears_it():
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    with ctrl_c_ignored():
        out = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
    assert out == "True\n"


def test_ctrl_c_waits_for_the_end_of_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt), ctrl_c_waits():
        press()
        press()
        done.append("the rest of the block")
    assert done


def test_a_block_without_ctrl_c_ends_as_any_block():
    with ctrl_c_waits(), ctrl_c_ignored():
        pass
    with pytest.raises(ValueError, match="its own"), ctrl_c_waits():
        raise ValueError("its own")


def test_other_threads_may_use_both():
    def both():
        with ctrl_c_ignored(), ctrl_c_waits():
            done.append(threading.current_thread().name)

    done = []
    thread = threading.Thread(target=both, name="another")
    thread.start()
    thread.join()
    assert done == ["another"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_in_a_callback_that_cannot_raise_is_heard_after_it(monkeypatch, capfd, number):
    class Finaliser:
        def __del__(self):
            signal.raise_signal(number)

    monkeypatch.setattr(sys, "unraisablehook", hear_again)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        finaliser, went_on = Finaliser(), False
        with pytest.raises(KeyboardInterrupt):
            del finaliser
            went_on = True
            time.sleep(10.0)
        assert went_on and capfd.readouterr().err == ""
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_errors_in_a_callback_are_printed_as_python_prints_them(monkeypatch, capfd):
    class Finaliser:
        def __del__(self):
            raise ValueError("its own")

    monkeypatch.setattr(sys, "unraisablehook", hear_again)
    finaliser = Finaliser()
    del finaliser
    assert "ValueError: its own" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_recorded_run_that_is_stopped_before_it_begins_ends_in_a_line(
    monkeypatch, capsys, number
):
    """It imports torch and warms a policy up first."""
    monkeypatch.setattr(recorded_run, "_make", lambda *_: signal.raise_signal(number))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(typer.Exit) as ended:
            recorded_run.main(["sync.yaml"], Path("out"))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.exit_code == 1
    assert (
        capsys.readouterr().err == "error: stopped; the same command goes on from the last update\n"
    )
