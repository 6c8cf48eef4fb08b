"""A real run's log as a scenario: how it was started, calibrated on some of its steps, and other systems to hold against it.

Invariant: the folder of a calibration has all that its scenario names, and appears whole or not at all.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simrl.calibration import Calibration, scenario_yaml
from simrl.calibration import calibrate as fit
from simrl.errors import InputError
from simrl.files import write_whole_folder
from simrl.importers.metrics import read_metrics
from simrl.scenario import Scenario, load_scenarios
from simrl.simulate import prepare
from simrl.systems import make_system
from simrl.trace import read_trace

MANIFEST = "files.txt"
CALIBRATED = "calibrated.yaml"
NEEDS = "model=qwen2.5-3b cluster.gpu=a100 cluster.gpus=4 cluster.tp=1"


def calibrated(
    run_log: Path,
    settings: Sequence[str],
    launch: Path | None,
    window: tuple[int, int],
    group: int,
    samples: int | None,
    prompt_tokens: float | None,
    cap_tokens: int | None,
    log_format: str | None,
    trace: Path | None,
    folder: Path,
) -> Calibration:
    """The calibration of a log on the steps of `window`, with its files in `folder`: scenario, lengths, errors.

    `settings` and `launch`, a scenario file, say how the run was started. Raises `InputError` as `simrl.calibration.calibrate`
    and `simrl.importers.metrics.read_metrics` do.
    """
    recorded = read_trace(trace) if trace is not None else None
    metrics = read_metrics(run_log, log_format, samples, prompt_tokens, lengths=recorded is None)
    name = run_name(run_log)

    def start(path: Path, count: int) -> Scenario:
        return launched(run_log, launch, settings, name, path, count)

    with write_whole_folder(folder, MANIFEST) as temporary:
        found = fit(metrics, start, window, group, temporary, cap_tokens, recorded)
        (temporary / CALIBRATED).write_text(scenario_yaml(found, run_log.name), encoding="utf-8")
        (temporary / "calibration.json").write_text(
            json.dumps(found.as_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    return found


def launched(
    run_log: Path, launch: Path | None, settings: Sequence[str], name: str, trace: Path, steps: int
) -> Scenario:
    """The run as it was started, on a trace of its lengths."""
    fixed = [f"name={name}", f"steps={steps}", "warmup_steps=0", f"workload.trace={json.dumps(str(trace.resolve()))}"]
    with tempfile.TemporaryDirectory(prefix="simrl-launch-") as temporary:
        file = launch
        if file is None:
            file = Path(temporary) / "launch.yaml"
            file.write_text("name: run\nprofile: {roofline: {}}\nsystems: [verl_colocated]\n", encoding="utf-8")
        try:
            found = load_scenarios(file, [*settings, *fixed, "workload.synthetic=null"])
        except InputError as error:
            if launch is not None:
                raise
            raise InputError(
                f"{str(error).replace(str(file), str(run_log))}; say how the run was started: {NEEDS}, or --launch FILE"
            ) from error
    if len(found) > 1:
        raise InputError(
            f"{launch or run_log}: {len(found)} systems; name the one that the run used, as systems=[verl_colocated]"
        )
    return found[0] if launch is not None else found[0].model_copy(update={"file": str(run_log)})


def alternatives(file: Path, systems: Sequence[Any]) -> tuple[list[Scenario], list[str]]:
    """The run's own scenario and one a system (a name, or a dictionary that has one), and what is to be said of them.

    Where the GPUs cannot be shared as the run had them, in smaller parts, and then its own system in such parts, too: what the
    parts do and what the system does are told apart."""
    own = load_scenarios(file)[0]
    found, said = [own], []
    for system in systems:
        other = load_scenarios(file, [f"systems={json.dumps([system])}"])[0]
        try:
            prepare(other)
        except InputError as error:
            other = _in_smaller_parts(other, error)
            same = other.model_copy(update={"system": own.system})
            found += [same] if same not in found else []
            said.append(
                f"{other.system.name} cannot share {own.cluster.gpus} GPUs as the run had them (tp {own.cluster.tp}, "
                f"{own.training.sequence_parallel} a sequence in training): simulated with {other.variant}, as is the "
                "run's own system beside it. The corrections are those of the run as it was: read it as an extrapolation."
            )
        found.append(other)
    return found, said


def check_system(system: Any) -> None:
    """Raises `InputError` for what is no system, before minutes go into a calibration."""
    if isinstance(system, str):
        make_system(system, {})
    elif isinstance(system, dict) and isinstance(system.get("name"), str):
        make_system(system["name"], {str(key): value for key, value in system.items() if key != "name"})
    else:
        raise InputError(f"system {system}: give a name, or {{name: areal, eta: 4}}")


def _in_smaller_parts(scenario: Scenario, error: InputError) -> Scenario:
    """The first that can be with tp, and if need be the GPUs that share a sequence in training, halved and halved again; a GPU
    trains as many tokens at a time as before."""
    tp, training = scenario.cluster.tp, scenario.training
    for halved in range(tp.bit_length()):
        for shared in range(training.sequence_parallel.bit_length()):
            if tp % 2**halved or training.sequence_parallel % 2**shared:
                continue
            parts = {
                "sequence_parallel": training.sequence_parallel // 2**shared,
                "tokens_per_microbatch": training.tokens_per_microbatch // 2**shared,
            }
            said = [f"cluster.tp={tp // 2**halved}"] if halved else []
            said += [f"training.sequence_parallel={parts['sequence_parallel']}"] if shared else []
            smaller = scenario.model_copy(
                update={
                    "cluster": scenario.cluster.model_copy(update={"tp": tp // 2**halved}),
                    "training": training.model_copy(update=parts),
                    "variant": ", ".join(said),
                }
            )
            try:
                prepare(smaller)
            except InputError:
                continue
            return smaller
    raise error


def run_name(run_log: Path) -> str:
    """What a run is called after its log."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", run_log.stem).strip("-._") or "run"
