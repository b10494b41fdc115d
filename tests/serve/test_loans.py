"""Lent arrays: no place is lent twice, none is lost, and none comes back while any part of it is in use."""

import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helmrec.serve.loans import Borrower, Lender, Loan
from helmrec.serve.ring import Link, open_ring, shared_file
from helmrec.types import IntArray

SIZE = 4_096
RING = 1 << 20


def lent_and_borrowed() -> tuple[Lender, Borrower]:
    memory = memoryview(bytearray(SIZE))
    return Lender(memory), Borrower(memory)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 120), st.integers(0, 50)), max_size=150))
def test_places_come_back_in_any_order(steps: list[tuple[bool, int, int]]) -> None:
    lender, borrower = lent_and_borrowed()
    used: list[tuple[IntArray, IntArray]] = []  # what is lent, and what was written
    for number, (is_lent, size, which) in enumerate(steps):
        if is_lent:
            written = np.full(size, number)
            loan = lender.lend([written[:1].tobytes(), written[1:].tobytes()])
            if loan is not None:
                used.append((borrower.use(loan), written))
        elif used:
            used.pop(which % len(used))
        for returned in borrower.take_returned():
            lender.take_back(returned)
        lender.check()
        assert lender.num_lent == len(used)
        assert all(np.array_equal(got, written) for got, written in used)
    used.clear()
    for returned in borrower.take_returned():
        lender.take_back(returned)
    lender.check()
    assert lender.lend([bytes(SIZE)]) == Loan(0, SIZE), "free places have grown together"


def test_a_loan_lasts_as_long_as_any_view_of_it() -> None:
    lender, borrower = lent_and_borrowed()
    loan = lender.lend([np.arange(40).tobytes()])
    assert loan is not None
    values: IntArray | None = borrower.use(loan)
    assert values is not None
    part: IntArray | None = values[8:].reshape(4, 8)[1:, ::2].T
    values = None
    assert borrower.take_returned() == []
    assert part is not None
    np.testing.assert_array_equal(part[:, 0], [16, 18, 20, 22])
    part = None
    assert borrower.take_returned() == [loan]


def test_what_is_not_lent_cannot_come_back() -> None:
    lender, _ = lent_and_borrowed()
    loan = lender.lend([bytes(64)])
    assert loan is not None
    for wrong in (Loan(64, 64), Loan(0, 8)):
        with pytest.raises(ValueError, match="not lent"):
            lender.take_back(wrong)
    lender.take_back(loan)
    with pytest.raises(ValueError, match="not lent"):
        lender.take_back(loan)


@pytest.mark.parametrize("wrong", [Loan(SIZE - 8, 16), Loan(2 * SIZE, 8), Loan(0, 12)])
def test_a_place_outside_of_the_memory_is_refused(wrong: Loan) -> None:
    _, borrower = lent_and_borrowed()
    with pytest.raises(ValueError, match="no place"):
        borrower.use(wrong)


def links() -> tuple[Link, Link]:
    ours, theirs = socket.socketpair()
    there, back = shared_file(RING), shared_file(RING)
    return Link(ours, open_ring(there), open_ring(back)), Link(theirs, open_ring(back), open_ring(there))


def test_large_arrays_stay_where_they_are_until_the_reader_drops_them() -> None:
    front, engine = links()
    sent = np.arange(20_000)  # more than half of what may be lent
    for round_ in range(3):
        front.send(1, round_, [b"head"], [sent.tobytes()])
        (frame,) = engine.receive()
        assert bytes(frame.payload) == b"head"
        kept = frame.arrays
        engine.done(frame)
        del frame
        assert kept is not None
        np.testing.assert_array_equal(kept, sent)
        del kept
        engine.send(2, round_)  # an answer, which also brings the loan back
        assert [answer.call for answer in front.receive()] == [round_]
    front.close()
    engine.close()


def test_arrays_are_part_of_the_frame_where_no_place_is_left_and_where_they_are_few() -> None:
    front, engine = links()
    sent = np.arange(20_000).tobytes()
    kept = []
    for _ in range(7):  # six fit
        front.send(1, 0, [b"head"], [sent])
        (frame,) = engine.receive()
        kept.append(frame.arrays)
        assert bytes(frame.payload) == (b"head" if frame.arrays is not None else b"head" + sent)
        engine.done(frame)
    assert [each is None for each in kept] == [False] * 6 + [True]
    front.send(1, 0, [b"head"], [b"12345678"])
    (frame,) = engine.receive()
    assert (bytes(frame.payload), frame.arrays) == (b"head12345678", None)
    front.close()
    engine.close()


def test_what_a_front_lent_outlives_it() -> None:
    front, engine = links()
    front.send(1, 0, [], [np.arange(20_000).tobytes()])
    (frame,) = engine.receive()
    arrays = frame.arrays
    engine.done(frame)
    front.close()
    engine.close()
    np.testing.assert_array_equal(arrays, np.arange(20_000))
