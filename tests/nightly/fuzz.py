"""Fuzzes every reader, or those that are named, with thousands of malformed inputs.

    python tests/nightly/fuzz.py --inputs 10000 --seed 1
    python tests/nightly/fuzz.py --reader trace --reader profile

Prints a row a reader; inputs that fail are kept in --kept, each with what happened. Exit code 1 if any did.
"""

import argparse
import importlib.util
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.fuzzing import fuzz
from tests.readers import READERS


def main() -> None:
    """Reads the arguments, fuzzes, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=10_000, help="of each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--reader", action="append", choices=list(READERS), help="may be repeated; all by default"
    )
    parser.add_argument(
        "--kept", type=Path, default=Path("fuzz-failures"), help="where inputs that fail are kept"
    )
    asked = parser.parse_args()
    print(
        f"{'reader':16}{'inputs':>8}{'refused':>9}{'accepted':>10}{'slowest s':>11}{'most MB':>9}{'failures':>10}{'s':>7}",
        flush=True,
    )
    failures = 0
    for name in asked.reader or READERS:
        if READERS[name].needs and importlib.util.find_spec(READERS[name].needs) is None:
            print(f"{name:16} left out: it needs {READERS[name].needs}")
            continue
        began_s = time.monotonic()
        report = fuzz(name, asked.inputs, asked.seed, asked.kept)
        failures += len(report.failures)
        print(
            f"{name:16}{report.inputs:8}{report.refused:9}{report.accepted:10}{report.slowest_s:11.2f}{report.most_mb:9.0f}"
            f"{len(report.failures):10}{time.monotonic() - began_s:7.0f}",
            flush=True,
        )
        for number, said in report.failures[:20]:
            what = said.strip().splitlines()[-1][:200]
            print(f"    {asked.kept / f'{name}-{asked.seed}-{number}'}: {what}", flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
