"""How plans are written and read back: places, settings, refusals in one line."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.errors import PlanError
from nereus.plan import ACTOR_TRAINING, Layout, Plan, Recompute, StagePlan, parse_stage_plan

COUNTS = st.integers(1, 10**12)


@settings(deadline=None)
@given(
    dp=st.integers(1, 5),
    tp=st.integers(1, 4),
    pp=st.integers(1, 3),
    micro_batch=st.none() | COUNTS,
    recompute=st.none() | st.sampled_from(Recompute),
    max_num_seqs=st.none() | COUNTS,
    cache_bytes=st.none() | COUNTS,
)
def test_a_plan_is_read_back_as_it_was_written(dp: int, tp: int, pp: int, **settings: object) -> None:
    stage_plan = StagePlan.of(Layout(tp, pp), range(dp * tp * pp)).with_settings(**settings)  # type: ignore[arg-type]
    plan = Plan.of({ACTOR_TRAINING: stage_plan})
    assert parse_stage_plan(str(stage_plan)) == stage_plan
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.placed == Plan.of({ACTOR_TRAINING: StagePlan.of(Layout(tp, pp), range(dp * tp * pp))})


@settings(deadline=None)
@given(tp=st.integers(1, 6), pp=st.integers(1, 5))
def test_a_rank_stands_at_one_place_along_every_axis(tp: int, pp: int) -> None:
    layout = Layout(tp, pp)
    for rank in range(layout.num_ranks):
        assert layout.rank(tp_rank=layout.along("tp", rank), pp_rank=layout.along("pp", rank)) == rank
        assert layout.along("tp", rank) < tp and layout.along("pp", rank) < pp
    assert Layout.of_axes({"dp": 7, **layout.axes}) == layout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("d2/mb=0", "mb=0; write a number from 1"),
        ("d2/mb=a", "mb=a; write a number from 1"),
        ("d2/x=1", "there are mb, recompute, seqs, cache"),
        ("d2/mb=1/mb=2", "'mb=2' is no setting of its own"),
        ("d2/recompute=some", "none, selective, full"),
        ("d2/cache=5", "write bytes such as 8.5GB"),
        ("d1/cache=0B", "it must be at least 1"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused_with_what_could_be(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        parse_stage_plan(text)
