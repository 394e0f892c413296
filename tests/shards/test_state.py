"""What a rank of a unit holds: the buffers that are allocated are the bytes that plans and moves are priced by."""

import pytest

from nereus.engine_facts import PRECISIONS
from nereus.shards.state import TORCH_DTYPES, state_dtypes


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("word", sorted(PRECISIONS))
def test_the_kinds_of_state_that_are_held_take_the_bytes_that_are_priced(word: str, trains: bool) -> None:
    held = sum(dtype.itemsize for dtype in state_dtypes(TORCH_DTYPES[word], trains=trains).values())
    assert PRECISIONS[word].state_bytes(trains=trains) == held


def test_a_trained_parameter_takes_fourteen_bytes_in_bf16_and_three_times_its_own_elsewhere() -> None:
    taken = {word: precision.state_bytes(trains=True) for word, precision in PRECISIONS.items()}
    assert taken == {"bf16": 14, "fp32": 12, "fp64": 24}
