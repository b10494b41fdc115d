import numpy as np

from helmrec.engine.assemble import assemble
from helmrec.engine.intake import Intake, Prepared
from helmrec.memory.prefix import KVPlan
from helmrec.model.config import ModelConfig
from helmrec.types import RankRequest
from tests.helpers import tiny_config

CONFIG = tiny_config()
PAGE_TOKENS = 4


def prepare(num_events: int, num_candidates: int = 2, config: ModelConfig = CONFIG, **overrides: object) -> Prepared:
    """Items 10, 11, ..., one event every 4 seconds from 100, candidates 200, 201, ..."""
    ids = list(range(10, 10 + num_events))
    request = RankRequest(
        user_id=1,
        items=ids,
        actions=[i % 4 for i in range(num_events)],
        timestamps=[100 + 4 * i for i in range(num_events)],
        candidates=list(range(200, 200 + num_candidates)),
        features={"category": [i % 20 for i in ids]},
        candidate_features={"category": [0] * num_candidates},
        context={"country": 3, "hour": 7} if config.user_context else {},
        **overrides,  # type: ignore[arg-type]
    )
    return Intake(config, version=1, max_history=1_000).prepare(request)


def plan(request: Prepared, resident: int, pages: list[int]) -> KVPlan:
    return KVPlan(prefix=None, num_resident=resident, num_tokens=request.history.num_tokens, pages=pages)


def test_tokens_lie_in_the_order_context_events_context_candidates() -> None:
    request = prepare(3)
    step = assemble([(request, plan(request, 0, [5]))], CONFIG, PAGE_TOKENS)
    assert step.cu_tokens.tolist() == [0, 1 + 3 + 1 + 2]
    assert step.context_rows.tolist() == [320 + 3, 325 + 7]
    assert step.context_at.tolist() == [0, 4]
    assert step.context_counts == (1, 1)
    assert step.event_at.tolist() == [1, 2, 3, 5, 6]
    assert step.event_rows.tolist() == [[10, 11, 12, 200, 201], [310, 311, 312, 300, 300]]
    assert step.candidates.tolist() == [3, 4]


def test_candidates_carry_the_placeholder_the_next_position_and_one_gap() -> None:
    request = prepare(3, request_time=108 + 6)
    step = assemble([(request, plan(request, 0, [5]))], CONFIG, PAGE_TOKENS)
    assert step.actions.tolist() == [0, 1, 2, 4, 4]
    assert step.positions.tolist() == [0, 1, 2, 3, 3]
    assert step.gaps.tolist() == [0, 5, 5, 6, 6]


def test_only_history_tokens_are_kept_each_in_its_page() -> None:
    request = prepare(5)
    step = assemble([(request, plan(request, 0, [5, 2]))], CONFIG, PAGE_TOKENS)
    assert step.write_slots.tolist() == [20, 21, 22, 23, 8, 9, -1, -1, -1]
    assert step.page_table.tolist() == [[5, 2]]
    assert (step.num_resident.tolist(), step.num_new.tolist()) == ([0], [6])


def test_resident_tokens_are_not_computed_again_and_the_next_ones_are_as_they_were() -> None:
    request = prepare(5)
    whole = assemble([(request, plan(request, 0, [5, 2]))], CONFIG, PAGE_TOKENS)
    rest = assemble([(request, plan(request, 3, [5, 2]))], CONFIG, PAGE_TOKENS)
    assert rest.cu_tokens.tolist() == [0, 3 + 1 + 2]
    assert rest.context_counts == (0, 1)
    for name in ("actions", "positions", "gaps"):
        assert np.array_equal(getattr(rest, name), getattr(whole, name)[2:])
    assert np.array_equal(rest.event_rows, whole.event_rows[:, 2:])
    assert rest.write_slots.tolist() == [23, 8, 9, -1, -1, -1]


def test_a_resident_context_token_alone_leaves_all_events_to_compute() -> None:
    request = prepare(2)
    step = assemble([(request, plan(request, 1, [5]))], CONFIG, PAGE_TOKENS)
    assert step.positions.tolist() == [0, 1, 2, 2]
    assert step.gaps.tolist()[:2] == [0, 5]
    assert step.write_slots.tolist() == [21, 22, -1, -1, -1]


def test_a_whole_resident_history_leaves_context_and_candidates() -> None:
    request = prepare(3)
    step = assemble([(request, plan(request, 4, [5]))], CONFIG, PAGE_TOKENS)
    assert step.cu_tokens.tolist() == [0, 3]
    assert step.write_slots.tolist() == [-1, -1, -1]
    assert step.positions.tolist() == [3, 3]


def test_a_cold_user_without_context_has_candidates_only() -> None:
    config = tiny_config(user_context=(), request_context=())
    request = prepare(0, config=config)
    step = assemble([(request, plan(request, 0, []))], config, PAGE_TOKENS)
    assert step.cu_tokens.tolist() == [0, 2]
    assert step.context_counts == ()
    assert step.page_table.shape == (1, 1)
    assert step.positions.tolist() == [0, 0]


def test_requests_lie_one_after_another_and_know_their_owner() -> None:
    first, second = prepare(2, num_candidates=1), prepare(1, num_candidates=3)
    step = assemble([(first, plan(first, 0, [1])), (second, plan(second, 0, [2]))], CONFIG, PAGE_TOKENS)
    assert step.cu_tokens.tolist() == [0, 5, 11]
    assert step.event_owner.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert step.num_candidates == [1, 3]
    assert step.candidates.tolist() == [2, 4, 5, 6]
    assert step.context_counts == (2, 2)
    assert step.context_owner.tolist() == [0, 1, 0, 1]
    assert step.context_at.tolist() == [0, 5, 3, 7]
    assert sorted([*step.event_at.tolist(), *step.context_at.tolist()]) == list(range(11))


def test_page_tables_are_as_wide_as_the_longest() -> None:
    first, second = prepare(2), prepare(9)
    step = assemble([(first, plan(first, 0, [1])), (second, plan(second, 0, [2, 3, 4]))], CONFIG, PAGE_TOKENS)
    assert step.page_table.tolist() == [[1, 0, 0], [2, 3, 4]]
