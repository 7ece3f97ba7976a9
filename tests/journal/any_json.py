"""Arbitrary JSON at every inference path of a real ingress.

`python -m tests.journal.any_json <redis url> <namespace> [<seconds>]`: the same requests each
time, or, for so many seconds, ever more of them, none of which may hold the loop. The ingress with
all its parts, a worker with the simulated engine and Redis are real; only Ray's handle and the
sockets are left out. The app runs on a loop in a thread of its own, and hypothesis waits while it
works, so that the CPU time of this process between two turns of the loop is what the project's own
code took from it: another process's is not in it, and a thread that keeps the interpreter for
itself is. A pause of the garbage collector is counted apart: it comes at whatever allocation is
next.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import hypothesis
from hypothesis import strategies as st

from serve_app.ingress.validation.bodies import INFERENCE_PATHS
from tests.journal.in_process import (
    WORKER,
    calling,
    ingress_process,
    settings_of,
    worker_process,
)
from tests.waiting import eventually

T = TypeVar("T")
STEP_S = 0.05
ANSWER_S = 120.0
EXAMPLES = 50
MODEL = "hermes-tiny"


class ServiceInAThread:
    """An ingress and a worker on an event loop of their own."""

    def __init__(self, redis_url: str, namespace: str, **engine: Any) -> None:
        self.settings = settings_of(
            redis_url,
            namespace,
            engine={
                "kind": "simulated",
                "args": {"tokens_per_s": 20_000, "max_output_tokens": 8, **engine},
            },
            workers={"replicas": 1},
            ingress={"replicas": 1},
            telemetry={"log_level": "ERROR"},
        )
        self.loop = asyncio.new_event_loop()
        self._running = AsyncExitStack()
        self.longest_s = 0.0
        self._gc_s = 0.0
        self._gc_began_s = 0.0
        threading.Thread(target=self.loop.run_forever, name="loop", daemon=True).start()
        self.run(self._start())
        gc.callbacks.append(self._on_gc)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on that loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def _start(self) -> None:
        worker = await self._running.enter_async_context(worker_process(self.settings))
        self._ingress = await self._running.enter_async_context(
            ingress_process(self.settings, calling(worker), [WORKER])
        )
        self._app = self._ingress.app()
        await eventually(lambda: self._ingress.readiness.report()[0])

    async def stop(self) -> None:
        """Stop both."""
        await self._running.aclose()

    async def metrics(self) -> str:
        """The page of the whole application."""
        return (await self._ingress.metrics.read()).decode()

    def _on_gc(self, phase: str, _: dict[str, int]) -> None:
        now_s = time.process_time()
        if phase == "start":
            self._gc_began_s = now_s
        else:
            self._gc_s += now_s - self._gc_began_s

    async def ask(
        self, path: str, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> tuple[int, bytes]:
        """Send a POST; returns status and answer. `longest_s` is the longest step of the loop so
        far.
        """
        got: list[Any] = []
        pending = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if pending:
                return pending.pop()
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            got.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "state": {},
        }
        answering = asyncio.ensure_future(self._app(scope, receive, send))
        async with asyncio.timeout(ANSWER_S):
            while not answering.done():
                before_s = time.process_time() - self._gc_s
                await asyncio.sleep(0.0005)
                self.longest_s = max(self.longest_s, time.process_time() - self._gc_s - before_s)
        await answering
        return got[0]["status"], b"".join(message.get("body", b"") for message in got[1:])


# -- what is sent --------------------------------------------------------------------------------


def encoded(value: Any) -> bytes:
    """Encode any value as JSON, including lone surrogates and NaN."""
    return json.dumps(value).encode()


def wide(item: bytes) -> st.SearchStrategy[bytes]:
    """A very long list."""
    return st.sampled_from([10, 1_000, 30_000, 400_000]).map(
        lambda count: b"[" + b",".join([item] * count) + b"]"
    )


def deep(opening: bytes, closing: bytes) -> st.SearchStrategy[bytes]:
    """A deeply nested value."""
    return st.sampled_from([5, 90, 150, 1_100, 25_000]).map(
        lambda levels: opening * levels + b"0" + closing * levels
    )


NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, -1, 1, 2**31, 2**53, 2**63, 2**64, -(2**63) - 1, 1e308, 5e-324, 10**400]),
)
TEXTS = st.one_of(
    st.text(max_size=20),
    st.text(alphabet=st.characters(categories=["Cs", "Cc", "Cf", "Co", "Zl"]), max_size=5),
    st.sampled_from(
        [
            "\x00",
            "\ud800",
            "\udfff",
            "a\r\nb",
            "\u2028",
            "%s",
            "{{7*7}}",
            "x" * 70_000,
            "é😀" * 300_000,
        ]
    ),
)
SMALL = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS).map(encoded)
HUGE = st.one_of(
    wide(b"null"),
    wide(b"1"),
    wide(b"70000"),
    wide(b'""'),
    wide(b"[]"),
    wide(b"{}"),
    wide(b'{"role":"user"}'),
    deep(b"[", b"]"),
    deep(b'{"a":', b"}"),
    st.sampled_from([b"9" * 40, b"9" * 4_300, b"9" * 5_000, b"1e999", b"01", b"NaN"]),
)
NAMES = st.one_of(
    TEXTS.map(encoded),
    st.sampled_from([b'"role"', b'"content"', b'"type"', b'"url"', b'"a"', b'"json"', b'"regex"']),
)


def listed(items: list[bytes]) -> bytes:
    return b"[" + b",".join(items) + b"]"


def fields(pairs: list[tuple[bytes, bytes]]) -> bytes:
    return b"{" + b",".join(name + b":" + value for name, value in pairs) + b"}"


VALUES = st.recursive(
    st.one_of(SMALL, SMALL, SMALL, HUGE),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5).map(listed),
        st.lists(st.tuples(NAMES, inner), max_size=5).map(fields),
    ),
    max_leaves=8,
)
FIELDS = (
    "model messages prompt input tokens stream stream_options temperature top_p top_k min_p "
    "max_tokens min_tokens n max_completion_tokens max_output_tokens best_of presence_penalty "
    "frequency_penalty repetition_penalty logprobs top_logprobs prompt_logprobs logit_bias seed "
    "stop stop_token_ids bad_words allowed_token_ids user service_tier prompt_cache_key "
    "cache_salt tools tool_choice response_format structured_outputs text chat_template "
    "chat_template_kwargs use_beam_search length_penalty truncate_prompt_tokens priority "
    "request_id vllm_xargs echo suffix instructions metadata dimensions encoding_format unknown"
).split()
MESSAGE = b'{"role":"user","content":"Hello"}'
PART = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,aGVsbG8="}}'
GOOD: dict[str, list[tuple[str, bytes]]] = {
    "/v1/chat/completions": [("messages", listed([MESSAGE]))],
    "/v1/completions": [("prompt", b'"Hello"')],
    "/v1/responses": [("input", b'"Hello"')],
    "/v1/embeddings": [("input", b'"Hello"')],
    "/tokenize": [("prompt", b'"Hello"')],
    "/detokenize": [("tokens", b"[1,2]")],
}
NEAR = st.one_of(
    VALUES,
    st.lists(st.one_of(st.just(MESSAGE), VALUES), max_size=4).map(listed),
    st.lists(st.one_of(st.just(PART), VALUES), max_size=4).map(
        lambda parts: listed([b'{"role":"user","content":' + listed(parts) + b"}"])
    ),
    VALUES.map(
        lambda value: listed(
            [b'{"type":"function","function":{"name":"f","parameters":' + value + b"}}"]
        )
    ),
)
HEADERS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                b"x-request-timeout-seconds",
                b"content-length",
                b"x-hermes-class",
                b"x-session-id",
                b"idempotency-key",
                b"traceparent",
                b"x-request-id",
                b"accept",
                b"authorization",
                b"last-event-id",
            ]
        ),
        st.one_of(
            st.binary(max_size=20),
            st.sampled_from(
                [
                    b"9" * 5_000,
                    b"\xb2",
                    b"1e400",
                    b"nan",
                    b"-1",
                    b"1_000",
                    b"standard",
                    b"a\r\nb: c",
                ]
            ),
        ),
    ),
    max_size=2,
)


@st.composite
def bodies(draw: st.DrawFn, path: str) -> bytes:
    """Usually a valid request with a few changed fields, then sometimes with a few changed
    bytes.
    """
    if draw(st.integers(0, 9)) == 0:
        anything: bytes = draw(st.one_of(VALUES, st.binary(max_size=200)))
        return anything
    pairs = [("model", encoded(MODEL)), ("max_tokens", b"5"), *GOOD[path]]
    changed = draw(st.lists(st.tuples(st.sampled_from(FIELDS), NEAR), max_size=3))
    if not draw(st.booleans()):  # else a name may come twice
        names = {name for name, _ in changed}
        pairs = [pair for pair in pairs if pair[0] not in names]
    body = fields(
        [
            (b'"' + name.encode() + b'"', value)
            for name, value in draw(st.permutations([*pairs, *changed]))
        ]
    )
    if draw(st.integers(0, 5)) == 0:
        at = draw(st.integers(0, len(body)))
        body = body[:at] + draw(st.binary(max_size=4)) + body[at + draw(st.integers(0, 3)) :]
    return body


def main(redis_url: str, namespace: str, seconds: float = 0.0) -> None:
    """Send requests; a failed assertion shows what was sent."""
    logging.disable(logging.CRITICAL)
    service = ServiceInAThread(redis_url, namespace)
    statuses: Counter[int] = Counter()
    until_s = time.monotonic() + seconds

    def one(path: str, data: st.DataObject) -> None:
        body = data.draw(bodies(path))
        sent = [(b"content-type", b"application/json"), *data.draw(HEADERS)]
        if seconds and time.monotonic() > until_s:
            return
        service.longest_s = 0.0
        status, answer = service.run(service.ask(path, sent, body))
        statuses[status] += 1
        assert status < 500, (status, answer[:500])
        if (
            seconds and service.longest_s > STEP_S
        ):  # again, for what happens once, such as the first use of something, or a slow moment
            held_s = []
            for _ in range(4):
                service.longest_s = 0.0
                service.run(service.ask(path, sent, body))
                held_s.append(service.longest_s)
            assert min(held_s) <= STEP_S, f"the loop was held for {min(held_s) * 1000:.0f} ms"

    quiet = hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    for seed in itertools.count(1):
        for path in INFERENCE_PATHS:
            quiet(
                hypothesis.seed(seed)(hypothesis.given(path=st.just(path), data=st.data())(one))
            )()
        if time.monotonic() > until_s:
            break
    service.run(service.stop())
    print(f"{sum(statuses.values())} requests: {dict(sorted(statuses.items()))}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(float, sys.argv[3:]))
