"""`simrl serve`: a page on this machine on which a person changes a scenario, and sees table and
timeline change.

Invariant: the page listens on the loopback interface alone, answers requests that name it, and
loads nothing from elsewhere. What it shows is what `simrl compare` prints of the scenario that it
hands out as YAML.
"""

from __future__ import annotations

import json
import logging
import threading
import weakref
import webbrowser
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from traceback import walk_tb
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
import yaml
from pydantic import TypeAdapter, ValidationError

from simrl.commands import options as o
from simrl.commands.view import DataView
from simrl.errors import InputError, StoppedError, refuse
from simrl.extensions import install_command
from simrl.validation import right, with_parameters

if TYPE_CHECKING:
    from dash import Dash

    from simrl.commands.compare import Comparison
    from simrl.scenario.load import ScenarioFile

HOST = "127.0.0.1"
SHARES = tuple(i / 16 for i in range(4, 16))
MOST_REQUEST_BYTES = 1_000_000
LONGEST_S = 60.0  # of an answer: the page is for choices that are seen at once
KEPT = 8  # latest answers, of up to a hundred MB each
GREY, PLAIN = {"opacity": "0.35"}, {"opacity": "1"}
LOOK = "body { font: 14px system-ui, sans-serif; margin: 0 }"


class Choice(NamedTuple):
    """A choice on the page; None stands for the file's value. `systems` are names, or objects with
    parameters as JSON; `other` has further settings, `key=value`, one a line."""

    systems: tuple[str, ...]
    gpus: int | None
    rollout_share: float | None
    eta: int | None
    updates: int | None
    other: str = ""

    def settings(self) -> list[str]:
        """Return the settings as `simrl compare` takes them. Raise `InputError` for no system."""
        from simrl.scenario.yaml_text import parse_override
        from simrl.systems.recipes import parameters_of

        refuse((not self.systems, "systems: none is chosen; choose one"))
        entries = [parse_override(f"system={system}")[1] for system in self.systems]
        known = [
            parameters_of(str(system.get("name") if isinstance(system, Mapping) else system))
            for system in entries
        ]
        values = {
            "system.rollout_share": self.rollout_share,
            "system.eta": self.eta,
            "cluster.gpus": self.gpus,
        }
        if self.updates is not None:
            values |= {"steps": self.updates, "warmup_steps": max(self.updates // 3, 0)}
        of_systems = {f"system.{key}" for parameters in known for key in parameters}
        taken = [key for key in values if key in of_systems or "system." not in key]
        return [
            f"systems=[{', '.join(self.systems)}]",
            *(f"{key}={values[key]}" for key in taken if values[key] is not None),
            *(line.strip() for line in self.other.splitlines() if line.strip()),
        ]


class Answer(NamedTuple):
    """The page's answer to a choice: the comparison, and the scenario as YAML."""

    compared: Comparison
    scenario: str
    seconds: float


def serve(
    scenario: Annotated[
        Path,
        typer.Argument(
            metavar="SCENARIO", help="a scenario file (YAML), with which the page begins"
        ),
    ],
    overrides: o.Overrides = None,
    *,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="the port on this machine; 0: a free one")
    ] = 8050,
    opens: Annotated[
        bool, typer.Option("--open/--no-open", help="open the page in the browser")
    ] = True,
) -> DataView:
    """Open a page on this machine, to change GPUs, split, staleness and systems; Ctrl-C ends it.

    The table and the timeline follow each change, and the scenario can be saved as YAML. The server
    is only on this machine.
    """
    page = make_page(scenario, [str(text) for text in overrides or ()])
    from werkzeug.serving import make_server  # comes with Dash; without it, `make_page` has raised

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # no line for each request
    try:
        server = make_server(HOST, port, page.server, threaded=True)
    except (OSError, SystemExit):  # werkzeug prints why, and ends the process
        raise InputError(
            f"--port {port}: another program listens there; name another, or 0 for a free one"
        ) from None
    address = f"http://{HOST}:{server.server_port}/"
    print(f"{address} shows {scenario}; Ctrl-C ends it", flush=True)
    if opens:
        threading.Timer(0.2, webbrowser.open, [address]).start()
    with server:
        server.serve_forever()
    return DataView({}, lambda data, console: None)


