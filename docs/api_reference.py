"""Makes the pages of the API from the docstrings: every public module of simrl, and of replay what imports without an engine.

python docs/api_reference.py site

Whatever pdoc warns of ends it: a module that cannot be imported, an annotation that names nothing.
"""

import sys
import warnings
from pathlib import Path
from pkgutil import iter_modules

import matplotlib.font_manager  # noqa: F401  finds fonts with a command when first imported, which pdoc forbids
import pdoc
import pdoc.render

import simrl

# These import torch or vLLM, which a base install does not have.
ENGINES = (
    "!simrl_replay.grpo",
    "!simrl_replay.random_model",
    "!simrl_replay.trained",
    "!simrl_replay.vllm_adapter",
)
# simrl's `__all__` is what `import simrl` is for; the modules are named, as pdoc would leave them out.
MODULES = (
    "simrl",
    *(f"simrl.{module.name}" for module in iter_modules(simrl.__path__)),
    "simrl_replay",
    *ENGINES,
)

if __name__ == "__main__":
    warnings.simplefilter("error")
    # The `__init__` of a named tuple or data class has annotations that are text, and pdoc looks inherited ones up in the wrong
    # module; a field's own annotation is still held to name something. Inherited fields of a typed dict are not found either.
    warnings.filterwarnings("ignore", r"Error parsing type annotation .*\.__init__\.", UserWarning)
    warnings.filterwarnings(
        "ignore", "Cannot determine where simrl.trace.importers.tabular.Options", UserWarning
    )
    # nor are keys with dots, which are fields of a scenario
    warnings.filterwarnings(
        "ignore", r"Cannot determine where simrl\.scenario\.calibration", UserWarning
    )
    # pdoc imports what a package holds, also for annotations, before it leaves out what ENGINES says.
    for words in (r"Couldn't import simrl_replay\.trained", r".*RealTraining \| None"):
        warnings.filterwarnings("ignore", words, UserWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    pdoc.render.configure(docformat="markdown", show_source=False, footer_text="simrl, Apache-2.0")
    pdoc.pdoc(*MODULES, output_directory=Path(sys.argv[1]))
