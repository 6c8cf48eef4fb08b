"""Time a command as on a fresh machine, where numba compiles the kernels first: seconds, and the functions that cost most.

    python experiments/bench/first_command.py [compare experiments/quickstart.yaml steps=4 ...]

Other work on the machine makes the wall's seconds longer, the processor's hardly. The results go to a folder that is
deleted.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import defaultdict
from typing import Any

COMMAND = [
    "run",
    "experiments/quickstart.yaml",
    "--system",
    "areal",
    "steps=6",
    "warmup_steps=1",
    "cluster.gpus=16",
]
MOST = 10


def main(command: list[str]) -> None:
    """Run a command with an empty cache of kernels, and print what it cost."""
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NUMBA_CACHE_DIR"] = f"{folder}/kernels"  # numba reads it on import
        from numba.core import event

        from simrl.commands.cli import main as run

        costs = Costs()
        event.register("numba:compile", costs.listener(event))
        sys.argv = ["simrl", *command, "-o", f"{folder}/results"]
        try:
            run()
        except SystemExit as ended:
            if ended.code:
                raise
    seconds = f"{time.process_time():.1f} s of a processor, {time.perf_counter() - began_s:.1f} s of the wall"
    print(
        f"\n{seconds}; {sum(map(len, costs.own_s.values()))} compilations took {costs.sum_s:.1f} s of a processor"
    )
    for name, own_s in sorted(costs.own_s.items(), key=lambda item: -sum(item[1]))[:MOST]:
        times = f" in {len(own_s)} versions" if len(own_s) > 1 else ""
        print(f"{sum(own_s):6.2f} s  {name}{times}")


class Costs:
    """The processor's seconds of each compiled function, without those that it calls."""

    def __init__(self) -> None:
        self.own_s: dict[str, list[float]] = defaultdict(list)
        self._under_way: list[
            tuple[float, list[float]]
        ] = []  # when each began, and what those that it calls took

    @property
    def sum_s(self) -> float:
        return sum(map(sum, self.own_s.values()))

    def listener(self, event: Any) -> Any:
        """Return a listener of numba's that counts."""

        class Listener(event.Listener):  # type: ignore[misc]
            def on_start(listener, _: Any) -> None:  # noqa: N805
                self._under_way.append((time.process_time(), []))

            def on_end(listener, ended: Any) -> None:  # noqa: N805
                began_s, inner_s = self._under_way.pop()
                whole_s = time.process_time() - began_s
                if self._under_way:
                    self._under_way[-1][1].append(whole_s)
                function = ended.data["dispatcher"].py_func
                self.own_s[f"{function.__module__}.{function.__name__}"].append(
                    whole_s - sum(inner_s)
                )

        return Listener()


if __name__ == "__main__":
    main(sys.argv[1:] or COMMAND)
