"""A simulated engine: no model, no vLLM; starts at once and says what it is in every response header.

For load, chaos and dry runs. Its timing is that of continuous batching with fixed rates: one step after another,
and each step gives one token to every running request. Its text is a function of the prompt alone, so that every
token that is lost, doubled or changed shows. Faults can be injected by what a prompt says (`faults`).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import time
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import msgspec

from serve_app.errors import Reason, RequestRefused, SettingsError
from serve_app.journal.entries import RequestLine
from serve_app.settings import Settings
from workers.engine import EngineFailed, Progress
from workers.recorder import Recorder

_WORDS = (
    "a queue holds every request until an engine has room and then the journal keeps what was said "
    "while replicas come and go so that nobody waits twice for the same word and no token is lost"
).split()


_HOLD_S = 1.5


class Fault(StrEnum):
    """What can befall an engine."""

    FAIL = "fail"
    """The engine fails under all of its requests, as vLLM's does when its core dies."""
    EXIT = "exit"
    """The whole process ends at once."""
    HANG = "hang"
    """The engine makes no further step."""
    HOLD = "hold"
    """The engine's code computes on the worker's event loop, and nobody else has a turn."""


class SimulatedArguments(msgspec.Struct, forbid_unknown_fields=True):
    """`engine.args` of a simulated engine."""

    tokens_per_s: float = 100.0
    """Of every running request."""
    max_output_tokens: int = 0
    """However many a request asks for, as a model's context bounds them; 0: as many as it asks for."""
    prefill_ms: float = 0.0
    """From the start of a request to its first step."""
    faults: dict[str, Fault] = {}
    """A text in a request's body, and what befalls the engine when it has produced `fault_after_tokens` for it."""
    fault_after_tokens: int = 3


class _Running:
    """One request in the batch: `steps` counts the tokens it may take."""

    __slots__ = ("ready", "steps")

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.ready = asyncio.Event()


