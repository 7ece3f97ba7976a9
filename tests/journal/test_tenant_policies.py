"""What a tenant's policy permits, over HTTP: models, classes, roles, the length of answers; and
what belongs to another tenant.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.observability.tracing import Facts, Span, Tracing
from tests.journal.in_process import Door, door, in_process, settings_of
from tests.waiting import eventually


def written(folder: Path, **tenants: dict[str, Any]) -> dict[str, Any]:
    """The section `auth`, with a policy in which each tenant has a key of its own name, and one
    `<tenant>-<role>` of each further role.
    """

    def key(text: str, role: str) -> dict[str, Any]:
        return {"hash": f"sha256:{hashlib.sha256(text.encode()).hexdigest()}", "roles": [role]}

    found = {
        name: {
            **fields,
            "keys": [
                key(name, "inference"),
                *(key(f"{name}-{role}", role) for role in ("metrics", "admin", "gateway")),
            ],
        }
        for name, fields in tenants.items()
    }
    (folder / "keys").write_text(json.dumps({"tenants": found}))
    return {"required": True, "keys_file": str(folder / "keys")}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def sent(d: Door, path: str, key: str, **fields: Any) -> httpx.Response:
    headers = {**bearer(key), **fields.pop("headers", {})}
    return await d.http.post(path, json=fields, headers=headers)


MESSAGES = [{"role": "user", "content": "Hi"}]


async def test_everything_of_a_tenant_is_unknown_to_every_other(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    auth = written(tmp_path, a={}, b={})
    async with in_process(settings_of(redis_url, namespace, auth=auth)) as d:
        chat = await sent(
            d, "/v1/chat/completions", "a", model="hermes-tiny", messages=MESSAGES, store=True
        )
        response = await sent(  # the simulated engine has none, but it is stored
            d, "/v1/responses", "a", model="hermes-tiny", input="Hi", background=True
        )
        chat_id, response_id = chat.json()["id"], response.json()["id"]
        its = [chat.headers["x-request-id"], response_id.removeprefix("resp_")]
        paths = [
            *(f"/v1/requests/{one}{part}" for one in its for part in ("", "/events")),
            f"/v1/responses/{response_id}",
            f"/v1/responses/{response_id}/input_items",
            f"/v1/chat/completions/{chat_id}",
            f"/v1/chat/completions/{chat_id}/messages",
        ]
        for path in paths:
            status = {
                key: (await d.http.get(path, headers=bearer(key))).status_code for key in "ab"
            }
            assert status == {"a": 200, "b": 404}, path
        for path in (paths[0], f"/v1/responses/{response_id}", f"/v1/chat/completions/{chat_id}"):
            assert (await d.http.delete(path, headers=bearer("b"))).status_code == 404, path
        never = "resp_req_" + "0" * 32
        mine, unknown = [
            (await sent(d, "/v1/responses", "b", input="?", previous_response_id=one)).text
            for one in (response_id, never)
        ]
        assert mine == unknown.replace(never, response_id)
        assert "not found" in mine
        for path in ("/v1/requests", "/v1/chat/completions"):
            lists = [(await d.http.get(path, headers=bearer(key))).json()["data"] for key in "ab"]
            assert [bool(one) for one in lists] == [True, False], path

        async def used(key: str) -> int:
            path = f"/v1/usage?start_time={chat.json()['created']}"
            page = await d.http.get(path, headers=bearer(key))
            results = [one for bucket in page.json()["data"] for one in bucket["results"]]
            return sum(one["num_model_requests"] for one in results)

        await eventually(lambda: used("a"))
        assert await used("b") == 0


async def test_a_key_opens_what_its_roles_say(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    async with door(redis_url, namespace, auth=written(tmp_path, a={})) as d:
        wanted = {
            "/metrics": {"a-metrics": 200, "a": 403, "a-admin": 403, "other": 401},
            "/v1/organization/dead_letters": {"a-admin": 200, "a": 403, "a-metrics": 403},
            "/v1/organization/usage/completions?start_time=0": {"a-admin": 200, "a": 403},
            "/v1/requests": {"a": 200, "a-admin": 403, "a-metrics": 403, "other": 401},
        }
        for path, status in wanted.items():
            found = {
                key: (await d.http.get(path, headers=bearer(key))).status_code for key in status
            }
            assert found == status, path
        refused = await sent(d, "/v1/chat/completions", "a-admin", model="hermes-tiny")
        assert (refused.status_code, refused.headers["x-hermes-reason"]) == (
            403,
            "key_not_permitted",
        )
        assert "its roles are admin" in refused.text


async def test_a_model_that_is_not_permitted_does_not_exist(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    auth = written(
        tmp_path, own={"models": ["hermes-*"]}, alias={"models": ["gpt-*"]}, none={"models": ["x"]}
    )
    settings = settings_of(
        redis_url, namespace, auth=auth, model={"aliases": ["gpt-4", "claude-*"]}
    )
    async with in_process(settings) as d:

        async def status(key: str, model: str) -> int:
            path, fields = "/v1/chat/completions", {"model": model, "messages": MESSAGES}
            return int((await sent(d, path, key, **fields)).status_code)

        # A model's own name permits all its names.
        assert [await status("own", one) for one in ("hermes-tiny", "gpt-4")] == [200, 200]
        names = ("gpt-4", "hermes-tiny", "claude-3")
        assert [await status("alias", one) for one in names] == [200, 404, 404]
        listed = {
            key: [
                one["id"]
                for one in (await d.http.get("/v1/models", headers=bearer(key))).json()["data"]
            ]
            for key in ("own", "alias", "none")
        }
        assert listed == {"own": ["hermes-tiny", "gpt-4"], "alias": ["gpt-4"], "none": []}
        assert (await d.http.get("/v1/models/gpt-4", headers=bearer("none"))).status_code == 404
        # A response without a model is for the one that is served.
        assert (await sent(d, "/v1/responses", "none", input="Hi")).status_code == 404
        theirs = await sent(
            d, "/v1/messages", "alias", model="claude-3", messages=MESSAGES, max_tokens=5
        )
        assert (theirs.status_code, theirs.json()["error"]["type"]) == (404, "not_found_error")


async def test_an_answer_and_its_class_are_cut_to_what_the_policy_permits(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    auth = written(tmp_path, a={"max_output_tokens": 3, "highest_class": "standard"})
    async with in_process(settings_of(redis_url, namespace, auth=auth)) as d:
        chat: dict[str, Any] = {"model": "hermes-tiny", "messages": MESSAGES}
        for fields in ({"max_tokens": 50}, {}, {"max_tokens": 2}):
            answer = await sent(
                d, "/v1/chat/completions", "a", service_tier="priority", **chat, **fields
            )
            assert answer.headers["x-hermes-class"] == "standard"
            assert answer.json()["usage"]["completion_tokens"] == min(
                3, fields.get("max_tokens", 3)
            )
        refused = await sent(
            d, "/v1/chat/completions", "a", headers={"x-hermes-class": "realtime"}, **chat
        )
        assert refused.status_code == 403


async def test_a_mistake_keeps_the_old_policy_and_is_told_once(
    redis_url: str, namespace: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    auth = written(tmp_path, a={}, b={"weight": 3})
    async with door(redis_url, namespace, auth=auth, telemetry={"page_period_s": 0}) as d:
        keys = d.ingress.api_keys

        async def valid(wanted: str) -> bool:
            page = await d.http.get("/metrics", headers=bearer("a-metrics"))
            return re.findall(r"^hermes_policy_valid{.*} (.*)$", page.text, re.M) == [wanted]

        await eventually(lambda: valid("1.0"))
        written(tmp_path, a={"weight": -1})
        await eventually(lambda: not keys.valid)
        for _ in range(3):
            await keys.look()
        told = [one for one in caplog.records if "cannot reload API keys" in one.message]
        assert [one.levelname for one in told] == ["ERROR"]
        assert "tenant 'a': 'weight'" in told[0].message
        assert (await d.http.get("/v1/requests", headers=bearer("b"))).status_code == 200
        assert keys.weights == {"b": 3.0}
        await eventually(lambda: valid("0.0"))
        written(tmp_path, a={"weight": 2})
        await eventually(lambda: keys.valid)
        assert keys.weights == {"a": 2.0}
        assert (await d.http.get("/v1/requests", headers=bearer("b"))).status_code == 401


async def test_only_a_gateway_names_tenant_and_class(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    auth = written(tmp_path, a={}, b={"highest_class": "standard", "max_output_tokens": 3}) | {
        "tenant_header": "x-tenant",
        "class_header": "x-class",
        "admin_tenants": ["b"],
    }
    async with in_process(settings_of(redis_url, namespace, auth=auth)) as d:
        chat: dict[str, Any] = {"model": "hermes-tiny", "messages": MESSAGES, "max_tokens": 9}

        async def answer(key: str, **headers: str) -> httpx.Response:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await sent(d, "/v1/chat/completions", key, headers=named, **chat)

        async def tenant(key: str, **headers: str) -> tuple[str, str, int]:
            """Whose request it is, its class, and the length of the answer."""
            found = await answer(key, **headers)
            request = f"/v1/requests/{found.headers['x-request-id']}"
            whose = [
                one for one in "ab" if (await d.http.get(request, headers=bearer(one))).is_success
            ]
            tokens = found.json()["usage"]["completion_tokens"]
            return "".join(whose), found.headers["x-hermes-class"], tokens

        assert await tenant("a", x_tenant="b", x_class="batch") == ("a", "standard", 9)
        assert await tenant("a-gateway", X_Tenant="a", X_Class="realtime") == ("a", "realtime", 9)
        assert await tenant("a-gateway", x_tenant="b") == ("b", "standard", 3)
        twice = {"x_class": "batch", "x_hermes_class": "realtime"}
        assert await tenant("a-gateway", x_tenant="b", **twice) == ("b", "batch", 3)
        for headers in (
            {"x_tenant": "c"},
            {"x_tenant": ""},
            {"x_tenant": "b", "x_class": "realtime"},
            {},
        ):
            refused = await answer("a-gateway", **headers)
            found = refused.status_code, refused.headers["x-hermes-reason"]
            assert found == (403, "key_not_permitted"), headers
        # Of another tenant it sees what that tenant does, and never what is an operator's.
        for path in ("/metrics", "/v1/organization/dead_letters"):
            headers = {**bearer("a-gateway"), "x-tenant": "b"}
            assert (await d.http.get(path, headers=headers)).status_code == 403, path


async def test_what_each_tenant_does_is_on_the_page_of_metrics_and_no_other_key_reads_a_name(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    auth = written(tmp_path, acme={"requests_per_minute": 1_000}, zeta={"tokens_per_month": 1})
    settings = settings_of(redis_url, namespace, auth=auth, telemetry={"page_period_s": 0})
    chat = {"model": "hermes-tiny", "messages": MESSAGES, "max_tokens": 3}
    async with in_process(settings) as d:

        async def page(key: str, path: str = "/metrics", method: str = "GET") -> httpx.Response:
            return await d.http.request(method, path, headers=bearer(key))

        async def ended() -> bool:
            return (
                'hermes_tenant_tokens_total{kind="output",tenant="acme"'
                in (await page("acme-metrics")).text
            )

        for key, status in (("acme", 200), ("zeta", 429)):
            answer = await sent(d, "/v1/chat/completions", key, **chat)
            assert answer.status_code == status
        await sent(d, "/v1/chat/completions", "unknown", **chat)
        await eventually(ended)
        text = (await page("zeta-metrics", "/metrics/")).text
        found = {
            (name, tenant): (labels, float(value))
            for name, labels, tenant, value in re.findall(
                r'^hermes_tenant_(\w+){(.*?)tenant="(\w+)",replica=.*} (.*)$', text, re.M
            )
        }
        assert found["requests_admitted_total", "acme"] == ("", 1)
        assert found["requests_refused_total", "zeta"] == ('reason="quota_exceeded",', 1)
        assert found["tokens_total", "acme"] == ('kind="output",', 3), "the last of its two"
        assert {tenant for _, tenant in found} == {"acme", "zeta"}, "nobody's has no name"
        assert ("requests_admitted_total", "zeta") not in found
        for method in ("GET", "HEAD"):
            for path in ("/metrics", "/metrics/", "/metrics//", "/%6detrics", "/metrics?a=b"):
                for role in ("", "-admin", "-gateway"):
                    refused = await page(f"acme{role}", path, method)
                    assert refused.status_code == 403, (method, path, role)
                    assert "zeta" not in refused.text
                assert (await page("unknown", path, method)).status_code == 401
                assert (await page("acme-metrics", path, method)).status_code == 200


async def test_every_span_of_a_request_names_its_tenant(
    redis_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, spans = Tracing.begin, {}

    def noted(self: Tracing, name: str, parent: str, facts: Facts, *more: Any, **how: Any) -> Span:
        spans[name] = facts
        return begin(self, name, parent, facts, *more, **how)

    monkeypatch.setattr(Tracing, "begin", noted)
    auth = written(tmp_path, acme={})
    path = "/v1/chat/completions"
    async with in_process(settings_of(redis_url, namespace, auth=auth)) as d:
        await sent(d, path, "acme", model="hermes-tiny", messages=MESSAGES)
    assert spans.keys() == {f"POST {path}", "queue", "dispatch", "attempt"}
    assert {facts.get("hermes.tenant") for facts in spans.values()} == {"acme"}
