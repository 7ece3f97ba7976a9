"""A key that is revoked is refused at every ingress, and operators see when keys were used."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from serve_app.cli.main import app
from serve_app.cluster import key_notices
from serve_app.cluster.key_notices import KeyNotices, revoke
from serve_app.ingress.api_keys import key_id_of
from serve_app.redis.keyspace import key_uses_key, revoked_key
from tests.journal.in_process import Door, door_of, ingress_process, keys_of, settings_of
from tests.journal.journal_helpers import World
from tests.waiting import eventually

DIGEST = hashlib.sha256(b"acme").digest()


async def hermes(*words: str) -> str:
    """What a command prints, which must succeed."""
    done = await asyncio.to_thread(CliRunner().invoke, app, ["api-key", *words])
    assert done.exit_code == 0, done.stderr
    return done.stdout


async def status(d: Door, key: str = "acme") -> int:
    answer = await d.http.get("/v1/requests", headers={"authorization": f"Bearer {key}"})
    return answer.status_code


async def test_a_revoked_key_is_refused_at_every_ingress_whatever_its_file_says(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    settings = settings_of(redis_url, namespace, auth=keys_of(tmp_path, "acme", "zeta"))
    mine = tmp_path / "mine"
    mine.write_bytes((tmp_path / "keys").read_bytes())
    where = ("--file", str(mine), "--redis", redis_url, "--namespace", namespace)
    async with (
        ingress_process(settings, name="ingress-1") as one,
        ingress_process(settings, name="ingress-2") as two,
        door_of(one) as first,
        door_of(two) as second,
    ):
        assert [await status(d) for d in (first, second)] == [200, 200]

        async def used() -> dict[str, Any]:
            found = [
                json.loads(line) for line in (await hermes("list", *where, "--json")).splitlines()
            ]
            return {each["tenant"]: each["last_used"] for each in found}

        await eventually(lambda: _is_used(used))
        assert (await used())["zeta"] == ""
        assert "revoked" in await hermes("revoke", key_id_of(DIGEST), *where)
        await eventually(lambda: _all_are(401, first, second))
        assert [await status(d, "zeta") for d in (first, second)] == [200, 200]
        refused = await first.http.get("/v1/requests", headers={"authorization": "Bearer acme"})
        assert "was revoked" in refused.text
        assert "acme sha256:" in (tmp_path / "keys").read_text(), "a Secret takes a minute"


async def _all_are(wanted: int, *doors: Door) -> bool:
    return all([await status(d) == wanted for d in doors])


async def _is_used(used: Any) -> bool:
    return bool((await used())["acme"])


async def renewed(w: World, notices: KeyNotices, now_ms: int) -> None:
    commands = notices.commands(now_ms)
    replies = await w.link.call(commands)
    notices.answered(replies[-1], now_ms)


async def test_what_is_known_of_keys_is_bounded_and_forgotten(
    w: World, namespace: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(key_notices, "MAX_REVOKED", 3)
    monkeypatch.setattr(key_notices, "MAX_USES", 2)
    notices = KeyNotices(namespace)
    for number in range(5):
        await w.link.call(revoke(namespace, bytes([number]) * 32, 1_000 + number))
    await renewed(w, notices, 2_000)
    known = [notices.is_revoked(bytes([number]) * 32) for number in range(5)]
    assert known == [False, False, True, True, True], "the oldest go"
    # One that is added late is seen, too, and nothing is read twice.
    await w.link.call(revoke(namespace, b"late" * 8, 1_000))
    await renewed(w, notices, 2_000)
    assert not notices.is_revoked(b"late" * 8), "it was the oldest of too many"
    await w.operator.delete(revoked_key(namespace))
    await renewed(w, notices, 2_000)
    assert notices.is_revoked(bytes([4]) * 32), "a Redis that has lost it changes nothing"
    await renewed(w, notices, 1_005 + 30 * 86_400_000)
    assert not notices.is_revoked(bytes([4]) * 32)

    for number, at_s in enumerate((7.0, 9.5, 8.0)):
        notices.used(f"key_{number}", at_s)
    await renewed(w, notices, 2_000)
    notices.used("key_1", 1.0)  # an ingress that is late
    assert notices.commands(2_000) == notices.commands(2_000), "until Redis has answered"
    await renewed(w, notices, 2_000)
    found = await w.operator.zrange(key_uses_key(namespace), 0, -1, withscores=True)
    assert found == [(b"key_2", 8.0), (b"key_1", 9.0)]
