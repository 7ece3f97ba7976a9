"""The commands `api-key create`, `list` and `revoke`, on a keys file. `api-key TENANT` prints a
line for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from serve_app.cli import api_key
from serve_app.cli.console import (
    CommandFailed,
    columns,
    fail,
    in_one_line,
    new_app,
    one_sentence,
    redis_url,
    when,
)

if TYPE_CHECKING:
    from serve_app.ingress.api_keys import KeyFacts
    from serve_app.redis.connection import Command

_HEADINGS = ("key", "tenant", "name", "roles", "expires", "last used")
_PLAIN = "line"

File = Annotated[Path, typer.Option("--file", help="the keys file (auth.keys_file)")]
Redis = Annotated[str, typer.Option("--redis", metavar="URL", help="the service's Redis")]
Namespace = Annotated[str, typer.Option(help="namespace of the service in Redis")]
CaFile = Annotated[str, typer.Option(help="for rediss://: CA certificates to trust")]


class _OrTenant(TyperGroup):
    """What names no command is a tenant, or `--metrics`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = [_PLAIN, *args]
        return super().parse_args(ctx, args)


app = new_app(
    "Create, list and revoke API keys.\n\n`api-key TENANT`, or `api-key --metrics`, prints a key "
    "once, and the line for a keys file.",
    _OrTenant,
)


@app.command(_PLAIN, hidden=True)
def print_line(
    tenant: Annotated[str, typer.Argument(help="the tenant that the key belongs to")] = "",
    metrics: Annotated[
        bool, typer.Option("--metrics", help="a key for /metrics and nothing else")
    ] = False,
) -> None:
    """Print a new key, and the line for a keys file."""
    try:
        api_key.show(api_key.METRICS if metrics and not tenant else tenant)
    except ValueError as error:
        fail(str(error))


@app.command("create")
def create(
    tenant: Annotated[str, typer.Argument(help="the tenant that the key belongs to")],
    file: File,
    name: Annotated[str, typer.Option(help="for people")] = "",
    expires: Annotated[
        str, typer.Option(metavar="TIME", help="when it is refused, such as 2027-01-31T00:00:00Z")
    ] = "",
    role: Annotated[
        list[str] | None, typer.Option(help="inference (the default), metrics, admin or gateway")
    ] = None,
) -> None:
    """Add a key to a keys file, and print it once.

    A file that is empty or missing becomes a policy in YAML. Comments of a policy are lost.
    """
    from serve_app.ingress.api_keys import with_key

    with one_sentence("api-key"):
        try:
            api_key.check(tenant)
        except ValueError as error:
            raise CommandFailed(str(error)) from None
        said = {"name": name, "expires": expires, "roles": role}
        more = {field: value for field, value in said.items() if value}
        key = api_key.new_key()
        with _edited(file, missing_ok=True) as text:
            text.append(with_key(text[0], tenant, hashlib.sha256(key.encode()).digest(), **more))
        print(key)


@app.command("list")
def list_keys(
    file: File,
    redis: Redis = "",
    namespace: Namespace = "hermes",
    ca_file: CaFile = "",
    as_json: Annotated[bool, typer.Option("--json", help="print a line of JSON for each")] = False,
) -> None:
    """Show the keys of a file; with --redis also when each was used last."""
    from serve_app.ingress.api_keys import key_id_of, parse

    with one_sentence("api-key"):
        keys = parse(_read(file)).keys
        used_s = asyncio.run(_last_uses(redis, ca_file, namespace)) if redis else {}
        facts = [_facts(key_id_of(digest), one, used_s) for digest, one in keys.items()]
        if as_json:
            for one in facts:
                print(json.dumps(one))
        else:
            rows = [[in_one_line(str(value or "-")) for value in one.values()] for one in facts]
            print(columns([_HEADINGS, *rows]))


@app.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(metavar="KEY_ID", help="as list and usage show it")],
    file: File,
    redis: Redis = "",
    namespace: Namespace = "hermes",
    ca_file: CaFile = "",
) -> None:
    """Remove a key from a file, and have every ingress refuse it now, wherever it reads the file.

    The service's Redis is that of --redis, otherwise $HERMES_REDIS_URL, otherwise that of a running
    `hermes-serve up`. A key that was revoked stays refused for 30 days, also if it is added again.
    """
    from serve_app.ingress.api_keys import without_key

    with one_sentence("api-key"):
        with _edited(file) as text:
            changed, digest, facts = without_key(text[0], key_id)
            text.append(changed)
        try:
            asyncio.run(_revoke(redis or redis_url(), ca_file, namespace, digest))
        except Exception as error:
            raise CommandFailed(
                f"{key_id} is no longer in {file}, but Redis was not told, so each ingress accepts "
                f"it until it has read the file: {error}"
            ) from None
        print(f"revoked {key_id} of {facts.tenant}")


def _facts(key_id: str, facts: KeyFacts, used_s: Mapping[bytes, int]) -> dict[str, str]:
    at_s = used_s.get(key_id.encode(), 0)
    return {
        "key": key_id,
        "tenant": facts.tenant,
        "name": facts.name,
        "roles": " ".join(facts.roles),
        "expires": _time(facts.expires_s),
        "last_used": _time(at_s),
    }


def _time(unix_s: float) -> str:
    return when(unix_s, "%Y-%m-%dT%H:%M:%SZ") if unix_s else ""


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise CommandFailed(f"cannot read {file}: {why}") from None


@contextlib.contextmanager
def _edited(file: Path, missing_ok: bool = False) -> Iterator[list[str]]:
    """The text of a file; what is appended to the list replaces it. One command at a time."""
    file = file.resolve()  # or a link would be replaced
    try:
        folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CommandFailed(f"cannot open {file.parent}: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        there = file.exists() or not missing_ok
        text = [_read(file) if there else ""]
        yield text
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=file.parent, prefix=f".{file.name}.", delete=False
        ) as new:
            new.write(text[-1])
            new.flush()
            if there:
                found = file.stat()
                os.fchmod(new.fileno(), found.st_mode & 0o7777)
                os.fchown(new.fileno(), found.st_uid, found.st_gid)
            os.fsync(new.fileno())
        os.replace(new.name, file)
    except OSError as error:
        raise CommandFailed(f"cannot write {file}: {error.strerror}") from None
    finally:
        os.close(folder)


async def _revoke(url: str, ca_file: str, namespace: str, digest: bytes) -> None:
    from serve_app.cluster.key_notices import revoke

    ((seconds, _),) = await _asked(url, ca_file, [("TIME",)])
    await _asked(url, ca_file, revoke(namespace, digest, int(seconds) * 1000))


async def _last_uses(url: str, ca_file: str, namespace: str) -> dict[bytes, int]:
    from serve_app.cluster.key_notices import last_uses, scored

    (reply,) = await _asked(url, ca_file, [last_uses(namespace)])
    return scored(reply)


async def _asked(url: str, ca_file: str, commands: Sequence[Command]) -> list[Any]:
    from serve_app.cli.check_redis import settings_of
    from serve_app.redis.link import RedisLink
    from serve_app.redis.replies import all_answered
    from serve_app.settings import RedisSettings

    link = RedisLink(settings_of("--redis", url or RedisSettings().url, ca_file))
    try:
        return list(all_answered(await link.call(commands)))
    finally:
        await link.close()
