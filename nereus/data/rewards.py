"""Reward functions that ship with the package, in the form every reward function has.

`compute_score(data_source, solution_str, ground_truth, extra_info=None)` returns a float, or a dict with `score`.
"""

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["exact_answer", "math_answer"]

RELATIVE_TOLERANCE = 1e-4
ABSOLUTE_TOLERANCE = 1e-9

_MARK = "####"
_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?:[eE][+-]?\d+)?"
_NUMBER = re.compile(rf"(?:[-+]\s*)?(?=\.?\d){_UNSIGNED}")
_FRACTION = re.compile(r"([-+]?)\s*\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_RATIO = re.compile(rf"({_NUMBER.pattern})\s*/\s*({_NUMBER.pattern})")
_IN_TEXT = re.compile(rf"(?<![\w.]){_NUMBER.pattern}(?:\s*/\s*\d+)?")
_DECORATION = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|\\[!,;: ]|\\left|\\right|\\%|[$%°\s]")


def exact_answer(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """1 where the text after the last `####`, to the end of its line, is the ground truth; else 0."""
    answer = _after_mark(solution_str)
    return float(answer is not None and answer == str(ground_truth).strip())


def math_answer(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    r"""1 where the answer equals the ground truth as a number within 1e-4 relative, or as text where it is none.

    The answer is the last `\boxed{}`, else what follows the last `####`, else the last number. Fractions (`3/4`,
    `\frac{3}{4}`), thousands separators, dollar and per cent signs and units in `\text{}` are understood.
    """
    answer = _boxed(solution_str) or _after_mark(solution_str) or _last_number(solution_str)
    if answer is None:
        return 0.0
    truth = _boxed(str(ground_truth)) or str(ground_truth)
    given, wanted = parse_number(answer), parse_number(truth)
    if given is None or wanted is None:
        return float(_plain(answer) == _plain(truth))
    return float(abs(given - wanted) <= max(ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE * abs(wanted)))


def parse_number(text: str) -> float | None:
    """The value of a number, fraction or LaTeX fraction; None where the text is anything else."""
    plain = _plain(text)
    latex = _FRACTION.fullmatch(plain)
    ratio = _RATIO.fullmatch(plain)
    if latex:
        sign = -1.0 if latex[1] == "-" else 1.0
        over, under = parse_number(latex[2]), parse_number(latex[3])
        return sign * over / under if over is not None and under else None
    if ratio:
        under = _float(ratio[2])
        return _float(ratio[1]) / under if under else None
    return _float(plain) if _NUMBER.fullmatch(plain) else None


def _float(text: str) -> float:
    return float(text.replace(",", "").replace(" ", ""))


def _plain(text: str) -> str:
    """The text without decoration that does not change its value."""
    return _DECORATION.sub("", text).rstrip(".")


def _after_mark(text: str) -> str | None:
    _, mark, rest = text.rpartition(_MARK)
    return rest.strip().partition("\n")[0].strip() if mark else None


def _last_number(text: str) -> str | None:
    found = _IN_TEXT.findall(text)
    return found[-1] if found else None


def _boxed(text: str) -> str | None:
    r"""The contents of the last `\boxed{...}` whose braces balance, or None."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, first = 0, start + len("\\boxed{")
    for place in range(first - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[first:place]
    return None
