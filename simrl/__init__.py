"""simrl: a trace-driven simulator of LLM reinforcement-learning post-training.

What the commands do is here as functions, `simrl.compare(…)` and so on, loaded when they are first used: `import simrl` alone
imports nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from simrl.api import acceptance, agree, calibrate, compare, diff, explain, optimize, report, run, sweep, whatif
    from simrl.errors import InputError, StoppedError
    from simrl.result import Result, read_result
    from simrl.trace import Trace, read_trace, write_trace

__all__ = [
    "InputError",
    "Result",
    "StoppedError",
    "Trace",
    "__version__",
    "acceptance",
    "agree",
    "calibrate",
    "compare",
    "diff",
    "explain",
    "optimize",
    "read_result",
    "read_trace",
    "report",
    "run",
    "sweep",
    "whatif",
    "write_trace",
]

_MODULES = {
    "simrl.errors": ("InputError", "StoppedError"),
    "simrl.result": ("Result", "read_result"),
    "simrl.trace": ("Trace", "read_trace", "write_trace"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'simrl' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF.get(name, "simrl.api")), name)
    globals()[name] = value  # the next time it is there
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
