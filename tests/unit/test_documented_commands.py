"""Whoever follows README.md or docs/install.md types nothing that no test has run."""

from __future__ import annotations

import ast

import pytest

from tests.documented import INSTALL, README, ROOT, lines, spans
from tests.tables import Failures

pytestmark = pytest.mark.nightly  # it concerns documents

WHEEL = "service/test_wheel.py::test_an_installed_wheel_starts_and_operates_a_service"
DEMO = "service/test_demo.py::test_the_demo_keeps_its_promises"
CODE_TRAVELS = "test_the_code_travels_to_a_cluster_that_has_only_ray_and_vllm"
NODES = "service/test_ray_start.py::test_operators_commands_work_with_the_token_and_say_so_without"
INSTALLS = "service/test_pages.py::test_the_commands_of_the_page_install_the_project"
REDIS = "service/test_pages.py::test_the_commands_of_the_page_start_a_redis_with_two_users"
KEYS = "unit/test_cli.py::test_a_key_and_its_line_fit_each_other"

RUN_BY = {
    "scripts/quickstart": "service/test_quickstart.py::test_it_starts_a_service_that_nothing_of_"
    "the_users_reaches_and_that_outlives_its_redis",
    "scripts/demo": DEMO,
    "scripts/deploy cluster/": f"service/test_deploy.py::{CODE_TRAVELS}",
    "curl -N http": "service/test_pages.py::test_the_readmes_request_is_answered",
    "pip install hermes-serve": WHEEL,
    "hermes-serve up": WHEEL,
    "hermes-serve status": WHEEL,
    "hermes-serve doctor": WHEEL,
    "hermes-serve demo": DEMO,
    "helm install hermes helm/hermes-serve --set image.repository=<image> --set model=<hub id>": (
        "chart/test_secrets.py::test_two_values_are_enough"
    ),
    "python3 -m venv": INSTALLS,
    "pip install --no-deps -r": INSTALLS,
    "(umask 077; openssl rand": REDIS,
    "hash() {": REDIS,
    'sed "/^user hermes/': REDIS,
    "redis-server cluster/redis.conf": REDIS,
    "scripts/api-key acme": KEYS,
    "scripts/api-key --metrics": KEYS,
    "export HERMES_REDIS_URL=": NODES,
    "cluster/ray-start alone": "service/test_ray_start.py::test_alone_leaves_nothing_open_but_what_"
    "serve_itself_opens",
    "cluster/ray-start head": NODES,
    "cluster/ray-start node": NODES,
    "export RAY_AUTH_MODE=token": NODES,
    "serve deploy cluster/": NODES,
    "until curl -sf": "service/test_pages.py::test_the_pages_wait_ends_when_the_service_is_ready",
}
"""By the beginning of a command, the test that runs it."""


def test_a_test_runs_each_command_that_a_reader_is_told() -> None:
    told = {*lines(README), *spans(README), *lines(INSTALL)}
    # The one runs this; the other stands in for wherever the clone comes from.
    told = {one for one in told if not one.startswith(("scripts/test", "git clone "))}
    assert len(told) >= len(RUN_BY)
    with Failures() as failures:
        for command in told:
            with failures.of(command):
                assert [begin for begin in RUN_BY if command.startswith(begin)], "no test runs it"
        for begin, test in RUN_BY.items():
            with failures.of(begin, test):
                assert [command for command in told if command.startswith(begin)], "nobody is told"
                file, _, name = test.partition("::")
                body = ast.parse((ROOT / "tests" / file).read_text()).body
                functions = (ast.FunctionDef, ast.AsyncFunctionDef)
                assert name in [node.name for node in body if isinstance(node, functions)]
