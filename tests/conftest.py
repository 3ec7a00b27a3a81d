"""Fixtures for all tests."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Machines that run tests are shared: how long an example takes says nothing.
settings.register_profile("pearl", deadline=None)
settings.load_profile("pearl")

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Commands and benchmarks quieten what they are about, for the rest of their process: here that is every test."""
    logger = logging.getLogger("pearl")
    before, disabled = logger.level, logging.root.manager.disable
    yield
    logger.setLevel(before)
    logging.disable(disabled)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the demo's untrained model."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from make_tiny_qwen3 import TinyQwen3, make_tiny_qwen3
    finally:
        sys.path.pop(0)
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3"
    make_tiny_qwen3(folder, TinyQwen3())
    return folder


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One small local Ray for all tests that need processes."""
    from pearl.cluster.local_ray import ray_session
    from pearl.config.cluster import ClusterConfig

    sys.path.insert(0, str(ROOT))
    with ray_session(ClusterConfig(object_store_mib=80)):
        yield
    sys.path.remove(str(ROOT))
