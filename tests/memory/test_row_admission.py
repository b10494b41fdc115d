import numpy as np

from helmrec.memory.row_admission import AdmitEveryRow, SecondTouch, make_row_admission


def test_always_admits_everything() -> None:
    assert AdmitEveryRow().worthy(np.arange(5)).tolist() == [True] * 5


def test_a_row_is_worthy_at_its_second_touch() -> None:
    admission = SecondTouch(1_000)
    assert not admission.worthy(np.array([7, 9])).any()
    assert admission.worthy(np.array([7, 8])).tolist() == [True, False]


def test_rows_touched_once_stay_out_of_a_young_cache() -> None:
    admission = SecondTouch(10_000)
    assert admission.worthy(np.arange(5_000)).mean() < 0.01


def test_rows_touched_once_stay_out_of_an_old_cache() -> None:
    admission = SecondTouch(256)
    shares = [admission.worthy(np.arange(start, start + 100)).mean() for start in range(0, 20_000, 100)]
    assert np.mean(shares[100:]) < 0.1


def test_a_row_touched_often_is_forgotten_in_the_end() -> None:
    admission = SecondTouch(256)
    for _ in range(8):
        admission.worthy(np.array([7]))
    for _ in range(400):
        admission.worthy(np.full(100, 3))
    assert not admission.worthy(np.array([7]))[0]


def test_counters_do_not_overflow() -> None:
    admission = SecondTouch(10_000)
    for _ in range(600):
        worthy = admission.worthy(np.array([3]))
    assert worthy[0]


def test_no_rows_are_no_work() -> None:
    assert SecondTouch(10).worthy(np.empty(0, np.int64)).size == 0


def test_policies_go_by_name() -> None:
    assert isinstance(make_row_admission("always", 8), AdmitEveryRow)
    assert isinstance(make_row_admission("second-touch", 8), SecondTouch)
