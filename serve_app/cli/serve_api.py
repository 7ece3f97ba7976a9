"""Ray's dashboard: deploys a Serve config and reads its status."""

from __future__ import annotations

import json
import operator
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

_TOKEN_FIX = "give the cluster's token in RAY_AUTH_TOKEN, or its file in RAY_AUTH_TOKEN_PATH"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def dashboard(address: str) -> str:
    """The URL of a dashboard as a person writes it: with or without scheme and trailing slash. A
    proxy is not asked for what is on this machine.

    Raises:
        RuntimeError: it is no address of a dashboard.
    """
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname if parts.scheme in ("http", "https") and parts.port != 0 else None
    except ValueError:
        host = None
    if not host:
        raise RuntimeError(f"'{address}' is no address of a dashboard: http://<head>:8265 is one")
    if host in _LOOPBACK:
        for name in ("no_proxy", "NO_PROXY"):  # for urllib and for Ray's client
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), *_LOOPBACK)))
    return url.rstrip("/")


def authorization() -> dict[str, str]:
    """Ray's token as a header, from the places where Ray's own clients look for it.

    Raises:
        RuntimeError: there is none, or it cannot be a header.
    """
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return {}
    where, token = "RAY_AUTH_TOKEN", os.environ.get("RAY_AUTH_TOKEN", "").strip()
    if not token:
        file = os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
        where = f"Ray's token file {file}"
        try:
            token = Path(file).expanduser().read_text().strip()
        except (OSError, RuntimeError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise RuntimeError(f"{where} cannot be read: {why}: {_TOKEN_FIX}") from None
    if not re.fullmatch(r"[!-~]+", token):
        raise RuntimeError(f"{where} holds no token: {_TOKEN_FIX}")
    return {"authorization": f"Bearer {token}"}


class DashboardFails(ConnectionError):
    """The dashboard is there, and fails at what it is asked (500)."""


def ask(url: str, timeout_s: float) -> Any:
    """Request a page of the dashboard; returns the open response.

    Raises:
        OSError: nobody answers, or somebody who is no dashboard of Ray or wants another token;
            `DashboardFails` if it answers 500.
    """
    request = urllib.request.Request(url, headers=authorization())
    try:
        return urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        if error.code == 500:
            said = error.read().decode(errors="replace").strip()[-2000:]
            raise DashboardFails(f"{url} answers 500: {said}") from None
        raise ConnectionError(_refusal(url, error.code)) from None
    except urllib.error.URLError as error:
        raise ConnectionError(f"{url} does not answer: {error.reason}") from None


def _refusal(url: str, status: int) -> str:
    if status in (401, 403):
        return f"{url} answers {status}: set RAY_AUTH_MODE=token, and {_TOKEN_FIX}"
    return f"{url} answers {status}: give the address of Ray's dashboard, http://<head>:8265"


def _value(url: str, *names: str) -> Any:
    """A value in the JSON of a page of the dashboard, by the names that lead to it.

    Raises:
        OSError: as `ask`, and if there is no such value.
    """
    with ask(url, timeout_s=30) as response:
        try:
            return reduce(operator.getitem, names, json.load(response))
        except (ValueError, LookupError, TypeError):
            raise ConnectionError(_refusal(url, response.status)) from None


def ray_version(dashboard_url: str) -> str:
    """The version of Ray that the cluster runs."""
    return str(_value(f"{dashboard_url}/api/version", "ray_version"))


def nodes(dashboard_url: str) -> list[dict[str, Any]]:
    """The living nodes, from Ray's state API."""
    found = _value(f"{dashboard_url}/api/v0/nodes?detail=1", "data", "result", "result")
    return [node for node in found if node["state"] == "ALIVE"]


def offered(dashboard_url: str) -> set[str]:
    """The resources that any node has, custom ones included."""
    return {name for node in nodes(dashboard_url) for name in node["resources_total"]}


def with_scaling(application: dict[str, Any]) -> None:
    """Move an application's autoscaling from its `args` to its `deployments`, unless its workers
    have an entry there. Serve replaces every replica after a change of `args`, and none after a
    change there. But for an entry its controller (2.60) imports our router, so Ray's own
    environment must have the code: `hermes-serve deploy` leaves the autoscaling where it is.
    """
    from serve_app.settings import Settings  # most commands need none, and it takes 0.1 s

    args, deployments = application.get("args") or {}, application.get("deployments") or []
    scaling = Settings.model_validate(args).workers.autoscaling
    if scaling is None or any(one.get("name") == "Worker" for one in deployments):
        return
    workers = {name: value for name, value in args["workers"].items() if name != "autoscaling"}
    application["args"] = {**args, "workers": {**workers, "replicas": scaling.min_replicas}}
    worker = {"name": "Worker", "num_replicas": "auto", "autoscaling_config": scaling.for_serve()}
    application["deployments"] = [*deployments, worker]


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
        if error.code in (401, 403, 404):
            raise RuntimeError(_refusal(dashboard_url, error.code)) from None
        raise RuntimeError(
            f"Serve refused the config: {error.read().decode(errors='replace')[-2000:]}"
        ) from None


def applications(dashboard_url: str) -> dict[str, Any]:
    """Serve's view of each application by its name: `status`, `message`, `deployments`."""
    url = f"{dashboard_url}/api/serve/applications/"
    found = _value(url, "applications")
    if not isinstance(found, dict):
        raise ConnectionError(_refusal(url, 200))
    return found


def application_status(dashboard_url: str) -> dict[str, Any]:
    """The same for the first application, of a cluster that has one."""
    return next(iter(applications(dashboard_url).values()), {})


def failure(status: Mapping[str, Any]) -> str:
    """The line that says why a deployment failed: ours if there is one, otherwise Serve's
    message.
    """
    messages = [str(status.get("message", ""))]
    messages += [str(item.get("message", "")) for item in status.get("deployments", {}).values()]
    lines = [line.strip() for message in messages for line in message.splitlines()]
    ours = [line for line in lines if "settings:" in line]
    return ours[-1][ours[-1].index("settings:") :] if ours else "\n".join(lines[-15:])
