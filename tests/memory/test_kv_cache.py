"""The prefix cache, held against a plain arena: a dict from (page, offset) to what was written there."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from helmrec.memory.kv_admission import Admission
from helmrec.memory.kv_cache import KVCache, KVLimits
from helmrec.memory.kv_host_tier import KVHostTier
from helmrec.memory.ledger import Owner, PageLedger
from helmrec.memory.prefix import KVPlan, PageCopy
from helmrec.memory.prefix_hash import HashKey, History, RowEpochs, chain

PAGE_TOKENS = 4
NUM_ROWS = 100

KEY = HashKey(bytes(32))


def make_history(user_id: int, events: Sequence[int], context: Sequence[int] = ()) -> History:
    """A history whose events are single rows."""
    rows = np.array([events], np.int64).reshape(1, -1)
    seed = (user_id, *context)
    return History(user_id, np.array(context, np.int64), rows, chain(KEY, seed, len(context), rows))


@dataclass
class Bench:
    """A cache on its own ledger, and steps that plan and commit at once."""

    num_pages: int = 12
    reserve: int = 1
    max_forks: int = 2
    lag_s: float = 0.0
    admission: Admission = Admission.ALWAYS
    num_slots: int = 0
    now: float = 0.0

    def __post_init__(self) -> None:
        self.ledger = PageLedger(self.num_pages)
        self.epochs = RowEpochs(NUM_ROWS)
        limits = KVLimits(PAGE_TOKENS, self.max_forks, self.lag_s)
        self.host_tier = KVHostTier(self.num_slots)
        self.cache = KVCache(limits, self.ledger, self.epochs, self.admission, self.host_tier)
        self.cache.reserve_pages = self.reserve

    def plan(self, user_id: int, events: Sequence[int], context: Sequence[int] = ()) -> KVPlan:
        plan = self.cache.plan(make_history(user_id, events, context), self.now)
        assert plan is not None
        self.cache.check()
        return plan

    def commit(self, *plans: KVPlan) -> None:
        self.now += 1
        for plan in plans:
            self.cache.commit(plan, self.now)
            self.cache.check()
        self.cache.restore_reserve()
        self.cache.check()

    def serve(self, user_id: int, events: Sequence[int], context: Sequence[int] = ()) -> KVPlan:
        plan = self.plan(user_id, events, context)
        self.commit(plan)
        return plan

    def resident(self, user_id: int, events: Sequence[int], context: Sequence[int] = ()) -> int:
        return self.cache.resident_tokens(make_history(user_id, events, context))

    def update(self, *rows: int) -> None:
        self.epochs.mark(np.array(rows, np.int64))


def test_a_cold_user_without_history_needs_no_pages() -> None:
    bench = Bench()
    plan = bench.serve(1, [])
    assert (plan.num_tokens, plan.num_new, len(plan.pages)) == (0, 0, 0)
    assert bench.ledger.num_free == bench.num_pages


def test_a_first_visit_computes_everything() -> None:
    plan = Bench().serve(1, range(10), context=[50])
    assert (plan.num_resident, plan.num_new, len(plan.pages)) == (0, 11, 3)
    assert plan.copy is None


def test_the_same_history_is_reused_whole() -> None:
    bench = Bench()
    first = bench.serve(1, range(10))
    again = bench.serve(1, range(10))
    assert (again.num_resident, again.num_new) == (10, 0)
    assert again.pages == first.pages


def test_a_grown_history_computes_only_its_new_events() -> None:
    bench = Bench()
    first = bench.serve(1, range(6))
    grown = bench.serve(1, range(9))
    assert (grown.num_resident, grown.num_new) == (6, 3)
    assert grown.pages[:2] == first.pages
    assert bench.resident(1, range(9)) == 9


def test_an_older_shorter_history_is_served_from_the_longer_one() -> None:
    bench = Bench()
    long = bench.serve(1, range(10))
    short = bench.serve(1, range(5))
    assert (short.num_resident, short.num_new, short.pages) == (5, 0, long.pages[:2])
    assert bench.resident(1, range(10)) == 10


def test_an_edited_history_shares_full_pages_and_copies_the_partial_one() -> None:
    bench = Bench()
    old = bench.serve(1, range(10))
    new = bench.serve(1, [*range(6), 90, 91])
    assert (new.num_resident, new.num_new) == (6, 2)
    assert new.pages[0] == old.pages[0]
    assert new.copy == PageCopy(source=old.pages[1], target=new.pages[1], num_tokens=2)
    assert new.pages[1] != old.pages[1]
    assert bench.resident(1, range(10)) == 10


def test_a_fork_at_a_page_boundary_copies_nothing() -> None:
    bench = Bench()
    old = bench.serve(1, range(10))
    new = bench.serve(1, [*range(8), 90])
    assert new.copy is None
    assert new.pages[:2] == old.pages[:2]


def test_an_edit_of_the_first_event_reuses_only_the_context() -> None:
    bench = Bench()
    bench.serve(1, range(10), context=[50])
    assert bench.serve(1, [90, *range(1, 10)], context=[50]).num_resident == 1
    assert bench.serve(1, range(10), context=[51]).num_resident == 0


def test_another_users_equal_history_is_not_shared() -> None:
    bench = Bench()
    bench.serve(1, range(8))
    assert bench.serve(2, range(8)).num_resident == 0


def test_a_known_user_whose_history_matches_nothing_is_a_stranger() -> None:
    bench = Bench()
    bench.serve(1, range(8))
    bench.serve(2, range(8))
    assert bench.cache.unmatched == 0
    bench.serve(1, range(20, 28))
    assert bench.cache.unmatched == 1


def test_two_requests_of_one_user_in_one_step_compute_new_tokens_once() -> None:
    bench = Bench()
    first, second = bench.plan(1, range(6)), bench.plan(1, range(6))
    longer = bench.plan(1, range(9))
    assert [p.num_new for p in (first, second, longer)] == [6, 0, 3]
    assert first.pages == second.pages == longer.pages[:2]
    bench.commit(first, second, longer)
    assert bench.resident(1, range(9)) == 9


def test_a_fork_inside_a_step_never_copies_a_page_that_step_still_writes() -> None:
    bench = Bench()
    first = bench.plan(1, range(7))
    fork = bench.plan(1, [*range(6), 90])
    assert fork.copy is None
    assert fork.num_resident == 4
    assert fork.pages[0] == first.pages[0]
    bench.commit(first, fork)
    assert bench.resident(1, range(7)) == bench.resident(1, [*range(6), 90]) == 7


def test_a_fork_of_a_prefix_the_step_extends_copies_only_settled_tokens() -> None:
    bench = Bench()
    bench.serve(1, range(5))
    grown = bench.plan(1, range(7))
    fork = bench.plan(1, [*range(6), 90])
    assert fork.num_resident == 5
    assert fork.copy == PageCopy(source=grown.pages[1], target=fork.pages[1], num_tokens=1)
    bench.commit(grown, fork)


def test_reuse_and_totals_are_counted_over_all_plans() -> None:
    bench = Bench()
    bench.serve(1, range(6))
    bench.serve(1, range(8))
    assert (bench.cache.reused_tokens, bench.cache.total_tokens) == (6, 14)
    assert bench.cache.num_users == 1


def test_pinned_prefixes_are_never_evicted() -> None:
    bench = Bench()
    plan = bench.plan(1, range(12))
    assert bench.cache.evict(3) == 0
    bench.commit(plan)
    held = bench.plan(1, range(12))
    assert bench.cache.evict(3) == 0
    bench.commit(held)
    assert bench.cache.evict(3) == 3


def test_a_plan_that_finds_no_pages_changes_nothing() -> None:
    bench = Bench(num_pages=4)
    held = bench.plan(1, range(12))
    assert bench.cache.plan(make_history(2, range(8)), 0.0) is None
    assert bench.cache.plan(make_history(1, range(20)), 0.0) is None
    assert bench.cache.plan(make_history(1, [*range(6), *range(50, 60)]), 0.0) is None
    bench.cache.check()
    assert bench.ledger.num_free == 1
    bench.commit(held)
    assert bench.resident(1, range(12)) == 12


def test_the_coldest_prefix_loses_its_tail_first() -> None:
    bench = Bench()
    bench.serve(1, range(12))
    bench.serve(2, range(12))
    bench.serve(1, range(12))
    assert bench.cache.evict(2) == 2
    assert (bench.resident(1, range(12)), bench.resident(2, range(12))) == (12, 4)
    assert bench.cache.evict(2) == 2
    assert (bench.resident(1, range(12)), bench.resident(2, range(12))) == (8, 0)
    assert (bench.cache.evicted_pages, bench.cache.num_users) == (4, 1)


def test_evicting_shared_pages_frees_them_once_both_histories_let_go() -> None:
    bench = Bench(num_pages=8)
    bench.serve(1, range(8))
    bench.serve(1, [*range(4), 90, 91, 92, 93])
    assert bench.ledger.count(Owner.KV) == 3
    assert bench.cache.evict(8) == 3
    bench.cache.check()
    assert bench.ledger.num_free == 8


def test_an_edit_takes_the_place_of_the_old_history_where_both_do_not_fit() -> None:
    bench = Bench(num_pages=6)
    bench.serve(1, range(20))
    edited = [*range(7), *range(50, 63)]
    plan = bench.serve(1, edited)
    assert (plan.num_resident, plan.num_new, plan.copy) == (7, 13, None)
    assert bench.resident(1, range(20)) == 7
    assert bench.resident(1, edited) == 20


def test_an_edit_that_finds_no_pages_at_all_leaves_no_empty_prefix() -> None:
    bench = Bench(num_pages=6)
    bench.serve(1, range(8))
    fork = [*range(4), *range(90, 94)]
    bench.serve(1, fork)
    held = [bench.plan(1, fork), bench.plan(2, range(8))]
    assert bench.cache.plan(make_history(1, [0, 1, *range(50, 68)]), 0.0) is None
    bench.cache.check()
    bench.commit(*held)


def test_a_full_cache_makes_room_for_a_new_user() -> None:
    bench = Bench(num_pages=6, reserve=1)
    for user_id in range(6):
        assert bench.serve(user_id, range(8)).num_new == 8
    assert bench.resident(5, range(8)) == 8
    assert bench.resident(0, range(8)) == 0
    assert bench.ledger.num_free >= 1


def test_a_commit_restores_the_reserve() -> None:
    bench = Bench(num_pages=6, reserve=3)
    bench.serve(1, range(8))
    bench.serve(2, range(8))
    assert bench.ledger.num_free == 3


def test_one_time_users_do_not_displace_returning_ones() -> None:
    bench = Bench(num_pages=10, reserve=2, admission=Admission.SECOND_VISIT)
    for _ in range(2):
        for user_id in range(4):
            bench.serve(user_id, range(8))
    for stranger in range(100, 150):
        bench.serve(stranger, range(8))
    assert [bench.resident(user_id, range(8)) for user_id in range(4)] == [8] * 4
    assert bench.cache.refused_prefixes >= 50


def test_one_time_users_do_not_displace_returning_ones_while_steps_overlap() -> None:
    """What the step behind still holds will be free, so there is room for strangers: as guests, who go first."""
    bench = Bench(num_pages=14, reserve=2, admission=Admission.SECOND_VISIT)
    for _ in range(2):
        for user_id in range(4):
            bench.serve(user_id, range(8))
    ahead = bench.plan(99, range(8))
    for stranger in range(100, 150):
        behind = bench.plan(stranger, range(8))
        bench.commit(ahead)
        ahead = behind
    bench.commit(ahead)
    assert [bench.resident(user_id, range(8)) for user_id in range(4)] == [8] * 4


def test_a_guest_that_comes_again_has_earned_its_place() -> None:
    bench = Bench(num_pages=10, reserve=2, admission=Admission.SECOND_VISIT, num_slots=8)
    bench.serve(1, range(8))
    assert bench.cache.next_saves(9) == [], "who came once is not worth the bus"
    assert bench.serve(1, range(8)).num_resident == 8
    assert len(bench.cache.next_saves(9)) == 2, "all of it is saved"
    for user_id in (2, 3, 2, 3):
        bench.serve(user_id, range(8))
    for stranger in range(100, 120):
        bench.serve(stranger, range(8))
    assert bench.resident(1, range(8)) == 8


def test_without_an_admission_policy_one_time_users_flush_everyone() -> None:
    bench = Bench(num_pages=10, reserve=2, admission=Admission.ALWAYS)
    for user_id in [0, 1, 2, 3, 0, 1, 2, 3, *range(100, 150)]:
        bench.serve(user_id, range(8))
    assert [bench.resident(user_id, range(8)) for user_id in range(4)] == [0] * 4


def test_an_aborted_first_visit_leaves_nothing() -> None:
    bench = Bench()
    bench.cache.abort(bench.plan(1, range(9)))
    bench.cache.check()
    assert bench.ledger.num_free == bench.num_pages
    assert bench.serve(1, range(9)).num_resident == 0


def test_an_aborted_extension_leaves_what_was_there_before() -> None:
    bench = Bench()
    bench.serve(1, range(5))
    bench.cache.abort(bench.plan(1, range(12)))
    bench.cache.check()
    assert bench.resident(1, range(12)) == 5
    assert bench.serve(1, range(12)).num_resident == 5


def test_an_aborted_step_with_a_fork_leaves_what_was_there_before() -> None:
    bench = Bench()
    bench.serve(1, range(5))
    plans = [bench.plan(1, range(12)), bench.plan(1, range(12)), bench.plan(1, [*range(10), 90])]
    for plan in plans:
        bench.cache.abort(plan)
    bench.cache.check()
    assert bench.resident(1, range(12)) in (4, 5)
    assert bench.cache.num_users == 1


def test_a_changed_row_cuts_the_prefix_at_its_first_event() -> None:
    bench = Bench()
    bench.serve(1, range(10), context=[50])
    bench.update(6)
    plan = bench.serve(1, range(10), context=[50])
    assert (plan.num_resident, plan.num_new) == (7, 4)
    assert bench.cache.stale_cuts == 1
    assert bench.serve(1, range(10), context=[50]).num_resident == 11


def test_a_changed_context_row_drops_the_whole_prefix() -> None:
    bench = Bench()
    bench.serve(1, range(10), context=[50])
    bench.update(50)
    assert bench.serve(1, range(10), context=[50]).num_resident == 0


def test_a_row_no_event_uses_cuts_nothing() -> None:
    bench = Bench()
    bench.serve(1, range(10))
    bench.update(77)
    assert bench.serve(1, range(10)).num_resident == 10
    assert bench.cache.stale_cuts == 0


def test_tokens_made_after_an_update_outlive_it() -> None:
    bench = Bench()
    bench.serve(1, [0, 1])
    bench.update(5)
    bench.serve(1, [0, 1, 5, 5])
    assert bench.serve(1, [0, 1, 5, 5]).num_resident == 4
    bench.update(5)
    assert bench.serve(1, [0, 1, 5, 5]).num_resident == 2


def test_a_stale_page_shared_with_a_fork_is_cut_for_both() -> None:
    bench = Bench()
    fork = [*range(8), 90]
    bench.serve(1, range(8))
    bench.serve(1, fork)
    bench.update(6)
    assert bench.serve(1, fork).num_resident <= 6
    assert bench.serve(1, range(8)).num_resident <= 6 + 2


def test_reused_kv_may_lag_behind_updates_for_the_stated_seconds_only() -> None:
    bench = Bench(lag_s=10.0)
    bench.serve(1, range(8))
    bench.now = 3.0
    bench.update(2)
    assert bench.serve(1, range(8)).num_resident == 8
    bench.now = 9.9
    assert bench.serve(1, range(8)).num_resident == 8
    bench.now = 13.0
    assert bench.serve(1, range(8)).num_resident == 2


def test_a_user_keeps_at_most_max_forks_histories() -> None:
    bench = Bench(max_forks=2)
    for first in (10, 20, 30, 40):
        bench.serve(1, range(first, first + 4))
    assert [bench.resident(1, range(first, first + 4)) for first in (10, 20, 30, 40)] == [0, 0, 4, 4]


def test_a_fork_replaces_its_donor_where_one_history_is_kept() -> None:
    bench = Bench(max_forks=1)
    bench.serve(1, range(8))
    bench.serve(1, [*range(4), 90])
    assert bench.ledger.count(Owner.KV) == 2


def test_a_forgotten_user_is_new_again() -> None:
    bench = Bench(num_pages=12, admission=Admission.SECOND_VISIT, reserve=12)
    for _ in range(2):
        bench.serve(1, range(8))
    fork = [*range(4), 90, 91, 92, 93]
    bench.serve(1, fork)
    bench.cache.forget(1)
    bench.cache.check()
    assert bench.ledger.num_free == bench.num_pages
    assert (bench.resident(1, range(8)), bench.resident(1, fork), bench.cache.num_users) == (0, 0, 0)
    bench.serve(1, range(8))
    assert bench.resident(1, range(8)) == 0, "its visits were forgotten too: a first one earns no pages"
    bench.cache.forget(2)


def test_forgetting_a_user_takes_its_pages_off_the_host_and_nobody_elses() -> None:
    bench = Bench(num_slots=3)
    for user_id in (1, 2):
        bench.serve(user_id, range(8))
    assert len(bench.cache.next_saves(9)) == 4, "the first page had to make room for the fourth"
    bench.cache.forget(1)
    bench.host_tier.check()
    assert bench.host_tier.num_pages == 2
    assert bench.cache.next_saves(9) == []
    bench.serve(3, range(8))
    bench.cache.next_saves(9)
    bench.cache.forget(1)
    assert bench.host_tier.num_pages == 3, "its old slots belong to others now"


users = st.integers(0, 2)
rows = st.integers(0, 5)


class KVMachine(RuleBasedStateMachine):
    """Steps of several requests, ended or failed, between evictions, row updates and boundary moves.

    What a token's K/V depends on (all tokens so far, and their rows' versions) stands for the K/V itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(num_pages=14, reserve=2, admission=Admission.SECOND_VISIT)
        self.arena: dict[tuple[int, int], int] = {}
        self.versions = [0] * NUM_ROWS
        self.current: dict[int, list[int]] = {}
        self.open: list[tuple[KVPlan, list[int]]] = []

    def contents(self, user_id: int, events: list[int]) -> list[int]:
        """What K/V of each token must hold now."""
        made, content = [], hash(user_id)
        for row in [90 + user_id, *events]:
            content = hash((content, row, self.versions[row]))
            made.append(content)
        return made

    @rule(user_id=users, new=st.lists(rows, min_size=1, max_size=6))
    def append(self, user_id: int, new: list[int]) -> None:
        self.request(user_id, self.current.get(user_id, []) + new)

    @rule(user_id=users)
    def repeat(self, user_id: int) -> None:
        self.request(user_id, self.current.get(user_id, []))

    @rule(user_id=users, keep=st.integers(0, 17), new=st.lists(rows, max_size=6))
    def edit(self, user_id: int, keep: int, new: list[int]) -> None:
        """Another history of the user, as a second device would send it."""
        self.request(user_id, self.current.get(user_id, [])[:keep] + new, is_current=len(new) > 3)

    def request(self, user_id: int, events: list[int], *, is_current: bool = True) -> None:
        events = events[:18]
        if is_current:
            self.current[user_id] = events
        history = make_history(user_id, events, context=[90 + user_id])
        best = self.bench.cache.resident_tokens(history)
        plan = self.bench.cache.plan(history, self.bench.now)
        if plan is None:
            assert self.open, "one request must always fit an idle pool"
            return
        assert plan.num_resident <= best
        assert plan.num_tokens == history.num_tokens
        assert len(plan.pages) == -(-plan.num_tokens // PAGE_TOKENS)
        self.open.append((plan, self.contents(user_id, events)))

    def copy_and_write(self, *, is_torn: bool) -> None:
        for plan, _ in self.open:
            if plan.copy is not None:
                for offset in range(plan.copy.num_tokens):
                    self.arena[plan.copy.target, offset] = self.arena[plan.copy.source, offset]
        written = set()
        for plan, contents in self.open:
            for token in range(plan.num_resident, plan.num_tokens):
                slot = self.slot(plan, token)
                assert slot not in written, "a token was computed twice"
                written.add(slot)
                self.arena[slot] = 0 if is_torn else contents[token]

    @staticmethod
    def slot(plan: KVPlan, token: int) -> tuple[int, int]:
        return plan.pages[token // PAGE_TOKENS], token % PAGE_TOKENS

    @precondition(lambda self: self.open)
    @rule()
    def end_step(self) -> None:
        self.copy_and_write(is_torn=False)
        for plan, contents in self.open:
            found = [self.arena[self.slot(plan, token)] for token in range(plan.num_tokens)]
            assert found == contents, "a request read K/V that is not its history's"
        self.bench.now += 1
        for plan, _ in self.open:
            self.bench.cache.commit(plan, self.bench.now)
        self.open.clear()

    @precondition(lambda self: self.open)
    @rule()
    def fail_step(self) -> None:
        self.copy_and_write(is_torn=True)
        for plan, _ in self.open:
            self.bench.cache.abort(plan)
        self.open.clear()

    @rule(num=st.integers(1, 4))
    def evict(self, num: int) -> None:
        before = self.bench.ledger.num_free
        assert self.bench.cache.evict(num) == self.bench.ledger.num_free - before <= num

    @precondition(lambda self: not self.open)
    @rule(user_id=users)
    def forget(self, user_id: int) -> None:
        """The user may come back with the history it had: nothing of it may be found."""
        others = {u: self.resident(u) for u in self.current if u != user_id}
        self.bench.cache.forget(user_id)
        assert self.resident(user_id) == 0
        assert {u: self.resident(u) for u in others} == others, "others keep what they had"

    def resident(self, user_id: int) -> int:
        return self.bench.resident(user_id, self.current.get(user_id, []), context=[90 + user_id])

    @precondition(lambda self: not self.open)
    @rule(changed=st.sets(rows | st.integers(90, 92), min_size=1, max_size=2))
    def update_rows(self, changed: set[int]) -> None:
        self.bench.update(*changed)
        for row in changed:
            self.versions[row] += 1

    @precondition(lambda self: self.bench.ledger.count(Owner.EMB) < 6)
    @rule()
    def lend_a_page(self) -> None:
        self.bench.ledger.allocate(Owner.EMB, min(1, self.bench.ledger.num_free))

    @rule()
    def return_pages(self) -> None:
        self.bench.ledger.drain(np.flatnonzero(self.bench.ledger.owners() == Owner.EMB).tolist(), 0)
        self.bench.ledger.retire(0)

    @invariant()
    def holds(self) -> None:
        self.bench.cache.check()
        self.bench.ledger.check()


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


def test_a_step_ahead_settles_only_what_the_failure_of_the_next_left_of_it() -> None:
    bench = Bench(max_forks=4)
    bench.serve(1, range(6))
    ahead = bench.plan(1, range(10))
    longer, fork = bench.plan(1, range(20)), bench.plan(1, [*range(15), 99])
    for plan in (longer, fork):  # the page that ends what is ahead is shared by the fork
        bench.cache.abort(plan)
        bench.cache.check()
    bench.commit(ahead)
    resident = bench.resident(1, range(20))
    assert resident == 8
    bench.plan(1, range(20))
    assert bench.plan(1, [*range(9), 77]).num_resident <= resident, "a token that no step has written is copied"


def test_a_rejected_plan_leaves_what_finite_scores_were_computed_from() -> None:
    bench = Bench()
    bench.serve(1, range(6))
    bench.cache.reject(bench.plan(1, range(9)))
    bench.cache.reject(bench.plan(2, range(9)))
    bench.cache.check()
    assert (bench.resident(1, range(9)), bench.resident(2, range(9))) == (6, 0)


def test_a_rejected_prefix_offers_only_sound_tokens_while_a_step_has_it_pinned() -> None:
    bench = Bench()
    bench.serve(1, range(6))
    bad, follower = bench.plan(1, range(9)), bench.plan(1, range(10))
    bench.cache.reject(bad)
    bench.cache.check()
    assert bench.resident(1, range(10)) == 6
    bench.cache.reject(follower)
    bench.cache.check()
    assert bench.resident(1, range(10)) == 6


def test_finite_scores_of_a_batch_mate_keep_what_both_read() -> None:
    bench = Bench()
    bad, good = bench.plan(1, range(9)), bench.plan(1, range(7))
    bench.cache.reject(bad)
    bench.commit(good)
    assert bench.resident(1, range(9)) == 7


def test_a_rejected_fork_drops_what_was_computed_ahead_and_nobody_vouched_for() -> None:
    bench = Bench()
    bench.serve(1, range(3))
    bench.cache.commit(bench.plan(1, range(9)), now=1.0, is_ahead=True)
    bench.cache.reject(bench.plan(1, [*range(8), 77]))
    bench.cache.check()
    assert bench.resident(1, range(9)) == 3


def test_the_host_loses_pages_that_scores_were_not_finite_with() -> None:
    bench = Bench(num_slots=8)
    bench.serve(1, range(4))
    bench.cache.commit(bench.plan(1, range(12)), now=1.0, is_ahead=True)
    assert len(bench.cache.next_saves(8)) == 3
    bench.cache.reject(bench.plan(1, range(13)))
    bench.host_tier.check()
    assert bench.host_tier.num_pages == 1
