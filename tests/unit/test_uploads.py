"""Bodies that are still being received have a bound for each tenant and one for all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serve_app.contract import Reason
from serve_app.errors import RequestRefused
from serve_app.ingress.connection_limits import Uploads
from serve_app.settings import Settings

KIB = 1024
LARGEST = 400 * KIB


def uploads(most: int) -> Uploads:
    settings = Settings.model_validate(
        {
            "auth": {"required": True, "keys_file": "/keys"},
            "ingress": {"max_body_bytes": LARGEST, "max_buffered_request_bytes": most},
        }
    )
    return Uploads(settings)


async def body(of: Uploads, tenant: str, *pieces: bytes) -> bytes:
    left = list(pieces)

    async def receive() -> dict[str, Any]:
        piece = left.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(left)}

    with of.of(tenant) as upload:
        return await upload.body({}, receive)


async def refused(of: Uploads, tenant: str, *pieces: bytes) -> Reason:
    with pytest.raises(RequestRefused) as refusal:
        await body(of, tenant, *pieces)
    return refusal.value.reason


async def test_a_body_comes_whole_in_any_pieces_and_counts_no_longer() -> None:
    of = uploads(LARGEST)
    for pieces in ([b"small"], [b"x" * LARGEST], [b"", b"a", b""], [b"x" * 100] * 4_000):
        assert await body(of, "acme", *pieces) == b"".join(pieces)
        assert len(of.held) == 0


async def test_a_body_beyond_the_limit_is_refused_however_it_comes() -> None:
    of = uploads(10 * LARGEST)
    assert await refused(of, "acme", b"x" * (LARGEST + 1)) is Reason.BODY_TOO_LARGE
    assert await refused(of, "acme", b"x" * LARGEST, b"x") is Reason.BODY_TOO_LARGE
    assert len(of.held) == 0


async def test_a_tenant_has_its_share_and_all_together_have_a_bound() -> None:
    of = uploads(4 * LARGEST)
    of.held.take("acme", 2 * LARGEST)
    assert await refused(of, "acme", b"a", b"b") is Reason.TENANT_LIMIT
    assert await body(of, "acme", b"a small body in one piece")
    of.held.take("zeta", 2 * LARGEST)
    assert await refused(of, "other", b"a", b"b") is Reason.TOO_MANY_CONNECTIONS
    of.held.release("acme", 2 * LARGEST)
    assert await body(of, "acme", b"a", b"b") == b"ab"


def test_what_is_put_before_a_body_counts_too() -> None:
    of = uploads(2 * LARGEST)
    with of.of("acme") as one, of.of("acme") as another:
        one.grew(LARGEST)
        with pytest.raises(RequestRefused):
            another.grew(LARGEST)
        one.grew(KIB)
    assert len(of.held) == 0


async def test_the_largest_body_fits_whatever_the_bound() -> None:
    assert await body(uploads(KIB), "acme", b"x" * LARGEST, b"")


async def test_who_sends_a_byte_now_and_then_does_not_keep_its_place_for_ever() -> None:
    of = uploads(LARGEST)
    of.within_s = 0.1

    async def trickle() -> dict[str, Any]:
        await asyncio.sleep(0.001)
        return {"type": "http.request", "body": b"x", "more_body": True}

    with pytest.raises(RequestRefused) as refusal, of.of("acme") as upload:
        await upload.body({}, trickle)
    assert (refusal.value.status, refusal.value.reason) == (408, Reason.UPLOAD_TIMEOUT)
    assert len(of.held) == 0
