"""Shell scripts as text: which values a command gets, and what is not known of them."""

import pytest

from simrl.errors import InputError
from tests.launch.reading import VERL, read, settings

# What a script says before its launch, a word of the launch, and the value of the word.
KNOWN = {
    "a variable": ("A=8", "$A", 8),
    "a variable in braces": ("A=8", "${A}", 8),
    "one inside a text": ("A=8", "run_${A}_b", "run_8_b"),
    "one in double quotes": ('A="a b"', '"$A"', "a b"),
    "an exported one": ("export A=8", "$A", 8),
    "a readonly one": ("readonly A=8", "$A", 8),
    "a declared one": ("declare -i A=8", "$A", 8),
    "one on the command's own line": ("", "$A", 8),
    "one assigned twice": ("A=4\nA=8", "$A", 8),
    "one from another": ("A=8\nB=$A", "$B", 8),
    "one appended to": ("A=1\nA+=6", "$A", 16),
    "a default": ("", "${A:-8}", 8),
    "a default without colon": ("", "${A-8}", 8),
    "a default of an empty text": ("A=", "${A:-8}", 8),
    "a default that is not needed": ("A=8", "${A:-4}", 8),
    "a default inside a default": ("", "${A:-${B:-8}}", 8),
    "a default that is assigned": (": ${A:=8}", "$A", 8),
    "an alternative": ("A=1", "${A:+8}", 8),
    "a demanded one": ("A=8", "${A:?needed}", 8),
    "a product": ("A=2\nB=4", "$((A*B))", 8),
    "a product of expansions": ("A=2\nB=4", "$(( $A * ${B} ))", 8),
    "a division of whole numbers": ("", "$((17/2))", 8),
    "brackets": ("", "$(((1+3)*2))", 8),
    "a comparison": ("A=9", "$((A > 8))", 1),
    "arithmetic with a default": ("", "$(( ${A:-2} * 4 ))", 8),
    "an element": ("A=(4 8 2)", "${A[1]}", 8),
    "an array's first": ("A=(8 2)", "$A", 8),
    "an element of an appended array": ("A=(4)\nA+=(8)", "${A[1]}", 8),
    "an echo": ("A=$(echo 8)", "$A", 8),
    "a basename": ("A=$(basename /a/qwen3-8b)", "$A", "qwen3-8b"),
    "a basename without its ending": ("A=$(basename /a/b.sh .sh)", "$A", "b"),
    "the script's name": ("A=$(basename $0 .sh)", "$A", "run"),
    "a text in single quotes": ("A=8", "'a b'", "a b"),
    "a text with escapes": ("", "$'8'", 8),
    "an escaped blank": ("", "a\\ b", "a b"),
    "a list": ("", "\"['a','b']\"", ["a", "b"]),
    "a branch that holds": ("A=1\nif [ $A = 1 ]; then B=8; else B=4; fi", "$B", 8),
    "an else": ("A=1\nif [ $A = 2 ]; then B=4; else B=8; fi", "$B", 8),
    "an elif": ("if [[ 1 -gt 2 ]]; then B=4; elif [[ a == a* ]]; then B=8; fi", "$B", 8),
    "a variable that no line sets": ('if [ -z "$A" ]; then B=8; fi', "$B", 8),
    "a negation": ("if ! [ 1 -eq 2 ]; then B=8; fi", "$B", 8),
    "both of two": ("if [[ 1 = 1 && ( 2 -lt 1 || 3 -ge 3 ) ]]; then B=8; fi", "$B", 8),
    "a test before &&": ("[ 1 = 1 ] && B=8", "$B", 8),
    "a test before ||": ("[ 1 = 2 ] || B=8", "$B", 8),
    "a branch of a case": ("A=b\ncase $A in a) B=4;; b|c) B=8;; *) B=2;; esac", "$B", 8),
    "a case's last branch": ("A=x\ncase $A in a) B=4;; *) B=8;; esac", "$B", 8),
    "a loop's first value": ("for A in 8 4 2; do B=$A; done", "$B", 8),
    "a loop over nothing": ("B=8\nfor A in ; do B=4; done", "$B", 8),
    "a function": ("f() { B=8; }\nf", "$B", 8),
    "the script's own argument": ("f() { :; }\nf 4", "${1:-8}", 8),
    "a function's argument": ("f() { B=$1; }\nf 8", "$B", 8),
    "a function in a function": ("g() { B=$1; }\nf() { g $1; }\nf 8", "$B", 8),
    "an expansion that is kept in quotes": ("A='$(hostname)'", "${B:-8}", 8),
    "Windows' ends of lines": ("A=8\r", "$A", 8),
    "a place to fill in": ("A=<size>\nB=8", "$B", 8),
}


@pytest.mark.parametrize(("before", "word", "value"), KNOWN.values(), ids=KNOWN)
def test_a_value_is_what_the_shell_would_give(tmp_path, before, word, value):
    prefix = "A=8 " if KNOWN["one on the command's own line"] == (before, word, value) else ""
    assert settings(tmp_path, f"{before}\n{prefix}{VERL} x={word}\n")["x"] == value


