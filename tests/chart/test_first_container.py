"""The container that runs before Ray in every Ray pod, as the chart renders it."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

from serve_app.local import processes, redis_server
from serve_app.local.environment import ROOT, VENV
from tests.chart.charts import (
    EXTERNAL,
    HA,
    NAMED,
    STAGES,
    TLS,
    Document,
    documents,
    merged,
    pod_templates,
    stage_values,
)
from tests.tables import each

GCS = {"HERMES_GCS_REDIS", "HERMES_GCS_REDIS_USER", "HERMES_GCS_REDIS_PASSWORD"}


def first(values: Document, component: str) -> Document:
    (found,) = pod_templates(documents(values))[component]["spec"]["initContainers"]
    container: Document = found
    return container


def names(container: Document) -> set[str]:
    return {item["name"] for item in container["env"]}


@each("stage, changes", itertools.product(STAGES, ({}, HA, EXTERNAL, merged(EXTERNAL, TLS))))
def test_every_ray_pod_asks_for_redis_with_the_logins_that_it_will_use(
    stage: str, changes: Document
) -> None:
    values = merged(stage_values(stage), changes)
    for component in ("head", "ingress", "engine"):
        container = first(values, component)
        ray = pod_templates(documents(values))[component]["spec"]["containers"][0]
        assert container["image"] == ray["image"]
        of_redis = [item for item in ray["env"] if item["name"].startswith("HERMES_REDIS")]
        assert [item for item in container["env"] if item["name"].startswith("HERMES_REDIS")] == (
            of_redis
        )
        assert (names(container) >= GCS) == (component == "head")
        with_ca = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
        assert with_ca == (["/etc/hermes/redis"] if changes and "caKey" in str(changes) else [])


def test_a_head_without_its_state_in_redis_has_no_login_for_it() -> None:
    off = merged(NAMED, {"gcsFaultTolerance": {"enabled": False}})
    assert not names(first(off, "head")) & GCS


def test_its_command_finds_a_redis_as_it_should_be(tmp_path: Path) -> None:
    container = first(NAMED, "head")
    program, *options = container["command"]
    server = redis_server.start(tmp_path)
    given = {
        "HERMES_REDIS_URL": server.url(),
        "HERMES_GCS_REDIS": f"{server.host}:{server.port}",
        "HERMES_GCS_REDIS_USER": "ray",
        "HERMES_GCS_REDIS_PASSWORD": server.password,
    }
    assert set(given) <= names(container)
    try:
        done = subprocess.run(
            [VENV / "bin" / program, *options],
            env={**os.environ, **given},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        processes.end(server.pid)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "Redis: usable\nRedis, for Ray's GCS: usable\n"
