"""Fixtures for all tests: a private Redis, and a namespace per test."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import itertools
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from serve_app.local import processes, ray_cluster, redis_server, surroundings
from serve_app.local.environment import ROOT
from tests import permits, runs

pytest_plugins = ("tests.reruns",)

# Before anything else: no test meets the variables, the token or the Ray of whoever runs it.
surroundings.leave()
_folder = tempfile.TemporaryDirectory(prefix=runs.folder_prefix())
ray_cluster.use_token(Path(os.environ.get("HERMES_KEEP_SERVICES", _folder.name)) / "ray-token")
os.environ["VLLM_RPC_BASE_PATH"] = (
    _folder.name
)  # of the engines in this process: their sockets stay where they are
# What vLLM compiles, once for all engines of a checkout.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(ROOT / ".hermes" / "compiled")

# A loaded machine may take its time; the examples are the same for everyone.
settings.register_profile("hermes", deadline=None, derandomize=True, database=None)
settings.load_profile("hermes")

_numbers = itertools.count(1)


def pytest_configure(config: pytest.Config) -> None:
    """SIGUSR1 prints the stack of every thread and interrupts the run, which ends what it started:
    `scripts/test` sends it to a run that hangs.
    """
    spreads = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")

    def interrupt(*_: object) -> None:
        for worker in psutil.Process().children() if spreads else ():
            worker.send_signal(signal.SIGUSR1)
        raise KeyboardInterrupt

    signal.signal(signal.SIGUSR1, interrupt)
    faulthandler.register(signal.SIGUSR1, file=os.dup(2), all_threads=True, chain=True)


def pytest_sessionstart() -> None:
    runs.begin()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """What async tests and fixtures run on."""
    return "asyncio"


async def _collected() -> None:
    gc.collect()
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    """A file leaves nothing behind that belongs to a closed event loop, such as an SDK's client or
    a process: its finalizer would fail in whichever test runs when Python collects it.
    """
    yield
    asyncio.run(_collected())


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Redis, started for this run and ended after it."""
    redis = permits.narrow(redis_server.start(tmp_path_factory.mktemp("redis"), namespace="t*"))
    yield redis.url()
    processes.end(redis.pid)


@pytest.fixture
def namespace() -> str:
    """A settings namespace that no other test uses."""
    return f"t{next(_numbers)}"