UNKNOWN = {
    "a command": "$(nproc)",
    "a pipe": "$(echo 8 | wc -c)",
    "a variable that no line sets": "$A",
    "arithmetic on one": "$((A * 2))",
    "a power": "$((2 ** 3))",
    "a length": "${#B[@]}",
    "a removed ending": "${B%x}",
    "a replacement": "${B/x/y}",
}


@pytest.mark.parametrize("word", UNKNOWN.values(), ids=UNKNOWN)
def test_what_only_a_run_knows_keeps_its_dollar(tmp_path, word):
    assert "$" in str(settings(tmp_path, f"B=8x\n{VERL} x={word} y=1")["x"])


HARD = {
    "the last element": ("A=(1 2 8)", "${A[-1]}", 8),
    "an element by a variable": ("i=1\nA=(1 8)", "${A[$i]}", 8),
    "an element by a name": ("i=1\nA=(1 8)", "${A[i]}", 8),
    "an element by a word": ("declare -A A=([a]=1 [b]=8)", "${A[b]}", 8),
    "an element that is assigned": ("A=(8 2)\nA[1]=3", "${A[0]}", 8),
    "a replaced text": ("A=$(echo a/x/8 | sed 's#a/x/##')", "$A", 8),
    "an arithmetic condition that holds": ("N=4\nif ((N > 3)); then A=8; fi", "$A", 8),
    "an arithmetic condition": ("A=8\nif ((2 > 3)); then A=4; fi", "$A", 8),
    "an unknown arithmetic condition": ("A=8\nif ((N > 3)); then A=4; fi", "$A", 8),
    "an unknown test before &&": ("A=8\n[ $(hostname) = a ] && A=4", "$A", 8),
}
WRONG = {
    "a function's local": ("A=8\nf() { local A=4; }\nf", "$A", 8),
    "a subshell's variable": ("A=8\n(A=4)", "$A", 8),
    "a variable of one command": ("A=8\nA=4 true", "$A", 8),
    "one that is unset": ("A=4\nunset A", "${A:-8}", 8),
    "arguments that are set": ("set -- 8", "${1:-4}", 8),
    "an arithmetic command": ("A=4\n((A *= 2))", "$A", 8),
    "a let": ("A=4\nlet A=8", "$A", 8),
    "an echo into a file": ("A=$(echo 4 > file)", "${A:-8}", 8),
}


@pytest.mark.parametrize(
    ("before", "word", "value"),
    [
        *(pytest.param(*case, id=name) for name, case in HARD.items()),
        *(
            pytest.param(
                *case,
                id=name,
                marks=pytest.mark.xfail(
                    strict=True, reason="it is not followed, and nothing says so"
                ),
            )
            for name, case in WRONG.items()
        ),
    ],
)
def test_a_value_that_cannot_be_followed_is_the_shells_or_unknown(tmp_path, before, word, value):
    values = settings(tmp_path, f"{before}\n{VERL} x={word} y=1\n")["x"]
    assert values == value or "$" in str(values)


@pytest.mark.xfail(strict=True, reason="read, mapfile and readarray set nothing")
def test_a_variable_that_is_read_has_no_silent_default(tmp_path):
    launch = read(tmp_path, f"read A\n{VERL} x=${{A:-8}}")
    assert "$" in str(launch.settings["x"]) or launch.guessed


@pytest.mark.parametrize(
    "text",
    [
        "LAUNCH x=8 > log.txt 2>&1 | tee log",
        "nohup LAUNCH x=8 &",
        "(LAUNCH x=8)",
        "{ LAUNCH x=8; }",
        "set -euxo pipefail\ncd somewhere && LAUNCH x=8",
        "if LAUNCH x=8; then echo done; fi",
        "LAUNCH \\\n  x=8 \\\n  y=2",
        "LAUNCH \\\n  x=8 \\\n  # z=4 \\\n  y=2",
        "A=(x=8 y=2)\nLAUNCH ${A[@]}",
        'A=(x=8)\nA+=(y=2)\nLAUNCH "${A[@]}"',
        'A="x=8 y=2"\nLAUNCH $A',
        "C='LAUNCH x=8'\n$C",
        "C='LAUNCH x=8'\neval \"$C\"",
        'bash -c "LAUNCH x=8"',
        "bash -c 'export B=8; LAUNCH x=$B'",
        "ray job submit -- bash -c 'cd a && LAUNCH x=8'",
        'run() { LAUNCH x=8 "$@"; }\nrun y=2',
        "run() { LAUNCH x=$1 ${@:2}; }\nrun 8",
        "run() { local b=$1; shift; LAUNCH x=$b; }\nrun 8",
        "LAUNCH ${NOT_SET[@]} x=8",
        'LAUNCH "$@" x=8',
        "LAUNCH x=4 x=8",
        "LAUNCH +x=8",
        "LAUNCH ++x=8",
        "srun --nodes 2 LAUNCH x=8",
        "echo start; LAUNCH x=8; LAUNCH x=4",
        "for b in 8 16; do LAUNCH x=$b; done",
        "case a in a) LAUNCH x=8;; esac",
    ],
)
def test_a_launch_is_read_wherever_the_script_has_it(tmp_path, text):
    assert settings(tmp_path, text.replace("LAUNCH", VERL))["x"] == 8


