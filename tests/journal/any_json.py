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
import time
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any, Self

import httpx
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
from tests.journal.state_machines import LoopThread
from tests.waiting import eventually

STEP_S = 0.05
EXAMPLES, TRIES = 50, 5
MODEL = "hermes-tiny"


class Service:
    """An ingress and a worker on an event loop of their own."""

    def __init__(self, redis_url: str, namespace: str) -> None:
        self.longest_s = 0.0
        self._gc_s = 0.0
        self._gc_began_s = 0.0
        args = {"tokens_per_s": 20_000, "max_output_tokens": 8}
        self._settings = settings_of(
            redis_url, namespace, engine={"kind": "simulated", "args": args}
        )
        self._running = AsyncExitStack()
        self._thread = LoopThread()
        self.run = self._thread.run

    def __enter__(self) -> Self:
        self.run(self._start())
        gc.callbacks.append(self._on_gc)
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._running.aclose())
        self._thread.end()

    async def _start(self) -> None:
        worker = await self._running.enter_async_context(worker_process(self._settings))
        ingress = await self._running.enter_async_context(
            ingress_process(self._settings, calling(worker), [WORKER])
        )
        transport = httpx.ASGITransport(app=ingress.app())
        self._http = httpx.AsyncClient(transport=transport, base_url="http://ingress")
        await eventually(lambda: ingress.readiness.report()[0])

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
        answering = asyncio.ensure_future(self._http.post(path, headers=headers, content=body))
        while not answering.done():
            before_s = time.process_time() - self._gc_s
            await asyncio.sleep(0.0005)
            self.longest_s = max(self.longest_s, time.process_time() - self._gc_s - before_s)
        answer = await answering
        return answer.status_code, answer.content


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
    st.sampled_from(["\x00", "\ud800", "\udfff", "a\r\nb", "\u2028", "%s", "{{7*7}}"]),
    st.sampled_from(["x" * 70_000, "é😀" * 300_000]),
)
SMALL = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS).map(encoded)
HUGE = st.one_of(
    *map(wide, [b"null", b"1", b"70000", b'""', b"[]", b"{}", b'{"role":"user"}']),
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
HEADER_NAMES = (
    b"x-request-timeout-seconds content-length x-hermes-class x-session-id idempotency-key "
    b"traceparent x-request-id accept authorization last-event-id"
).split()
HEADER_VALUES = [
    b"9" * 5_000,
    b"\xb2",
    b"1e400",
    b"nan",
    b"-1",
    b"1_000",
    b"standard",
    b"a\r\nb: c",
]
HEADERS = st.lists(
    st.tuples(
        st.sampled_from(HEADER_NAMES),
        st.one_of(st.binary(max_size=20), st.sampled_from(HEADER_VALUES)),
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
    shuffled = draw(st.permutations([*pairs, *changed]))
    body = fields([(b'"%b"' % name.encode(), value) for name, value in shuffled])
    if draw(st.integers(0, 5)) == 0:
        at = draw(st.integers(0, len(body)))
        body = body[:at] + draw(st.binary(max_size=4)) + body[at + draw(st.integers(0, 3)) :]
    return body


def main(redis_url: str, namespace: str, seconds: float = 0.0) -> None:
    """Send requests; a failed assertion shows what was sent."""
    logging.disable(logging.CRITICAL)
    statuses: Counter[int] = Counter()
    until_s = time.monotonic() + seconds
    with Service(redis_url, namespace) as service:

        def one(path: str, data: st.DataObject) -> None:
            body = data.draw(bodies(path))
            sent = [(b"content-type", b"application/json"), *data.draw(HEADERS)]
            if seconds and time.monotonic() > until_s:
                return
            held_s: list[float] = []
            # Again, for what happens once, such as the first use of something, or a slow moment.
            while not held_s or (seconds and held_s[-1] > STEP_S and len(held_s) < TRIES):
                service.longest_s = 0.0
                status, answer = service.run(service.ask(path, sent, body))
                held_s.append(service.longest_s)
            statuses[status] += 1
            assert status < 500, (status, answer[:500])
            held = f"the loop was held for {min(held_s) * 1000:.0f} ms"
            assert not seconds or min(held_s) <= STEP_S, held

        quiet = hypothesis.settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        for seed in itertools.count(1):
            for path in INFERENCE_PATHS:
                given = hypothesis.given(path=st.just(path), data=st.data())(one)
                quiet(hypothesis.seed(seed)(given))()
            if time.monotonic() > until_s:
                break
    print(f"{sum(statuses.values())} requests: {dict(sorted(statuses.items()))}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(float, sys.argv[3:]))
