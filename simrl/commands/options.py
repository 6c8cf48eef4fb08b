"""Parameters that several commands have, each with its type and its help.

What the CLI gives as a text may be an object in Python: at run time, where typer reads the
annotations, a type is the CLI's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypedDict

import typer

if TYPE_CHECKING:
    import pandas as pd

    from simrl.commands.compare import Comparison
    from simrl.result.result import Result
    from simrl.trace.trace import Trace

    File = str | os.PathLike[str]
    Place = str | os.PathLike[str] | bool
    WorkloadLike = str | os.PathLike[str] | Mapping[str, Any] | Trace | pd.DataFrame
    RunLike: TypeAlias = Comparison | Result | str | os.PathLike[str]
    OneSystem = str | Mapping[str, Any]
    NameList = Sequence[str]
    SystemList = Sequence[str | Mapping[str, Any]]
    ByKey = Mapping[str, Any] | Sequence[str]
    WindowLike = str | tuple[int, int]
    GpuNumbers = str | Sequence[int]
else:
    File = Place = WorkloadLike = RunLike = Path
    OneSystem = WindowLike = GpuNumbers = str
    NameList = SystemList = ByKey = list[str]

Workload = Annotated[
    WorkloadLike,
    typer.Argument(
        metavar="SCENARIO",
        help="a scenario file (YAML), or a trace (Parquet) with --model, --gpu, --gpus and --system",
    ),
]
Systems = Annotated[
    SystemList | None,
    typer.Option(
        "--system",
        help="a system, areal or {name: areal, eta: 4}, in place of the scenario's (see simrl systems); may be repeated",
    ),
]
GpuName = Annotated[str | None, typer.Option(help="the kind of GPU: a100, h100, h200 …")]


class Setup(TypedDict, total=False):
    """The keywords that a trace needs; with a scenario, they replace its fields. All are None where
    they are not given."""

    model: Annotated[
        str | None, typer.Option(help="a model that simrl knows, or the path of a config.json")
    ]
    gpu: GpuName
    gpus: Annotated[int | None, typer.Option(help="the number of GPUs")]
    tp: Annotated[
        int | None,
        typer.Option(
            help="GPUs of a rollout worker (tensor parallelism); with a trace, by default 1"
        ),
    ]
    profile: Annotated[
        File | None,
        typer.Option(
            help="step times: a profile (Parquet) or roofline; with a trace, by default the profile that is shipped for the "
            "model and GPU, else roofline"
        ),
    ]
    steps: Annotated[
        int | None,
        typer.Option(help="policy updates to simulate; with a trace, by default all of its steps"),
    ]
    warmup_steps: Annotated[
        int | None,
        typer.Option(
            help="first updates, which averages leave out; with a trace, by default a quarter of the updates"
        ),
    ]
    columns: Annotated[
        ByKey | None,
        typer.Option(
            "--column",
            help="column of a CSV or JSON Lines: OURS=THEIRS, such as response_tokens=out_len; may be repeated",
        ),
    ]
    cap_tokens: int | None


Seed = Annotated[
    int | None,
    typer.Option(max=2**63 - 1, help="seed of the simulation, in place of the scenario's"),
]
Overrides = Annotated[
    ByKey | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="changes of scenario fields, such as cluster.gpus=128 seed=3"
    ),
]
Values = Annotated[
    ByKey | None,
    typer.Argument(
        metavar="[KEY=A,B,C]...",
        help="keys to vary: values separated by commas, 0..9 for whole numbers; a single value is set everywhere. Values may "
        "be objects and lists: 'training={mfu: 0.3},{mfu: 0.5}'. system.KEY sets a parameter of the systems that have it",
    ),
]
Run = Annotated[
    RunLike, typer.Argument(metavar="RESULT", help="the folder of a run or of a replay")
]
Jobs = Annotated[int, typer.Option(min=1, help="processes that simulate at the same time")]
Updates = Annotated[
    int | None, typer.Option(min=1, help="policy updates of the planned run, each of a whole batch")
]
Price = Annotated[float | None, typer.Option(min=0, help="price of a GPU-hour")]
Brief = Annotated[bool, typer.Option("--brief", help="print the table and one line")]
ExplainColumns = Annotated[
    bool, typer.Option("--explain-columns", help="print what the columns mean")
]
Inputs = Annotated[
    bool,
    typer.Option("--inputs", help="print every input with its source, and what is not modelled"),
]
Folder = Annotated[
    Place | None,
    typer.Option("--output", "-o", help="folder of the results (default: results/NAME)"),
]
Picture = Annotated[
    Place | None,
    typer.Option("--output", "-o", help="the picture to draw (default: NAME-….png, here)"),
]
JOBS = os.cpu_count() or 1
