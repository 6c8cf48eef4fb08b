"""`simrl init`: a scenario from the file that starts a run, or from six answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simrl.commands.view import DataView
from simrl.errors import InputError, choose
from simrl.scenario.yaml_text import parse_override

if TYPE_CHECKING:
    from rich.console import Console

    from simrl.launch.settings import Launch
    from simrl.launch.translate import Translation


def init(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="fields of the scenario, such as workload.synthetic.sigma=1",
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="a launch script or configuration: verl, AReaL, slime, miles, NeMo-RL, SkyRL, ROLL, RLinf, prime-rl, OpenRLHF, TRL",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="the scenario to write (default: its name here)"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="a model, or a folder with its config.json")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="kind of GPU, such as h100")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="number of all GPUs")] = None,
    mean_tokens: Annotated[float | None, typer.Option(help="mean length of responses")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="a trace of your lengths, in place of a model of them")
    ] = None,
    release: Annotated[
        str | None,
        typer.Option(
            help="release of the framework, whose defaults are taken (default: the newest known)"
        ),
    ] = None,
    lists: Annotated[
        bool, typer.Option("--lists", help="print every key with what became of it")
    ] = False,
) -> DataView:
    """Write a scenario from what starts a run, and say what became of each of its settings.

    Without --from, six questions are asked. No script is run.
    """
    from simrl.launch.files import write_scenario
    from simrl.launch.fit import fit
    from simrl.launch.settings import read_launch
    from simrl.launch.translate import translate
    from simrl.scenario.load import ScenarioFile

    fields: dict[str, Any] = {"model": model, "cluster.gpu": gpu, "cluster.gpus": gpus}
    fields |= {
        "workload.synthetic.mean_tokens": mean_tokens,
        "workload.trace": trace and str(trace.absolute()),
    }
    fields |= dict(parse_override(text) for text in overrides or [])
    launch, aim = (read_launch(source), "compare") if source is not None else _asked(fields)
    translation = translate(launch, fields, release)
    fit(translation)
    path = output or Path(f"{translation.data['name']}.yaml")
    ScenarioFile(path, (), translation.data).scenarios()
    heading = f"{launch.path.name}: {launch.table.title}. Each value says where it is from.\nsimrl compare {path}"
    files = write_scenario(path, translation, heading)
    notes = [
        f"Written: {', '.join(map(str, files))}",
        f"Next:  simrl {aim} {path}{' cluster.gpus=32,64,128' * (aim == 'sweep')}",
    ]

    def show(data: Any, console: Console) -> None:
        _show(translation, lists, console)

    rows = [key._asdict() for key in translation.keys]
    return DataView(
        {"scenario": str(path), "data": translation.data}, show, "init", rows, notes=notes
    )


def _asked(fields: dict[str, Any]) -> tuple[Launch, str]:
    """Ask what no option gave, put the answers into `fields`, and return the framework's defaults
    and the command that is wanted."""
    from simrl.launch.settings import Launch
    from simrl.launch.tables import TABLES
    from simrl.launch.translate import QUESTIONS

    words: dict[str, str] = {}
    tables = {table.name: table for table in TABLES}
    for name, question in QUESTIONS.items():
        keys = question.get("fields", [])
        if "question" not in question or (
            keys and all(fields.get(key) is not None for key in keys)
        ):
            continue
        try:
            text = typer.prompt(question["question"], default=question["answer"], err=True)
        except typer.Abort as error:
            raise InputError(
                "no answer; name what starts your run with --from FILE, or answer in a terminal"
            ) from error
        parts = (
            [part for part in re.split(r"[\s,x×]+(?=\S)", text.strip()) if part]
            if len(keys) > 1
            else [text.strip()]
        )
        if len(keys) not in (0, len(parts)):
            raise InputError(
                f"{question['question']}: {text!r}; answer such as {question['answer']}"
            )
        words[name] = text.strip().lower().replace("-", "_")
        fields |= {
            key: parse_override(f"{key}={part}")[1] for key, part in zip(keys, parts, strict=False)
        }
    for name, known in (("framework", list(tables)), ("aim", ["compare", "advise", "sweep"])):
        if words[name] not in known:
            raise InputError(
                f"{name} {words[name]!r}{choose(words[name], known, ', '.join(known))}"
            )
    return Launch(Path("my run"), tables[words["framework"]], {}), words["aim"]


def _show(translation: Translation, lists: bool, console: Console) -> None:
    """Print the lists: their lengths, what is not understood and what is missing; all if wanted."""
    from simrl.launch.translate import NO_EFFECT, NOT_UNDERSTOOD, UNDERSTOOD
    from simrl.show.text import bare_table

    def line(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False, markup=False)

    systems = [
        str(one if isinstance(one, str) else one["name"]) for one in translation.data["systems"]
    ]
    line(
        f"{translation.launch.path.name}: {translation.launch.table.title}, simulated as {systems[0]}, beside {', '.join(systems[1:])}"
    )
    names = (UNDERSTOOD, NO_EFFECT, NOT_UNDERSTOOD)
    line("Keys: " + ", ".join(f"{len(translation.of(name))} {name}" for name in names))
    if lists:
        for name in names:
            line(f"\n{name}:")
            cells = [
                (
                    key.key,
                    key.value[:40],
                    key.field or key.becomes,
                    key.becomes if key.field else "",
                )
                for key in translation.of(name)
            ]
            console.print(
                bare_table(("key", "value", "field" if name == UNDERSTOOD else "why", ""), cells)
            )
    elif keys := translation.of(NOT_UNDERSTOOD):
        line("\nNot understood, so not simulated:")
        for key in keys:
            line(f"  {key.key}={key.value[:60]}" + (f"  ({key.becomes})" if key.becomes else ""))
    for title, texts in (
        (
            "Missing, and assumed for now:",
            [f"{one.what}: {one.value}; give {one.option}" for one in translation.assumed],
        ),
        ("Note:", translation.notes),
    ):
        if texts:
            line(f"\n{title}")
            for text in texts:
                line(f"  {text}")
    line("")
