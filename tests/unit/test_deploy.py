"""`scripts/deploy` says in one sentence what it cannot deploy, and removes nothing unasked."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cli import serve_api
from serve_app.cli.deploy_code import left_out
from serve_app.cli.main import app
from tests.http_server import Script, sending, serving, whole
from tests.tables import each

CONFIG = Path(__file__).parents[2] / "cluster" / "local_cpu.yaml"


def refusal(config: Path, address: str) -> str:
    done = CliRunner().invoke(app, ["deploy", str(config), "--address", address])
    assert done.exit_code == 1, done.exception
    assert done.stderr.count("\n") == 1
    return done.stderr


def somebody(status: int, page: bytes = b"<html>") -> Script:
    """No dashboard of Ray: the same page and status for everything."""
    return sending(whole(status, page, "text/html"))


NO_CONFIGS = ["", "applications: []", "- a", "applications: [hermes]", "applications: [{name: 5}]"]


@each("text", [*NO_CONFIGS, "a: ["])
def test_a_file_without_an_application_is_refused(text: str, tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(text)
    said = refusal(config, "127.0.0.1:1")
    assert said.startswith(f"{config}: `applications` must list what to deploy")


@each("address", ["ray://h:10001", "http://", "http://h:port", "http://h:70000", "", "http://[h"])
def test_what_is_no_address_is_refused(address: str) -> None:
    assert f"'{address}' is no address of a dashboard" in refusal(CONFIG, address)


@each(
    "status, words, page",
    [
        (401, "RAY_AUTH_TOKEN", b"<html>"),
        (404, "Ray's dashboard", b"<html>"),
        (200, "/api/serve/applications/ answers 200: give the address of Ray's", b"<html>"),
        (200, "/api/version answers 200: give the address of Ray's", b'{"applications": {}}'),
    ],
)
def test_who_answers_and_is_no_dashboard_is_told(status: int, words: str, page: bytes) -> None:
    with serving(somebody(status, page)) as server:
        said = refusal(CONFIG, f"127.0.0.1:{server.port}")
    assert f"answers {status}" in said
    assert words in said


@each(
    "name, words",
    [
        ("none", "none cannot be read: No such file or directory: "),
        ("empty", "empty holds no token: "),
        ("lines", "lines holds no token: "),
        ("binary", "binary cannot be read: "),
    ],
)
def test_a_token_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    files = {"empty": b"\n", "lines": b"a\nb", "binary": b"\xff"}
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / name))
    said = refusal(CONFIG, "127.0.0.1:1")
    assert said.startswith(f"Ray's token file {tmp_path}")
    assert words in said
    assert "RAY_AUTH_TOKEN, or its file in RAY_AUTH_TOKEN_PATH" in said


def test_no_proxy_is_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    with serving(somebody(404)) as server:
        assert "answers 404" in refusal(CONFIG, f"127.0.0.1:{server.port}")


@each("address", ["h:8265", "http://h:8265", "http://h:8265/"])
def test_an_address_may_lack_its_scheme_and_end_with_a_slash(address: str) -> None:
    assert serve_api.dashboard(address) == "http://h:8265"


def test_what_a_config_does_not_name_would_be_removed() -> None:
    config = {"applications": [{"name": "hermes"}, {}]}
    assert left_out(config, ["other", "hermes", "default", "a"]) == ["a", "other"]
