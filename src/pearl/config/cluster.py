"""`[cluster]`: Ray and the processes on it."""

from pydantic import Field

from pearl.config.base import Section


class ClusterConfig(Section):
    """`[cluster]`."""

    address: str = Field("", description="Of a running Ray cluster; empty: a local one for this run.")
    object_store_mib: int = Field(128, ge=80, description="Object store of a local Ray.")
    start_timeout_s: float = Field(
        120, gt=0, description="For a process to start, and for a cluster at `address` to answer."
    )
    max_worker_restarts: int = Field(8, ge=0, description="Rollout workers restarted over the whole run.")
    health_timeout_s: float = Field(
        60, gt=0, description="A rollout worker that does not answer for this long is replaced."
    )
    max_environment_restarts: int = Field(32, ge=0, description="Environment processes restarted over the whole run.")
