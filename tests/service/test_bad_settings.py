"""Serve rejects settings that cannot work, in one line that names the setting and the fix."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.local import service as local
from serve_app.cli import serve_api
from tests.service.support import Running
from tests.waiting import until

# In the gate: unit/test_settings.py and test_cli.py refuse each.
pytestmark = pytest.mark.nightly

# What is changed, and words of the line that refuses it.
ROWS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "an unknown key": (
        {"ingress": {"replica": 2}},
        ("'ingress.replica'", "did you mean 'replicas'?"),
    ),
    "a wrong unit": (
        {"ingress": {"heartbeat_s": "10s"}},
        ("'ingress.heartbeat_s'", "plain number of seconds"),
    ),
    "an impossible combination": (
        {"workers": {"autoscaling": {"min_replicas": 4, "max_replicas": 2}}},
        ("'workers.autoscaling'", "min_replicas (4) is above max_replicas (2)"),
    ),
    "a typo in the engine's arguments": (
        {"engine": {"args": {"max_modle_len": 4096}}},
        ("'engine.args.max_modle_len'", "did you mean 'max_model_len'?"),
    ),
}


def test_bad_settings_are_refused_and_what_runs_is_left_alone(service: Running) -> None:
    url = f"{service.service.dashboard_url}/api/serve/applications/"
    good = yaml.safe_load((Path(service.service.state_dir) / "serve.yaml").read_text())
    (application,) = good["applications"]
    bad = [
        {
            **application,
            "name": f"bad-{number}",
            "route_prefix": f"/bad-{number}",
            "args": local.merged(application["args"], changes),
        }
        for number, (changes, _) in enumerate(ROWS.values())
    ]

    def failed(number: int) -> dict[str, Any] | None:
        with serve_api.ask(url, timeout_s=120) as response:
            status: dict[str, Any] = json.load(response)["applications"].get(f"bad-{number}", {})
        return status if status.get("status") == "DEPLOY_FAILED" else None

    serve_api.deploy(service.service.dashboard_url, {**good, "applications": [application, *bad]})
    try:
        for number, (what, (_, words)) in enumerate(ROWS.items()):
            status = until(f"{what} is refused", partial(failed, number), 480)
            line = serve_api.failure(status)
            assert line.startswith("settings: "), f"{what}: {line}"
            assert "\n" not in line
            assert [word for word in words if word not in line] == [], f"{what}: {line}"
        assert service.ask(tokens=2).status_code == 200
    finally:
        serve_api.deploy(service.service.dashboard_url, good)
