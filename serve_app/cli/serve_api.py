"""Ray's dashboard: deploys a Serve config and reads its status."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def authorization() -> dict[str, str]:
    """Ray's token as a header, from the places where Ray's own clients look for it."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return {}
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return {
        "authorization": f"Bearer {os.environ.get('RAY_AUTH_TOKEN') or file.read_text().strip()}"
    }


def ask(url: str, timeout_s: float) -> Any:
    """Request a page of the dashboard; returns the open response. Raises as
    `urllib.request.urlopen` does.
    """
    return urllib.request.urlopen(
        urllib.request.Request(url, headers=authorization()), timeout=timeout_s
    )


def nodes(dashboard_url: str) -> list[dict[str, Any]]:
    """The living nodes, from Ray's state API."""
    with ask(f"{dashboard_url}/api/v0/nodes?detail=1", timeout_s=30) as response:
        found = json.load(response)["data"]["result"]["result"]
    return [node for node in found if node["state"] == "ALIVE"]


def offered(dashboard_url: str) -> set[str]:
    """The resources that any node has, custom ones included."""
    return {name for node in nodes(dashboard_url) for name in node["resources_total"]}


def deploy(dashboard_url: str, document: Mapping[str, Any]) -> None:
    """Do what `serve deploy` does, without its start-up time.

    Raises:
        RuntimeError: Serve rejected the config; the message is its answer.
    """
    request = urllib.request.Request(
        f"{dashboard_url}/api/serve/applications/",
        data=json.dumps(document).encode(),
        headers={"content-type": "application/json", **authorization()},
        method="PUT",
    )
    try:
        with urllib.request.urlopen(request, timeout=120):
            pass
    except urllib.error.HTTPError as error:
        raise RuntimeError(
            f"Serve refused the config: {error.read().decode(errors='replace')[-2000:]}"
        ) from None


def application_status(dashboard_url: str) -> dict[str, Any]:
    """Serve's view of the application: `status`, `message`, `deployments`."""
    with ask(f"{dashboard_url}/api/serve/applications/", timeout_s=30) as response:
        applications: dict[str, Any] = json.load(response)["applications"]
    return next(iter(applications.values()), {})


def failure(status: Mapping[str, Any]) -> str:
    """The line that says why a deployment failed: ours if there is one, otherwise Serve's
    message.
    """
    messages = [str(status.get("message", ""))]
    messages += [str(item.get("message", "")) for item in status.get("deployments", {}).values()]
    lines = [line.strip() for message in messages for line in message.splitlines()]
    ours = [line for line in lines if "settings:" in line]
    return ours[-1][ours[-1].index("settings:") :] if ours else "\n".join(lines[-15:])