class SimulatedEngine:
    """The engine interface without an engine."""

    name = "simulated"

    def __init__(self, settings: Settings) -> None:
        try:
            self._arguments = msgspec.convert(settings.engine.args, SimulatedArguments)
        except msgspec.ValidationError as error:
            raise SettingsError(f"settings: engine.args (simulated): {error}") from None
        self._model = settings.model.name
        self._batch: set[_Running] = set()
        self._work = asyncio.Event()
        self._steps: asyncio.Task[None] | None = None
        self._failed = asyncio.Event()
        self._progress = Progress()
        self._stall_s = settings.workers.stall_s

    @property
    def fingerprint(self) -> str:
        """The text depends on nothing but the prompt."""
        return self.name

    async def start(self) -> None:
        """Begin to step."""
        self._steps = asyncio.create_task(self._step(), name="simulated-steps")

    async def stop(self) -> None:
        """Stop stepping."""
        if self._steps is not None:
            self._steps.cancel()

    async def check_health(self) -> None:
        """Raises once the engine has been told to fail or to hang."""
        if self._failed.is_set():
            raise EngineFailed("the simulated engine was told to fail")
        self._progress.check(self._stall_s)

    async def _step(self) -> None:
        """The batch's clock: a step is due every 1/rate seconds; a late one does not shift the next."""
        period_s = 1.0 / self._arguments.tokens_per_s
        due = time.monotonic()
        while True:
            if not self._batch:
                self._work.clear()
                await self._work.wait()
                due = time.monotonic()
            due = max(due + period_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            self._progress.stepped()
            for running in self._batch:
                running.steps += 1
                running.ready.set()

    async def serve(self, request_id: str, line: RequestLine, body: bytes, recorder: Recorder) -> None:
        """Chat and completions, streamed and not.

        Raises:
            EngineFailed: a fault was injected.
        """
        request = msgspec.json.decode(body)
        if line.path not in ("/v1/chat/completions", "/v1/completions"):
            refusal = RequestRefused(Reason.NOT_FOUND, f"The simulated engine has no {line.path}.")
            await _respond(recorder, refusal.status, "application/json", refusal.body())
            return
        shape = _Shape(request_id, self._model, line.path.endswith("/chat/completions"), int(recorder.created_s))
        limit = request.get("max_completion_tokens") or request.get("max_tokens") or 64
        limit = min(limit, self._arguments.max_output_tokens or limit)
        words = text_of(msgspec.json.encode(request.get("messages", request.get("prompt"))))
        streamed = request.get("stream") is True
        if streamed:
            await recorder.send(_start(200, "text/event-stream; charset=utf-8"))
        fault = next((fault for text, fault in self._arguments.faults.items() if text.encode() in body), None)
        self._progress.begun()
        try:
            spoken = [word async for word in self._speak(words, limit, shape, recorder, streamed, fault)]
        finally:
            self._progress.ended()
        usage = {"prompt_tokens": len(body) // 4, "completion_tokens": limit, "total_tokens": len(body) // 4 + limit}
        if not streamed:
            await _respond(recorder, 200, "application/json", shape.whole("".join(spoken), usage))
            return
        if (request.get("stream_options") or {}).get("include_usage"):
            await recorder.send(_body(shape.usage(usage)))
        await recorder.send(_body(b"data: [DONE]\n\n"))
        await recorder.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _speak(
        self, words: Iterator[str], limit: int, shape: _Shape, recorder: Recorder, streamed: bool, fault: Fault | None
    ) -> Any:
        """What was recorded at once; then one token a step, several where the loop was late."""
        taken = 0
        for output in recorder.recorded.outputs:
            recorder.replay(output)
            word, taken = next(words), taken + 1
            if streamed:
                await recorder.send(_body(shape.chunk(word, taken == limit)))
            recorder.pulled()
            yield word
        if self._arguments.prefill_ms:
            await asyncio.sleep(self._arguments.prefill_ms / 1000)
        running = _Running(taken)
        self._batch.add(running)
        self._work.set()
        fault_at = taken + self._arguments.fault_after_tokens if fault else limit
        try:
            while taken < limit:
                await running.ready.wait()
                running.ready.clear()
                if taken >= fault_at or self._failed.is_set():
                    await self._suffer(fault, recorder)
                for _ in range(min(running.steps, limit) - taken):
                    word = next(words)
                    taken += 1
                    last = taken == limit
                    recorder.record(0, word, (taken,), "length" if last else None, None, 0)
                    if streamed:
                        await recorder.send(_body(shape.chunk(word, last)))
                    if not last:
                        recorder.pulled()
                    yield word
        finally:
            self._batch.discard(running)

    async def _suffer(self, fault: Fault | None, recorder: Recorder) -> None:
        if fault is Fault.EXIT:
            os._exit(1)
        if fault is Fault.HOLD:
            until_s = time.thread_time() + _HOLD_S
            while time.thread_time() < until_s:
                pass
            return
        if fault is Fault.HANG:
            if self._steps is not None:
                self._steps.cancel()
            await asyncio.Event().wait()
        self._failed.set()
        recorder.fail()
        raise EngineFailed("the simulated engine was told to fail")


def text_of(prompt: bytes) -> Iterator[str]:
    """The words that follow a prompt: endless, and the same for the same prompt; each carries its number."""
    seed = int.from_bytes(hashlib.blake2b(prompt, digest_size=4).digest(), "big")
    for number in itertools.count(1):
        yield f"{_WORDS[(seed + number * number) % len(_WORDS)]}-{number} "


class _Shape:
    """OpenAI's response objects, in the one form this engine needs."""

    def __init__(self, request_id: str, model: str, chat: bool, created_s: int) -> None:
        self._chat = chat
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{request_id}"
        self._model = model
        self._created = created_s
        kind = "chat.completion.chunk" if chat else "text_completion"
        self._prefix = (
            f'data: {{"id":"{self._id}","object":"{kind}","created":{self._created},"model":"{model}",'
            '"choices":[{"index":0,' + ('"delta":{"content":"' if chat else '"text":"')
        ).encode()

    def chunk(self, word: str, last: bool) -> bytes:
        """One streamed token; the words need no escaping."""
        finish = b'"length"' if last else b"null"
        return b'%b%b"%b,"logprobs":null,"finish_reason":%b}]}\n\n' % (
            self._prefix, word.encode(), b"}" if self._chat else b"", finish
        )  # fmt: skip

    def usage(self, usage: dict[str, int]) -> bytes:
        """The chunk that `stream_options.include_usage` asks for."""
        chunk = {**self._object("chat.completion.chunk" if self._chat else "text_completion", []), "usage": usage}
        return b"data: %b\n\n" % msgspec.json.encode(chunk)

    def whole(self, text: str, usage: dict[str, int]) -> bytes:
        """The response that is not streamed."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "logprobs": None}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        kind = "chat.completion" if self._chat else "text_completion"
        return msgspec.json.encode({**self._object(kind, [choice]), "usage": usage})

    def _object(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}


def _start(status: int, content_type: str) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type.encode())]}


def _body(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _respond(recorder: Recorder, status: int, content_type: str, body: bytes) -> None:
    await recorder.send(_start(status, content_type))
    await recorder.send({"type": "http.response.body", "body": body, "more_body": False})
