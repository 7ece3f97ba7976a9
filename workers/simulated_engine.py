"""A simulated engine without a model and without vLLM. It starts at once, and every response header
names it.

It is for load tests, chaos and dry runs. Its timing is that of continuous batching with fixed
rates: each step gives one token to every running request. Its text depends on the prompt alone, so
every lost, duplicated or changed token shows. A prompt can trigger faults (`faults`).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from array import array
from base64 import b64encode
from collections.abc import Iterator
from enum import StrEnum
from itertools import count, islice
from typing import Any

import msgspec

from serve_app import timings
from serve_app.clock import SYSTEM
from serve_app.contract import Cause, EngineReport, Reason
from serve_app.errors import RequestRefused, SettingsError
from serve_app.journal.facts import RequestLine
from serve_app.journal.pause import Pause
from serve_app.settings import Settings
from workers.attempt import Attempt, EngineFailed
from workers.engine import Progress


class ResponseFormat:
    """OpenAI's response objects, in the only form that this engine needs."""

    def __init__(self, request_id: str, model: str, chat: bool, created_s: int) -> None:
        self._chat = chat
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{request_id}"
        self._model = model
        self._created = created_s
        kind = "chat.completion.chunk" if chat else "text_completion"
        self._prefix = (
            "data: "
            f'{{"id":"{self._id}","object":"{kind}","created":{self._created},"model":"{model}",'
            '"choices":[{"index":0,' + ('"delta":{"content":"' if chat else '"text":"')
        ).encode()

    def chunk(self, words: str, last: bool) -> bytes:
        """One event of a stream; the words need no escaping."""
        finish = b'"length"' if last else b"null"
        return b'%b%b"%b,"logprobs":null,"finish_reason":%b}]}\n\n' % (
            self._prefix,
            words.encode(),
            b"}" if self._chat else b"",
            finish,
        )

    def usage(self, usage: dict[str, int]) -> bytes:
        """The chunk that `stream_options.include_usage` asks for."""
        chunk = {
            **self._object("chat.completion.chunk" if self._chat else "text_completion", []),
            "usage": usage,
        }
        return b"data: %b\n\n" % msgspec.json.encode(chunk)

    def complete(self, text: str, usage: dict[str, int]) -> bytes:
        """The complete response, if it is not streamed."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "logprobs": None}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        kind = "chat.completion" if self._chat else "text_completion"
        return msgspec.json.encode({**self._object(kind, [choice]), "usage": usage})

    def _object(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


def embeddings(request: dict[str, Any], model: str) -> tuple[bytes, int]:
    """The response to a request for embeddings, and how many tokens that has read. Each embedding
    depends on its text alone.
    """
    inputs = request.get("input")
    texts = [inputs] if isinstance(inputs, str) or not isinstance(inputs, list) else inputs
    if texts and isinstance(texts[0], int):
        texts = [texts]
    base64 = request.get("encoding_format") == "base64"
    data: list[dict[str, Any]] = []
    encoded = [msgspec.json.encode(text) for text in texts]
    for index, text in enumerate(encoded):
        vector = array("f", (byte / 256 for byte in hashlib.blake2b(text).digest()))
        value = b64encode(vector.tobytes()).decode() if base64 else vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": value})
    read = sum(map(len, encoded)) // 4
    usage = {"prompt_tokens": read, "total_tokens": read}
    answer = {"object": "list", "data": data, "model": model, "usage": usage}
    return msgspec.json.encode(answer), read


def start(status: int, content_type: str) -> dict[str, Any]:
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", content_type.encode())],
    }


def body_part(body: bytes) -> dict[str, Any]:
    """An ASGI message with a part of the body, not the last one."""
    return {"type": "http.response.body", "body": body, "more_body": True}


async def respond(recorder: Attempt, status: int, content_type: str, body: bytes) -> None:
    """Send a complete response."""
    await recorder.send(start(status, content_type))
    await recorder.send({"type": "http.response.body", "body": body, "more_body": False})


_WORDS = (
    "a queue holds every request until an engine has room and then the journal keeps what was said "
    "while replicas come and go so that nobody waits twice for the same word and no token is lost"
).split()


class Fault(StrEnum):
    """What can happen to an engine."""

    FAIL = "fail"
    """The engine fails during all of its requests, as vLLM's does when its core dies."""
    EXIT = "exit"
    """The whole process exits at once."""
    HANG = "hang"
    """The engine makes no further step."""
    HOLD = "hold"
    """The engine's code computes on the worker's event loop and blocks everything else."""
    STAY = "stay"
    """The request gets no further token and keeps its place until it is cancelled."""


