"""The ends of responses in the background, by the real engine, are told to a receiver, which reads
them with OpenAI's unmodified SDK.
"""

from __future__ import annotations

from typing import Any

import openai
import pytest

pytest.importorskip("vllm")

from tests.engine.resume_helpers import EngineThread
from tests.engine.test_both_ways import Started
from tests.http_server import Server, sending, serving, whole
from tests.journal.in_process import Door, in_process, settings_of
from tests.journal.receiving import SECRET, per_request, quick, receivers
from tests.waiting import eventually

ENDLESS = {"extra_body": {"ignore_eos": True}}
UNREADABLE = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "wat"}}}
LATE = {"x-request-timeout-seconds": "0.001"}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "its own end": ("completed", {"max_output_tokens": 1_500}),
    "its own end, streamed": ("completed", {"max_output_tokens": 1_500, "stream": True}),
    "its last token": ("incomplete", {"max_output_tokens": 8, **ENDLESS}),
    "a schema that is none": ("failed", {"text": UNREADABLE}),
    "its deadline": ("failed", {**ENDLESS, "extra_headers": LATE}),
    "its client": ("cancelled", ENDLESS),
}
"""What ends a response: the status that it has then, and what is asked for."""


async def begun(client: openai.AsyncOpenAI, asked: dict[str, Any]) -> str:
    """The id of a response in the background."""
    create: Any = client.responses.create
    usual = {"model": "hermes-tiny", "input": "Hello", "temperature": 0, "background": True}
    made = await create(**usual, **asked)
    if asked.get("stream"):
        made = [event async for event in made][-1].response
    return str(made.id)


async def told(d: Door, receiver: Server) -> None:
    own: Any = {"api_key": "none", "webhook_secret": SECRET, "max_retries": 0}
    own["default_headers"] = {"x-hermes-webhook": f"{receiver.url}/mine"}
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{d.port}/v1", **own) as client:
        ids = {name: await begun(client, asked) for name, (_, asked) in ASKED.items()}
        await client.responses.cancel(ids["its client"])
        await eventually(lambda: len(receiver.asked) == 2 * len(ids))
        posted = list(receiver.asked)
        events: list[Any] = [client.webhooks.unwrap(one.body, one.headers) for one in posted]
        for name, (status, _) in ASKED.items():
            mine = [event for event in events if event.data.id == ids[name]]
            assert [event.type for event in mine] == [f"response.{status}"] * 2, name
            assert len({event.id for event in mine}) == 1
            response = await client.responses.retrieve(mine[0].data.id)
            assert response.status == status, name
        kinds = {type(event).__name__ for event in events}
        assert kinds == {
            "ResponseCompletedWebhookEvent",
            "ResponseIncompleteWebhookEvent",
            "ResponseFailedWebhookEvent",
            "ResponseCancelledWebhookEvent",
        }
        paths = sorted(one.path for one in posted)
        assert paths == ["/all"] * len(ids) + ["/mine"] * len(ids)


@pytest.mark.timeout(900)
def test_each_end_of_a_response_in_the_background_is_told(
    world: EngineThread, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To an endpoint of the settings, and to a URL that the request names."""
    quick(monkeypatch)

    async def run() -> None:
        with serving(sending(whole(200, b""))) as receiver:
            webhooks = {**receivers(all=f"{receiver.url}/all"), **per_request()}
            stalled = {"engine_stall_timeout_s": 600.0}
            settings = settings_of(redis_url, namespace, webhooks=webhooks, workers=stalled)
            async with in_process(settings, Started(world.engine)) as d:
                await told(d, receiver)

    world.run(run(), timeout_s=600)
