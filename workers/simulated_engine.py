"""A simulated engine without a model, for load tests, chaos and dry runs. It starts at once, and
every response header names it.

Its timing is that of continuous batching, by the law that `scripts/simulation` has, too. Its text
depends on the prompt alone, so every lost, duplicated or changed token shows. A prompt can trigger
faults.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from array import array
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from enum import StrEnum
from itertools import count, islice
from typing import Any

import msgspec

from serve_app import timings
from serve_app.clock import SYSTEM
from serve_app.contract import Cause, EngineReport, Reason
from serve_app.errors import RequestRefused, SettingsError
from serve_app.journal.attempt_log import Pause
from serve_app.journal.entries import RequestLine
from serve_app.settings import Settings
from workers.attempt import Attempt, EngineFailed
from workers.engine import Progress


class ResponseFormat:
    """OpenAI's response objects, in the only form that this engine needs."""

    def __init__(self, request_id: str, model: str, chat: bool, created_s: int) -> None:
        self._chat = chat
        self._facts: dict[str, Any] = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": created_s,
            "model": model,
        }
        said = b'"delta":{"content":"' if chat else b'"text":"'
        facts = msgspec.json.encode(self._facts)[:-1]
        self._prefix = b'data: %b,"choices":[{"index":0,%b' % (facts, said)

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
        chunk = {**self._facts, "choices": [], "usage": usage}
        return b"data: %b\n\n" % msgspec.json.encode(chunk)

    def complete(self, text: str, usage: dict[str, int]) -> bytes:
        """The complete response, if it is not streamed."""
        said: dict[str, Any] = {"text": text}
        if self._chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = {"index": 0, "finish_reason": "length", "logprobs": None, **said}
        kind = "chat.completion" if self._chat else "text_completion"
        whole = {**self._facts, "object": kind, "choices": [choice], "usage": usage}
        return msgspec.json.encode(whole)


def embeddings(request: dict[str, Any], model: str) -> tuple[bytes, int]:
    """The response to a request for embeddings, and how many tokens that has read. Each embedding
    depends on its text alone.
    """
    inputs: Any = request.get("input")
    several = isinstance(inputs, list) and not isinstance(next(iter(inputs), ""), int)
    base64 = request.get("encoding_format") == "base64"
    data: list[dict[str, Any]] = []
    encoded = [msgspec.json.encode(text) for text in (inputs if several else [inputs])]
    for index, text in enumerate(encoded):
        vector = array("f", (byte / 256 for byte in hashlib.blake2b(text).digest()))
        value = b64encode(vector.tobytes()).decode() if base64 else vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": value})
    read = sum(map(len, encoded)) // 4
    usage = {"prompt_tokens": read, "total_tokens": read}
    answer = {"object": "list", "data": data, "model": model, "usage": usage}
    return msgspec.json.encode(answer), read


def start(content_type: bytes) -> dict[str, Any]:
    headers = [(b"content-type", content_type)]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def body_part(body: bytes) -> dict[str, Any]:
    """An ASGI message with a part of the body, not the last one."""
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _respond(attempt: Attempt, body: bytes) -> None:
    """Send a complete response."""
    await attempt.send(start(b"application/json"))
    await attempt.send({"type": "http.response.body", "body": body, "more_body": False})


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


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a step takes: the sum of these, each times what the step holds."""

    step_ms: float
    """For the step itself, whatever it holds."""
    prefill_token_us: float = 0.0
    """For each token of a prompt that the step computes."""
    decode_sequence_us: float = 0.0
    """For each sequence that gets its next token."""
    context_token_ns: float = 0.0
    """For each token of context that those sequences read."""
    prefill_context_token_ps: float = 0.0
    """For each pair of a computed token of a prompt and a token that it attends to."""
    new_sequence_us: float = 0.0
    """For each sequence that begins in the step."""
    request_ms: float = 0.0
    """From a request's arrival until the engine knows it, and the way of its first token back."""

    def step_s(self, prefill: int, pairs: int, decoding: int, context: int, fresh: int) -> float:
        """Of a step that holds so much of each."""
        each_us = (
            self.prefill_token_us * prefill
            + self.decode_sequence_us * decoding
            + self.new_sequence_us * fresh
        )
        return (
            self.step_ms * 1e-3
            + each_us * 1e-6
            + self.context_token_ns * context * 1e-9
            + self.prefill_context_token_ps * pairs * 1e-12
        )