def make_page(scenario: Path, overrides: Sequence[str] = ()) -> Dash:
    """Return the page of a scenario file, ready to be served. Raise `InputError` for a scenario
    that cannot be executed, and without Dash."""
    try:
        from dash import Dash
    except ImportError:
        raise InputError(f"simrl serve needs Dash; {install_command('serve')}") from None
    from simrl.study.progress import compile_kernels

    source = _Source(scenario, tuple(overrides))
    first = source.first_choice()
    compile_kernels([1])
    source.answer(first)  # errors of the file are raised before the page opens
    page = Dash(
        __name__,
        title=f"simrl: {scenario.name}",
        update_title="",
        assets_folder="",
        serve_locally=True,
        suppress_callback_exceptions=False,
    )
    page.server.config["MAX_CONTENT_LENGTH"] = MOST_REQUEST_BYTES
    page.server.before_request(_refuse_other_hosts)
    page.server.register_error_handler(Exception, _refuse_malformed)
    page.layout = _layout(scenario, first)
    _connect(page, source)
    return page


def _refuse_other_hosts() -> Any:
    """Refuse a request that names another host, as a foreign page does by DNS rebinding, in its
    header or as an address in place of a path, and one that names none (HTTP/1.0)."""
    from flask import abort, request

    host = request.environ.get("HTTP_HOST", "")
    path = request.environ.get("RAW_URI", "/")
    origin = request.headers.get("Origin")
    if (
        host.partition(":")[0] not in (HOST, "localhost")
        or not path.startswith("/")
        or (origin is not None and origin.partition("://")[2] != host)
    ):
        abort(403)


def _refuse_malformed(error: Exception) -> Any:
    """Answer a request that Dash cannot read with one line. An error of simrl itself is a bug and
    shows its traceback."""
    from werkzeug.exceptions import HTTPException

    if isinstance(error, HTTPException):
        return error
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    if any(name.startswith("simrl.") for name in modules):
        raise error
    return "the page sends no such request; load it again", 400


class _Source:
    """A scenario file that answers choices, one at a time, in a process that a later choice ends,
    or `LONGEST_S`; the latest answers are kept."""

    def __init__(self, path: Path, overrides: tuple[str, ...]) -> None:
        from simrl.study.executors import Processes

        self._path, self._overrides = path, overrides
        self._one_at_a_time = threading.Lock()
        self._process = Processes(1, stay=True)
        weakref.finalize(self, self._process.end)
        self._latest: Choice | None = None
        self._kept = lru_cache(maxsize=KEPT)(self._simulated)
        self._drawn = lru_cache(maxsize=KEPT)(
            lambda choice, name: self._kept(choice).compared.timeline(name, steps=2)._repr_png_()
        )

    def first_choice(self) -> Choice:
        """Return the choice that the file makes."""
        from simrl.systems.recipes import parameters_of

        file = self._file(self._overrides)
        sizes = {entry.cluster.gpus for entry in file.scenarios(parameters_of=parameters_of)}
        systems = dict.fromkeys(
            json.dumps(entry) if len(entry) > 1 else entry["name"]
            for entry in file.data(parameters_of)["systems"]
        )
        return Choice(tuple(systems), sizes.pop() if len(sizes) == 1 else None, None, None, None)

    def answer(self, choice: Choice) -> Answer:
        """Return the answer to a choice. Raise `InputError` for one that cannot be simulated, and
        `StoppedError` where another follows before its answer is there, or it takes too long."""
        self._latest = choice
        with self._one_at_a_time:
            return self._kept(choice)

    def timeline(self, choice: Choice, name: str) -> bytes:
        """Return a picture (PNG) of two updates of a run. Raise `InputError` for one that cannot be
        simulated."""
        with self._one_at_a_time:
            return self._drawn(choice, name)

    def _file(self, settings: Sequence[str]) -> ScenarioFile:
        from simrl.scenario.load import ScenarioFile, override

        return ScenarioFile(self._path, [override(text) for text in settings])

    def _simulated(self, choice: Choice) -> Answer:
        from simrl.study.executors import each

        began_s = perf_counter()

        def why_stop() -> str:
            if self._latest != choice:
                return "another choice followed; its answer comes"
            if perf_counter() - began_s > LONGEST_S:
                return f"takes longer than {LONGEST_S:g} s; choose fewer updates or GPUs, or run simrl compare"
            return ""

        file = self._file([*self._overrides, *choice.settings()])
        [(_, answer)] = each(_answer, [file], self._process, why_stop)
        return answer