class SimulatedArguments(msgspec.Struct, forbid_unknown_fields=True):
    """`engine.args` of a simulated engine."""

    tokens_per_s: float = 100.0
    """Tokens per second for each running request."""
    max_output_tokens: int = 0
    """Upper limit on the output, like a model's context; 0: no limit beyond the request's own."""
    prefill_ms: float = 0.0
    """Time from the start of a request to its first step."""
    faults: dict[str, Fault] = {}
    """Maps a text in a request's body to the fault that occurs after `fault_after_tokens` of its
    output.
    """
    fault_after_tokens: int = 3


class _Running:
    """One request in the batch. `waiting`: tokens that it has not taken; `left`: those to come."""

    __slots__ = ("_begun", "_left", "_pause", "ready", "waiting")

    def __init__(self, left: int, pause: Pause) -> None:
        self.waiting = 0
        self.ready = asyncio.Event()
        self._begun = False
        self._left = left
        self._pause = pause

    def step(self) -> None:
        """One more token. In a pause it waits, unless it is the first or the last."""
        self._left -= 1
        running, self._begun = self._begun and self._left > 0, True
        if not running or (not self.waiting and not self._pause.holds(self._wake)):
            self.ready.set()
        self.waiting += 1

    async def taken(self) -> int:
        """How many tokens there are now, at least one."""
        await self.ready.wait()
        self.ready.clear()
        tokens, self.waiting = min(self.waiting, self.waiting + self._left), 0
        return tokens

    def _wake(self) -> None:
        if self.waiting:
            self.ready.set()


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
        self.progress = Progress()
        self._stall_s = settings.workers.engine_stall_timeout_s

    @property
    def fingerprint(self) -> str:
        """Constant, because the text depends on nothing but the prompt."""
        return self.name

    async def start(self) -> None:
        self._steps = asyncio.create_task(self._step(), name="simulated-steps")

    async def stop(self) -> None:
        if self._steps is not None:
            self._steps.cancel()

    def report(self, name: str) -> EngineReport | None:
        """None: fixed rates know no memory."""
        return None

    async def check_health(self) -> None:
        """Raise once a fault has made the engine fail or hang."""
        if self._failed.is_set():
            raise EngineFailed("the simulated engine was told to fail")
        self.progress.check(self._stall_s)

    async def _step(self) -> None:
        """The clock of the batch: a step is due every 1/rate seconds; a late step does not delay
        the next.
        """
        period_s = 1.0 / self._arguments.tokens_per_s
        due = SYSTEM.monotonic_s()
        while True:
            if not self._batch:
                self._work.clear()
                await self._work.wait()
                due = SYSTEM.monotonic_s()
            due = max(due + period_s, SYSTEM.monotonic_s())
            await asyncio.sleep(due - SYSTEM.monotonic_s())
            for running in self._batch:
                running.step()
            self.progress.stepped()

    async def serve(
        self, request_id: str, line: RequestLine, body: bytes, recorder: Attempt
    ) -> None:
        """Chat and completions, streamed and not, and embeddings.

        Raises:
            EngineFailed: a fault was injected.
        """
        request = msgspec.json.decode(body)
        if line.path == "/v1/embeddings":
            await self._embed(request, recorder)
            return
        if line.path not in ("/v1/chat/completions", "/v1/completions"):
            message = f"The simulated engine has no {line.path}."
            recorder.failure = RequestRefused(Reason.NOT_FOUND, message)
            return
        shape = ResponseFormat(
            request_id,
            self._model,
            line.path.endswith("/chat/completions"),
            int(recorder.created_s),
        )
        limit = int(request.get("max_completion_tokens") or request.get("max_tokens") or 64)
        limit = min(limit, self._arguments.max_output_tokens or limit)
        prompt = msgspec.json.encode(request.get("messages", request.get("prompt")))
        streamed = request.get("stream") is True
        if streamed:
            await recorder.send(start(200, "text/event-stream; charset=utf-8"))
        fault = next(
            (fault for text, fault in self._arguments.faults.items() if text.encode() in body), None
        )
        self.progress.begun()
        try:
            spoken = [
                word async for word in self._speak(prompt, limit, shape, recorder, streamed, fault)
            ]
        finally:
            self.progress.ended()
        usage = {
            "prompt_tokens": len(prompt) // 4,
            "completion_tokens": limit,
            "total_tokens": len(prompt) // 4 + limit,
        }
        if not streamed:
            await respond(recorder, 200, "application/json", shape.complete("".join(spoken), usage))
            return
        if (request.get("stream_options") or {}).get("include_usage"):
            await recorder.send(body_part(shape.usage(usage)))
        await recorder.send(body_part(b"data: [DONE]\n\n"))
        await recorder.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _embed(self, request: dict[str, Any], recorder: Attempt) -> None:
        """A request for embeddings takes one step."""
        self.progress.begun()
        running = await self._join(1, recorder.pause)
        try:
            await running.taken()
        finally:
            self._batch.discard(running)
            self.progress.ended()
        answer, read = embeddings(request, self._model)
        recorder.read(read, 0)
        await respond(recorder, 200, "application/json", answer)

    async def _speak(
        self,
        prompt: bytes,
        limit: int,
        shape: ResponseFormat,
        recorder: Attempt,
        streamed: bool,
        fault: Fault | None,
    ) -> Any:
        """Send the recorded part at once; then one token per step, or several together if a pause
        has kept them or the loop was late.
        """
        words, taken = text_of(prompt), 0
        for output in recorder.recorded.outputs:
            text = "".join(islice(words, len(output.token_ids)))
            taken += len(output.token_ids)
            if streamed:
                await recorder.send(body_part(shape.chunk(text, taken == limit)))
            recorder.flush_previous()
            yield text
        running = await self._join(limit - taken, recorder.pause)
        read = len(prompt) // 4
        if taken:
            recorder.count_recompute(read + taken)
        else:
            recorder.read(read, 0)
        fault_at = taken + self._arguments.fault_after_tokens if fault else limit
        try:
            while taken < limit:
                tokens = await running.taken()
                if taken >= fault_at or self._failed.is_set():
                    await self._suffer(fault, recorder)
                text = "".join(islice(words, tokens))
                token_ids = range(taken + 1, taken + tokens + 1)
                taken += tokens
                last = taken == limit
                recorder.record(0, text, token_ids, "length" if last else None, None, 0)
                if streamed:
                    await recorder.send(body_part(shape.chunk(text, last)))
                if not last:
                    recorder.flush_previous()
                yield text
        finally:
            self._batch.discard(running)

    async def _join(self, left: int, pause: Pause) -> _Running:
        if self._arguments.prefill_ms:
            await asyncio.sleep(self._arguments.prefill_ms / 1000)
        running = _Running(left, pause)
        self._batch.add(running)
        self._work.set()
        return running

    async def _suffer(self, fault: Fault | None, recorder: Attempt) -> None:
        if fault is Fault.EXIT:
            os._exit(1)
        if fault is Fault.HOLD:
            until_s = time.thread_time() + timings.SIMULATED_HOLD_S
            while time.thread_time() < until_s:
                pass
            return
        if fault is Fault.STAY:
            await asyncio.Event().wait()
        if fault is Fault.HANG:
            if self._steps is not None:
                self._steps.cancel()
            await asyncio.Event().wait()
        self._failed.set()
        recorder.stop(Cause.ENGINE_FAILED)
        raise EngineFailed("the simulated engine was told to fail")


def text_of(prompt: bytes) -> Iterator[str]:
    """The words that follow a prompt: endless, the same for the same prompt, and numbered."""
    seed = int.from_bytes(hashlib.blake2b(prompt, digest_size=4).digest(), "big")
    for number in count(1):
        yield f"{_WORDS[(seed + number * number) % len(_WORDS)]}-{number} "
