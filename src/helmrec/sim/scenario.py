"""Scenarios: the traffic, node, faults and measured period of a run as one TOML file, without policy and seed."""

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from helmrec.config import EngineConfig, Frozen
from helmrec.costs.calibrated import CostModel, CostTerms, default_cost, load_cost
from helmrec.errors import ConfigError
from helmrec.extensions import SCENARIOS, extensions
from helmrec.model.profiles import profile
from helmrec.sim.node.config import NodeConfig
from helmrec.sim.node.state import Faults
from helmrec.traffic.families import Shape, family, preset
from helmrec.traffic.generate import generate
from helmrec.traffic.trace import Trace
from helmrec.traffic.trace_file import read_trace
from helmrec.traffic.workload import Workload


class SlowBus(Frozen):
    """A period in which the bus is slower."""

    from_s: float = Field(ge=0)
    until_s: float = Field(gt=0)
    speed: float = Field(gt=0, le=1, description="share of the normal speed")


class Stall(Frozen):
    """A period in which the node does nothing."""

    from_s: float = Field(ge=0)
    until_s: float = Field(gt=0)


class UpdateStorm(Frozen):
    """A period in which a share of the items gets new rows at regular intervals, other items each time."""

    from_s: float = Field(ge=0)
    until_s: float = Field(gt=0)
    every_s: float = Field(1.0, gt=0)
    share: float = Field(0.001, gt=0, le=1, description="of all items, each time")


class FaultPlan(Frozen):
    """The faults of a node."""

    slow_bus: tuple[SlowBus, ...] = ()
    stalls: tuple[Stall, ...] = ()
    storms: tuple[UpdateStorm, ...] = ()

    def compiled(self) -> Faults:
        """The faults as arrays, for compiled code."""
        times = [np.arange(storm.from_s, storm.until_s, storm.every_s) for storm in self.storms]
        shares = [np.full(when.size, storm.share) for when, storm in zip(times, self.storms, strict=True)]
        update_s, share = np.concatenate([[], *times]), np.concatenate([[], *shares])
        order = np.argsort(update_s, kind="stable")
        return Faults(
            slow_bus=np.array([(f.from_s, f.until_s, f.speed) for f in self.slow_bus], np.float64).reshape(-1, 3),
            stall=np.array([(f.from_s, f.until_s) for f in self.stalls], np.float64).reshape(-1, 2),
            update_s=update_s[order],
            update_share=share[order],
            update_salt=np.arange(update_s.size),
        )


class FamilyChoice(Frozen):
    """A named family of traffic and a preset; `shape` replaces settings of the preset."""

    name: str = "steady"
    preset: str = "dlrmv3"
    shape: dict[str, Any] = Field(default_factory=dict)

    def workload(self) -> Workload:
        return family(self.name, Shape(**preset(self.preset).model_dump() | self.shape))


class Scenario(Frozen):
    """A scenario. Its traffic is exactly one of family, workload and trace; a trace does not depend on the seed."""

    name: str = Field(min_length=1)
    profile: str = Field("dlrmv3", description="model shape")
    num_items: int | None = Field(None, ge=1, description="rows of the item table; default: items of the traffic")
    engine: EngineConfig
    family: FamilyChoice | None = None
    workload: Workload | None = None
    trace: Path | None = Field(None, description="a trace file, relative to the scenario")
    calibration: Path | None = Field(None, description="a cost file, relative to the scenario; default: the H200's")
    bus_speed: float = Field(1.0, gt=0, le=4, description="share of the calibration's bus speed")
    row_sample: float = Field(5 / 256, gt=0, le=1, description="share of the rows that is simulated")
    slo_ms: float = Field(80.0, gt=0)
    tick_s: float = Field(1.0, gt=0, description="interval between decisions of the policy")
    warm_up_s: float = Field(0.0, ge=0, description="time left out of the results")
    faults: FaultPlan = FaultPlan()

    @field_validator("engine", mode="before")
    @classmethod
    def _engine(cls, value: object) -> object:
        return EngineConfig(**value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _has_one_kind_of_traffic(self) -> Self:
        given = [name for name in ("family", "workload", "trace") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"one of family, workload and trace is needed, not {len(given)}")
        return self

    def make_trace(self, seed: int) -> Trace:
        """The traffic for a seed."""
        if self.trace is not None:
            return read_trace(self.trace)
        workload = self.workload or (self.family or FamilyChoice()).workload()
        return generate(workload, seed)

    def node_config(self, trace: Trace) -> NodeConfig:
        """The node for a trace."""
        model = profile(self.profile, self.num_items or trace.catalogue.num_items)
        return NodeConfig(model=model, engine=self.engine, row_sample=self.row_sample, slo_ms=self.slo_ms)

    def cost(self) -> CostModel:
        """The costs of the device."""
        measured = default_cost() if self.calibration is None else load_cost(self.calibration)
        return with_bus_speed(measured, self.bus_speed)


def with_bus_speed(cost: CostModel, speed: float) -> CostModel:
    """The same device with another bus speed, which is added to its name."""
    if speed == 1:
        return cost
    links = [name for name in CostTerms._fields if name.endswith("_gb_per_s") and name != "hit_gb_per_s"]
    changed: dict[str, Any] = {name: getattr(cost, name) * speed for name in links}
    return cost.model_copy(update={**changed, "name": f"{cost.name}, bus x {speed:g}"})


def find_scenario(path: Path) -> Path:
    """The path itself if it is a file's, else that of the scenario of this name in an installed package."""
    if path.exists() or path.suffix:
        return path
    folders = [Path(str(files(entry.load()))) for entry in extensions(SCENARIOS).values()]
    installed = {
        str(file.relative_to(folder).with_suffix("")): file
        for folder in folders
        for file in sorted(folder.rglob("*.toml"))
    }
    if str(path) not in installed:
        known = ", ".join(installed) or "none"
        raise ConfigError(f"scenario must be a file or an installed one ({known}), got {str(path)!r}")
    return installed[str(path)]


def load_scenario(path: Path) -> Scenario:
    """Read a scenario from TOML; unknown keys are errors."""
    try:
        settings = tomllib.loads(path.read_text())
        for name in ("trace", "calibration"):
            if name in settings:
                settings[name] = path.parent / str(settings[name])
        return Scenario(**settings)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read scenario {path}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
