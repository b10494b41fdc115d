"""A round of a row update: rows are written only while every engine holds, and one that hangs stops no other."""

import hypothesis.strategies as st
from hypothesis import given

from helmrec.serve.row_round import Action, CutOff, RoundLimits, RowMessage, RowRound, Send, Write

LIMITS = RoundLimits(hold_s=0.5, cut_off_s=4.0)
BOTH = frozenset({"a", "b"})
ANSWERS = {RowMessage.ASK: RowMessage.HAS, RowMessage.HOLD: RowMessage.HELD}


def answer_all(course: RowRound, message: RowMessage, *engines: str) -> None:
    for engine in engines:
        course.answer(engine, message, course.turn)


def test_rows_are_written_when_all_have_the_update_and_all_hold() -> None:
    course = RowRound(BOTH, LIMITS, now_s=0.0)
    assert course.decide(0.0) == Send(RowMessage.ASK, BOTH)
    answer_all(course, RowMessage.HAS, "a")
    assert course.decide(0.1) is None
    answer_all(course, RowMessage.HAS, "b")
    assert course.decide(0.1) == Send(RowMessage.HOLD, BOTH)
    answer_all(course, RowMessage.HELD, "b")
    assert course.decide(0.2) is None
    answer_all(course, RowMessage.HELD, "a")
    assert course.decide(0.2) == Write()
    assert course.is_over


def test_without_engines_the_keeper_writes_at_once() -> None:
    course = RowRound((), LIMITS, now_s=0.0)
    assert [type(course.decide(0.0)) for _ in range(3)] == [Send, Send, Write]


def test_an_engine_that_hung_before_holds_nobody_and_is_cut_off() -> None:
    course = RowRound(BOTH, LIMITS, now_s=0.0)
    course.decide(0.0)
    answer_all(course, RowMessage.HAS, "a")
    assert course.decide(3.9) is None, "nobody was asked to hold"
    assert course.next_s() == 4.0
    assert course.decide(4.0) == CutOff(frozenset({"b"}))
    assert course.decide(4.1) is None, "cut off once, and waited for until it has ended"
    course.leave("b")
    assert course.decide(4.2) == Send(RowMessage.HOLD, frozenset({"a"}))
    assert course.decide(4.3) is None, "the one that answered is not late"
    answer_all(course, RowMessage.HELD, "a")
    assert course.decide(4.4) == Write()


def test_an_engine_that_hangs_in_between_delays_the_others_by_a_bound() -> None:
    course = RowRound(BOTH, LIMITS, now_s=0.0)
    course.decide(0.0)
    answer_all(course, RowMessage.HAS, *BOTH)
    course.decide(0.0)
    answer_all(course, RowMessage.HELD, "a")
    assert course.next_s() == 0.5
    assert course.decide(0.5) == Send(RowMessage.RELEASED, BOTH)
    assert course.decide(0.5) == Send(RowMessage.ASK, BOTH)
    course.answer("b", RowMessage.HELD, turn=1)
    answer_all(course, RowMessage.HAS, "a")
    assert course.decide(3.0) is None, "an answer to an earlier turn does not count"
    assert course.decide(4.0) == CutOff(frozenset({"b"}))


def test_an_engine_that_answers_and_never_holds_is_cut_off() -> None:
    course, now_s = RowRound(BOTH, LIMITS, now_s=0.0), 0.0
    while not isinstance(action := course.decide(now_s), CutOff):
        assert now_s < 2 * LIMITS.cut_off_s
        if action == Send(RowMessage.ASK, BOTH):
            answer_all(course, RowMessage.HAS, *BOTH)
        elif action == Send(RowMessage.HOLD, BOTH):
            answer_all(course, RowMessage.HELD, "a")
        elif action is None:
            now_s = course.next_s()
    assert action == CutOff(frozenset({"b"}))


def test_a_slow_engine_gets_longer_every_turn() -> None:
    course = RowRound(("a",), LIMITS, now_s=0.0)
    now_s, holds = 0.0, []
    for _ in range(3):
        course.decide(now_s)
        answer_all(course, RowMessage.HAS, "a")
        course.decide(now_s)
        holds.append(course.next_s() - now_s)
        now_s = course.next_s()
        course.decide(now_s)
    assert holds == [0.5, 1.0, 2.0]


class Engines:
    """Engines that answer, end or keep silent, as they are told."""

    def __init__(self, course: RowRound, names: str) -> None:
        self.course = course
        self.alive, self.held = set(names), set[str]()
        self.asked: dict[str, tuple[RowMessage, int]] = {}

    def obey(self, action: CutOff | Send) -> None:
        if isinstance(action, CutOff):
            assert action.engines <= self.alive
            for engine in action.engines:
                self.end(engine)
        elif action.message is RowMessage.RELEASED:
            self.held.clear()
        else:
            self.asked |= dict.fromkeys(action.engines, (action.message, self.course.turn))

    def end(self, engine: str) -> None:
        self.alive.discard(engine)
        self.held.discard(engine)
        self.asked.pop(engine, None)
        self.course.leave(engine)

    def answer(self, engine: str) -> None:
        message, turn = self.asked[engine]
        if message is RowMessage.HOLD and turn == self.course.turn:
            self.held.add(engine)
        self.course.answer(engine, ANSWERS[message], turn)


@given(st.data())
def test_whatever_engines_do_rows_are_written_only_while_all_that_live_hold(data: st.DataObject) -> None:
    course, now_s = RowRound("abc", LIMITS, now_s=0.0), 0.0
    engines = Engines(course, "abc")
    for _ in range(60):
        action: Action | None = course.decide(now_s)
        course.check()
        if isinstance(action, Write):
            assert engines.held >= engines.alive
            return
        if action is not None:
            engines.obey(action)
            continue
        do = data.draw(st.sampled_from([engines.answer, engines.end, None]))
        if do is None or not engines.asked:
            now_s = course.next_s() if course.next_s() > now_s else now_s + 1.0
        else:
            do(data.draw(st.sampled_from(sorted(engines.asked))))
