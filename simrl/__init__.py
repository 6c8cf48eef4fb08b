"""simrl: a trace-driven simulator of LLM reinforcement-learning post-training.

The commands are functions, `simrl.compare(…)` and so on, loaded when they are first used: `import
simrl` alone imports nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from simrl.commands.acceptance import acceptance as acceptance
    from simrl.commands.advise import advise as advise
    from simrl.commands.calibrate import calibrate as calibrate, whatif as whatif
    from simrl.commands.compare import compare as compare, run as run
    from simrl.commands.init import init as init
    from simrl.commands.results import (
        agree as agree,
        diff as diff,
        explain as explain,
        report as report,
    )
    from simrl.commands.sweep import sweep as sweep
    from simrl.errors import InputError as InputError, StoppedError as StoppedError
    from simrl.result.result import Result as Result, read_result as read_result
    from simrl.trace.trace import (
        Trace as Trace,
        read_trace as read_trace,
        write_trace as write_trace,
    )

_MODULES = {
    "simrl.commands.acceptance": ("acceptance",),
    "simrl.commands.advise": ("advise",),
    "simrl.commands.calibrate": ("calibrate", "whatif"),
    "simrl.commands.compare": ("compare", "run"),
    "simrl.commands.init": ("init",),
    "simrl.commands.results": ("agree", "diff", "explain", "report"),
    "simrl.commands.sweep": ("sweep",),
    "simrl.errors": ("InputError", "StoppedError"),
    "simrl.result.result": ("Result", "read_result"),
    "simrl.trace.trace": ("Trace", "read_trace", "write_trace"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(["__version__", *_MODULE_OF])


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        instead = "; it is simrl.advise now" if name == "optimize" else ""
        raise AttributeError(f"module 'simrl' has no attribute {name!r}{instead}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value  # the next time it is there
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
