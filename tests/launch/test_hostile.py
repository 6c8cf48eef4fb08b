"""Files that nobody writes in good faith: each is read or refused within two seconds, and none is run."""

import os
from pathlib import Path

import pytest

from simrl.errors import InputError
from simrl.launch.settings import read_launch
from simrl.launch.translate import translate
from tests.launch.reading import LONGEST_S, VERL, within

BATCH = f"{VERL} data.train_batch_size="
ROLLOUT = "actor_rollout_ref: {rollout: {n: 8}}\n"
GRPO = "from trl import GRPOConfig\nGRPOConfig(num_generations=8, x={})\n"
MARK = "touch MARK"


def read_or_refused(path, wall_s=20, most_s=LONGEST_S):
    """Return the settings of a launch, or the words of its refusal; the rest is a fault."""
    with within(most_s, wall_s):
        try:
            launch = read_launch(path)
            translate(launch, {})
        except InputError as error:
            assert "\n" not in str(error)
            return str(error)
    return launch.settings


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder that is the current one, in which nothing is made."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not list(tmp_path.rglob("MARK"))


RUNS = {  # if anything of it were run, a file would be there
    "a substitution": f"{BATCH}$({MARK})",
    "backticks": f"{BATCH}`{MARK}`",
    "one in quotes": f'{BATCH}"$({MARK})"',
    "one in an assignment": f"A=$({MARK})\n{BATCH}$A",
    "one in arithmetic": f"{BATCH}$(( $({MARK}) ))",
    "one in an index": f"A=(1)\n{BATCH}${{A[$({MARK})]}}",
    "one in a default": f"{BATCH}${{A:-$({MARK})}}",
    "one in a test": f"[[ $({MARK}) ]] && {BATCH}8",
    "one in a heredoc": f"cat <<EOF\n$({MARK})\nEOF\n{BATCH}8",
    "one in a process substitution": f"cat <({MARK})\n{BATCH}8",
    "a command": f"{MARK}\n{BATCH}8",
    "eval": f'eval "{MARK}"\n{BATCH}8',
    "a trap": f"trap '{MARK}' EXIT\n{BATCH}8",
    "bash -c": f'bash -c "{MARK}; {BATCH}8"',
    "an interpreter": f"python3 -c \"import os; os.system('{MARK}')\"\n{BATCH}8",
    "a dirname": f"A=$(cd $(dirname $0); {MARK}; pwd)\n{BATCH}$A",
    "what is printed": f"A=$(echo $({MARK}))\n{BATCH}$A",
    "an expression": f"{BATCH}\"__import__('os').system('{MARK}')\"",
    "an interpolation": f"{BATCH}'${{eval:\"__import__(\\'os\\').system(\\'{MARK}\\')\"}}'",
    "a tag of YAML in a value": f"{BATCH}'!!python/object/apply:os.system [{MARK}]'",
}


@pytest.mark.parametrize("text", RUNS.values(), ids=RUNS)
def test_nothing_of_a_script_is_run(folder, text):
    (folder / "run.sh").write_text(text)
    read_or_refused(folder / "run.sh")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.py", f"import os\nos.system('{MARK}')\n{GRPO.format(1)}"),
        ("run.py", GRPO.format(f"__import__('os').system('{MARK}')")),
        ("run.py", f"@__import__('os').system('{MARK}')\ndef f(): pass\n{GRPO.format(1)}"),
        ("run.yaml", f"{ROLLOUT}a: !!python/object/apply:os.system ['{MARK}']\n"),
        ("run.yaml", f"{ROLLOUT}a: !!python/object/new:os.system ['{MARK}']\n"),
        (
            "run.yaml",
            f"actor_rollout_ref: {{rollout: {{n: \"__import__('os').system('{MARK}')\"}}}}\n",
        ),
        (
            "run.yaml",
            f"actor_infer: {{device_mapping: \"list(range(0,8))+[__import__('os').system('{MARK}')]\"}}\n",
        ),
        ("run.toml", f"[orchestrator]\nbatch_size = \"__import__('os').system('{MARK}')\"\n"),
    ],
)
def test_nothing_of_a_configuration_is_run(folder, name, text):
    (folder / name).write_text(text)
    read_or_refused(folder / name)


