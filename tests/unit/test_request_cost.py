"""Validating a body needs neither much memory nor much time in the event loop, whatever it
contains.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from serve_app.contract import COMPACT, MESSAGE
from serve_app.errors import RequestRefused
from serve_app.ingress.validation.fields import INFERENCE_PATHS
from serve_app.ingress.validation.structure import read
from serve_app.policy.placement import session_key
from serve_app.policy.prediction import LengthModel
from serve_app.policy.work import work_of
from serve_app.settings.limits import RequestLimits
from tests.tables import each
from tests.unit.virtual_order import Entry

T = TypeVar("T")
MODEL = "hermes-tiny"
CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS = INFERENCE_PATHS[:4]
LIMITS = RequestLimits()
LARGEST = (16 << 20) - 200
HELLO = [{"role": "user", "content": "hello"}]


def text(content: bytes) -> bytes:
    return b'{"a":"' + content + b'"}'


def many(item: bytes, count: int = 0) -> bytes:
    return b'{"a":[' + b",".join([item] * (count or LARGEST // (len(item) + 1))) + b"]}"


PASSES = {
    "a prompt": text(b"word, [and] {more} " * (LARGEST // 19)),
    "a picture": text(b"data:image/png;base64," + b"QUJD" * (LARGEST // 4 - 10)),
    "escapes": text(b"\\n" * (LARGEST // 2)),
    "backslashes": text(b"\\\\" * (LARGEST // 2)),
    "code points": text(b"\\u0041" * (LARGEST // 6)),
    "pairs": text(b"\\ud83d\\ude00" * (LARGEST // 12)),
    "one wide among many": text("😀".encode() + b"x" * (LARGEST - 4)),
    "token ids": b'{"a":[' + b",".join(b"%d" % (100_000 + n) for n in range(290_000)) + b"]}",
    "token ids as other numbers": many(b"3e2", 290_000),
    "lists of ids": many(b"[" + b",".join([b"300"] * 400) + b"]", 700),
    "many texts": many(b'"ab"', 90_000),
    "many objects": many(b'{"a":1}', 19_000),
}
REFUSED = {
    "nulls": many(b"null"),
    "objects": many(b'{"a":1}'),
    "texts": many(b'""'),
    "deep": b"[" * LARGEST,
    "large and deep": b"[" * 20 + text(b"x" * (LARGEST - 100)) + b"]" * 20,
    "no json": b'"' * LARGEST,
    "one number": b"1" * LARGEST,
    "a lone surrogate": text(b"x" * (LARGEST - 6) + b"\\ud83d"),
    "a newline": text("é".encode() + b"x" * (LARGEST - 3) + b"\n"),
    "no escape": text(b"\\n" * (LARGEST // 2 - 1) + b"\\x"),
}
BODIES = {**PASSES, **REFUSED}
OVERHEAD_BYTES = 16 << 20
"""Of a smaller body: a list of 300,000 numbers takes this much, however short they are."""


def outcome(body: bytes) -> bool:
    try:
        read(body, LIMITS)
    except RequestRefused:
        return False
    return True


def peak_bytes(call: Callable[[], T]) -> tuple[T, int]:
    """What a call returns, and the most that Python held for it at a time."""
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@each("name", BODIES)
def test_no_body_takes_more_than_eight_times_its_size(name: str) -> None:
    found, peak = peak_bytes(lambda: outcome(BODIES[name]))
    assert found == (name in PASSES)
    assert peak < max(7 * len(BODIES[name]), OVERHEAD_BYTES), "beside the body itself"


def test_a_long_text_is_cut_and_its_rest_is_checked_all_the_same() -> None:
    whole = 'é😀\n\\"x' * 300_000
    for body in (
        json.dumps({"a": [{"b": whole}]}),
        json.dumps({"a": [{"b": whole}]}, ensure_ascii=False),
    ):
        ((found,),) = [list(item.values()) for item in read(body.encode(), LIMITS)["a"]]
        assert whole.startswith(found)
        assert 65_536 < len(found) < len(whole)


def test_whatever_the_size_of_the_pieces_the_outcome_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A boundary in the midst of an escape, a character or a run of backslashes changes nothing."""
    few = RequestLimits(max_values=100, max_texts=100, max_containers=100)
    for content in (
        rb"\\" * 9 + rb"\"" + rb"\\\"" * 5,
        "aé😀".encode() * 5,
        rb"\ud83d\ude00\u00e9" * 4,
        rb"[,{\"" * 40,
    ):
        body = b'{"k":["' + content + b'",{"z":1,"q":[2,3]}%b]}'
        for size in range(24, 64):
            monkeypatch.setattr("serve_app.ingress.validation.structure.PIECE_BYTES", size)
            assert read(body % b"", LIMITS) == json.loads(body % b"")
            assert read(body % (b",0" * 90), few)
            with pytest.raises(RequestRefused, match="values"):
                read(body % (b",0" * 100), few)
            with pytest.raises(RequestRefused, match="texts"):
                read(body % (b',""' * 100), RequestLimits(max_texts=100))


