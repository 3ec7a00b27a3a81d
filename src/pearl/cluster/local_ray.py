"""Ray for one run: a local one of its own, or a cluster that is there.

The only module that touches what Ray does not document: that a local Ray listens on loopback only, and that its reports of
dead processes, which pearl handles and reports itself, go to the log and not into the terminal. Pinned by a test.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import ray
from ray._private import ray_constants
from ray._private import worker as ray_worker

from pearl.config.cluster import ClusterConfig
from pearl.errors import UserError
from pearl.units import MIB

NAMESPACE = "pearl"

_log = logging.getLogger(__name__)


def import_from_here() -> None:
    """Let classes of the user's own be imported from the current directory, as `python -m` does."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)


def _paths() -> list[str]:
    """What worker processes must be able to import from, as this process does."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return list(dict.fromkeys(path for path in (os.getcwd(), *given) if path))


def _listen_on_loopback_only() -> None:
    """What Ray does by itself on Windows and macOS, where a firewall would ask: no port is open to other machines."""
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"  # for the processes that Ray starts
    ray_constants.ENABLE_RAY_CLUSTER = False  # for this one, where Ray has read it already


def _to_log(data: dict[str, Any], ignore_prefix: bool) -> None:  # noqa: ARG001 - Ray's signature
    _log.info("ray: %s", data.get("lines"))


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
    os.environ["PYTHONPATH"] = os.pathsep.join(_paths())
    ray_worker.print_to_stdstream = _to_log
    try:
        if config.address:
            ray.init(address=config.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        else:
            _listen_on_loopback_only()
            ray.init(
                address="local",
                namespace=NAMESPACE,
                object_store_memory=config.object_store_mib * MIB,
                include_dashboard=False,
                # By default Ray's processes step back for everything else on the machine; here they are the job.
                _system_config={"worker_niceness": 0},
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"cluster.address: got {config.address!r}, cannot start or reach Ray there: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()