SCRIPTS = {
    "quotes in one another": BATCH + '"$(echo ' * 10_000,
    "quotes in one another, closed": BATCH + '"$(echo ' * 10_000 + "8" + ')"' * 10_000,
    "fewer of them": BATCH + '"$(echo ' * 500 + "8" + ')"' * 500,
    "defaults in one another": BATCH + "${A:-" * 10_000 + "8" + "}" * 10_000,
    "fewer of those": BATCH + "${A:-" * 200 + "8" + "}" * 200,
    "brackets": "(" * 10_000 + BATCH + ")" * 10_000,
    "an open heredoc": f"cat <<EOF\n{BATCH}8\n",
    "many heredocs": "cat <<A\nx\nA\n" * 1_000 + f"{BATCH}8\n",
    "ten megabytes": "# x\n" * 2_500_000 + f"{BATCH}8\n",
    "ten megabytes in a line": "x" * 10_000_000,
    "an open quote": f'{BATCH}"8',
    "a fork bomb": f":(){{ :|:& }};:\n{BATCH}8",
    "one with a name": f"f() {{ f | f & }}\nf\n{BATCH}8",
    "functions that double": "f0() { :; }\n"
    + "".join(f"f{i + 1}() {{ f{i}; f{i}; }}\n" for i in range(60))
    + f"f60\n{BATCH}8",
    "a text that doubles": "A=xxxxxxxx\n" + "A=$A$A\n" * 100 + f"{BATCH}$A",
    "an array that doubles": "A=(x)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 100 + f"{BATCH}$A",
    "a number that grows": "A=99\n" + "A=$((A*A))\n" * 300 + f"{BATCH}$A",
    "a power": f"{BATCH}$((10**10**10))",
    "a shift": f"{BATCH}$((1<<10000000000))",
    "a division by zero": f"{BATCH}$((1/0))",
    "a number of many digits": BATCH + "9" * 5_000,
    "no number": f"{BATCH}.nan trainer.nnodes=.inf data.max_response_length=-1e400",
    "an endless loop": f"while true; do :; done\n{BATCH}8",
    "an open list": BATCH + "[" * 10_000,
    "a deep list": BATCH + "[" * 4_000 + "]" * 4_000,
    "a deep key": f"{VERL} {'a.' * 5_000}a=1",
    "interpolations of one another": f"{VERL} a.b='${{a.c}}' a.c='${{a.b}}'",
    "interpolations in one another": f"{VERL} a='{'${' * 2_000}x{'}' * 2_000}'",
    "interpolations that double": f"{VERL} a.b0=xx "
    + " ".join(f"a.b{i + 1}='${{a.b{i}}}${{a.b{i}}}'" for i in range(60)),
    "patterns": f"X={'a' * 3_000}\n[[ $X == {'*a' * 25}b ]] && {BATCH}8",
    "launches in quotes": "\n".join(["x 'python3 -m verl.trainer.main_pp a=1'"] * 500),
    "a word that is no text": f"{BATCH}$'\\0' a.b=\udcff",
    "a text times a number": f"{VERL} trainer.nnodes={'x' * 20_000}",
    "a long name of a model": f"{VERL} actor_rollout_ref.model.path={'x' * 300}",
    "a long name of a file": f"{VERL} --config-name={'x' * 300}",
    "a model of size 0": f"{VERL} actor_rollout_ref.model.path=foo-0b",
    "one of no active size": f"{VERL} actor_rollout_ref.model.path=foo-a0b",
}


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_a_hostile_script_is_read_or_refused(folder, text):
    (folder / "run.sh").write_bytes(text.encode("utf-8", "surrogateescape"))
    read_or_refused(folder / "run.sh")


