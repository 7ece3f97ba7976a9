"""Ray's dashboard: deploys a Serve config and reads its status."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

_TOKEN_FIX = "give the cluster's token in RAY_AUTH_TOKEN, or its file in RAY_AUTH_TOKEN_PATH"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def host_of(url: str) -> str | None:
    """The host of an HTTP URL; None if it is none."""
    try:
        parts = urlsplit(url)
        return parts.hostname if parts.scheme in ("http", "https") and parts.port != 0 else None
    except ValueError:
        return None


def dashboard(address: str) -> str:
    """The URL of a dashboard as a person writes it: with or without scheme and trailing slash. A
    proxy is not asked for what is on this machine. `RuntimeError` if it is none.
    """
    url = address if "://" in address else f"http://{address}"
    if not (host := host_of(url)):
        raise RuntimeError(f"'{address}' is no address of a dashboard: http://<head>:8265 is one")
    if host in _LOOPBACK:
        for name in ("no_proxy", "NO_PROXY"):  # for httpx and for Ray's client
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), *_LOOPBACK)))
    return url.rstrip("/")


def authorization() -> dict[str, str]:
    """Ray's token as a header, from the places where Ray's own clients look for it; `RuntimeError`
    if it cannot be one.
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


def _send(method: str, url: str, timeout_s: float, **what: Any) -> httpx.Response:
    verify = url.startswith("https:")  # else it loads CA certificates for nothing
    given = {"headers": authorization(), "timeout": timeout_s, "verify": verify, **what}
    try:
        return httpx.request(method, url, follow_redirects=True, **given)
    except httpx.HTTPError as error:
        raise ConnectionError(f"{url} does not answer: {error}") from None


def ask(url: str, timeout_s: float = 30) -> httpx.Response:
    """Request a page of the dashboard.

    Raises:
        OSError: nobody answers, or somebody who is no dashboard of Ray or wants another token;
            `DashboardFails` if it answers 500.
    """
    response = _send("GET", url, timeout_s)
    if response.status_code == 500:
        raise DashboardFails(f"{url} answers 500: {response.text.strip()[-2000:]}")
    if not response.is_success:
        raise ConnectionError(_refusal(url, response.status_code))
    return response


def _refusal(url: str, status: int) -> str:
    if status in (401, 403):
        return f"{url} answers {status}: set RAY_AUTH_MODE=token, and {_TOKEN_FIX}"
    return f"{url} answers {status}: give the address of Ray's dashboard, http://<head>:8265"


def _value(url: str, *names: str) -> Any:
    """A value in the JSON of a page of the dashboard, by the names that lead to it; raises as `ask`
    does.
    """
    response = ask(url)
    try:
        return reduce(operator.getitem, names, response.json())
    except (ValueError, LookupError, TypeError):
        raise ConnectionError(_refusal(url, response.status_code)) from None


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
    """Do what `serve deploy` does, without its start-up time; `RuntimeError` says why Serve refuses
    the config.
    """
    response = _send("PUT", f"{dashboard_url}/api/serve/applications/", 120, json=document)
    if response.status_code in (401, 403, 404):
        raise RuntimeError(_refusal(dashboard_url, response.status_code))
    if not response.is_success:
        raise RuntimeError(f"Serve refused the config: {response.text[-2000:]}")


def applications(dashboard_url: str) -> dict[str, Any]:
    """Serve's view of each application by its name: `status`, `message`, `deployments`."""
    url = f"{dashboard_url}/api/serve/applications/"
    found = _value(url, "applications")
    if not isinstance(found, dict):
        raise ConnectionError(_refusal(url, 200))
    return found


def application_status(dashboard_url: str) -> dict[str, Any]:
    """The same for the first application."""
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
