from collections import OrderedDict

import numpy as np
import pytest

from helmrec.memory.miss_curves.lru import OUT, Lines, close_gaps_of, coldest, join, make_lines, with_ids, with_places


class PlainLine:
    """The twin: an ordered dictionary, coldest first."""

    def __init__(self) -> None:
        self.ids: OrderedDict[int, None] = OrderedDict()

    def join(self, id_: int) -> None:
        self.ids.pop(id_, None)
        self.ids[id_] = None

    def coldest(self) -> int:
        return next(iter(self.ids), OUT)


def enter(lines: Lines, column: int, id_: int) -> None:
    close_gaps_of(lines.queue, lines.place, lines.ends, column, 1)
    join(lines.queue, lines.place, lines.ends, column, id_)


def first_of(lines: Lines, column: int) -> int:
    return int(coldest(lines.queue, lines.place, lines.ends, column))


@pytest.mark.parametrize("seed", range(3))
def test_lines_keep_the_order_of_their_plain_twins(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lines, twins = make_lines(3, 12, 30), [PlainLine() for _ in range(3)]
    for _ in range(2_000):
        column, id_ = int(rng.integers(3)), int(rng.integers(12))
        if rng.random() < 0.7:
            enter(lines, column, id_)
            twins[column].join(id_)
        elif (cold := twins[column].coldest()) != OUT:
            lines.place[cold, column] = OUT
            del twins[column].ids[cold]
        assert [first_of(lines, c) for c in range(3)] == [twin.coldest() for twin in twins]
        standing = [set(np.flatnonzero(lines.place[:, c] != OUT).tolist()) for c in range(3)]
        assert standing == [set(twin.ids) for twin in twins]


def test_an_empty_line_has_no_coldest() -> None:
    assert first_of(make_lines(1, 4, 8), 0) == OUT


def test_more_ids_and_places_change_no_order() -> None:
    lines = make_lines(2, 4, 6)
    for id_ in (2, 0, 3, 0):
        enter(lines, 0, id_)
    lines = with_places(with_ids(lines, 9), 20)
    enter(lines, 0, 8)
    order = []
    while (cold := first_of(lines, 0)) != OUT:
        order.append(cold)
        lines.place[cold, 0] = OUT
    assert order == [2, 3, 0, 8]
    assert first_of(lines, 1) == OUT
