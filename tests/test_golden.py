"""A math run in small, number by number: a change of any mechanism shows here, meant or not.

If it was meant: `python -m pytest tests/test_golden.py --renew-golden`, read the diff of tests/golden, commit it.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from simrl.result.metrics import summary
from simrl.scenario.load import load_scenarios
from simrl.simulate.run import simulate

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "math_14b.json"
SMALL = ("steps=4", "warmup_steps=1", "workload.synthetic.prompts_per_step=16")
RELATIVE = 1e-9


def differences(golden: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    """A line for each value that is not as it was."""
    keys = [[(row["system"], row["variant"]) for row in rows] for rows in (golden, found)]
    if keys[0] != keys[1]:
        return [f"rows were {keys[0]}", f"now they are {keys[1]}"]
    lines = []
    for before, after in zip(golden, found, strict=True):
        for name in {**before, **after}:
            was, now = before.get(name), after.get(name)
            if isinstance(was, float) and isinstance(now, float):
                if not math.isclose(was, now, rel_tol=RELATIVE, abs_tol=1e-12):
                    change = f" ({now / was - 1:+.3g})" if was else ""
                    lines.append(
                        f"{before['system']}, {before['variant']}: {name} was {was!r}, is {now!r}{change}"
                    )
            elif was != now:
                lines.append(
                    f"{before['system']}, {before['variant']}: {name} was {was!r}, is {now!r}"
                )
    return lines


def test_a_math_run_in_small_has_the_numbers_it_had(request: pytest.FixtureRequest):
    scenarios = load_scenarios(ROOT / "experiments" / "math_14b.yaml", SMALL)
    rows = [summary(simulate(s), s.warmup_steps, s.cluster.cost_per_gpu_hour) for s in scenarios]
    if request.config.getoption("--renew-golden"):
        GOLDEN.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    changed = differences(json.loads(GOLDEN.read_text(encoding="utf-8")), rows)
    assert not changed, "\n".join(["not as in tests/golden (see the top of this file):", *changed])


def test_differences_name_the_row_the_value_before_and_after_and_nothing_else():
    golden = [{"system": "split", "variant": "x=1", "step_s": 10.0, "gpus": 4, "cost": None}]
    same = [{**golden[0], "step_s": 10.0 * (1 + 1e-10)}]
    assert differences(golden, same) == []
    other = [{**golden[0], "step_s": 11.0, "gpus": 5, "cost": 1.0}]
    assert differences(golden, other) == [
        "split, x=1: step_s was 10.0, is 11.0 (+0.1)",
        "split, x=1: gpus was 4, is 5",
        "split, x=1: cost was None, is 1.0",
    ]
    assert differences(golden, []) == ["rows were [('split', 'x=1')]", "now they are []"]
