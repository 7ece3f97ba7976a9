"""Serve rejects settings that cannot work, in one line that names the setting and the fix."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.cli import serve_api
from tests.service.support import Running
from tests.waiting import until


@pytest.mark.nightly  # in the gate, unit/test_settings.py and test_cli.py have each refusal
def test_bad_settings_are_refused_and_what_runs_is_left_alone(service: Running) -> None:
    dashboard = service.service.dashboard_url
    good = yaml.safe_load((Path(service.service.state_dir) / "serve.yaml").read_text())
    (application,) = good["applications"]
    bad = {**copy.deepcopy(application), "name": "bad", "route_prefix": "/bad"}
    bad["args"]["ingress"]["replica"] = 2

    def failed() -> dict[str, Any] | None:
        with serve_api.ask(f"{dashboard}/api/serve/applications/", timeout_s=120) as response:
            status: dict[str, Any] = json.load(response)["applications"].get("bad", {})
        return status if status.get("status") == "DEPLOY_FAILED" else None

    serve_api.deploy(dashboard, {**good, "applications": [application, bad]})
    try:
        line = serve_api.failure(until("it is refused", failed, 480))
        assert line.startswith("settings: "), line
        assert "'ingress.replica'" in line
        assert "did you mean 'replicas'?" in line
        assert "\n" not in line
        assert service.ask(tokens=2).status_code == 200
    finally:
        serve_api.deploy(dashboard, good)