YAMLS = {
    "billions of laughs": "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]\n" for i in range(30))
    + ROLLOUT,
    "an alias of itself": f"a: &a [*a]\n{ROLLOUT}",
    "a python object": f"a: !!python/object:os.system {{}}\n{ROLLOUT}",
    "a tag": f"a: !include b.yaml\n{ROLLOUT}",
    "a deep list": f"a: {'[' * 10_000}\n{ROLLOUT}",
    "a deep mapping": f"a: {'{a: ' * 400}1{'}' * 400}\n{ROLLOUT}",
    "two documents": f"{ROLLOUT}---\na: 1\n",
    "a key twice": ROLLOUT * 2,
    "the file itself": f"defaults: [run]\n{ROLLOUT}",
    "no defaults": f"defaults: [1, null, {{}}, [], [[a]], {{a: null}}, {{a: [b]}}]\n{ROLLOUT}",
    "files of the machine": f"defaults: [/etc/passwd, ../../../../../../etc/hosts]\n{ROLLOUT}",
    "a name that no file has": f'defaults: ["a\\0b"]\n{ROLLOUT}',
    "a loop of links": f"defaults: [link]\n{ROLLOUT}",
    "a pipe": f"defaults: [pipe]\n{ROLLOUT}",
    "ten megabytes": ROLLOUT + "# x\n" * 2_500_000,
    "a long number": f"actor_rollout_ref: {{rollout: {{n: {'9' * 5_000}}}}}\n",
    "the file itself twice": f"defaults: [run, run]\n{ROLLOUT}",
    "a long name of a file": f"defaults: [{'x' * 300}]\n{ROLLOUT}",
}


@pytest.mark.parametrize("text", YAMLS.values(), ids=YAMLS)
def test_a_hostile_yaml_is_read_or_refused(folder, text):
    (folder / "link.yaml").symlink_to("other.yaml")
    (folder / "other.yaml").symlink_to("link.yaml")
    os.mkfifo(folder / "pipe.yaml")
    (folder / "run.yaml").write_text(text)
    assert "root:" not in str(read_or_refused(folder / "run.yaml", wall_s=4))


DATA = [
    ("run.json", '{"actor_rollout_ref":{"rollout":{"n":8}},"a":' + "[" * 9_000),
    ("run.json", '{"actor_rollout_ref":{"rollout":{"n":8}},"a":' + '{"a":' * 400 + "1" + "}" * 401),
    ("run.json", '{"actor_rollout_ref":{"rollout":{"n":' + "9" * 5_000 + "}}}"),
    ("run.json", '{"actor_rollout_ref":{"rollout":{"n":NaN},"model":{"path":"\\ud800\\u0000"}}}'),
    ("run.toml", "[orchestrator]\nbatch_size = inf\nx = " + "[" * 9_000),
    ("run.toml", "[orchestrator]\nbatch_size = 2026-01-01\n"),
    ("run.toml", "[orchestrator]\nbatch_size = 8\n[x]\n" + ".".join("a" * 400) + " = 1\n"),
    ("run.toml", "[orchestrator]\nbatch_size = 8\n[x]\n" + ".".join("a" * 9_000) + " = 1\n"),
    ("run.toml", f"[orchestrator]\nbatch_size = 0x{'f' * 9_000}\n"),
]


@pytest.mark.parametrize(("name", "text"), DATA)
def test_hostile_json_and_toml_are_read_or_refused(folder, name, text):
    (folder / name).write_text(text)
    read_or_refused(folder / name)


PYTHON = {
    "brackets": GRPO.format("(" * 5_000 + "1" + ")" * 5_000),
    "fewer brackets": GRPO.format("(" * 150 + "1" + ")" * 150),
    "very many signs": GRPO.format("-" * 13_000 + "1"),
    "a power": GRPO.format("10**10**10"),
    "a long text": GRPO.format("'x' * 10**10"),
    "a literal of many digits": GRPO.format("9" * 5_000),
    "a number that grows": "a = 9\n" + "a = a * a\n" * 300 + GRPO.format("a"),
    "a tuple that doubles": "a = (1,)\n" + "a = (a, a)\n" * 300 + GRPO.format("a"),
    "other literals": GRPO.format("[1j, {1}, b'a', ..., {'a': {}}]"),
    "an encoding": f"# -*- coding: utf-7 -*-\n{GRPO.format(1)}",
    "ten megabytes": "# x\n" * 2_500_000 + GRPO.format(1),
    "deep blocks": "".join(" " * i + "if 1:\n" for i in range(90)) + " " * 90 + f"{GRPO.format(1)}",
    "signs": GRPO.format("-" * 900 + "1"),
    "a sum": GRPO.format("1" + "+1" * 900),
    "attributes": GRPO.format(1) + "x" + ".a" * 900 + "(1)\n",
    "calls": GRPO.format(1) + "x" + "()" * 900 + "\n",
    "a hexadecimal of many digits": GRPO.format("0x" + "f" * 9_000),
}


