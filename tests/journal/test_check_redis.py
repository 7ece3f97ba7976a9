"""`hermes check-redis`, as the pods' init container runs it, on real Redis processes: each way in
which Redis cannot be used gives one sentence that says what to look at.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from serve_app.local import environment, ports, processes, redis_server
from serve_app.local.environment import ROOT
from serve_app.redis.connection import connect
from serve_app.redis.keyspace import service_key
from serve_app.settings import RedisSettings
from tests.tables import each
from tests.waiting import PATIENCE_S, until

SECRET = "not-the-password"
Done = subprocess.CompletedProcess[str]


def command(*options: str, wait_s: float = 0) -> list[str]:
    """`hermes check-redis` of this clone, whichever is installed."""
    hermes = [sys.executable, "-m", "serve_app.cli.main"]
    return [*hermes, "check-redis", "--wait-s", str(wait_s), *options]


def variables(url: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HERMES_")}
    return {**kept, "HERMES_REDIS_URL": url}


def run(url: str, words: list[str]) -> Done:
    env = variables(url)
    return subprocess.run(
        words, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def refused(done: Done, *said: str) -> None:
    """It ended with one sentence that says all this, and no password."""
    assert done.returncode == 1, done
    assert done.stderr.count("\n") == 1, done.stderr
    for words in said:
        assert words in done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis_server.RedisServer]:
    server = redis_server.start(tmp_path_factory.mktemp("redis"))
    yield server
    processes.end(server.pid)


@contextmanager
def serving(folder: Path, **settings: object) -> Iterator[redis_server.RedisServer]:
    server = redis_server.start(
        folder, settings={name.replace("_", "-"): value for name, value in settings.items()}
    )
    try:
        yield server
    finally:
        processes.end(server.pid)


# -- the way to it ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "said", "hint"),
    [
        ("hermes-redis", "DNS has no address for 'hermes-redis'", "and DNS"),
        ("10.1.2.3", "10.1.2.3:6379 does not serve", "check the URL"),
    ],
)
def test_an_address_that_leads_nowhere(tmp_path: Path, host: str, said: str, hint: str) -> None:
    """On a network of its own, with a loopback and a DNS server that does not answer."""
    resolv = tmp_path / "resolv.conf"
    resolv.write_text("nameserver 10.96.0.10\n")
    mounted = f'mount --bind {resolv} /etc/resolv.conf && ip link set lo up && exec "$@"'
    apart = ["unshare", "--net", "--mount", "sh", "-c", mounted, "sh"]
    refused(run(f"redis://hermes:{SECRET}@{host}:6379/0", [*apart, *command()]), said, hint)


def test_it_waits_for_a_redis_that_starts_and_says_for_what(tmp_path: Path) -> None:
    port = ports.free_port()
    (tmp_path / "password").write_text("known")
    env = variables(f"redis://hermes:known@127.0.0.1:{port}/0")
    with subprocess.Popen(
        command(wait_s=50), env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as waiting:
        assert waiting.stdout is not None
        told = waiting.stdout.readline()
        assert told.startswith("waiting: ")
        assert "Errno 111" in told
        server = redis_server.start(tmp_path, port)
        try:
            assert waiting.stdout.read() == "Redis: usable\n"
        finally:
            processes.end(server.pid)
    assert waiting.returncode == 0


# -- the login -------------------------------------------------------------------------------------


@pytest.mark.parametrize("login", [f"hermes:{SECRET}@", ""])
def test_a_login_that_redis_rejects_is_not_waited_for(
    redis: redis_server.RedisServer, login: str
) -> None:
    done = run(f"redis://{login}{redis.host}:{redis.port}/0", command(wait_s=600))
    refused(done, "rejects user and password", "Redis's ACL")


def test_another_namespace_than_the_users(redis: redis_server.RedisServer) -> None:
    done = run(redis.url(), command("--namespace", "other"))
    refused(done, " other:try:", "NOPERM ", "check the namespace")


def test_the_namespace_of_another_service(redis: redis_server.RedisServer) -> None:
    with Redis.from_url(redis.url("operator"), protocol=2) as operator:
        operator.set(service_key("hermes"), "theirs")
        done = run(redis.url(), command("--service", "ours"))
        refused(done, "belongs to the service 'theirs', and this one is 'ours'", "choose another")
        assert run(redis.url(), command("--service", "theirs")).returncode == 0
        operator.delete(service_key("hermes"))


def test_a_redis_in_cluster_mode_is_not_waited_for(tmp_path: Path) -> None:
    with serving(tmp_path, cluster_enabled="yes") as server:
        with Redis.from_url(server.url("operator"), protocol=2) as operator:
            operator.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
            until("it is whole", lambda: operator.cluster("INFO")["cluster_state"] == "ok")
        done = run(server.url(), command(wait_s=600))
    refused(done, "Redis Cluster is not supported: CROSSSLOT")


# -- what it is ------------------------------------------------------------------------------------


def test_settings_that_lose_requests_are_warnings(tmp_path: Path) -> None:
    wrong = {"appendonly": "no", "maxmemory": 0, "maxmemory-policy": "allkeys-lru"}
    with serving(tmp_path, **wrong) as server:
        done = run(server.url(), command())
    assert (done.returncode, done.stderr) == (0, "")
    for what in ("appendonly is no", "maxmemory is 0", "maxmemory-policy is allkeys-lru"):
        assert f"Redis: warning: {what}" in done.stdout


def test_a_replica_is_not_the_redis_that_takes_writes(tmp_path: Path) -> None:
    with serving(tmp_path, replicaof=f"127.0.0.1 {ports.free_port()}") as server:
        refused(run(server.url(), command()), "it is a replica")


def test_a_redis_that_takes_nothing_for_now_says_why(tmp_path: Path) -> None:
    see = "; see to what it says, such as memory"
    refusals = {
        "OOM command not allowed": ({"maxmemory": 1}, see),
        "NOREPLICAS ": ({"min-replicas-to-write": 1}, see),
        "ERR max number of clients": ({"maxclients": 1}, "; raise its maxclients"),
    }
    for number, (words, (settings, hint)) in enumerate(refusals.items()):
        with serving(tmp_path / str(number), **settings) as server:
            refused(run(server.url(), command()), "for now: " + words, hint)


def test_a_redis_that_takes_smaller_values_than_requests_may_have_is_a_warning(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, proto_max_bulk_len="1mb", client_query_buffer_limit="1mb") as server:
        done = run(server.url(), command())
        assert (done.returncode, done.stderr) == (0, "")
        assert "warning: it does not take and give values of 16,777,216 bytes" in done.stdout
        smaller = ["--max-body-bytes", "1"]  # answers need more: entries of ENTRY_BYTES
        assert run(server.url(), command(*smaller)).stdout == "Redis: usable\n"


def test_a_sentinel_that_does_not_know_the_primary(tmp_path: Path) -> None:
    port = ports.free_port()
    (conf := tmp_path / "conf").write_text(f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\n")
    words = [environment.find_redis_server() or "", str(conf), "--sentinel"]
    pid = processes.start(words, tmp_path / "log", os.environ, tmp_path)
    try:
        until("the Sentinel listens", lambda: ports.is_taken(port))
        url = f"redis+sentinel://hermes:{SECRET}@127.0.0.1:{port}/main"
        done = run(url, command(wait_s=3))
        refused(done, "no Sentinel knows a living primary 'main'", "the primary's name")
        nobody = ports.free_port()
        done = run(f"redis+sentinel://hermes:{SECRET}@127.0.0.1:{nobody}/main", command())
        refused(done, f"a living primary 'main' (127.0.0.1:{nobody} [Errno 111]")
    finally:
        processes.end(pid)


@each("kind", ["missing", "a folder", "empty", "no certificate"])
def test_a_ca_file_that_cannot_be_read_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    file = tmp_path / kind
    if kind == "a folder":
        file.mkdir()
    elif kind != "missing":
        file.write_text("" if kind == "empty" else "-----BEGIN CERTIFICATE-----\n")
    url = f"rediss://hermes:{SECRET}@127.0.0.1:{ports.free_port()}/0"
    done = run(url, command("--ca-file", str(file), wait_s=600))  # else the minute of `run` ends it
    refused(done, f"cannot read redis.ca_file '{file}'", "name a file of PEM certificates")
    assert done.stdout == ""


# -- TLS -------------------------------------------------------------------------------------------


@contextmanager
def serving_tls(folder: Path) -> Iterator[tuple[redis_server.RedisServer, int, Path]]:
    """A Redis, the port on which it speaks TLS, and its certificate."""
    certificate, key = folder / "tls.crt", folder / "tls.key"
    making = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
    named = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*making.split(), *named, *files], check=True, capture_output=True)
    port = ports.free_port()
    tls = {"tls_port": port, "tls_cert_file": certificate, "tls_key_file": key}
    with serving(folder / "redis", **tls, tls_auth_clients="no") as server:
        yield server, port, certificate


def test_one_side_speaks_tls_and_the_other_does_not(tmp_path: Path) -> None:
    with serving_tls(tmp_path) as (server, port, certificate):
        login = f"hermes:{server.password}@127.0.0.1"
        for url in (f"redis://{login}:{port}/0", f"rediss://{login}:{server.port}/0"):
            refused(run(url, command()), "does not serve", "redis:// or rediss://")
        done = run(f"rediss://{login}:{port}/0", command())
        refused(done, "CERTIFICATE_VERIFY_FAILED", "the CA certificates")
        trusting = command("--ca-file", str(certificate))
        done = run(f"rediss://{login}:{port}/0", trusting)
        assert (done.returncode, done.stderr) == (0, "")
        with Redis.from_url(server.url("operator"), protocol=2) as operator:
            operator.config_set("tls-ca-cert-file", str(certificate))
            operator.config_set("tls-auth-clients", "yes")
        done = run(f"rediss://{login}:{port}/0", trusting)
        refused(done, "it may require a client certificate")


async def test_certificates_are_read_once_and_not_on_the_loop_until_they_are_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all connections."""
    readers: list[threading.Thread] = []
    make = ssl.create_default_context

    def counted(*args: Any, **kwargs: Any) -> ssl.SSLContext:
        readers.append(threading.current_thread())
        return make(*args, **kwargs)

    monkeypatch.setattr(ssl, "create_default_context", counted)
    with serving_tls(tmp_path) as (server, port, certificate):
        url = f"rediss://hermes:{server.password}@127.0.0.1:{port}/0"
        settings = RedisSettings(url=url, ca_file=str(certificate), connect_timeout_s=PATIENCE_S)

        async def connections() -> None:
            for one in await asyncio.gather(*(connect(settings) for _ in range(4))):
                one.abort()

        for times in (1, 2):
            await connections()
            await connections()
            assert len(readers) == times
            certificate.write_bytes(certificate.read_bytes() * 2)
    assert threading.current_thread() not in readers
