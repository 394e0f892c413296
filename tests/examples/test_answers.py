import re

import pytest

from nereus.data.prompts import Prompt, read_rows, tokenize
from nereus.data.rewards import exact_answer
from nereus.data.tokenizers import Tokenizer, byte_tokenizer
from nereus.errors import DataError
from nereus.examples.chain_sum.answers import WarmStart, worked_answer
from nereus.recipe.sections import DataSource


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    source = DataSource.model_validate(
        {"reasoning_gym": "chain_sum", "size": 50, "min_terms": 4, "max_terms": 6, "max_digits": 1}
    )
    return tokenize(read_rows(source), tokenizer, max_prompt_length=200)


def warm_start(prompts: tuple[Prompt, ...], tokenizer: Tokenizer) -> WarmStart:
    return WarmStart(prompts, tokenizer, steps=100, batch=64, seed=0)


def truth(prompts: tuple[Prompt, ...], tokens: tuple[int, ...]) -> str:
    return next(str(p.ground_truth) for p in prompts if p.tokens == tokens)


def test_a_worked_answer_is_the_running_sum_line_by_line() -> None:
    assert worked_answer("7 - 8 + 0 - 0") == "7 - 8 = -1\n-1 + 0 = -1\n-1 - 0 = -1\n#### -1"


def test_a_slip_is_carried_on_to_the_result() -> None:
    assert worked_answer("7 - 8 + 3", slips=[2, 0]) == "7 - 8 = 1\n1 + 3 = 4\n#### 4"


def test_every_answer_taught_is_right_and_ends_the_sequence(prompts: tuple[Prompt, ...], tokenizer: Tokenizer) -> None:
    for example in warm_start(prompts, tokenizer).examples(3):
        assert example.response_tokens[-1] == tokenizer.eos_id
        text = tokenizer.decode(example.response_tokens)
        assert exact_answer("chain_sum", text, truth(prompts, example.prompt_tokens)) == 1.0
        for left, sign, right, result in re.findall(r"^(-?\d+) ([+-]) (\d+) = (-?\d+)$", text, re.MULTILINE):
            assert int(left) + int(f"{sign}{right}") == int(result)


def test_the_share_of_worked_answers_drops_late(prompts: tuple[Prompt, ...], tokenizer: Tokenizer) -> None:
    warm = warm_start(prompts, tokenizer)

    def share(steps: range) -> float:
        texts = [tokenizer.decode(e.response_tokens) for step in steps for e in warm.examples(step)]
        return sum("\n" in text for text in texts) / len(texts)

    assert share(range(20)) == pytest.approx(0.7, abs=0.05)
    assert share(range(80, 100)) == pytest.approx(0.15, abs=0.05)
    assert (warm.worked_share(79), warm.worked_share(80)) == (0.7, 0.15)


def test_a_batch_depends_on_seed_and_step_alone(prompts: tuple[Prompt, ...], tokenizer: Tokenizer) -> None:
    warm = warm_start(prompts, tokenizer)
    assert warm.examples(5) == warm_start(prompts, tokenizer).examples(5) != warm.examples(6)
    assert warm.pairs(5) == warm_start(prompts, tokenizer).pairs(5) != warm.pairs(6)
    assert warm.examples(5) != WarmStart(prompts, tokenizer, steps=100, batch=64, seed=1).examples(5)


def test_one_answer_of_a_pair_is_right_and_the_other_of_the_same_form_is_wrong(
    prompts: tuple[Prompt, ...], tokenizer: Tokenizer
) -> None:
    pairs = warm_start(prompts, tokenizer).pairs(0)
    forms = set()
    for pair in pairs:
        right, wrong = tokenizer.decode(pair.right_tokens), tokenizer.decode(pair.wrong_tokens)
        answer = truth(prompts, pair.prompt_tokens)
        assert (exact_answer("", right, answer), exact_answer("", wrong, answer)) == (1.0, 0.0)
        assert right.count("\n") == wrong.count("\n")
        forms.add("\n" in right)
    assert len(pairs) == 64 and forms == {True, False}


def test_prompts_of_another_task_are_refused(tokenizer: Tokenizer) -> None:
    prompt = Prompt(index=3, tokens=(5,), text="?", data_source="sums", ground_truth="4")
    with pytest.raises(DataError, match="prompt 3 is of sums; worked answers exist for chain_sum alone"):
        WarmStart([prompt], tokenizer, steps=1, batch=1, seed=0)
