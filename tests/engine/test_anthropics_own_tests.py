"""The tests that Anthropic has for messages in its own SDK, against the real engine: `claude-*` are
aliases of the model.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("vllm")

from tests.engine.resume_helpers import EngineThread
from tests.engine.test_both_ways import Started
from tests.installed_clients import ENVIRONMENT, of_anthropics_tests
from tests.journal.in_process import in_process, settings_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
FILES = ["tests/api_resources/test_messages.py", "tests/api_resources/beta/test_messages.py"]
NOT_HERE = ("there are no containers here", "MCP servers are not called from here")
"""What is refused in requests that have every parameter."""


def test_the_sdks_own_tests_pass(
    world: EngineThread, redis_url: str, namespace: str, tmp_path: Path
) -> None:
    command, folder = of_anthropics_tests()
    report = tmp_path / "report.xml"

    async def run() -> None:
        more: dict[str, Any] = {"workers": {"engine_stall_timeout_s": 600.0}}
        more["model"] = {"aliases": ["claude-*"]}
        async with in_process(
            settings_of(redis_url, namespace, **more), Started(world.engine)
        ) as d:
            environment = {**ENVIRONMENT, "TEST_API_BASE_URL": f"http://127.0.0.1:{d.port}"}
            words = [*command, *FILES, f"--junitxml={report}"]
            ran = await asyncio.create_subprocess_exec(*words, env=environment, cwd=folder)
            await ran.wait()

    world.run(run(), timeout_s=1500)
    cases = ElementTree.parse(report).getroot().iter("testcase")
    passed, wrong = 0, {}
    for case in cases:
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        why = str(problem.get("message")) if problem is not None else ""
        if not why and case.find("skipped") is None:
            passed += 1
        elif why and not any(text in why for text in NOT_HERE):
            wrong[f"{case.get('classname')}.{case.get('name')}"] = why
    assert not wrong
    assert passed >= 100
