"""The command `deploy`: deploys a Serve config file to a Ray cluster, together with the code."""

from __future__ import annotations

import importlib
import importlib.metadata
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import BaseModel, Field, ValidationError

from serve_app.cli import serve_api
from serve_app.cli.console import DASHBOARD, fail, new_app
from serve_app.errors import SettingsError
from serve_app.settings import load_settings
from serve_app.settings.sections import no_place

IMPORT_PATH = "serve_app.deploy:build"
CARRIED = ("serve_app", "workers", "redis", "hiredis", "fastapi_offline")
EXCLUDED = ["**/__pycache__", "*.pyc", "redoc.standalone.js", "direct_url.json"]

_CONFIG = "Serve config file, such as cluster/local_cpu.yaml"
_REPLACE = "remove the cluster's other Serve applications, which CONFIG lacks"
_RENDER = "write a config for `serve deploy` to this file instead of deploying"

app = new_app()


@app.command("deploy")
def deploy(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", exists=True, dir_okay=False, help=_CONFIG)
    ],
    address: Annotated[str, typer.Option(help="address of the cluster's dashboard")] = DASHBOARD,
    replace_all: Annotated[bool, typer.Option(help=_REPLACE)] = False,
    render: Annotated[Path | None, typer.Option(metavar="FILE", help=_RENDER)] = None,
    timeout_s: Annotated[float, typer.Option(help="how long to wait until it runs")] = 600.0,
) -> None:
    """Deploy a Serve config file to a Ray cluster that has only Ray and vLLM installed.

    Uploads the project's packages, and the small libraries that neither Ray nor vLLM installs
    (redis, hiredis, fastapi-offline), to the cluster's own package store, and names them in the
    application's runtime_env; every node fetches them from there. The rest is `serve deploy`.
    """
    if find_spec("ray") is None:
        fail("deploy needs Ray's client: pip install 'hermes-serve[serve]'")
    try:
        address = serve_api.dashboard(address)
        document = read(config)
        ours = [one for one in document["applications"] if one.get("import_path") == IMPORT_PATH]
        settings = [load_settings(application.get("args") or {}) for application in ours]
        others = left_out(document, serve_api.applications(address))
        if others and not replace_all:
            raise RuntimeError(
                f"Serve would remove what else runs on this cluster: {', '.join(others)}. Add them "
                f"to `applications` in {config} (`serve config --address {address}` prints them), "
                "or give --replace-all"
            )
        for one in settings:
            check_places(one.workers.ray_resource, address)
        with_code({"applications": ours}, address)
        if render:
            render.write_text(yaml.safe_dump(document, sort_keys=False))
            print(f"serve deploy --address {address} {render}")
            return
        serve_api.deploy(address, document)
        for application in document["applications"]:
            wait_running(address, application.get("name", "default"), timeout_s)
    except (SettingsError, RuntimeError, OSError) as error:
        fail(str(error))


class _Application(BaseModel):
    name: str = "default"


class _Config(BaseModel):
    applications: list[_Application] = Field(min_length=1)


def read(config: Path) -> dict[str, Any]:
    """A Serve config file, with at least one application; `SettingsError` if it is none."""
    try:
        document: dict[str, Any] = yaml.safe_load(config.read_text())
        _Config.model_validate(document)
    except (yaml.YAMLError, UnicodeDecodeError, ValidationError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise SettingsError(
            f"{config}: `applications` must list what to deploy, as in cluster/local_cpu.yaml: "
            + " ".join(str(why).split())
        ) from None
    return document


def left_out(document: Mapping[str, Any], running: Iterable[str]) -> list[str]:
    """The applications that run and that a config does not name."""
    named = {application.get("name", "default") for application in document["applications"]}
    return sorted(set(running) - named)


def check_places(resource: str, address: str) -> None:
    """Raise `SettingsError` if no node offers the workers' resource: Serve would wait for one
    without an end.
    """
    if resource and resource not in serve_api.offered(address):
        raise SettingsError(f"settings: {no_place(resource)}")


def with_code(
    document: dict[str, Any], address: str, folders: Sequence[Path] | None = None
) -> None:
    """Upload packages (`folders`: instead of those here) and name them in every application's
    `runtime_env`.
    """
    # Import Ray here: it takes seconds, which no other command needs to wait for.
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

    serve_api.ray_version(address)  # Ray's client asks for it, too, and ends with a KeyError
    client = ServeSubmissionClient(address)
    carried = {
        "py_modules": [str(path) for path in folders or (*map(_folder, CARRIED), _entry_points())],
        "excludes": EXCLUDED,
    }
    client._upload_py_modules_if_needed(carried)
    for application in document["applications"]:
        application.setdefault("runtime_env", {})["py_modules"] = carried["py_modules"]


def _folder(name: str) -> Path:
    module = importlib.import_module(name)
    assert module.__file__ is not None
    return Path(module.__file__).parent


def _entry_points() -> Path:
    """The folder by which vLLM finds its plug-in in every process of an engine."""
    files = importlib.metadata.files("hermes-serve") or []
    (file,) = [file for file in files if file.name == "entry_points.txt"]
    return Path(str(file.locate())).parent


def wait_running(address: str, name: str, timeout_s: float) -> None:
    """Wait until Serve reports that the application of this name runs; `RuntimeError` if it failed
    or took too long.
    """
    deadline = time.monotonic() + timeout_s
    said = ""
    while said != "RUNNING":
        status = serve_api.applications(address).get(name, {})
        line = str(status.get("status", "unknown"))
        if line != said:
            print(f"  {line}", flush=True)
            said = line
        if line in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise RuntimeError(f"the deployment failed: {serve_api.failure(status)}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"not running after {timeout_s:.0f} s")
        time.sleep(0.5)
