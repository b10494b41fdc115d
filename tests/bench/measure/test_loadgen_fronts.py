"""LoadGen with fronts in processes of their own: queries and answers, and a small run of the whole."""

import json
from argparse import Namespace
from concurrent.futures import Future
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from helmrec_bench.measure.cards import loadgen_fronts
from helmrec_bench.measure.cards.loadgen_fronts import QUERY_BYTES, Listening


def test_an_answer_settles_its_query_and_a_mark_fails_it() -> None:
    ours, front = Pipe()
    calls: dict[int, Future[Any]] = {1: Future(), 2: Future()}
    answered, failed = calls[1], calls[2]
    with Listening([ours], calls):
        front.send_bytes((2).to_bytes(QUERY_BYTES) + b"!")
        front.send_bytes((1).to_bytes(QUERY_BYTES))
        assert answered.result(10) is None
        with pytest.raises(RuntimeError, match="could not send it"):
            failed.result(10)
    assert not calls


@pytest.mark.slow
def test_fronts_serve_loadgen_with_intake_and_without(tmp_path: Path) -> None:
    loadgen_fronts.main(Namespace(quick=True, out=tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    for way in loadgen_fronts.WAYS:
        assert found[way]["saturated_per_s"] > 0
        assert all(point["num_queries"] > 0 for point in found[way]["points"])
