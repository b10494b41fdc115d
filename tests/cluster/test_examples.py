"""The guide's files are what Ray Serve, KubeRay and our own settings would take."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from helmrec.cluster.config import ClusterConfig, read_cluster_config
from helmrec.errors import ConfigError
from helmrec.serve.settings import Given, resolve

yaml = pytest.importorskip("yaml", reason="helmrec[cluster] is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="helmrec[cluster] is not installed")
EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
SCHEMA = json.loads((Path(__file__).parent / "rayservice.schema.json").read_text())


def bare_hosts() -> Any:
    return yaml.safe_load((EXAMPLES / "serve.yaml").read_text())


def kubernetes() -> Any:
    return yaml.safe_load((EXAMPLES / "rayservice.yaml").read_text())


def serve_configs() -> list[Any]:
    return [bare_hosts(), yaml.safe_load(kubernetes()["spec"]["serveConfigV2"])]


@pytest.mark.parametrize("config", serve_configs(), ids=["bare hosts", "kubernetes"])
def test_serve_configs_are_what_ray_takes_and_their_settings_are_ours(config: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray's own imports
        schema = pytest.importorskip("ray.serve.schema")
        checked = schema.ServeDeploySchema.model_validate(config)
    (application,) = checked.applications
    assert application.import_path == "helmrec.cluster.app:build"
    assert set(application.args) <= {"model", "settings", "cluster"}
    given = {name: Given(value, "the example") for name, value in application.args["settings"].items()}
    assert resolve(given, {}, None).serve.history_path is not None
    cluster = ClusterConfig(**application.args["cluster"])
    assert cluster.gpus_per_replica == 1


def test_the_rayservice_is_one_as_kuberay_describes_it() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(kubernetes(), SCHEMA)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "rayClusterConfig", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("spec", "serveConfigv2"), "applications: []"),
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "template", "spec", "container"), []),
        (("kind",), "RayCluster"),
    ],
)
def test_the_schema_sees_what_is_wrong(path: tuple[Any, ...], value: Any) -> None:
    document = kubernetes()
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA)


def test_the_settings_file_of_the_guide_is_read() -> None:
    config = read_cluster_config(EXAMPLES / "cluster.toml", replicas=6)
    assert (config.replicas, config.gpus_per_replica, config.ingresses) == (6, 1, 2)


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"replicas": 0}, "replicas must be at least 1"),
        ({"router": "fastest"}, "router must be one of"),
        ({"scaling": {"min_replicas": 3, "max_replicas": 2}}, "max_replicas must be at least min_replicas"),
        ({"speed": 9}, "speed is not a known setting"),
        ({"routing": {"load_gap_ms": -1}}, "load_gap_ms must be at least 0"),
    )
    for wrong, told in cases:
        with pytest.raises(ConfigError, match=told):
            ClusterConfig(**wrong)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_cluster_config(tmp_path / "none.toml")