def _answer(file: ScenarioFile) -> Answer:
    """Return the answer to the choice that a file and its settings make."""
    from simrl.commands.compare import simulate_all
    from simrl.study.compare import Beside, without_colocated
    from simrl.study.executors import inputs_of_this_process
    from simrl.systems.recipes import parameters_of

    began_s = perf_counter()
    scenarios, _ = without_colocated(file.scenarios(parameters_of=parameters_of))
    inputs, beside = inputs_of_this_process(), Beside(False, False, False)
    compared = simulate_all(scenarios, inputs, 1, None, beside)
    written = yaml.safe_dump(file.data(parameters_of), sort_keys=False, allow_unicode=True)
    return Answer(compared, written, perf_counter() - began_s)


def _layout(path: Path, first: Choice) -> Any:
    """Return the elements of the page: the choices at the left, what follows from them at the
    right."""
    from dash import dcc, html

    from simrl.systems.recipes import RECIPES

    def field(label: str, name: str, control: Any) -> Any:
        return html.Label(
            [html.Span(label), control],
            htmlFor=name,
            style={"display": "block", "margin": "0 0 0.9em"},
        )

    def number(name: str, value: int | None, least: int) -> Any:
        look: Any = {
            "style": {"width": "100%", "boxSizing": "border-box"},
            "placeholder": "as in the file",
        }
        return dcc.Input(
            id=name, type="number", value=value, min=least, step=1, debounce=0.3, **look
        )

    labels = {name: _label(name) for name in dict.fromkeys([*first.systems, *RECIPES])}
    shares: list[Any] = [{"label": "each system's own", "value": ""}]
    shares += [{"label": f"{share:.1%} of the GPUs roll out", "value": share} for share in SHARES]
    wide = {"width": "100%", "height": "5em", "boxSizing": "border-box", "fontFamily": "monospace"}
    choices = [
        html.H1(f"simrl: {path.name}", style={"fontSize": "1.2em"}),
        field(
            "Systems",
            "systems",
            dcc.Dropdown(labels, list(first.systems), multi=True, id="systems"),
        ),
        field("GPUs", "gpus", number("gpus", first.gpus, 1)),
        field(
            "Split, where rollout and training have GPUs of their own",
            "share",
            dcc.Dropdown(shares, "", id="share", clearable=False),
        ),
        field(
            "Staleness η, where a system has it (empty: each system's own)",
            "eta",
            number("eta", first.eta, 0),
        ),
        field(
            "Updates, of which the first third is left out (empty: as in the file)",
            "updates",
            number("updates", first.updates, 1),
        ),
        field(
            "Other keys, one a line: training.sharding=fsdp",
            "other",
            dcc.Textarea(id="other", value="", spellCheck=False, style=wide),
        ),
        html.Button("Download the scenario (YAML)", id="export"),
        dcc.Download(id="download"),
        html.Details(
            [html.Summary("The scenario"), html.Pre(id="scenario", style={"overflow": "auto"})]
        ),
    ]
    answer = [
        html.Div(id="error", role="alert", style={"color": "#a4161a", "minHeight": "1.4em"}),
        html.Div(
            [
                html.Div(id="said", role="status", style={"color": "#555", "minHeight": "1.4em"}),
                html.Iframe(
                    id="table",
                    title="comparison",
                    sandbox="",
                    style={"width": "100%", "height": "24em", "border": "0"},
                ),
                dcc.Dropdown(id="shown", clearable=False),
                html.Img(id="timeline", style={"width": "100%"}),
            ],
            id="answer",
        ),
    ]
    return html.Div(
        [
            html.Div(choices, style={"flex": "0 0 20em", "padding": "1em"}),
            html.Div(answer, style={"flex": "1 1 30em", "padding": "1em", "minWidth": "0"}),
        ],
        style={
            "display": "flex",
            "flexWrap": "wrap",
            "fontFamily": "system-ui, sans-serif",
            "fontSize": "15px",
        },
    )


