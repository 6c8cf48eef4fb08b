"""Countdown: every prompt can be solved, written solutions are right and long-tailed, rewards are exact for any tokens."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from simrl.errors import InputError
from simrl_replay.grpo.tasks import (
    CHARACTERS,
    EOS,
    PAD,
    VOCABULARY,
    Countdown,
    Problem,
    decode,
    encode,
)

PROBLEM = Problem((3, 5, 2), 24, tuple(encode("3 5 2?24:")))


def reward(response: str, problem: Problem = PROBLEM) -> float:
    return Countdown().reward(problem, [*encode(response), EOS])


def test_a_prompt_belongs_to_its_seed_and_its_place():
    task = Countdown(counts=(3, 4))
    assert task.make_prompts(7, 20)[:5] == task.make_prompts(7, 5)
    assert task.make_prompts(7, 5) != task.make_prompts(8, 5)


def test_prompts_say_what_is_asked_in_the_limits_of_the_task():
    task = Countdown(counts=(3, 4), largest_number=12, largest_target=50)
    for problem in task.make_prompts(0, 300):
        assert (
            decode(problem.prompt_ids) == f"{' '.join(map(str, problem.numbers))}?{problem.target}:"
        )
        assert (
            len(problem.numbers) in (3, 4)
            and max(problem.numbers) <= 12
            and 1 <= problem.target <= 50
        )
        assert len(problem.prompt_ids) <= task.most_prompt_tokens
    assert {len(problem.numbers) for problem in task.make_prompts(0, 20)} == {3, 4}


@pytest.mark.parametrize("counts", [(2,), (3,), (3, 4)])
def test_written_solutions_are_right_and_their_arithmetic_too(counts):
    task = Countdown(counts=counts, most_tokens=20_000)
    for i, problem in enumerate(task.make_prompts(0, 40)):
        response = task.write_solution(problem, np.random.default_rng(i))
        assert task.reward(problem, response) == 1.0
        tries = decode(response).partition(">")[0].split("x")
        assert len(set(tries)) == len(tries)
        assert all(text.endswith(f"?{problem.target}") for text in tries)
        steps = [text.partition("?")[0] for text in tries]
        for step in ",".join(steps).split(","):
            made, _, value = step.partition("=")
            assert eval(made) == int(value) >= 0
        assert [text.endswith(f"={problem.target}") for text in steps] == [False] * (
            len(tries) - 1
        ) + [True]


def test_a_solution_that_does_not_fit_is_cut_at_the_cap_and_earns_nothing():
    short, whole = Countdown(most_tokens=40), Countdown()
    problems = whole.make_prompts(0, 100)
    cut = 0
    for i, problem in enumerate(problems):
        response = short.write_solution(problem, np.random.default_rng(i))
        assert response == whole.write_solution(problem, np.random.default_rng(i))[:40]
        assert short.reward(problem, response) == float(response[-1] == EOS)
        cut += response[-1] != EOS
    assert 30 < cut < 100


def test_lengths_are_long_tailed():
    task = Countdown(most_tokens=2000)
    problems = task.make_prompts(0, 400)
    lengths = [
        len(task.write_solution(problem, np.random.default_rng(i)))
        for i, problem in enumerate(problems)
    ]
    p50, p95 = np.percentile(lengths, [50, 95])
    assert p95 > 2.5 * p50 and p50 > 60


@pytest.mark.parametrize(
    "response",
    [
        ">(5-2)*8",  # 24, but of another number
        ">(5+3)*3",  # 24, but 3 twice
        ">3*(5+2)+3",  # 24, but 3 twice beside all others
        ">5*5-1",
        ">24",
        ">",
        "",
        "5*3=15",
        ">3*5*2-6",
        ">2*5*3",
    ],
)
def test_what_is_no_right_answer_earns_nothing(response):
    assert reward(response) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "3+5+2>",
        "(3+5+2",
        "3+5+2)",
        "+3+5+2",
        "3+5+2+",
        "3++5+2",
        "03+5+2",
        "3 +5+2",
        "3+5=8,8+2",
        "3,5,2",
        "()3+5+2",
        "3(5+2)",
    ],
)
def test_what_is_no_expression_earns_nothing(answer):
    """3 + 5 + 2 is 10, but not so written."""
    assert reward(f">{answer}", Problem((3, 5, 2), 10, ())) == 0.0
    assert reward(">3+5+2", Problem((3, 5, 2), 10, ())) == 1.0


def test_an_expression_counts_with_the_precedence_it_is_written_in():
    assert reward(">5*2-3", Problem((3, 5, 2), 7, ())) == 1.0
    assert reward(">5*(3-2)", Problem((3, 5, 2), 5, ())) == 1.0
    assert reward(">5*(3-2)", Problem((3, 5, 2), 13, ())) == 0.0
    assert reward(">5-2-3", Problem((3, 5, 2), 0, ())) == 1.0
    assert reward(">2-3*5", Problem((3, 5, 2), -13, ())) == 1.0
    assert reward("5*3=7x>(((5)))+(3-2)", Problem((3, 5, 2), 6, ())) == 1.0


def test_an_answer_that_does_not_end_or_goes_on_after_its_end_earns_nothing():
    problem, answer = Problem((3, 5, 2), 10, ()), encode(">3+5+2")
    task = Countdown()
    assert task.reward(problem, [*answer, EOS]) == 1.0
    for response in (
        [],
        answer,
        [EOS],
        [*answer, EOS, EOS],
        [*answer, EOS, PAD],
        [*answer, PAD, EOS],
        [EOS, *answer],
    ):
        assert task.reward(problem, response) == 0.0


@given(st.lists(st.integers(-5, VOCABULARY + 5)), st.booleans())
def test_any_token_ids_have_a_reward(ids, ended):
    assert (
        Countdown().reward(PROBLEM, [*encode(">"), *ids, *([EOS] if ended else [])]) == 0.0 or ended
    )


@given(st.text("235+-*()>", max_size=12))
def test_a_reward_agrees_with_python_wherever_both_read_an_expression(answer):
    """Python reads more: unary signs, powers, calls; so what earns a reward is worth the target in Python too."""
    problem = Problem((3, 5, 2), 10, ())
    if reward(f">{answer}", problem):
        assert eval(answer.rpartition(">")[2]) == 10
    assert reward(f">{answer}>{'(' * len(answer)}2+3+5{')' * len(answer)}", problem) == 1.0


def test_thousands_of_parentheses_are_no_answer():
    assert reward(">" + "(" * 5000 + "3+5+2" + ")" * 5000, Problem((3, 5, 2), 10, ())) == 0.0
    assert reward(">3+5+2" + "9" * 5000) == 0.0


def test_numpy_ids_are_ids():
    ids = np.array([*encode(">3+5+2"), EOS])
    assert Countdown().reward(Problem((3, 5, 2), 10, ()), ids) == 1.0


def test_tasks_have_names_and_refuse_what_they_do_not_know():
    assert Countdown(counts=(3, 4)).kind == "countdown"
    assert max(encode(CHARACTERS)) < VOCABULARY and VOCABULARY % 32 == 0
    for wrong in ({"counts": []}, {"counts": [1]}, {"count": 3}, {"most_tokens": 0}):
        with pytest.raises(ValidationError):
            Countdown(**wrong)


def test_a_target_that_no_try_comes_to_is_told_in_a_line(monkeypatch):
    monkeypatch.setattr("simrl_replay.grpo.tasks._MOST_DRAWS", 0)
    with pytest.raises(
        InputError, match=r"task: no problem found in 0 draws; raise task\.largest_target"
    ):
        Countdown().make_prompts(0, 1)
