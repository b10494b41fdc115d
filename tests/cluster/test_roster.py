from helmrec.cluster.roster import Roster


def restarts(*calls: str) -> int:
    """Each call is answered by replicas of one letter."""
    roster = Roster()
    for names in calls:
        roster.note(set(names))
        roster.check()
    return roster.num_restarts


def test_replicas_that_come_one_by_one_are_no_restarts() -> None:
    assert restarts("", "a", "abc", "abcd") == 0


def test_a_replica_in_place_of_one_that_went_away_is_a_restart() -> None:
    assert restarts("abc", "ab", "abd") == 1
    assert restarts("abc", "abd") == 1
    assert restarts("abc", "", "def") == 3
    assert restarts("abc", "", "de", "def", "defg") == 3


def test_a_replica_that_did_not_answer_once_is_no_restart() -> None:
    assert restarts("abc", "ab", "abc", "abcd") == 0


def test_scaling_down_is_no_restart() -> None:
    assert restarts("abcd", "ab", "ab") == 0
