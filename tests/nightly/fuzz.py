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

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--inputs", type=int, default=10_000, help="of each reader")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--reader", action="append", choices=list(READERS), help="default: all")
parser.add_argument("--kept", type=Path, default=Path("fuzz-failures"), help="for failing inputs")
options = parser.parse_args()
failures = 0
for name in options.reader or READERS:
    if (needs := READERS[name].needs) and importlib.util.find_spec(needs) is None:
        print(f"{name:12} left out: it needs {needs}")
        continue
    began_s = time.monotonic()
    report = fuzz(name, options.inputs, options.seed, options.kept)
    failures += len(report.failures)
    print(
        f"{name:12} {report.inputs} inputs, {report.refused} refused, {report.accepted} accepted, "
        f"slowest {report.slowest_s:.2f} s, most {report.most_mb:.0f} MB, "
        f"{len(report.failures)} failures; {time.monotonic() - began_s:.0f} s",
        flush=True,
    )
    for number, message in report.failures[:20]:
        what = message.strip().splitlines()[-1][:200]
        print(f"    {options.kept / f'{name}-{options.seed}-{number}'}: {what}", flush=True)
sys.exit(1 if failures else 0)
