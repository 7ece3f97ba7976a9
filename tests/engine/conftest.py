"""One real engine for all tests that need no arguments of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.engine.resume_helpers import EngineThread


@pytest.fixture(scope="session")
def world() -> Iterator[EngineThread]:
    """A running engine behind vLLM's own server app."""
    made = EngineThread()
    yield made
    made.close()
