import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from helmrec.memory.evicted_rows import GhostRows


def test_the_latest_evicted_come_first_and_the_oldest_are_forgotten() -> None:
    ghosts = GhostRows(capacity=4)
    ghosts.push(np.array([1, 2, 3]))
    ghosts.push(np.array([4, 5]))
    assert len(ghosts) == 4
    assert ghosts.pop(3).tolist() == [5, 4, 3]
    assert ghosts.pop(9).tolist() == [2]
    assert ghosts.pop(1).size == 0


@given(
    st.lists(st.one_of(st.lists(st.integers(0, 99), max_size=12), st.integers(0, 8)), max_size=20), st.integers(1, 10)
)
def test_it_is_a_bounded_stack(steps: list[list[int] | int], capacity: int) -> None:
    ghosts, twin = GhostRows(capacity), list[int]()
    for step in steps:
        if isinstance(step, int):
            expected = twin[len(twin) - min(step, len(twin)) :][::-1]
            del twin[len(twin) - len(expected) :]
            assert ghosts.pop(step).tolist() == expected
        else:
            ghosts.push(np.array(step, np.int64))
            twin = (twin + step)[-capacity:]
        assert len(ghosts) == len(twin)
