"""The root of the configuration tree: one recipe."""

from pathlib import Path

from pydantic import Field

from pearl.config.base import Section
from pearl.config.cluster import ClusterConfig
from pearl.config.elastic import ElasticConfig, FleetConfig, PlatformConfig, WorkloadConfig
from pearl.config.engine import EngineConfig, SamplingConfig
from pearl.config.environment import EnvironmentConfig
from pearl.config.model import ModelConfig
from pearl.config.rollout import RolloutConfig
from pearl.config.simulation import FaultsConfig, PricesConfig, SimulationConfig
from pearl.config.train import CheckpointConfig, EvaluationConfig, TrainConfig, WarmupConfig, WeightsConfig


class RunConfig(Section):
    """`[run]`."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9._-]+$", description="First part of the run folder's name.")
    seed: int = Field(0, ge=0, lt=2**31, description="Of everything random in the run.")
    steps: int = Field(100, ge=0, description="Training steps.")
    root: Path = Field(Path("runs"), description="Where run folders are made; relative to the current directory.")
    stop_at_success: float | None = Field(
        None, ge=0, le=1, description="Stop early once the smoothed success rate (5 steps) reaches this."
    )


class Recipe(Section):
    """Everything that defines a run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    environment: EnvironmentConfig
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    train: TrainConfig = TrainConfig()
    warmup: WarmupConfig = WarmupConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    cluster: ClusterConfig = ClusterConfig()
    fleet: FleetConfig = FleetConfig()
    elastic: ElasticConfig = ElasticConfig()
    workload: WorkloadConfig = WorkloadConfig()
    platform: PlatformConfig = PlatformConfig()
    simulation: SimulationConfig = SimulationConfig()
    faults: FaultsConfig = FaultsConfig()
    prices: PricesConfig = PricesConfig()
