"""Reward functions that ship with the package, in the form every reward function has.

`compute_score(data_source, solution_str, ground_truth, extra_info=None)` returns a float, or a dict with `score`.
"""

import logging
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
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]{2,}(?:[ '-][^\W\d_]+)*")
_DECORATION = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|\{,\}|\\[!,;: ]|\\left|\\right|\\%|[$%°\s]")


def exact_answer(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """1 where the text after the last `####`, to the end of its line, is the ground truth; else 0."""
    answer = _after_mark(solution_str)
    return float(answer is not None and answer == str(ground_truth).strip())


def math_answer(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    r"""1 where the answer equals the ground truth: numbers within 1e-4 relative, words as text, all else as
    `math-verify` compares it (expressions, intervals, sets, LaTeX).

    The answer is the last `\boxed{}`, else what follows the last `####`, else the last number. Fractions (`3/4`,
    `\frac{3}{4}`), thousands separators, dollar and per cent signs and units in `\text{}` are understood.
    """
    boxed = _boxed(solution_str)
    answer = boxed if boxed is not None else _after_mark(solution_str) or _last_number(solution_str)
    inner = _boxed(str(ground_truth))
    truth = str(ground_truth) if inner is None else inner
    if not answer or not answer.strip():
        return 0.0
    given, wanted = parse_number(answer), parse_number(truth)
    if given is not None and wanted is not None:
        return float(abs(given - wanted) <= max(ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE * abs(wanted)))
    words = _words(answer), _words(truth)
    return float(words[0] == words[1] if all(words) else _equal_in_value(answer, truth))


def _words(text: str) -> str:
    r"""The text where it is words and no formula (`Evelyn`, `\text{New York}`), in lower case; else nothing."""
    plain = _TEXT.sub(r"\1", text).strip().rstrip(".")
    return plain.lower() if _WORDS.fullmatch(plain) else ""


def _equal_in_value(answer: str, truth: str) -> bool:
    """What `math-verify` says. Its own time limits need a main thread; the reward pool bounds every sample instead."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of each call without a limit
    gold, given = (
        math_verify.parse("\\boxed{" + text + "}", parsing_timeout=None, raise_on_error=False)
        for text in (truth, answer)
    )
    return bool(math_verify.verify(gold, given, timeout_seconds=None, raise_on_error=False))


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
