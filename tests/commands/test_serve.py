"""simrl serve: a page on this machine that changes with what is chosen on it."""

import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

import simrl as simrl_package
from simrl.commands import serve
from simrl.commands.serve import Choice, _checked, _label, _Source, make_page
from simrl.errors import InputError, StoppedError
from simrl.scenario.load import load_scenarios
from tests.browser import Browser
from tests.command_line import CommandLine

EXAMPLE = Path(__file__).parents[2] / "experiments" / "quickstart.yaml"
FIRST = ["cluster.gpus=16", "steps=4", "warmup_steps=1"]
CHOICE = Choice(("one_step_off", "areal"), 16, 0.5, 2, 4)


def source(*settings: str) -> _Source:
    return _Source(EXAMPLE, tuple(settings))


@contextmanager
def served(*settings: str) -> Iterator[str]:
    pytest.importorskip("dash", reason="simrl serve needs Dash")
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", 0, make_page(EXAMPLE, settings).server, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(*FIRST) as address:
        yield address


def fetched(address: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address, headers=headers), timeout=20
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def test_a_parameter_goes_to_the_systems_that_have_it() -> None:
    choice = CHOICE._replace(
        systems=("verl_colocated", "one_step_off", '{"name": "areal", "eta": 8}'), other=""
    )
    scenarios = source(*FIRST).answer(choice).compared.scenarios
    assert [each.system.parameters for each in scenarios] == [
        {},
        {"rollout_share": 0.5},
        {"eta": 2, "rollout_share": 0.5},
    ]
    assert "system.eta=2" not in CHOICE._replace(systems=("verl_colocated",)).settings(), (
        "no system has it"
    )


def test_the_page_begins_with_the_rows_of_a_comparison_of_the_file_each_system_at_its_own_split(
    tmp_path: Path,
) -> None:
    text = (EXAMPLE.parent / "reasoning.yaml").read_text(encoding="utf-8")
    file = tmp_path / "reasoning.yaml"
    file.write_text(text.partition("\nvary:")[0], encoding="utf-8")
    settings = ["model=qwen3-8b", "cluster.tp=1", "steps=4", "warmup_steps=1"]
    page = _Source(file, tuple(settings))
    first = page.first_choice()
    assert first.systems[1:] == (
        '{"name": "one_step_off", "rollout_share": 0.6875}',
        '{"name": "areal", "eta": 4, "rollout_share": 0.5}',
    )
    assert [_label(each) for each in first.systems][2] == "areal(eta=4, rollout_share=0.5)"
    compared = simrl_package.compare(file, overrides=settings, ranking=False, best_split=False)
    assert page.answer(first).compared.rows == compared.rows


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"systems": ()}, "systems: none is chosen; choose one"),
        ({"gpus": 1}, "use more GPUs"),
        ({"other": "cluster.gpuz=3"}, "did you mean gpu or gpus?"),
        ({"other": "nonsense"}, "nonsense"),
        ({"other": "profile.path=${oc.env:HOME}"}, "oc.env"),
    ],
)
def test_what_cannot_be_simulated_is_a_line(changed: dict[str, object], line: str) -> None:
    with pytest.raises(InputError) as error:
        source().answer(CHOICE._replace(**changed))
    assert line in str(error.value) and "\n" not in str(error.value)


def test_the_scenario_that_the_page_hands_out_is_the_one_it_shows(tmp_path: Path) -> None:
    answer = source(*FIRST).answer(CHOICE)
    file = tmp_path / "elsewhere" / "scenario.yaml"
    file.parent.mkdir()
    file.write_text(answer.scenario, encoding="utf-8")
    scenarios = load_scenarios(file)
    assert [(s.system.name, s.cluster.gpus, s.steps) for s in scenarios] == [
        ("one_step_off", 16, 4),
        ("areal", 16, 4),
    ]
    assert [s.system.parameters["rollout_share"] for s in scenarios] == [0.5, 0.5]
    again = _Source(file, ()).answer(CHOICE)
    assert again.compared.rows == answer.compared.rows
    assert "vary" not in yaml.safe_load(answer.scenario)


def test_the_page_begins_with_what_the_file_says() -> None:
    first = source().first_choice()
    assert first.systems == (
        "verl_colocated",
        "one_step_off",
        '{"name": "areal", "eta": 1}',
        '{"name": "areal", "eta": 4}',
    )
    assert first.gpus is None, "the file varies it"
    assert source("cluster.gpus=16").first_choice().gpus == 16


def test_a_page_of_another_host_is_not_answered(address: str) -> None:
    status, page = fetched(address)
    assert status == 200 and "<title>" in page
    assert fetched(address, Host="simrl.example.com")[0] == 403
    assert fetched(address, Origin="http://simrl.example.com")[0] == 403


