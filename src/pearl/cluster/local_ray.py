"""Ray for one run: a local one of its own, or a cluster that is there."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

import ray

from pearl.config.cluster import ClusterConfig
from pearl.errors import UserError
from pearl.units import MIB

NAMESPACE = "pearl"


@contextlib.contextmanager
def ray_session(config: ClusterConfig) -> Iterator[None]:
    """Have Ray for the block; a local Ray ends with it, with every process that it started.

    Raises:
        UserError: the cluster at `cluster.address` cannot be reached.
    """
    if ray.is_initialized():
        yield
        return
    # Workers inherit this: a BLAS with a thread per core makes processes on shared cores wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        if config.address:
            ray.init(address=config.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        else:
            ray.init(
                address="local",
                namespace=NAMESPACE,
                object_store_memory=config.object_store_mib * MIB,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"cluster.address: got {config.address!r}, cannot start or reach Ray there: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()