@pytest.mark.parametrize(
    "text",
    [
        "time LAUNCH x=8",
        "while true; do LAUNCH x=8; done",
        "until LAUNCH x=8; do sleep 1; done",
        "for ((i = 0; i < 3; i++)); do LAUNCH x=8; done",
    ],
)
def test_a_launch_in_a_loop_or_under_a_clock_is_read(tmp_path, text):
    assert settings(tmp_path, text.replace("LAUNCH", VERL))["x"] == 8


def test_an_array_that_is_not_set_is_no_words(tmp_path):
    keys = settings(tmp_path, f'{VERL} "${{EXTRA[@]}}" x=8 ${{MORE[@]}}').keys()
    assert keys == {"program", "x"}


def test_an_empty_array_is_no_words(tmp_path):
    keys = settings(tmp_path, f'EXTRA=()\n{VERL} "${{EXTRA[@]}}" x=8').keys()
    assert keys == {"program", "x"}


def test_an_unknown_condition_is_read_as_false_and_noted(tmp_path):
    launch = read(tmp_path, f'if [ "$(hostname)" = node0 ]; then A=4; else A=8; fi\n{VERL} x=$A')
    assert launch.settings["x"] == 8
    (note,) = launch.guessed
    assert note == '[ "$(hostname)" = node0 ]: cannot be known, read as false'


def test_an_unknown_condition_is_read_as_true_where_else_no_launch_is(tmp_path):
    launch = read(tmp_path, f"if nvidia-smi; then\n{VERL} x=8\nfi")
    assert launch.settings["x"] == 8
    assert launch.guessed == ["if nvidia-smi: cannot be known, read as true"]


def test_no_branch_of_an_unknown_case_is_read_and_it_is_noted(tmp_path):
    launch = read(tmp_path, f"A=8\ncase $(uname) in *) A=4;; esac\n{VERL} x=$A")
    assert launch.settings["x"] == 8
    assert launch.guessed == ["case $(uname): cannot be known, no branch is read"]


def test_a_loop_is_noted_where_it_has_more_values(tmp_path):
    assert read(tmp_path, f"for b in 8 16; do {VERL} x=$b; done").guessed == [
        "for b: read once, with 8"
    ]
    assert not read(tmp_path, f"for b in 8; do {VERL} x=$b; done").guessed


@pytest.mark.xfail(strict=True, reason="a command before || is taken to succeed")
def test_an_unknown_condition_between_commands_is_noted(tmp_path):
    assert read(tmp_path, f"A=8\nnvidia-smi || A=4\n{VERL} x=$A").guessed


@pytest.mark.parametrize("command", ["source env.sh", ". ./env.sh", "source ./env.sh a b"])
def test_a_script_that_is_sourced_sets_variables(tmp_path, command):
    beside = {"env.sh": "export A=8\n"}
    assert settings(tmp_path, f"{command}\n{VERL} x=$A", **beside)["x"] == 8


def test_a_script_that_is_called_has_its_arguments(tmp_path):
    beside = {"inner.sh": f"A=$1\nshift\n{VERL} x=$A"}
    assert settings(tmp_path, "bash inner.sh 8", **beside)["x"] == 8


def test_a_sourced_script_that_is_not_there_is_noted(tmp_path):
    launch = read(tmp_path, f"source nowhere.sh\n{VERL} x=8")
    assert launch.settings["x"] == 8
    assert "source nowhere.sh: left out (" in launch.guessed[0]


def test_functions_of_a_sourced_script_are_read_from_it(tmp_path):
    beside = {"lib.sh": "# a long comment before\nf() { B=$((A * 2)); }\n"}
    assert settings(tmp_path, f"source lib.sh\nA=4\nf\n{VERL} x=$B", **beside)["x"] == 8


def test_after_a_sourced_script_that_is_left_out_the_rest_is_read_from_its_own_text(tmp_path):
    beside = {"bad.sh": f"# {'x' * 500}\nexport Q=1\nf() {{"}
    launch = read(tmp_path, f"A=4\nsource bad.sh\nC=$((A * 2))\n{VERL} x=$C", **beside)
    assert launch.settings["x"] == 8


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no command starts RL training"),
        ("echo hello", "no command starts RL training"),
        ("python3 -m verl.trainer.sft_trainer a=1", "supervised fine-tuning, no RL rollouts"),
        (f'{VERL} x="8', "no shell script"),
        ("if true; then", "no shell script"),
        ("cat <<EOF\nnever closed", "no shell script"),
        (f"cat <<EOF\n{VERL}\nEOF", "no command starts RL training"),
        (f"# {VERL}", "no command starts RL training"),
    ],
)
def test_a_script_without_a_launch_is_refused_with_the_reason(tmp_path, text, why):
    with pytest.raises(InputError, match=why):
        read(tmp_path, text)
