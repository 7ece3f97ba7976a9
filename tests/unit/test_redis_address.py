"""Parsing the URL of Redis."""

from __future__ import annotations

import pytest

from serve_app.errors import SettingsError
from serve_app.settings import load_settings
from serve_app.settings.redis_address import SentinelAddress, sentinel_address
from tests.tables import each


@each(
    "url",
    [
        "redis://h:6379/0",
        "rediss://u:p@h/1",
        "rediss://u:p%2Fp@[::1]:6379/1",
        "redis://[::1]/0",
        "unix:///run/redis.sock",
        "unix://u:p@/run/a:b@c.sock",
    ],
)
def test_one_address_has_no_sentinels(url: str) -> None:
    assert sentinel_address(url) is None
    assert load_settings({"redis": {"url": url}}).redis.url == url


def test_everything_that_a_url_with_sentinels_can_say() -> None:
    url = "rediss+sentinel://hermes:p%40ss@s1:1,s2,[::1]:3,[fe80::2]/main%20one/4?sentinel_username=a&sentinel_password=b%20c"
    assert sentinel_address(url) == SentinelAddress(
        nodes=(("s1", 1), ("s2", 26379), ("::1", 3), ("fe80::2", 26379)),
        primary="main one",
        db=4,
        tls=True,
        login={"username": "hermes", "password": "p@ss"},
        own_login={"username": "a", "password": "b c"},
    )


def test_the_least_that_it_must_say() -> None:
    assert sentinel_address("redis+sentinel://s1/main") == SentinelAddress(
        (("s1", 26379),), "main", 0, False, {}, {}
    )
    assert sentinel_address("redis+sentinel://:p@s1/main").login == {"password": "p"}  # type: ignore[union-attr]


@each(
    "url, words",
    [
        ("redis+sentinel:///main", "names no Sentinel"),
        ("redis+sentinel://s1,,s2/main", "names no Sentinel"),
        ("redis+sentinel://:secret@s1:26379", "names no primary"),
        ("redis+sentinel://:secret@s1:x/main", "port 'x'"),
        ("redis+sentinel://:secret@s1/main/first", "database 'first'"),
        ("http://:secret@s1", "must start with"),
        ("redis://h:secret/x@h:6379/0", "%2F"),
        ("redis://h:12/secret@h:6379/0", "%2F"),
        ("rediss://h:secret?x@h:6379/0", "%3F"),
        ("redis://h:secret#x@h:6379/0", "%23"),
        ("redis+sentinel://h:secret/x@s1:26379/main?sentinel_password=p", "%2F"),
        ("redis://h:secret@h:x/0", "port 'x'"),
        ("redis://h:secret@h:99999/0", "port '99999'"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_settings_and_tells_no_password(
    url: str, words: str
) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        load_settings({"redis": {"url": url}})
    assert "secret" not in str(caught.value)
