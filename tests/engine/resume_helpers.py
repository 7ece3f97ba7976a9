"""One real engine behind vLLM's own server app, and attempts whose journals can be cut anywhere."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar
from unittest.mock import patch
from weakref import WeakSet

import msgspec

from serve_app.clock import RedisClock
from serve_app.journal.attempt_log import AttemptLog, Pause
from serve_app.journal.entries import AttemptFacts, Entry, EntryId, RequestFacts, RequestLine
from serve_app.journal.reader import JournalReader
from serve_app.observability.metrics import Telemetry
from serve_app.settings import load_settings
from workers import attempt as recording
from workers.attempt import Attempt
from workers.replay import recorded
from workers.vllm_engine import VllmEngine

T = TypeVar("T")
ADMITTED_MS = 1_700_000_000_123
AT_ONCE = 16
ARGS = {
    "dtype": "float32",
    "max_model_len": 2048,
    "enforce_eager": True,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "enable_prefix_caching": True,
}


class EngineThread:
    """Runs the engine on one event loop in a thread, because tests are plain functions.

    `core`: another one, whose processes this one uses behind a server app of its own.
    """

    loop: asyncio.AbstractEventLoop
    generated_tokens: Counter[Attempt | None]
    priorities: dict[str, list[Any]]
    """`{request id of the engine: the priorities that it was given}`."""
    pauses: WeakSet[Pause]

    def __init__(
        self, core: EngineThread | None = None, rerun_tokens: int = 8_192, **args: Any
    ) -> None:
        workers = {"max_running_requests": AT_ONCE, "max_regenerated_tokens": rerun_tokens}
        settings = load_settings({"engine": {"args": {**ARGS, **args}}, "workers": workers})
        self.engine = VllmEngine(settings)
        self.telemetry = Telemetry()
        self._core = core
        if core is not None:
            self.loop, self.generated_tokens = core.loop, core.generated_tokens
            self.priorities, self.pauses = core.priorities, core.pauses

            def shared(engine_args: Any, **_: Any) -> Any:
                engine_args.create_engine_config()  # it completes the arguments of the server app
                return core.engine._engine

            with patch("vllm.v1.engine.async_llm.AsyncLLM.from_engine_args", shared):
                self.run(self.engine.start(), 600)
            return
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.generated_tokens = Counter[Attempt | None]()
        self.priorities, self.pauses = {}, WeakSet()
        self.engine.progress.on_step = self._stepped
        self.run(self.engine.start(), 600)
        self._count()

    def _count(self) -> None:
        generate = self.engine._engine.generate

        async def counting(prompt: Any, params: Any, request_id: str, **options: Any) -> Any:
            self.priorities.setdefault(request_id, []).append(options.get("priority"))
            async for output in generate(prompt, params, request_id, **options):
                tokens = sum(len(item.token_ids) for item in output.outputs)
                self.generated_tokens[recording.current.get()] += tokens
                yield output

        self.engine._engine.generate = counting

    def _stepped(self) -> None:
        for pause in list(self.pauses):
            pause.stepped()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 300) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def close(self) -> None:
        assert self._core is None, "its processes are another's"
        self.run(self.engine.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)


def body_of(entries: Sequence[Entry]) -> bytes:
    """The response bytes that a reader of a journal has."""
    reader, body = JournalReader(), []
    for entry in entries:
        reader.feed(entry)
        body.append(reader.take())
    if not reader.streams:  # held until the end, which is not among them
        body += reader._body
    return b"".join(body)


class Written:
    """The result of an attempt: its entries, the response bytes so far, and the number of tokens
    that the engine generated for it.
    """

    def __init__(self, entries: list[Entry], attempt: Attempt, generated_tokens: int) -> None:
        self.entries = entries
        self.attempt = attempt
        self.generated_tokens = generated_tokens

    @property
    def body(self) -> bytes:
        return body_of(self.entries)


def request(
    path: str,
    body: dict[str, Any],
    tenant: str = "default",
    request_class: str = "standard",
    alias: str = "",
) -> Entry:
    """Entry 0-1."""
    streamed = bool(body.get("stream"))
    facts = RequestFacts(
        request_class, tenant, "s", "hermes-tiny", streamed, ADMITTED_MS, 2**62, "", alias=alias
    )
    line = RequestLine("POST", path, "", [("content-type", "application/json")])
    fields = {
        b"r": msgspec.json.encode(line),
        b"m": msgspec.json.encode(facts),
        b"b": msgspec.json.encode(body),
    }
    return Entry(EntryId(0, 1), fields)


class PauseAfterPause(Pause):
    """One ends behind the third step in which something waits, and another one begins at once."""

    def __init__(self) -> None:
        super().__init__(3_600.0)
        self.on, self._steps = True, 0

    def stepped(self) -> None:
        self._steps += bool(self._wakes)
        if self._steps == 3:
            self.end()
            self.on, self._steps = True, 0


async def attempt(
    world: EngineThread,
    journal: list[Entry],
    request_id: str = "req_0",
    pause: type[Pause] = Pause,
) -> Written:
    """Work on a journal as a worker does, one entry for every engine output, to the end of the
    response.
    """
    epoch = journal[-1].id.epoch + 1
    opened = AttemptFacts("replica", world.engine.name, 1, fingerprint=world.engine.fingerprint)
    entries = [
        *journal,
        Entry(EntryId(epoch, 0), {b"n": b"nonce", b"m": msgspec.json.encode(opened)}),
    ]

    def write(one: AttemptLog) -> None:
        while (entry := one.take()) is not None:
            entries.append(entry)
            one.accepted(entry)

    one = AttemptLog(request_id, "key", epoch, b"nonce", "", write)
    one.pause = pause()
    world.pauses.add(one.pause)
    facts = msgspec.json.decode(journal[0].fields[b"m"], type=RequestFacts)
    line = msgspec.json.decode(journal[0].fields[b"r"], type=RequestLine)
    part = recorded(entries) if epoch > 1 else None
    attempt = Attempt(one, facts, opened, world.telemetry, RedisClock(), part)
    attempt.path = line.path
    recording.current.set(attempt)
    try:
        await world.engine.serve(request_id, line, journal[0].body, attempt)
    except Exception:
        if attempt.failure is None:
            raise
    if attempt.failure is not None:
        attempt.stop(attempt.failure)
    else:
        attempt.stop()
    return Written(
        [entry for entry in entries if not entry.terminal],
        attempt,
        world.generated_tokens.pop(attempt, 0),
    )


async def attempts(
    world: EngineThread, journals: Sequence[list[Entry]], pause: type[Pause] = Pause
) -> list[Written]:
    """An attempt for each journal, as many at once as the engine runs."""
    few = asyncio.Semaphore(AT_ONCE)

    async def one(journal: list[Entry]) -> Written:
        async with few:
            return await attempt(world, journal, pause=pause)

    return await asyncio.gather(*(one(journal) for journal in journals))
