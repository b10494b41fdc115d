"""Scores of the whole model against the float64 reference, without any cache in between."""

import numpy as np
import pytest

from tests.helpers import random_request, tiny_engine, tiny_model
from tests.reference import Reference


@pytest.mark.parametrize("form", ["concat", "gated"])
@pytest.mark.parametrize("v_dim", [8, 20])
def test_scores_match_the_reference_from_no_history_to_a_full_window(form: str, v_dim: int) -> None:
    model = tiny_model(form=form, v_dim=v_dim, window=64, normaliser=64)
    engine = tiny_engine(model, pool_bytes="1MiB")
    reference = Reference(model.config, model.dense, model.tables)
    rng = np.random.default_rng(3)
    requests = [
        random_request(rng, model.config, user, length, num_candidates=1 + user % 8)
        for user, length in enumerate([0, 1, 3, 4, 5, 17, 63, 64, 65, 200])
    ]
    for request, result in zip(requests, engine.rank(requests), strict=True):
        assert result.scores.shape == (len(request.candidates), model.config.num_tasks)
        assert np.abs(result.scores - reference.scores(request)).max() <= 1e-5


def test_a_model_without_context_tables_scores_as_the_reference() -> None:
    model = tiny_model(user_context=(), request_context=())
    reference = Reference(model.config, model.dense, model.tables)
    engine = tiny_engine(model)
    request = random_request(np.random.default_rng(0), model.config, num_events=9)
    for _ in range(2):
        assert np.abs(engine.rank([request])[0].scores - reference.scores(request)).max() <= 1e-5


def test_summed_features_score_as_the_reference() -> None:
    encoders = ({"name": "all", "tables": ("item", "category"), "pooling": "sum"},)
    model = tiny_model(encoders=encoders)
    reference = Reference(model.config, model.dense, model.tables)
    request = random_request(np.random.default_rng(0), model.config, num_events=9)
    assert np.abs(tiny_engine(model).rank([request])[0].scores - reference.scores(request)).max() <= 1e-5


def test_candidates_never_see_each_other() -> None:
    engine = tiny_engine()
    rng = np.random.default_rng(0)
    request = random_request(rng, engine.model_config, num_events=7, num_candidates=8)
    together = engine.rank([request])[0].scores
    for i in range(8):
        alone = random_request(
            rng,
            engine.model_config,
            items=request.items,
            actions=request.actions,
            timestamps=request.timestamps,
            features=request.features,
            context=request.context,
            candidates=request.candidates[i : i + 1],
            candidate_features={"category": request.candidate_features["category"][i : i + 1]},
        )
        assert np.abs(engine.rank([alone])[0].scores - together[i]).max() <= 1e-5
