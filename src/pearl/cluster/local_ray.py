"""Ray for one run: a local one of its own, or a cluster that is there.

The only module that touches what Ray does not document: that a local Ray listens on loopback only, and that its reports of
dead processes, which pearl handles and reports itself, go to the log and not into the terminal. Pinned by a test.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray._private import ray_constants
from ray._private import worker as ray_worker

from pearl.config.cluster import ClusterConfig
from pearl.errors import ConfigError, UserError
from pearl.units import MIB

NAMESPACE = "pearl"
_FOUND_BY_RAY = ("auto", "local")
_CLIENT = "ray://"
_SHORTEST_CHECK_S = 10.0
"""What the check of a cluster's health gets at least: most of it is the import of Ray."""

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


def _start_local(config: ClusterConfig) -> None:
    _listen_on_loopback_only()
    try:
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
    except ValueError as error:
        raise ConfigError(
            f"cluster.object_store_mib: got {config.object_store_mib}: Ray refuses it: {error}"
        ) from error
    except (ConnectionError, RuntimeError) as error:
        raise UserError(f"Ray cannot be started on this machine: {error}; `pearl doctor` examines it") from error


def _connect(config: ClusterConfig) -> None:
    _check_answers(config.address, config.start_timeout_s)
    try:
        ray.init(address=config.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _unreachable(config.address, str(error)) from error


def _check_answers(address: str, timeout_s: float) -> None:
    """Ask a cluster for its health first: `ray.init` waits without a bound, and writes its own warnings meanwhile.

    Raises:
        ConfigError: nothing answers, or nothing that is a Ray cluster.
    """
    if address in _FOUND_BY_RAY:
        return
    is_client = address.startswith(_CLIENT)
    host, _, port = address.removeprefix(_CLIENT).rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise _unreachable(address, "not a host and a port")
    ends_s = time.monotonic() + timeout_s
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except OSError as error:
        raise _unreachable(address, error.strerror or str(error)) from error
    if is_client:
        return  # Ray's client gives up by itself.
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--skip-version-check"]
    try:
        # In a process of its own, as no call of Ray's for it has a bound.
        subprocess.run(  # noqa: S603 - fixed arguments, and an address that was checked
            [*command, "--address", address],
            capture_output=True,
            check=True,
            timeout=max(_SHORTEST_CHECK_S, ends_s - time.monotonic()),
        )
    except subprocess.CalledProcessError as error:
        raise _unreachable(address, "what answers there is not one") from error
    except subprocess.TimeoutExpired as error:
        raise _unreachable(address, f"no answer within {timeout_s:g} s (cluster.start_timeout_s)") from error


def _unreachable(address: str, why: str) -> ConfigError:
    return ConfigError(
        f"cluster.address: got {address!r}: no Ray cluster there: {why}; want host:port of one that "
        "`ray start --head` has begun, `auto` for the one on this machine, or nothing for a Ray of the run's own"
    )


@contextlib.contextmanager
def ray_session(config: ClusterConfig) -> Iterator[None]:
    """Have Ray for the block; a local Ray ends with it, with every process that it started.

    Raises:
        ConfigError: no cluster answers at `cluster.address` within `cluster.start_timeout_s`; no room for the object store.
        UserError: Ray cannot be started on this machine.
    """
    if ray.is_initialized():
        yield
        return
    # Workers inherit this: a BLAS with a thread per core makes processes on shared cores wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ["PYTHONPATH"] = os.pathsep.join(_paths())
    ray_worker.print_to_stdstream = _to_log
    if config.address:
        _connect(config)
    else:
        _start_local(config)
    try:
        yield
    finally:
        ray.shutdown()
