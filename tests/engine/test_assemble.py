import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helmrec.engine.assemble import assemble
from helmrec.engine.intake import Intake, Prepared
from helmrec.memory.prefix import KVPlan, page_numbers
from helmrec.model.config import ModelConfig
from helmrec.model.window import gap_bucket
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
    return KVPlan(prefix=None, num_resident=resident, num_tokens=request.history.num_tokens, pages=page_numbers(pages))


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
    assert step.cu_events.tolist() == [0, 3, 7]
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


class PlainStep:
    """The twin of `assemble`: token by token, in lists."""

    def __init__(self, members: list[tuple[Prepared, KVPlan]], config: ModelConfig) -> None:
        self.write_slots: list[int] = []
        self.events: list[
            tuple[int, int, int, int, list[int]]
        ] = []  # position in the step, action, position, gap, rows
        self.context: list[tuple[int, int, int, int]] = []  # table, owner, row, position in the step
        self.candidates: list[int] = []
        self.num_rows: list[int] = []
        for owner, (request, plan) in enumerate(members):
            before = len(self.events), len(self.context)
            for token in range(plan.num_resident, plan.num_tokens):
                event = token - len(config.user_context)
                if event < 0:
                    self._add_context(token, owner, request.history.context_rows[token])
                else:
                    self._add_event(request, event, config)
                slot = plan.pages[token // PAGE_TOKENS] * PAGE_TOKENS + token % PAGE_TOKENS
                self.write_slots.append(slot)
            for i, row in enumerate(request.request_rows):
                self._add_context(len(config.user_context) + i, owner, row)
                self.write_slots.append(-1)
            for rows in request.candidate_rows.T.tolist():
                at = len(self.write_slots)
                self.candidates.append(len(self.events))
                self.events.append((at, config.num_actions, request.num_events, request.candidate_gap, rows))
                self.write_slots.append(-1)
            num_events, num_context = len(self.events) - before[0], len(self.context) - before[1]
            self.num_rows.append(len(config.features) * num_events + num_context)

    def _add_context(self, table: int, owner: int, row: int) -> None:
        self.context.append((table, owner, int(row), len(self.write_slots)))

    def _add_event(self, request: Prepared, event: int, config: ModelConfig) -> None:
        *rows, action, time = request.columns[:, event].tolist()
        gap = time - int(request.columns[-1, event - 1]) if event else 0
        bucket = int(gap_bucket(gap, config.time_buckets))
        self.events.append((len(self.write_slots), action, event, bucket, rows))


lengths = st.tuples(st.integers(0, 9), st.floats(0, 1), st.integers(1, 4))


@pytest.mark.parametrize("has_context", [True, False])
@given(drawn=st.lists(lengths, min_size=1, max_size=4))
def test_a_step_is_laid_out_as_by_the_plain_twin(has_context: bool, drawn: list[tuple[int, float, int]]) -> None:
    config = CONFIG if has_context else tiny_config(user_context=(), request_context=())
    members = []
    for i, (num_events, share, num_candidates) in enumerate(drawn):
        request = prepare(num_events, num_candidates, config)
        pages = [10 * i + 3, 10 * i + 1, 10 * i + 7][: -(-request.history.num_tokens // PAGE_TOKENS)]
        members.append((request, plan(request, round(share * request.history.num_tokens), pages)))
    step, plain = assemble(members, config, PAGE_TOKENS), PlainStep(members, config)
    assert step.write_slots.tolist() == plain.write_slots
    lines = (step.event_at, step.actions, step.positions, step.gaps)
    assert [tuple(each) for each in np.stack(lines, 1).tolist()] == [event[:4] for event in plain.events]
    assert step.event_rows.T.tolist() == [event[4] for event in plain.events]
    assert step.candidates.tolist() == plain.candidates
    context = zip(step.context_table, step.context_owner, step.context_rows, step.context_at, strict=True)
    assert [tuple(map(int, each)) for each in context] == sorted(plain.context)
    assert step.num_rows.tolist() == plain.num_rows
    every_row = np.arange(step.rows.size)
    assert step.count_by_request(every_row).tolist() == plain.num_rows
    some = every_row[::3]
    parts = np.concatenate([np.tile(np.repeat(range(len(drawn)), np.diff(step.cu_events)), 2), step.context_owner])
    assert step.count_by_request(some).tolist() == np.bincount(parts[some], minlength=len(drawn)).tolist()
