"""Which events go where, when they are tried again, and what a request may name."""

from __future__ import annotations

import base64
import json
import time
from itertools import pairwise
from typing import Any

import pytest
from openai import OpenAI
from openai.types.webhooks import ResponseCompletedWebhookEvent
from pydantic import ValidationError

from serve_app.contract import Reason, State
from serve_app.errors import RequestRefused
from serve_app.settings.webhooks import WebhookSettings
from serve_app.webhooks.events import (
    HEADER,
    Delivery,
    check_url,
    deliveries,
    event_of,
    is_public,
    pause_s,
)
from serve_app.webhooks.post import Failed, secrets_of, signed
from tests.tables import each

SECRET = "whsec_" + base64.b64encode(b"a secret of 24 bytes, ok").decode()
HOSTS = ["hooks.example.com", "*.example.org"]
ONE = WebhookSettings(hosts=HOSTS, secret="env:S")
DAY_S = 86_400.0


def settings_of(**endpoints: Any) -> WebhookSettings:
    return WebhookSettings.model_validate({"endpoints": endpoints})


def endpoint(**more: Any) -> dict[str, Any]:
    return {"url": "http://a:80/x", "secret": "env:S", **more}


def test_an_event_goes_to_whoever_wants_its_type_and_its_tenant() -> None:
    settings = settings_of(
        all=endpoint(),
        failures=endpoint(events=["response.failed", "batch.*"]),
        acme=endpoint(tenants=["acme*"]),
        nobody=endpoint(events=[]),
    )
    wanted = {
        ("response.failed", "acme-1"): ["all", "failures", "acme"],
        ("response.completed", "acme-1"): ["all", "acme"],
        ("batch.expired", "other"): ["all", "failures"],
    }
    for (event, tenant), names in wanted.items():
        found = list(deliveries(settings, event, "resp_1", tenant, 1_000))
        assert [one.target for one in found] == names
        assert len({one.event_id for one in found}) == 1
    (*_, last) = deliveries(settings, "batch.failed", "b", "t", 1_000, "https://h/p")
    assert last.target == "https://h/p"


def test_the_same_end_has_the_same_id_and_no_other_has() -> None:
    settings = settings_of(all=endpoint())
    ends = [("response.failed", "resp_1", 1), ("response.failed", "resp_1", 2)]
    ends += [("response.completed", "resp_1", 1), ("response.failed", "resp_2", 1)]
    ids = [next(deliveries(settings, e, s, "t", ms)).event_id for e, s, ms in ends * 2]
    assert ids[:4] == ids[4:]
    assert len(set(ids)) == 4


@each(
    "kind, state, cut, event",
    [
        ("response", State.COMPLETED, False, "response.completed"),
        ("response", State.COMPLETED, True, "response.incomplete"),
        ("response", State.FAILED, True, "response.failed"),
        ("response", State.EXPIRED, False, "response.failed"),
        ("response", State.CANCELLED, False, "response.cancelled"),
        ("request", State.COMPLETED, True, "request.completed"),
    ],
)
def test_an_end_has_one_type(kind: str, state: State, cut: bool, event: str) -> None:
    assert event_of(kind, state, cut) == event


@each(
    "url",
    [
        "https://hooks.example.com",
        "https://hooks.example.com:8443/a?b=c",
        "https://HOOKS.example.com/",
        "https://a.b.example.org/x",
    ],
)
def test_a_request_may_name_hosts_that_are_allowed(url: str) -> None:
    check_url(ONE, url)