class SimulatedArguments(msgspec.Struct, forbid_unknown_fields=True):
    """`engine.args` of a simulated engine."""

    tokens_per_s: float = 100.0
    """Tokens per second for each running request."""
    prefill_ms: float = 0.0
    """Time from the start of a request to its first step."""
    timing: Timing | None = None
    """In place of these two: the `timing` of an engine in `scripts/simulation/engines`."""
    max_output_tokens: int = 0
    """Upper limit on the output, like a model's context; 0: no limit beyond the request's own."""
    faults: dict[str, Fault] = {}
    """Maps a text in a request's body to the fault that occurs after `fault_after_tokens` of its
    output.
    """
    fault_after_tokens: int = 3

    def fault_of(self, body: bytes) -> Fault | None:
        return next((it for text, it in self.faults.items() if text.encode() in body), None)


class Batch:
    """What runs, and the clock of its steps: each gives one token to every member, and is due when
    the one before it is, and its own time, are over; a late step does not delay the next.
    """

    def __init__(self, arguments: SimulatedArguments, stepped: Callable[[], None]) -> None:
        self._timing = arguments.timing or Timing(
            1e3 / arguments.tokens_per_s, request_ms=arguments.prefill_ms
        )
        self._stepped = stepped
        self._members: set[_Running] = set()
        """Each step gives them one more token."""
        self._work = asyncio.Event()
        self._steps: asyncio.Task[None] | None = None

    async def join(self, member: _Running) -> None:
        await asyncio.sleep(self._timing.request_ms / 1e3)
        if self._steps is None:
            self._steps = asyncio.create_task(self._step(), name="simulated-steps")
        self._members.add(member)
        self._work.set()

    def leave(self, member: _Running) -> None:
        self._members.discard(member)

    def stop(self) -> None:
        if self._steps is not None:
            self._steps.cancel()

    async def _step(self) -> None:
        due = SYSTEM.monotonic_s()
        while True:
            if not self._members:
                self._work.clear()
                await self._work.wait()
                due = SYSTEM.monotonic_s()
            due = max(due + self._step_s(), SYSTEM.monotonic_s())
            await asyncio.sleep(due - SYSTEM.monotonic_s())
            for member in list(self._members):
                member.step()
            self._stepped()

    def _step_s(self) -> float:
        fresh = [one.prompt_tokens for one in self._members if not one.produced]
        prefill = sum(fresh)
        context = sum(one.prompt_tokens + one.produced for one in self._members) - prefill
        pairs = sum(tokens * tokens // 2 for tokens in fresh)
        decoding = len(self._members) - len(fresh)
        return self._timing.step_s(prefill, pairs, decoding, context, len(fresh))


class _Running:
    """A request of the engine. `waiting`: tokens that it has not taken."""

    __slots__ = ("_left", "_pause", "produced", "prompt_tokens", "ready", "waiting")

    def __init__(self, prompt_tokens: int, left: int, pause: Pause) -> None:
        self.prompt_tokens, self.produced = prompt_tokens, 0
        self.waiting = 0
        self.ready = asyncio.Event()
        self._left = left
        self._pause = pause

    def step(self) -> None:
        """In a pause the token waits, unless it is the first or the last."""
        self._left -= 1
        running = self.produced and self._left > 0
        self.produced += 1
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
    """Its fingerprint is constant: the text depends on nothing but the prompt."""

    name = fingerprint = "simulated"

    def __init__(self, settings: Settings) -> None:
        try:
            self._arguments = msgspec.convert(settings.engine.args, SimulatedArguments)
        except msgspec.ValidationError as error:
            raise SettingsError(f"settings: engine.args (simulated): {error}") from None
        self.progress = Progress()
        self._batch = Batch(self._arguments, self.progress.stepped)
        self._stall_s = settings.workers.engine_stall_timeout_s
        self._failed = False

    async def start(self) -> None:
        """Nothing is loaded."""

    async def stop(self) -> None:
        self._batch.stop()

    def report(self, name: str) -> EngineReport | None:
        """None: it has no memory."""
        return None

    async def check_health(self) -> None:
        """Raise once a fault has made the engine fail or hang."""
        self._check()
        self.progress.check(self._stall_s)

    def _check(self) -> None:
        if self._failed:
            raise EngineFailed("the simulated engine was told to fail")

    async def serve(
        self, request_id: str, line: RequestLine, body: bytes, attempt: Attempt
    ) -> None:
        """Chat and completions, streamed and not, and embeddings."""
        if line.path not in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
            message = f"The simulated engine has no {line.path}."
            attempt.failure = RequestRefused(Reason.NOT_FOUND, message)
            return
        self.progress.begun()
        try:
            if line.path == "/v1/embeddings":
                await self._embed(msgspec.json.decode(body), attempt)
            else:
                await self._answer(request_id, line, body, attempt)
        finally:
            self.progress.ended()

    async def _answer(
        self, request_id: str, line: RequestLine, body: bytes, attempt: Attempt
    ) -> None:
        request = msgspec.json.decode(body)
        chat = line.path.endswith("/chat/completions")
        shape = ResponseFormat(request_id, attempt.facts.called, chat, int(attempt.created_s))
        limit = int(request.get("max_completion_tokens") or request.get("max_tokens") or 64)
        limit = min(limit, self._arguments.max_output_tokens or limit)
        prompt = msgspec.json.encode(request.get("messages", request.get("prompt")))
        streamed = request.get("stream") is True
        if streamed:
            await attempt.send(start(b"text/event-stream; charset=utf-8"))
        spoken = []
        fault = self._arguments.fault_of(body)
        async with aclosing(self._speak(prompt, limit, attempt, fault)) as parts:
            async for words, last in parts:
                if streamed:
                    await attempt.send(body_part(shape.chunk(words, last)))
                spoken.append(words)
        read = len(prompt) // 4
        usage = {"prompt_tokens": read, "completion_tokens": limit, "total_tokens": read + limit}
        if not streamed:
            await _respond(attempt, shape.complete("".join(spoken), usage))
            return
        if (request.get("stream_options") or {}).get("include_usage"):
            await attempt.send(body_part(shape.usage(usage)))
        await attempt.send(body_part(b"data: [DONE]\n\n"))
        await attempt.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _embed(self, request: dict[str, Any], attempt: Attempt) -> None:
        """A request for embeddings takes one step."""
        answer, read = embeddings(request, attempt.facts.called)
        running = _Running(read, 1, attempt.pause)
        await self._batch.join(running)
        try:
            await running.taken()
        finally:
            self._batch.leave(running)
        attempt.read(read, 0)
        await _respond(attempt, answer)

    async def _speak(
        self, prompt: bytes, limit: int, attempt: Attempt, fault: Fault | None
    ) -> AsyncGenerator[tuple[str, bool], None]:
        """The recorded part at once; then one token per step, or several together if a pause has
        kept them or the loop was late. Each with whether it is the last.
        """
        words, taken, read = text_of(prompt), 0, len(prompt) // 4
        for output in attempt.recorded.outputs:
            taken += len(output.token_ids)
            yield "".join(islice(words, len(output.token_ids))), taken == limit
            attempt.flush_previous()
        running = _Running(read + taken, limit - taken, attempt.pause)
        await self._batch.join(running)
        if taken:
            attempt.count_recompute(read + taken)
        else:
            attempt.read(read, 0)
        fault_at = taken + self._arguments.fault_after_tokens if fault else limit
        try:
            while taken < limit:
                tokens = await running.taken()
                if taken >= fault_at or self._failed:
                    await self._suffer(fault, attempt)
                text = "".join(islice(words, tokens))
                token_ids = range(taken + 1, taken + tokens + 1)
                taken += tokens
                last = taken == limit
                attempt.record(0, text, token_ids, "length" if last else None, None, 0)
                yield text, last
                if not last:
                    attempt.flush_previous()
        finally:
            self._batch.leave(running)

    async def _suffer(self, fault: Fault | None, attempt: Attempt) -> None:
        match fault:
            case Fault.EXIT:
                os._exit(1)
            case Fault.HOLD:
                until_s = time.thread_time() + timings.SIMULATED_HOLD_S
                while time.thread_time() < until_s:
                    pass
            case Fault.HANG:
                self._batch.stop()
                await asyncio.Event().wait()
            case Fault.STAY:
                await asyncio.Event().wait()
            case Fault.FAIL:
                self._failed = True
        if self._failed:
            attempt.stop(Cause.ENGINE_FAILED)
            self._check()


def text_of(prompt: bytes) -> Iterator[str]:
    """The words that follow a prompt: endless, the same for the same prompt, and numbered."""
    seed = int.from_bytes(hashlib.blake2b(prompt, digest_size=4).digest(), "big")
    for number in count(1):
        yield f"{_WORDS[(seed + number * number) % len(_WORDS)]}-{number} "
