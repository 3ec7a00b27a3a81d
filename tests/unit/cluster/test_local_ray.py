"""A cluster that is not there is told of at once, or within a bound, and by the right key. Ray itself: tests/integration."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from pearl.cluster import local_ray
from pearl.cluster.local_ray import ray_session
from pearl.config.cluster import ClusterConfig
from pearl.errors import ConfigError, UserError


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a session sets for its processes does not outlive the test."""
    for name in (
        "OMP_NUM_THREADS",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
        "PYTHONPATH",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
    ):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(local_ray.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(local_ray.ray_worker, "print_to_stdstream", lambda *_: None)
    monkeypatch.setattr(local_ray.ray_constants, "ENABLE_RAY_CLUSTER", False)


def refuse(error: Exception) -> Any:
    def init(**_: object) -> None:
        raise error

    return init


def enter(**config: object) -> None:
    with ray_session(ClusterConfig.model_validate(config)):
        raise AssertionError("there is no Ray")


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_on_which_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ray.ray, "init", refuse(AssertionError("must not be asked")))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    want = rf"^cluster\.address: got '127\.0\.0\.1:{port}': no Ray cluster there: Connection refused; want host:port of one"
    with pytest.raises(ConfigError, match=want):
        enter(address=f"127.0.0.1:{port}")


def test_something_that_never_answers(monkeypatch: pytest.MonkeyPatch, silent_port: int) -> None:
    monkeypatch.setattr(local_ray.ray, "init", refuse(AssertionError("must not be asked")))
    monkeypatch.setattr(local_ray, "_SHORTEST_CHECK_S", 0.1)
    with pytest.raises(ConfigError, match=r"no answer within 0\.5 s \(cluster\.start_timeout_s\)"):
        enter(address=f"127.0.0.1:{silent_port}", start_timeout_s=0.5)


def test_something_that_is_no_cluster(monkeypatch: pytest.MonkeyPatch, silent_port: int) -> None:
    def run(command: list[str], **_: object) -> None:
        assert command[-2:] == ["--address", f"127.0.0.1:{silent_port}"]
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(local_ray.subprocess, "run", run)
    with pytest.raises(ConfigError, match="what answers there is not one"):
        enter(address=f"127.0.0.1:{silent_port}")


@pytest.mark.parametrize("address", ["here", ":6379", "host:port", "host:0", "host:65536", "-x:y"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^cluster\.address: got .*: not a host and a port; want host:port"):
        enter(address=address)


def test_what_ray_finds_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ray.ray, "init", refuse(ConnectionError("could not find any running Ray")))
    with pytest.raises(ConfigError, match=r"^cluster\.address: got 'auto': .*: could not find any running Ray"):
        enter(address="auto")


def test_rays_client(monkeypatch: pytest.MonkeyPatch, silent_port: int) -> None:
    monkeypatch.setattr(local_ray.ray, "init", refuse(ConnectionError("ray client connection timeout")))
    with pytest.raises(ConfigError, match=r"ray client connection timeout"):
        enter(address=f"ray://127.0.0.1:{silent_port}")
    with pytest.raises(ConfigError, match=r"not a host and a port"):
        enter(address="ray://here")


def test_an_object_store_that_ray_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ray.ray, "init", refuse(ValueError("exceeds /dev/shm size")))
    with pytest.raises(
        ConfigError, match=r"^cluster\.object_store_mib: got 99: Ray refuses it: exceeds /dev/shm size$"
    ):
        enter(object_store_mib=99)


def test_a_ray_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ray.ray, "init", refuse(RuntimeError("no port")))
    with pytest.raises(UserError, match=r"^Ray cannot be started on this machine: no port; `pearl doctor`"):
        enter()