@pytest.mark.parametrize("text", PYTHON.values(), ids=PYTHON)
def test_hostile_python_is_read_or_refused(folder, text):
    (folder / "run.py").write_text(text)
    read_or_refused(folder / "run.py")


NO_FILES = [
    "nowhere.sh",
    "folder",
    "folder.yaml",
    "link.sh",
    "/dev/zero",
    "/dev/null",
    "/dev/urandom",
    f"{'x' * 300}.sh",
    f"{'x/' * 3_000}a.yaml",
    "a\udcff.sh",
    "bytes.sh",
    "bytes.yaml",
    "utf16.sh",
    "nul\0.py",
    "nul\0.sh",
    "nul\0.yaml",
    "pipe.sh",
    "pipe.yaml",
]


@pytest.mark.parametrize("name", NO_FILES, ids=lambda name: ascii(name)[:20])
def test_what_is_no_file_of_text_is_refused(folder, name):
    for made in ("folder", "folder.yaml"):
        (folder / made).mkdir()
    for made in ("pipe.sh", "pipe.yaml"):
        os.mkfifo(folder / made)
    (folder / "link.sh").symlink_to("back.sh")
    (folder / "back.sh").symlink_to("link.sh")
    for made in ("bytes.sh", "bytes.yaml"):
        (folder / made).write_bytes(bytes(range(256)))
    (folder / "utf16.sh").write_text(f"{BATCH}8", encoding="utf-16")
    assert isinstance(read_or_refused(Path(name), wall_s=2), str)


SOURCED = {
    "a script that sources itself": ("self.sh", "source self.sh\nA=8\n"),
    "a loop of links": ("link.sh", None),
    "a device": ("/dev/zero", None),
    "bytes": ("bytes.sh", "\0\1\2"),
    "no shell": ("bad.sh", 'echo "'),
    "ten megabytes": ("long.sh", "# x\n" * 2_500_000),
}


@pytest.mark.parametrize(("name", "text"), SOURCED.values(), ids=SOURCED)
def test_a_hostile_script_that_is_sourced_is_left_out_or_refused(folder, name, text):
    (folder / "link.sh").symlink_to("back.sh")
    (folder / "back.sh").symlink_to("link.sh")
    if text is not None:
        (folder / name).write_text(text)
    (folder / "run.sh").write_text(f"source {name}\n{VERL} x=${{A:-8}}\n")
    launch = read_or_refused(folder / "run.sh")
    assert isinstance(launch, str) if name == "self.sh" else launch["x"] == 8


def test_a_pipe_that_is_sourced_is_left_out(folder):
    os.mkfifo(folder / "pipe.sh")
    (folder / "run.sh").write_text(f"source pipe.sh\n{VERL} x=8\n")
    assert read_or_refused(folder / "run.sh", wall_s=2)["x"] == 8


def test_scripts_that_take_long_share_the_time(folder):
    (folder / "slow.sh").write_text(f"x $(({'(' * 9_000}1{')' * 9_000}))")
    (folder / "run.sh").write_text("source slow.sh\n" * 50 + f"{BATCH}8\n")
    # they have two seconds of the clock, in which shfmt uses more than one core
    read_or_refused(folder / "run.sh", wall_s=10, most_s=6)


@pytest.mark.parametrize(
    "text", ["accelerate launch grpo " * 2_500, "recipe." * 8_000], ids=["trl", "verl"]
)
def test_a_pattern_is_found_in_a_long_text_or_not(folder, text):
    (folder / "run.sh").write_text(text)
    read_or_refused(folder / "run.sh")
