import numpy as np
import pytest

from helmrec.history.words import event_words, fold_words, seed_state
from helmrec.memory.history import chain
from tests.memory.test_history import plain_fold, plain_mix


@pytest.mark.parametrize("num_events", [0, 1, 300])
def test_words_folded_from_a_seed_are_the_kv_caches_chain(num_events: int, rng: np.random.Generator) -> None:
    columns = rng.integers(0, 2**63 - 1, (4, num_events))
    seed = (7, 2, 128, 5)
    assert np.array_equal(fold_words(seed_state(seed), event_words(columns)), chain(seed, 0, columns))


def test_a_fold_goes_on_where_another_ended(rng: np.random.Generator) -> None:
    words = event_words(rng.integers(0, 100, (3, 50)))
    whole = fold_words(seed_state((1,)), words)
    assert np.array_equal(fold_words(int(whole[19]), words[20:]), whole[20:])


def test_words_and_folds_are_those_of_their_plain_twins(rng: np.random.Generator) -> None:
    columns = rng.integers(0, 2**63 - 1, (3, 20))
    words = [sum(plain_mix(int(v), field) for field, v in enumerate(event)) % 2**64 for event in columns.T]
    assert event_words(columns).tolist() == words
    state, states = seed_state((9, 4)), []
    assert state == plain_fold(plain_fold(0, plain_mix(9, 0)), plain_mix(4, 1))
    for word in words:
        state = plain_fold(state, word)
        states.append(state)
    assert fold_words(seed_state((9, 4)), event_words(columns)).tolist() == states


def test_a_word_depends_on_its_event_alone(rng: np.random.Generator) -> None:
    columns = rng.integers(0, 100, (3, 10))
    assert np.array_equal(event_words(columns)[4:], event_words(np.ascontiguousarray(columns[:, 4:])))
