"""Trainings of a few hundred steps."""

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from helmrec.cli.main import app
from helmrec.errors import ConfigError, ModelError
from helmrec.ppo.network import Network
from helmrec_bench.train.designs import STEPS
from helmrec_bench.train.ppo import CHECKPOINT, Training, TrainSettings

SETTINGS = TrainSettings(design="records", steps=512, seed=1, nodes=4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Training, Path]:
    folder = tmp_path_factory.mktemp("trained")
    training = Training(SETTINGS)
    training.run()
    training.save(folder)
    return training, folder


def test_a_training_ends_after_its_steps_with_a_learning_curve(trained: tuple[Training, Path]) -> None:
    training, _ = trained
    assert training.num_done == 512
    assert [point.steps for point in training.curve] == [256, 512]
    assert all(point.lost > 0 for point in training.curve)


def test_the_controllers_forward_pass_is_that_of_torch(trained: tuple[Training, Path]) -> None:
    training, folder = trained
    network = Network(folder / "network.safetensors")
    inputs = np.random.default_rng(0).normal(size=(20, len(network.record.centre))).astype(np.float32)
    with torch.no_grad():
        policy = training.model.policy
        expected = policy.action_net(policy.mlp_extractor.forward_actor(torch.as_tensor(inputs)))
    ours = np.array([network.forward(line) for line in inputs.astype(float)])
    assert ours == pytest.approx(expected.numpy(), abs=1e-5)
    assert network.record.training["seed"] == 1
    assert network.record.steps == STEPS


def test_a_training_goes_on_from_its_checkpoint(trained: tuple[Training, Path]) -> None:
    training, folder = trained
    longer = SETTINGS.model_copy(update={"steps": 1_024})
    resumed = Training.resume(folder, longer)
    before = training.model.policy.state_dict()
    assert all((value == before[name]).all() for name, value in resumed.model.policy.state_dict().items())
    moments = resumed.model.policy.optimizer.state_dict()["state"][0]["exp_avg"]
    assert (moments == training.model.policy.optimizer.state_dict()["state"][0]["exp_avg"]).all()
    resumed.run()
    assert resumed.num_done == 1_024
    assert [point.steps for point in resumed.curve] == [256, 512, 768, 1_024]


def test_a_seed_gives_the_same_network(trained: tuple[Training, Path]) -> None:
    again = Training(SETTINGS)
    again.run()
    expected = trained[0].model.policy.state_dict()
    assert all((value == expected[name]).all() for name, value in again.model.policy.state_dict().items())


def test_a_checkpoint_of_other_settings_is_refused(trained: tuple[Training, Path]) -> None:
    with pytest.raises(ConfigError, match="other settings"):
        Training.resume(trained[1], SETTINGS.model_copy(update={"seed": 2}))


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINT).write_bytes(b"something else")
    with pytest.raises(ModelError, match="cannot read checkpoint"):
        Training.resume(tmp_path, SETTINGS)


def test_the_command_trains_and_goes_on(tmp_path: Path) -> None:
    def ran(steps: int) -> str:
        flags = ["--design", "curves", "--steps", str(steps), "--nodes", "4", "--out", str(tmp_path)]
        result = CliRunner().invoke(app, ["train", *flags])
        assert result.exit_code == 0, result.output
        return result.output

    assert "256 steps" in ran(256)
    assert "512 steps" in ran(512)
    assert Network(tmp_path / "network.safetensors").record.training["done"] == 512


def test_the_command_refuses_a_design_nobody_made(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "--design", "none", "--out", str(tmp_path)])
    assert result.exit_code != 0
    assert "design must be one of" in result.output
