import pytest

from nereus.data.rewards import exact_answer, math_answer, parse_number


def exact(solution: str, truth: object) -> float:
    return exact_answer("any", solution, truth)


def math(solution: str, truth: object) -> float:
    return math_answer("any", solution, truth)


def test_an_exact_answer_is_what_follows_the_last_mark() -> None:
    assert exact("7 - 8 = -1\n#### -1", "-1") == 1.0
    assert exact("#### 3\n#### 4", "4") == 1.0
    assert exact("#### 4 \nmore text", 4) == 1.0


@pytest.mark.parametrize("solution", ["", "4", "#### 3\n", "#### 4\n#### 3", "#### 4.0", "#### 4 - 1", "####"])
def test_anything_else_scores_nothing(solution: str) -> None:
    assert exact(solution, "4") == 0.0


@pytest.mark.parametrize(
    ("solution", "truth"),
    [
        (r"so \boxed{42}", "42"),
        (r"first \boxed{1}, then \boxed{\frac{3}{4}}", "0.75"),
        (r"\boxed{-\frac{1}{2}}", "-1/2"),
        ("#### 1,234,567", "1234567"),
        ("#### $1,200.50", "1200.5"),
        ("the total is 12 apples, that is 3/4 of 16", "16"),
        ("it is 0.3333333", "1/3"),
        (r"\boxed{50\%}", "50"),
        (r"\boxed{12 \text{ cm}}", "12"),
        ("#### 1.5e3", "1500"),
        (r"\boxed{x^2 + 1}", "x^2+1"),
        ("the answer is 7.", r"\boxed{7}"),
        ("#### 3.14159", "3.1416"),
        ("it is 5 ... or so", "5"),
        (r"\boxed{1{,}000}", "1000"),
        (r"\boxed{\text{Evelyn}}", "Evelyn"),
        (r"\boxed{\text{New York}}", "new york"),
        (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{1}{2}\sqrt{3}"),
        (r"\boxed{\{2,1\}}", r"\{1,2\}"),
        (r"\boxed{1 + x^2}", "x^2+1"),
        (r"\boxed{10^{3}}", "1000"),
        (r"\boxed{(3,\infty)}", r"(3,\infty)"),
    ],
)
def test_a_math_answer_that_is_equal_in_value_scores(solution: str, truth: str) -> None:
    assert math(solution, truth) == 1.0


@pytest.mark.parametrize(
    ("solution", "truth"),
    [
        ("no number at all", "3"),
        ("#### 3.15", "3.14"),
        (r"\boxed{3", "4"),
        ("#### 1/0", "0"),
        (r"\boxed{\frac{1}{0}}", "0"),
        ("#### -5", "5"),
        (r"\boxed{x + 1}", "x + 2"),
        ("#### 12,34", "1234"),
        (r"\boxed{\text{Evelyn}}", r"\text{Bob}"),
        (r"\boxed{}", r"\text{yes}"),
        (r"\boxed{ }", ""),
        ("", ""),
        (r"\boxed{\text{cm}}", "12"),
        (r"\boxed{abc}", "cab"),
        (r"\boxed{[0,1)}", "[0,1]"),
        (r"\boxed{\frac{}}", "1"),
    ],
)
def test_a_math_answer_that_differs_scores_nothing(solution: str, truth: str) -> None:
    assert math(solution, truth) == 0.0


def test_numbers_are_read_in_every_usual_spelling() -> None:
    spellings = {"3": 3.0, "-3.5": -3.5, ".5": 0.5, "+2": 2.0, "1,000": 1000.0, "3/8": 0.375, r"\dfrac{1}{4}": 0.25}
    assert {text: parse_number(text) for text in spellings} == spellings
    assert parse_number("three") is None and parse_number("") is None and parse_number("1/0") is None
