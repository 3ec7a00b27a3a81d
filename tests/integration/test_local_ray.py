"""What this project relies on in Ray beyond its documented interface."""

from __future__ import annotations

import ipaddress
import os
import subprocess
import sys

import psutil
import pytest
import ray

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("local_ray")]


def test_no_port_is_open_to_other_machines() -> None:
    processes = {process.pid for process in psutil.Process().children(recursive=True)} | {os.getpid()}
    listening = [
        connection.laddr
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.pid in processes
    ]
    assert listening, "Ray listens nowhere: this test sees nothing"
    for address in listening:
        ip = ipaddress.ip_address(address.ip)
        plain = getattr(ip, "ipv4_mapped", None) or ip
        assert plain.is_loopback, f"{address} is open to other machines"
    assert {node["NodeManagerAddress"] for node in ray.nodes()} == {"127.0.0.1"}


def test_a_cluster_that_is_there_is_connected_to() -> None:
    address = ray.get_runtime_context().gcs_address
    code = (
        "import ray, sys; from pearl.cluster.local_ray import ray_session; from pearl.config.cluster import ClusterConfig\n"
        "with ray_session(ClusterConfig(address=sys.argv[1])): print(len(ray.nodes()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, address], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
