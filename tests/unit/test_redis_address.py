"""Parsing the URL of Redis; what it cannot mean is one sentence."""

from __future__ import annotations

import pytest

from serve_app.errors import SettingsError
from serve_app.settings import RedisSettings, load_settings
from serve_app.settings.redis_address import RedisAddress, redis_address
from tests.tables import each

HERE = RedisAddress((("h", 6379),), "", "", 0, False, {}, {})
SOCKET = HERE._replace(nodes=(), path="/run/redis.sock")
LOGIN = {"username": "u", "password": "p/p"}


@each(
    "url, address",
    [
        ("redis://h", HERE),
        ("redis://h:/0", HERE),
        ("redis://h:6380/0", HERE._replace(nodes=(("h", 6380),))),
        ("rediss://u:p%2Fp@h/1", HERE._replace(tls=True, db=1, login=LOGIN)),
        ("redis://h?username=u&password=p%2Fp&db=1", HERE._replace(db=1, login=LOGIN)),
        ("redis://:p@h", HERE._replace(login={"password": "p"})),
        ("redis://[::1]:7/0", HERE._replace(nodes=(("::1", 7),))),
        ("unix://u:p%2Fp@/run/redis.sock?db=3", SOCKET._replace(db=3, login=LOGIN)),
        ("unix:///run/a:b@c.sock", SOCKET._replace(path="/run/a:b@c.sock")),
    ],
)
def test_what_the_url_says(url: str, address: RedisAddress) -> None:
    settings = load_settings({"redis": {"url": url}}).redis
    assert (settings.url, settings.address) == (url, address)


def test_everything_that_a_url_with_sentinels_can_say() -> None:
    url = "rediss+sentinel://hermes:p%40ss@s1:1,s2,[::1]:3,[fe80::2]/main%20one/4?sentinel_username=a&sentinel_password=b%20c"
    assert redis_address(url) == RedisAddress(
        nodes=(("s1", 1), ("s2", 26379), ("::1", 3), ("fe80::2", 26379)),
        path="",
        primary="main one",
        db=4,
        tls=True,
        login={"username": "hermes", "password": "p@ss"},
        own_login={"username": "a", "password": "b c"},
    )


def test_the_least_that_it_must_say() -> None:
    least = RedisAddress((("s1", 26379),), "", "main", 0, False, {}, {})
    assert redis_address("redis+sentinel://s1/main") == least
    assert redis_address("redis+sentinel://:p@s1/main").login == {"password": "p"}


@each(
    "url, words",
    [
        ("redis+sentinel:///main", "names no Sentinel"),
        ("redis+sentinel://:secret@s1:26379", "names no primary"),
        ("redis+sentinel://:secret@s1/main/first", "database 'first'"),
        ("http://:secret@s1", "must start with"),
        ("redis://h:secret/x@h:6379/0", "%2F"),
        ("rediss://h:secret?x@h:6379/0", "%3F"),
        ("redis://h:secret#x@h:6379/0", "%23"),
        ("redis://h:secret@h:x/0", "a port that is not a number"),
        ("redis://h:secret@h:99999/0", "up to 65535"),
        ("redis://:secret", "a port that is not a number"),
        ("redis://u:secret@/0", "names no host: use redis://host:6379/0"),
        ("redis://:secret@h/abc", "database 'abc' is not a number: use /0"),
        ("redis://h?password=secret&x=secret", "the option 'x'.*: remove it"),
        ("redis://:secret@h?ssl_ca_certs=", "'ssl_ca_certs'.*redis.ca_file"),
        ("redis://:secret@h?sentinel_password=secret", "the option 'sentinel_password'"),
        ("unix://tmp/x", "names the host 'tmp': .*three slashes, unix:///run/redis.sock"),
        ("unix://u:secret@", "names no file"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_settings_and_tells_no_password(
    url: str, words: str
) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        load_settings({"redis": {"url": url}})
    assert "secret" not in str(caught.value)


def test_no_text_shows_the_settings_password() -> None:
    assert "secret" not in repr(RedisSettings(url="redis://u:secret@h"))
