"""`simrl init`: a scenario from the file that starts a run, or from six answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simrl.commands.command import command
from simrl.commands.view import DataView
from simrl.errors import InputError, choose, refuse
from simrl.scenario.yaml_text import parse_override

if TYPE_CHECKING:
    from simrl.launch.settings import Launch
    from simrl.launch.translate import Translation


@command
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
            help="a launch script or configuration of verl, AReaL, slime, miles, NeMo-RL, SkyRL, ROLL, RLinf, "
            "prime-rl, OpenRLHF or TRL",
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
    \f
    view = simrl.init(source="run.sh", gpu="h100", mean_tokens=3000)
    """
    from simrl.launch.files import write_scenario
    from simrl.launch.fit import fit, require_possible
    from simrl.launch.settings import read_launch
    from simrl.launch.translate import translate
    from simrl.profile.hardware import gpu as gpu_named
    from simrl.scenario.load import ScenarioFile
    from simrl.show.text import say

    fields: dict[str, Any] = {
        "model": model,
        "cluster.gpu": parse_override(f"cluster.gpu={gpu}")[1] if str(gpu).startswith("{") else gpu,
        "cluster.gpus": gpus,
    }
    fields |= {
        "workload.synthetic.mean_tokens": mean_tokens,
        "workload.trace": trace and str(Path(trace).absolute()),
    }
    for file in (text for text in overrides or [] if "=" not in text):
        raise InputError(f"{file}: no KEY=VALUE; a launch script is --from {file}")
    fields |= dict(parse_override(text) for text in overrides or [])
    refuse(
        (
            "systems" in fields,
            "systems: the launch decides the first; simrl compare has others: --system split",
        ),
        (
            release is not None and not re.search(r"\d", release),
            f"--release {release}: give one such as 0.7",
        ),
        (trace and mean_tokens, "--trace has its own lengths; leave --mean-tokens out"),
        (output is not None and Path(output).is_dir(), f"{output}: is a folder; name a file"),
    )
    launch, aim = (read_launch(Path(source)), "compare") if source is not None else _asked(fields)
    fields |= {  # files, from where the user stands
        key: str(Path(text).absolute()) if text.endswith(".toml") else text
        for key in ("cluster.gpu", "cluster.train.gpu")
        if isinstance(fields.get(key), str | int) and (text := str(fields[key]))
    }
    if fields.get("cluster.gpu"):
        gpu_named(fields["cluster.gpu"])
    translation = translate(launch, fields, release)
    default = Path(f"{translation.data['name']}.yaml")
    is_source = source is not None and default.absolute() == Path(source).absolute()
    path = Path(output or (default.with_stem(f"{default.stem}_scenario") if is_source else default))
    translation.data["name"] = path.stem
    try:
        ScenarioFile(path, (), translation.data).scenarios()
        require_possible(translation.data)
    except InputError as error:
        wrong = (key for name, key in translation.sources.items() if f"{name} is" in str(error))
        raise InputError(
            f"{launch.path}{next((f', {key}' for key in wrong), '')}: {error}"
        ) from error
    fits = fit(translation)
    heading = f"{launch.path.name}: {launch.table.title}. Each value says where it is from.\nsimrl compare {path}"
    files = write_scenario(path, translation, heading)
    varied = " cluster.gpus=32,64,128" if aim == "sweep" else ""
    first = "" if fits else "change what the last note names, then  "
    notes = [f"Written: {', '.join(map(str, files))}", f"Next:  {first}simrl {aim} {path}{varied}"]

    rows = [key._asdict() for key in translation.keys]
    assumed, changed = (
        [one._asdict() for one in part] for part in (translation.assumed, translation.changed)
    )
    data = {
        "scenario": str(path),
        "data": translation.data,
        "keys": rows,
        "changed": changed,
        "assumed": assumed,
        "notes": translation.notes,
    }
    text = _text(translation, lists)
    return DataView(
        data, lambda _, console: say(console, text, soft_wrap=True), "init", rows, notes=notes
    )


def _asked(fields: dict[str, Any]) -> tuple[Launch, str]:
    """Ask what no option gave, put the answers into `fields`, and return the framework's defaults
    and the command that is wanted."""
    from simrl.launch.settings import Launch
    from simrl.launch.tables import TABLES
    from simrl.launch.translate import QUESTIONS

    tables = {table.name: table for table in TABLES}
    words = {"framework": list(tables), "aim": ["compare", "advise", "sweep"]}
    for name, question in QUESTIONS.items():
        keys = question.get("fields", [])
        if "question" not in question or (
            keys and all(fields.get(key) is not None for key in keys)
        ):
            continue
        try:
            text = typer.prompt(question["question"], default=question["answer"], err=True).strip()
        except typer.Abort as error:
            raise InputError(
                "no answer; name what starts your run with --from FILE, or answer in a terminal"
            ) from error
        parts = (
            re.split(r"[\s,×]+(?:x\s+)?|(?<=\d)x(?=\w)", text)
            if len(keys) > 1
            else [text] * len(keys)
        )
        choices, word = words.get(name, []), text.lower().replace("-", "_")
        if len(parts) != len(keys) or (choices and word not in choices):
            near = (
                choose(word, choices, ", ".join(choices))
                if choices
                else f"; answer such as {question['answer']}"
            )
            raise InputError(f"{question['question']}: {text!r}{near}")
        words[name] = [word]
        answers = {
            key: parse_override(f"{key}={part}")[1] for key, part in zip(keys, parts, strict=True)
        }
        fields |= {key: value for key, value in answers.items() if fields.get(key) is None}
    return Launch(Path("my run"), tables[words["framework"][0]], {}), words["aim"][0]


def _text(translation: Translation, lists: bool) -> str:
    """Return the lists of keys: their lengths, what is not understood and what is missing; all if
    wanted."""
    from simrl.launch.translate import NO_EFFECT, NOT_UNDERSTOOD, UNDERSTOOD

    launch = translation.launch
    first, *others = [system["name"] for system in translation.data["systems"]]
    lines = [
        f"{launch.path.name}: {launch.table.title}, simulated as {first}{', beside ' * bool(others)}{', '.join(others)}"
    ]
    for name in (UNDERSTOOD, NO_EFFECT, NOT_UNDERSTOOD) if launch.settings else ():
        keys = translation.of(name)
        lines.append(
            f"{len(keys)} key{'s' * (len(keys) != 1)} {name}{':' * bool(keys and (lists or name == NOT_UNDERSTOOD))}"
        )
        for key in keys if lists or name == NOT_UNDERSTOOD else ():
            why = (
                f"  → {key.field} = {key.becomes}"
                if key.field
                else f"  ({key.becomes})" * bool(key.becomes)
            )
            lines.append(f"  {key.key}={key.value[:60]}{why}")
    if translation.changed:
        lines.append("\nChanged, so that simrl can simulate it:")
        lines += [f"  {one.field}: {one.value} ({one.what})" for one in translation.changed]
    if translation.assumed:
        lines.append("\nMissing, and assumed for now:")
        lines += [f"  {one.what}: {one.value}; give {one.option}" for one in translation.assumed]
    if notes := set(translation.notes) - {key.becomes for key in translation.keys}:
        lines += ["\nNotes:", *(f"  {note}" for note in translation.notes if note in notes)]
    return "\n".join([*lines, ""])
