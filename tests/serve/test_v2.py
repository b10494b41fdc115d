"""The Open Inference Protocol as its own client speaks it, over loopback."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from helmrec.clock import MonotonicClock
from helmrec.serve.app import make_app
from helmrec.serve.port import InProcessPort
from helmrec.serve.settings import ServeConfig
from tests.helpers import tiny_engine
from tests.serve.asgi import Caller, on_loopback, wait_for
from tests.serve.cases import infer_binary, infer_json, rank_requests, tensors_of

REQUESTS = rank_requests(6)


@pytest.fixture(scope="module")
def expected() -> Any:
    return np.concatenate([result.scores for result in tiny_engine().rank(REQUESTS)])


@pytest.fixture(scope="module")
def client() -> Iterator[triton.InferenceServerClient]:
    with on_loopback(make_app(InProcessPort(tiny_engine(clock=MonotonicClock())), ServeConfig())) as port:
        client = triton.InferenceServerClient(f"127.0.0.1:{port}")
        wait_for(client.is_server_ready)
        yield client
        client.close()


def inputs(tensors: dict[str, Any], is_binary: bool) -> list[triton.InferInput]:
    made = []
    for name, values in tensors.items():
        tensor = triton.InferInput(name, list(values.shape), "INT64")
        tensor.set_data_from_numpy(values, binary_data=is_binary)
        made.append(tensor)
    return made


@pytest.mark.parametrize("is_binary", [True, False])
def test_tritonclient_ranks_a_ragged_batch(client: Any, expected: Any, is_binary: bool) -> None:
    outputs = [triton.InferRequestedOutput("SCORES", binary_data=is_binary)]
    tensors = inputs(tensors_of(REQUESTS), is_binary)
    result = client.infer("tiny", tensors, outputs=outputs, request_id="r-1", timeout=60_000_000)
    np.testing.assert_allclose(result.as_numpy("SCORES"), expected, atol=1e-5)
    answer = result.get_response()
    assert (answer["id"], answer["model_name"]) == ("r-1", "tiny")
    assert answer["parameters"]["computed_tokens"] > 0
    assert ("data" in answer["outputs"][0]) is not is_binary


def test_tritonclient_gets_bytes_when_it_names_no_output(client: Any, expected: Any) -> None:
    result = client.infer("tiny", inputs(tensors_of(REQUESTS), is_binary=True))
    np.testing.assert_allclose(result.as_numpy("SCORES"), expected, atol=1e-5)


def test_tritonclient_reads_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_model_ready("tiny")
    assert not client.is_model_ready("huge")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data", "model_configuration", "statistics"]
    metadata = client.get_model_metadata("tiny")
    assert {"name": "features.category", "datatype": "INT64", "shape": [-1]} in metadata["inputs"]
    assert metadata["outputs"] == [{"name": "SCORES", "datatype": "FP32", "shape": [-1, 2]}]


def test_tritonclient_names_the_version(client: Any, expected: Any) -> None:
    result = client.infer("tiny", inputs(tensors_of(REQUESTS), is_binary=True), model_version="1")
    np.testing.assert_allclose(result.as_numpy("SCORES"), expected, atol=1e-5)
    assert result.get_response()["model_version"] == "1"
    assert client.is_model_ready("tiny", "1")
    assert not client.is_model_ready("tiny", "2")
    assert client.get_model_metadata("tiny", "1") == client.get_model_metadata("tiny")
    assert client.get_model_metadata("tiny")["versions"] == ["1"]
    with pytest.raises(InferenceServerException, match="the version served here is '1', got '2'"):
        client.infer("tiny", inputs(tensors_of(REQUESTS), is_binary=True), model_version="2")


def test_tritonclient_reads_the_configuration(client: Any) -> None:
    config = client.get_model_config("tiny")
    assert config == client.get_model_config("tiny", "1")
    assert (config["name"], config["backend"], config["max_batch_size"]) == ("tiny", "helmrec", 0)
    assert {"name": "ITEMS", "data_type": "TYPE_INT64", "dims": [-1]} in config["input"]
    assert config["output"] == [{"name": "SCORES", "data_type": "TYPE_FP32", "dims": [-1, 2]}]
    assert config["parameters"]["max_candidates"] == {"string_value": "8"}


def test_tritonclient_reads_statistics(client: Any) -> None:
    def stats() -> Any:
        (found,) = client.get_inference_statistics("tiny")["model_stats"]
        return found

    before = stats()
    client.infer("tiny", inputs(tensors_of(REQUESTS), is_binary=True))
    tensors = tensors_of(REQUESTS)
    tensors["ITEMS"][4] = 300
    with pytest.raises(InferenceServerException):
        client.infer("tiny", inputs(tensors, is_binary=True))
    after = stats()
    assert after["inference_count"] == before["inference_count"] + len(REQUESTS)
    assert after["execution_count"] > before["execution_count"]
    assert after["last_inference"] > 1.7e12, "milliseconds since 1970"
    for stage, more in (("success", 1), ("queue", 1), ("compute_infer", 1), ("fail", 1), ("cache_hit", 0)):
        was, now = before["inference_stats"][stage], after["inference_stats"][stage]
        assert now["count"] == was["count"] + more
        assert (now["ns"] > was["ns"]) is bool(more)
    assert client.get_inference_statistics("tiny", "1") == client.get_inference_statistics()


def test_tritonclient_lists_the_models(client: Any) -> None:
    assert client.get_model_repository_index() == [{"name": "tiny", "version": "1", "state": "READY", "reason": ""}]


def test_the_index_of_models_may_be_of_ready_ones_only(caller: Caller) -> None:
    assert [each["state"] for each in caller.post("/v2/repository/index", {"ready": True}).json] == ["READY"]
    assert caller.post("/v2/repository/index", {"ready": 3}).status == 400


def test_tritonclient_raises_the_error_of_the_server(client: Any) -> None:
    tensors = tensors_of(REQUESTS)
    with pytest.raises(InferenceServerException, match="the model served here is 'tiny', got 'huge'"):
        client.infer("huge", inputs(tensors, is_binary=True))
    tensors["ITEMS"][4] = 300
    with pytest.raises(InferenceServerException, match=r"requests\[1\].items\[1\]: values run from 0 to 299, got 300"):
        client.infer("tiny", inputs(tensors, is_binary=True))


def test_a_wrong_request_leaves_the_others_of_its_batch_unranked(caller: Caller) -> None:
    tensors = tensors_of(REQUESTS)
    tensors["CANDIDATES"][-1] = -1
    before = caller.get("/v1/pool").json
    sent = infer_binary(tensors)
    for reply in (
        caller.post("/v2/models/tiny/infer", sent.body, sent.headers),
        caller.post("/v2/models/tiny/infer", infer_json(tensors)),
        caller.post("/v2/models/tiny/infer", infer_json(tensors_of(REQUESTS), outputs=[{"name": "LABELS"}])),
    ):
        assert reply.status == 400
        assert reply.json["error"] == reply.json["detail"]
    assert caller.get("/v1/pool").json == before