@each(
    "url",
    [
        "http://hooks.example.com/",
        "ftp://hooks.example.com/",
        "https://example.org/",
        "https://evilexample.org/",
        "https://hooks.example.com.evil.com/",
        "https://hooks.example.com@evil.com/",
        "https://user:pw@hooks.example.com/",
        "https://evil.com#hooks.example.com",
        "https://hooks.example.com/#a",
        "https://hooks.example.com\\@evil.com/",
        "https://evil.com\\.example.org/",
        "https://evil.com%2f.example.org/",
        "https://[::1]/",
        "https://127.0.0.1/",
        "https://hooks.example.com:0/",
        "https://hooks.example.com:99999/",
        "https://hooks.example.com/ a",
        "https://hooks.example.com/\u00e4",
        "https://hooks.example.com/" + "a" * 2_048,
        "https:///x",
        "hooks.example.com",
        "https://[",
    ],
)
def test_it_may_name_no_others(url: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        check_url(ONE, url)
    assert (refused.value.reason, refused.value.param) == (Reason.INVALID_REQUEST, HEADER)


def test_without_hosts_it_may_name_none_and_plain_http_only_if_allowed() -> None:
    with pytest.raises(RequestRefused, match=r"webhooks\.hosts"):
        check_url(WebhookSettings(), "https://hooks.example.com/")
    plain = ONE.model_copy(update={"plain_http": True})
    check_url(plain, "http://hooks.example.com/")
    with pytest.raises(RequestRefused):
        check_url(plain, "ftp://hooks.example.com/")


@each("address", ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"])
def test_an_address_of_the_internet_is_public(address: str) -> None:
    assert is_public(address)


@each(
    "address",
    """0.0.0.0 10.1.2.3 100.64.0.1 127.0.0.1 169.254.169.254 172.16.0.1 192.168.1.1 192.0.0.8
    224.0.0.1 239.1.2.3 240.0.0.1 255.255.255.255 198.18.0.1 :: ::1 fe80::1 fe80::1%eth0 fc00::1
    fec0::1 ff02::1 ::ffff:127.0.0.1 ::ffff:93.184.215.14 64:ff9b::7f00:1 2002:7f00:1::
    2001:0:7f00:1::""".split(),
)
def test_no_other_address_is(address: str) -> None:
    assert not is_public(address)


def test_pauses_grow_from_seconds_to_hours() -> None:
    ages, age = [], 0.0
    while age < 3 * DAY_S:
        ages.append(age)
        age += pause_s(age)
    pauses = [after - before for before, after in pairwise(ages)]
    assert 5 <= pauses[0] <= 6
    assert max(pauses) == pytest.approx(4 * 3_600)
    assert 25 < len(ages) < 60
    assert pause_s(10.0, asked_s=300.0) == 300.0
    assert pause_s(10.0, asked_s=1e9) == 4 * 3_600


def test_a_route_is_of_one_receiver_and_one_tenant_and_shows_no_path() -> None:
    def route(target: str, tenant: str = "t") -> str:
        return Delivery("evt_1", "response.completed", 1, "resp_1", tenant, target).route

    assert route("https://h:1/secret?key=1") == route("https://h:1/other") == "//h:1|t"
    assert route("h") == "h|t"
    assert len({route("a"), route("a", "u"), route("https://a/"), route("https://a:1/")}) == 4


BODY = Delivery("evt_1", "response.completed", 1_700_000_000, "resp_1", "t", "a").body()


def test_the_sdk_of_openai_accepts_what_any_of_the_secrets_signs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = "whsec_" + base64.b64encode(b"another secret").decode()
    monkeypatch.setenv("SECRETS", f"{other}\n {SECRET}\n")
    headers = signed(secrets_of("env:SECRETS"), "evt_1", int(time.time()), BODY)
    client = OpenAI(api_key="k")
    for secret in (SECRET, other):
        event = client.webhooks.unwrap(BODY, headers, secret=secret)
        assert isinstance(event, ResponseCompletedWebhookEvent)
        assert (event.id, event.data.id) == ("evt_1", "resp_1")
        assert event.created_at == 1_700_000_000
    with pytest.raises(ValueError, match="signature"):
        client.webhooks.unwrap(BODY.replace(b"resp_1", b"resp_2"), headers, secret=SECRET)
    assert json.loads(BODY)["object"] == "event"


@each("text", ["", "whsec_", "whsec_!", SECRET.removeprefix("whsec_"), SECRET + " x"])
def test_what_is_no_secret_signs_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRETS", text)
    with pytest.raises(Failed, match="env:SECRETS"):
        secrets_of("env:SECRETS")


@each(
    "wrong, said",
    [
        ({"endpoints": {"a b": endpoint()}}, "name"),
        ({"endpoints": {"a": endpoint(url="ftp://a")}}, "url"),
        ({"endpoints": {"a": endpoint(secret=SECRET)}}, "secret"),
        ({"endpoints": {"a": endpoint(events=["done"])}}, "events"),
        ({"hosts": ["a.example.com"]}, "secret"),
        ({"hosts": ["https://a"], "secret": "env:S"}, "hosts"),
        ({"secret": SECRET}, "secret"),
    ],
)
def test_a_mistake_in_the_settings_is_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said) as error:
        WebhookSettings.model_validate(wrong)
    assert said in str(error.value)