def test_the_estimate_of_a_requests_cost_stays_a_small_number() -> None:
    assert work_of(CHAT, b"x" * 40, {"max_tokens": 10**4_000}).cost_tokens < 2**32
    assert work_of(CHAT, b"x" * 40, {"max_tokens": -(10**4_000)}).cost_tokens >= 0


@each("path", INFERENCE_PATHS)
def test_only_what_writes_tokens_is_charged_for_an_unknown_output(path: str) -> None:
    """An embedding would cost its tenant 256 tokens that nobody writes, and its class their
    time.
    """
    writes = path in (CHAT, COMPLETIONS, RESPONSES, COMPACT, MESSAGE)
    for request in ({"input": "x"}, {"input": "x", "max_tokens": 4_000}):
        work = work_of(path, b"x" * 40, request)
        entry = Entry(prompt_tokens=10, max_output_tokens=work.max_output_tokens, kind=work.kind)
        expected = LengthModel().predict(entry)
        assert (work.cost_tokens > 200) == (expected.mean > 200) == writes
        assert work.prompt_tokens == 10
        assert writes or work.cost_tokens == 11


def test_an_affinity_key_of_a_large_request_costs_little() -> None:
    whole = {
        "messages": [{"role": "system", "content": "x" * LARGEST}, *HELLO],
        "instructions": "x" * LARGEST,
    }
    key, peak = peak_bytes(lambda: session_key({}, whole))
    assert key
    assert peak < 1 << 18, "it reads the beginnings only"


def test_the_bytes_of_a_picture_are_not_counted_as_text() -> None:
    """Otherwise one picture of 4 MB would cost a class as much as a thousand short answers."""
    picture, words = "data:image/png;base64," + "QUJD" * (1 << 20), "word " * 4_000
    parts = (
        {"type": "image_url", "image_url": {"url": picture}},
        {"type": "input_image", "image_url": picture},
        {"type": "input_audio", "input_audio": {"data": picture, "format": "wav"}},
    )
    for part in parts:
        asked = {"messages": [{"role": "user", "content": [{"type": "text", "text": words}, part]}]}
        twice = {"messages": asked["messages"] * 2}
        moved = {"input": asked["messages"]}
        for request, least in ((asked, 5_000), (twice, 10_000), (moved, 5_000)):
            body = json.dumps(request).encode()
            seen = read(body, LIMITS)
            assert len(str(seen)) < len(body) / 2, "only the beginning of the picture"
            assert least < work_of(CHAT, body, seen).prompt_tokens < 1.5 * least
    text = {"messages": [{"role": "user", "content": [{"type": "text", "text": words}]}]}
    assert 5_000 < work_of(CHAT, json.dumps(text).encode(), text).prompt_tokens < 5_100
    contents: list[Any] = [None, "text", [None], [{}], [{"image_url": 1}], [{"refusal": picture}]]
    for content in contents:
        odd = {"messages": [None, {"content": content}], "input": 3}
        assert work_of(CHAT, b"x" * (1 << 20), odd).prompt_tokens == 1 << 18


class Searched(bytes):
    """A body that counts how many of its bytes are searched."""

    searched = 0

    def find(self, text: bytes, start: int = 0) -> int:  # type: ignore[override]
        found = super().find(text, start)
        self.searched += (len(self) if found < 0 else found) - start
        return found


def test_the_estimate_for_a_large_request_costs_little() -> None:
    """However many pictures there are, the body is searched once."""
    part = {"image_url": {"url": "data:image/png;base64," + "QUJD" * 4_250}}
    asked = {"messages": [{"content": [part] * 900}]}
    body = json.dumps(asked).encode()
    for written in (Searched(body), Searched(body.replace(b"data:", b"d\\u0061ta:"))):
        work_of(CHAT, written, asked)
        assert 0.9 * len(written) < written.searched < 1.1 * len(written)


@each(
    "path, request, sequences",
    [
        (CHAT, {"messages": [1, 2, 3]}, 1),
        (CHAT, {"messages": [], "n": 4}, 4),
        (CHAT, {"messages": [], "n": -4}, 1),
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "best_of": 3}, 4),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, 1),
        ("/v1/embeddings", {"input": ["a", "b", "c"]}, 3),
        ("/v1/embeddings", {"messages": [{}, {}, {}]}, 1),
    ],
)
def test_a_request_has_a_sequence_for_each_answer_and_each_text(
    path: str, request: dict[str, Any], sequences: int
) -> None:
    assert work_of(path, b"x", request).sequences == sequences