@pytest.mark.parametrize(
    "request_line",
    ["GET / HTTP/1.0", "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: simrl.example.com"],
)
def test_a_page_of_another_host_is_not_answered_in_any_form_of_a_request(
    address: str, request_line: str
) -> None:
    port = int(address.rstrip("/").rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(
            f"{request_line.format(port=port)}\r\nConnection: close\r\n\r\n".encode()
        )
        assert b" 403 " in connection.recv(100)


def test_an_answer_that_takes_too_long_is_given_up_and_the_next_choice_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = source(*FIRST)
    expected = page.answer(CHOICE).compared.names  # the process has started
    monkeypatch.setattr(serve, "LONGEST_S", 0.5)
    with pytest.raises(StoppedError, match=r"takes longer than 0.5 s; choose fewer updates"):
        page.answer(CHOICE._replace(updates=200_000))
    monkeypatch.undo()
    assert page.answer(CHOICE).compared.names == expected


def test_a_later_choice_ends_the_answer_to_an_earlier_one() -> None:
    page, reasons = source(*FIRST), list[str]()
    page.answer(CHOICE)

    def long() -> None:
        with pytest.raises(StoppedError) as stopped:
            page.answer(CHOICE._replace(updates=200_000))
        reasons.append(str(stopped.value))

    thread = threading.Thread(target=long)
    thread.start()
    time.sleep(1.0)  # it is being simulated
    assert page.answer(CHOICE._replace(eta=1)).compared.names
    thread.join(20)
    assert reasons == ["another choice followed; its answer comes"]


@pytest.mark.parametrize(
    "changed",
    [
        {"systems": [["areal"]]},
        {"systems": 3},
        {"gpus": "x"},
        {"eta": {}},
        {"updates": 1.5},
        {"other": 1},
    ],
)
def test_a_request_with_a_value_of_another_type_is_answered_in_a_line(
    changed: dict[str, object],
) -> None:
    values = {**CHOICE._asdict(), **changed}
    with pytest.raises(InputError, match=f"{next(iter(changed))}: .* needed"):
        _checked(tuple(values.values()))


def test_a_request_of_many_megabytes_is_refused(address: str) -> None:
    body = json.dumps({"output": "x" * 2_000_000}).encode()
    request = urllib.request.Request(
        f"{address}_dash-update-component",
        body,
        {"Content-Type": "application/json"},
        method="POST",
    )
    with pytest.raises(urllib.error.HTTPError, match="413"):
        urllib.request.urlopen(request, timeout=20)


def test_a_request_that_the_page_never_sends_is_refused_in_a_line_and_logs_nothing(
    address: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for path, body in [
        *(
            ("_dash-update-component", body)
            for body in (b"[]", b"null", b'{"output":1}', b'{"output":"nowhere.value"}')
        ),
        ("_dash-component-suites/os/environ", None),
        ("_dash-component-suites/dash/dcc/%00", None),
    ]:
        request = urllib.request.Request(
            f"{address}{path}", body, {"Content-Type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(request, timeout=20)
    assert fetched(address)[0] == 200
    assert "Traceback" not in caplog.text


def test_the_page_names_no_other_address_to_load_from(address: str) -> None:
    page = fetched(address)[1]
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert loaded and not [each for each in loaded if re.match(r"(\w+:)?//", each)]


def test_a_file_that_cannot_be_executed_is_refused_before_the_page_opens(
    simrl: CommandLine,
) -> None:
    pytest.importorskip("dash", reason="simrl serve needs Dash")
    run = simrl("serve", "missing.yaml", "--no-open", "--port", "0")
    assert (run.code, "missing.yaml" in run.err, "Traceback" in run.err) == (2, True, False)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.quit()


def test_a_reader_changes_the_page_and_is_told_of_bad_input_in_it(
    address: str, browser: Browser
) -> None:
    driver = browser.driver
    driver.get(address)
    browser.wait("(document.querySelector('#table') || {}).srcdoc?.includes('areal')", 60)
    browser.wait(
        "(document.querySelector('#timeline') || {}).src?.startsWith('data:image/png')", 60
    )
    before = browser.js("return document.querySelector('#timeline').src")

    def type_gpus(text: str) -> None:
        field = driver.find_element("id", "gpus")
        field.send_keys("\ue009a")  # Ctrl-A
        field.send_keys(text, "\ue007")  # Enter

    type_gpus("32")
    browser.wait("document.querySelector('#scenario').textContent.includes('gpus: 32')", 60)
    browser.wait(f"document.querySelector('#timeline').src.length != {len(before)}", 60)
    type_gpus("1")
    browser.wait("document.querySelector('#error').textContent.includes('use more GPUs')", 60)
    assert browser.js("return document.querySelector('#answer').style.opacity") == "0.35"
    type_gpus("16")
    browser.wait("document.querySelector('#error').textContent === ''", 60)
    loaded = browser.js("return performance.getEntriesByType('resource').map(each => each.name)")
    assert loaded and all(each.startswith((address, "data:")) for each in loaded)
