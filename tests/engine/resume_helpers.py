"""One real engine behind vLLM's own server app, and attempts on it whose journals can be cut anywhere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from serve_app.journal.attempt import Attempt
from serve_app.journal.entries import AttemptFacts, Entry, EntryId, RequestFacts, RequestLine
from serve_app.redis_clock import RedisClock
from serve_app.settings import load_settings
from serve_app.telemetry import Telemetry
from workers import recorder as recording
from workers.recorder import Recorder
from workers.replay import recorded
from workers.vllm_engine import VllmEngine

T = TypeVar("T")
ADMITTED_MS = 1_700_000_000_123
ARGS = {
    "dtype": "float32",
    "max_model_len": 2048,
    "enforce_eager": True,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "enable_prefix_caching": True,
}


class EngineThread:
    """The engine lives on one event loop; tests are plain functions."""

    def __init__(self, **args: Any) -> None:
        settings = load_settings({"engine": {"args": {**ARGS, **args}}, "workers": {"max_running_requests": 8}})
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.engine = VllmEngine(settings)
        self.telemetry = Telemetry()
        self.generated_tokens = 0
        self.run(self.engine.start(), 240)
        generate = self.engine._engine.generate

        async def counting(*args: Any, **options: Any) -> Any:
            async for output in generate(*args, **options):
                self.generated_tokens += sum(len(item.token_ids) for item in output.outputs)
                yield output

        self.engine._engine.generate = counting

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 60) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def close(self) -> None:
        self.run(self.engine.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)


class Written:
    """What an attempt has left: its entries, and the bytes of the response so far."""

    def __init__(self, entries: list[Entry], recorder: Recorder) -> None:
        self.entries = entries
        self.recorder = recorder

    @property
    def body(self) -> bytes:
        return b"".join(entry.body for entry in self.entries if entry.id.epoch > 0)


def request(path: str, body: dict[str, Any], tenant: str = "default") -> Entry:
    """Entry 0-1."""
    facts = RequestFacts("standard", tenant, "s", "hermes-tiny", bool(body.get("stream")), ADMITTED_MS, 2**62, "")
    line = RequestLine("POST", path, "", [("content-type", "application/json")])
    fields = {b"r": msgspec.json.encode(line), b"m": msgspec.json.encode(facts), b"b": msgspec.json.encode(body)}
    return Entry(EntryId(0, 1), fields)


async def attempt(world: EngineThread, journal: list[Entry], request_id: str = "req_0") -> Written:
    """Work on a journal as a worker does, one entry for every engine output, to the end of the response."""
    epoch = journal[-1].id.epoch + 1
    opened = AttemptFacts("replica", world.engine.name, 1, fingerprint=world.engine.fingerprint)
    entries = [*journal, Entry(EntryId(epoch, 0), {b"n": b"nonce", b"m": msgspec.json.encode(opened)})]

    def write(one: Attempt) -> None:
        while (entry := one.take()) is not None:
            entries.append(entry)
            one.accepted(entry)

    one = Attempt(request_id, "key", epoch, b"nonce", "", write)
    facts = msgspec.json.decode(journal[0].fields[b"m"], type=RequestFacts)
    line = msgspec.json.decode(journal[0].fields[b"r"], type=RequestLine)
    part = recorded(entries)
    if epoch > 1:
        one.continue_from(part.last, part.body, part.events, part.head)
    recorder = Recorder(one, facts, opened, world.telemetry, RedisClock(), part)
    recording.current.set(recorder)
    await world.engine.serve(request_id, line, journal[0].body, recorder)
    recorder.end("completed" if not recorder.lost else "failed", "", None)
    return Written([entry for entry in entries if not entry.terminal], recorder)