def _label(system: str) -> str:
    """Return a system with its parameters, as tables name it."""
    parameters = json.loads(system) if system.startswith("{") else {"name": system}
    return with_parameters(parameters.pop("name"), parameters)


def _checked(values: Sequence[Any]) -> Choice:
    """Return the choice with these values, which may come from anywhere. Raise `InputError` for a
    value of another type."""
    try:
        return TypeAdapter(Choice).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(
            f"{Choice._fields[int(first['loc'][0])]}: {right(first)}; choose another"
        ) from None


def _connect(page: Dash, source: _Source) -> None:
    """Register the callbacks by which the page follows its choices."""
    from base64 import b64encode

    from dash import Input, Output, State, no_update

    names = ("systems", "gpus", "share", "eta", "updates", "other")

    def choice(systems: Any, gpus: Any, share: Any, eta: Any, updates: Any, other: Any) -> Choice:
        return _checked((systems or (), gpus, share or None, eta, updates, other or ""))

    @page.callback(
        output=[
            Output("error", "children"),
            Output("answer", "style"),
            Output("said", "children"),
            Output("table", "srcDoc"),
            Output("scenario", "children"),
            Output("shown", "options"),
            Output("shown", "value"),
        ],
        inputs={
            "values": [Input(name, "value") for name in names],
            "shown": State("shown", "value"),
        },
    )
    def answered(values: Sequence[Any], shown: str | None) -> tuple[Any, ...]:
        try:
            answer = source.answer(choice(*values))
        except (InputError, StoppedError) as error:
            return f"{error}", GREY, no_update, no_update, no_update, no_update, no_update
        runs, table = answer.compared.names, f"<style>{LOOK}</style>{answer.compared._repr_html_()}"
        status = f"Simulated in {answer.seconds:.1f} s. A run of few updates may not have settled; its row says so."
        return "", PLAIN, status, table, answer.scenario, runs, shown if shown in runs else runs[0]

    @page.callback(
        output=[Output("timeline", "src"), Output("timeline", "alt")],
        inputs={
            "shown": Input("shown", "value"),
            "_": Input("scenario", "children"),
            "values": [State(name, "value") for name in names],
        },
    )
    def drawn(shown: str | None, _: Any, values: Sequence[Any]) -> tuple[Any, ...]:
        try:
            picture = source.timeline(choice(*values), str(shown or ""))
        except (InputError, StoppedError):  # the other callback prints it
            return no_update, no_update
        return (
            f"data:image/png;base64,{b64encode(picture).decode()}",
            f"two updates of {shown}, a row a GPU; idle is hatched",
        )

    @page.callback(
        Output("download", "data"),
        Input("export", "n_clicks"),
        State("scenario", "children"),
        prevent_initial_call=True,
    )
    def exported(_: int, scenario: str) -> dict[str, str]:
        return {"content": scenario, "filename": "scenario.yaml", "type": "application/yaml"}
