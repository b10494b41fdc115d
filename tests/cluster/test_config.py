"""Settings of a cluster: what replicas may take of a card."""

import pytest

from helmrec.cluster.config import ClusterConfig, check_cards, with_card_share
from helmrec.config import EngineConfig
from helmrec.errors import ConfigError


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_replicas_that_share_a_card_take_their_part_of_its_memory(share: float) -> None:
    cluster = ClusterConfig(gpus_per_replica=share)
    assert with_card_share(cluster, EngineConfig(device="cuda")).card_share == share
    check_cards(cluster, EngineConfig(device="cuda"))
    check_cards(cluster, EngineConfig())


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_replica_alone_takes_what_it_finds(share: float) -> None:
    config = EngineConfig(card_share=0.7)
    assert with_card_share(ClusterConfig(gpus_per_replica=share), config) is config


@pytest.mark.parametrize("share", [-0.5, 1.5, 2])
def test_an_engine_runs_on_one_card(share: float) -> None:
    with pytest.raises(ConfigError, match=f"gpus_per_replica must be at .* got {share}"):
        ClusterConfig(gpus_per_replica=share)


def test_replicas_run_where_ray_reserves_for_them() -> None:
    with pytest.raises(ConfigError, match='gpus_per_replica must be more than 0 with device "cuda", got 0'):
        check_cards(ClusterConfig(), EngineConfig(device="cuda"))
    with pytest.raises(ConfigError, match=r'gpus_per_replica must be 0 with device "cpu", got 0\.5'):
        check_cards(ClusterConfig(gpus_per_replica=0.5), EngineConfig(device="cpu"))
