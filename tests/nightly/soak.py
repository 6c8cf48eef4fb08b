"""Simulates hundreds of random scenarios over all systems with every invariant on.

    python tests/nightly/soak.py --scenarios 500 --seed 1

Prints a row a system; scenarios that fail are kept in --kept as YAML, each with what happened. Exit code 1 if any did.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import yaml

from tests.soaking import a_scenario, soak


def main() -> None:
    """Reads the arguments, simulates, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenarios", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the number to begin with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kept",
        type=Path,
        default=Path("soak-failures"),
        help="where scenarios that fail are kept",
    )
    asked = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    why: Counter[str] = Counter()
    slowest_s: dict[str, float] = {}
    for number in range(asked.first, asked.scenarios):
        scenario = a_scenario(asked.seed, number)
        system = scenario["system"]["name"]
        began_s = time.process_time()
        soaked = soak(asked.seed, number)
        slowest_s[system] = max(slowest_s.get(system, 0.0), time.process_time() - began_s)
        counts.setdefault(system, Counter())[soaked.outcome] += 1
        if soaked.outcome == "refused":
            why[soaked.said[:90]] += 1
        if soaked.outcome == "failed":
            asked.kept.mkdir(parents=True, exist_ok=True)
            place = asked.kept / f"soak-{asked.seed}-{number}"
            place.with_suffix(".yaml").write_text(
                yaml.safe_dump(scenario, sort_keys=False), encoding="utf-8"
            )
            place.with_suffix(".txt").write_text(soaked.said, encoding="utf-8")
            print(
                f"{place}.yaml ({system}): {soaked.said.strip().splitlines()[-1][:200]}", flush=True
            )
    print(f"{'system':20}{'ran':>6}{'refused':>9}{'failed':>8}{'slowest s':>11}")
    for system, count in counts.items():
        print(
            f"{system:20}{count['ran']:6}{count['refused']:9}{count['failed']:8}{slowest_s[system]:11.1f}"
        )
    total = sum(counts.values(), Counter())
    print(
        f"{'all':20}{total['ran']:6}{total['refused']:9}{total['failed']:8}{max(slowest_s.values()):11.1f}"
    )
    for said, times in why.most_common(10):
        print(f"refused {times} times: {said}")
    sys.exit(1 if total["failed"] else 0)


if __name__ == "__main__":
    main()
