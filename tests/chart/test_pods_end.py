"""What is first in a container of the head ends when Kubernetes asks it to, and needs no SIGKILL:
the next head starts only when the pod has gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from serve_app.local.environment import ROOT, VENV
from tests.chart.charts import cluster_of, documents, pod_templates, stage_values
from tests.waiting import PATIENCE_S, until


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def first_process(words: Sequence[str], **more: str) -> Iterator[subprocess.Popen[str]]:
    """A command that is the first process of a namespace, as in a container."""
    env = {**os.environ, "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}", **more}
    apart = ["unshare", "--net", "--pid", "--fork", "--kill-child", *words]
    running = subprocess.Popen(apart, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        until("the first process", lambda: children(running.pid))
        yield running
    finally:
        running.kill()
        running.wait()


def ends_at_sigterm(running: subprocess.Popen[str]) -> None:
    """Who ignores the signal, as the first process of a namespace does unless it handles it, never
    ends.
    """
    os.kill(children(running.pid)[0], signal.SIGTERM)
    assert running.wait(PATIENCE_S) == 128 + signal.SIGTERM


def test_the_autoscaler_ends_when_it_is_asked_to() -> None:
    """Ray's own process would ignore the signal: it is first in its container, and handles none."""
    options = cluster_of(documents(stage_values("multi-node")))["autoscalerOptions"]
    words = [*options["command"], *options["args"]]
    named = {"RAY_CLUSTER_NAME": "hermes", "RAY_CLUSTER_NAMESPACE": "prod"}
    with first_process(words, **named) as running:
        until("Ray's autoscaler", lambda: "ray kuberay-autoscaler" in started(running))
        ends_at_sigterm(running)


def started(running: subprocess.Popen[str]) -> str:
    """The command line of what the first process has started."""
    of_first = [words_of(pid) for first in children(running.pid) for pid in children(first)]
    return " ".join(of_first)


def words_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")


def test_a_pod_that_waits_for_redis_ends_when_it_is_asked_to() -> None:
    (container,) = pod_templates(documents(stage_values("cpu")))["head"]["spec"]["initContainers"]
    nobody = {"HERMES_REDIS_URL": "redis://127.0.0.1:1/0"}
    with first_process(container["command"], **nobody) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("waiting: ")
        ends_at_sigterm(running)
