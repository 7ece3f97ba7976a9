"""The lines of a batch: what fails it, what is only a bad line, the order of work, the index."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.batches import lines
from serve_app.batches.lines import Checker, LineError, Row, asked_by
from serve_app.contract import Reason
from serve_app.errors import RequestRefused
from serve_app.ingress.validation.bodies import parse
from serve_app.policy.work import work_of
from tests.tables import each

CHATS = "/v1/chat/completions"
MOST_BYTES = 4_096


def body(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


def line(custom_id: Any, **fields: Any) -> bytes:
    whole = {"custom_id": custom_id, "method": "POST", "url": CHATS, "body": body(), **fields}
    return json.dumps({name: value for name, value in whole.items() if value != "absent"}).encode()


def as_the_service_checks(text: bytes) -> tuple[Mapping[str, Any], int]:
    request = parse(CHATS, text, "m").request
    return request, work_of(CHATS, text, request).cost_tokens


def checked(file: bytes, size: int = 50) -> Checker:
    """After a file that came in pieces of this size."""
    checker = Checker(CHATS, MOST_BYTES, as_the_service_checks)
    for begin in range(0, len(file), size):
        checker.feed(file[begin : begin + size])
    checker.end()
    return checker


def read(index: bytes, first: int = 0, many: int | None = None) -> list[Row]:
    """Rows as they are read from a storage."""
    if many is None:
        many = lines.totals(index[slice(*lines.header_span())])[0]
    rows = index[slice(*lines.rows_span(first, many))]
    return lines.rows_of(rows, index[slice(*lines.refusals_span(rows))])


def texts(file: bytes, rows: Sequence[Row]) -> list[str]:
    return [asked_by(file[row.offset : row.offset + row.length]).custom_id for row in rows]


@each("size", [1, 7, 1_000_000])
@each(
    "between, before, behind",
    [
        (b"\n", b"", b"\n"),
        (b"\n", b"", b""),
        (b"\r\n", b"", b"\r\n"),
        (b"\n\n \n", b"\n", b"\n\n"),
        (b"\n", b"\xef\xbb\xbf", b""),
    ],
)
def test_every_line_is_found_in_whatever_pieces_a_file_comes(
    size: int, between: bytes, before: bytes, behind: bytes
) -> None:
    file = before + between.join(line(f"é{n}") for n in range(20)) + behind
    checker = checked(file, size)
    assert not checker.errors
    assert checker.lines == 20
    rows = read(checker.index())
    assert texts(file, rows) == [f"é{n}" for n in range(20)]
    assert checker.tokens == sum(
        as_the_service_checks(asked_by(file[one.offset : one.offset + one.length]).body)[1]
        for one in rows
    )
    assert not any(row.bad for row in rows)


@each(
    "wrong, code, param",
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b'{"a": ' + b"[" * 2_000 + b"}", "invalid_json_line", None),
        (line("absent"), "missing_required_parameter", "custom_id"),
        (line("b", method="absent"), "missing_required_parameter", "method"),
        (line("b", url="absent"), "missing_required_parameter", "url"),
        (line(7), "invalid_custom_id", "custom_id"),
        (line(""), "invalid_custom_id", "custom_id"),
        (line("x" * 513), "invalid_custom_id", "custom_id"),
        (line("é" * 600), "invalid_custom_id", "custom_id"),
        (line("a"), "duplicate_custom_id", "custom_id"),
        (line("b", method="GET"), "invalid_method", "method"),
        (line("b", method=None), "invalid_method", "method"),
        (line("b", url="/v1/completions"), "invalid_url", "url"),
        (line("b", url="/v1/chat/completions?a=b"), "invalid_url", "url"),
        (line("b", body=body("x" * MOST_BYTES)), "line_too_large", None),
    ],
)
def test_what_is_wrong_around_a_body_fails_the_batch_and_names_the_line(
    wrong: bytes, code: str, param: str | None
) -> None:
    (error,) = checked(b"\n".join([line("a"), b"", wrong, line("c")])).errors
    assert (error.code, error.line, error.param) == (code, 3, param)


def test_a_line_that_never_ends_is_refused_before_it_is_kept() -> None:
    checker = Checker(CHATS, MOST_BYTES, as_the_service_checks)
    for _ in range(100):
        checker.feed(b"x" * 1_000)
    assert [(one.code, one.line) for one in checker.errors] == [("line_too_large", 1)]
    assert checker.stopped
    assert len(checker._kept) <= MOST_BYTES + 1_000


@each("file", [b"", b"\n\n  \n", b"\xef\xbb\xbf"])
def test_a_file_without_a_line_fails(file: bytes) -> None:
    assert [one.code for one in checked(file).errors] == ["empty_file"]


def test_no_more_than_a_hundred_errors_are_told() -> None:
    checker = checked(b"{\n" * 1_000, 10_000)
    assert [one.line for one in checker.errors] == [*range(1, 101)]


def test_a_batch_has_at_most_so_many_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINES", 3)
    four = [line(str(n)) for n in range(4)]
    assert not checked(b"\n".join(four[:3])).errors
    assert checked(b"\n".join([*four, line("4")])).errors == [
        LineError("too_many_lines", "A batch has at most 3 requests.", 4)
    ]
    assert not checked(four[0] + b"\n" * 5 + four[1]).errors
    blank = checked(four[0] + b"\n" * 1_000)
    assert [(one.code, one.line) for one in blank.errors] == [("too_many_lines", 7)]


@each(
    "wrong, reason, param",
    [
        ({"messages": "absent"}, Reason.INVALID_REQUEST, "messages"),
        ({"temperature": 9}, Reason.INVALID_REQUEST, "temperature"),
        ({"model": "another"}, Reason.MODEL_NOT_FOUND, "model"),
    ],
)
def test_a_body_that_is_refused_is_a_bad_line(
    wrong: dict[str, Any], reason: Reason, param: str
) -> None:
    bad = {name: value for name, value in body(**wrong).items() if value != "absent"}
    file = b"\n".join([line("a"), line("b", body=bad), line("c"), line("d", body=bad)])
    checker = checked(file)
    rows = read(checker.index())
    assert checker.lines == 4
    assert texts(file, rows) == ["a", "c", "b", "d"]
    assert [one.bad for one in rows] == [False, False, True, True]
    with pytest.raises(RequestRefused) as refused:
        as_the_service_checks(json.dumps(bad).encode())
    found = rows[2].refusal
    assert (found.reason, found.message, found.param) == (reason, refused.value.message, param)


@each("its", ["absent", None, 7, "text", []])
def test_a_body_that_is_no_object_is_a_bad_line(its: Any) -> None:
    (row,) = read(checked(line("a", body=its)).index())
    assert row.refusal.status == 400


def test_any_part_of_the_index_is_read_by_itself() -> None:
    bad = body(temperature=9)
    file = b"\n".join(line(str(n), body=bad if n % 3 else body()) for n in range(10))
    index = checked(file).index()
    whole = read(index)
    assert sum(row.bad for row in whole) == 6
    for first in range(10):
        for many in range(1, 11 - first):
            assert read(index, first, many) == whole[first : first + many]


SYSTEM: Callable[[str], dict[str, Any]] = lambda text: body(  # noqa: E731
    messages=[{"role": "system", "content": text}, {"role": "user", "content": "hi"}]
)


@each(
    "one, same, other",
    [
        (SYSTEM("A"), {**SYSTEM("A"), "temperature": 0}, SYSTEM("B")),
        (body("x" * 64 + "a"), body("x" * 64 + "b"), body("y" * 64)),
        (body(tools=[{"type": "function", "function": {"name": "f"}}]),) * 2 + (body(),),
    ],
)
def test_lines_whose_prompts_begin_alike_are_worked_on_together(
    one: dict[str, Any], same: dict[str, Any], other: dict[str, Any]
) -> None:
    bodies = {"a": one, "b": other, "c": same, "d": other}
    file = b"\n".join(line(custom_id, body=its) for custom_id, its in bodies.items())
    assert texts(file, read(checked(file).index())) == ["a", "c", "b", "d"]


@each(
    "request_, head",
    [
        ({"prompt": "x" * 100}, ["x" * 64]),
        ({"prompt": ["ab", "c"]}, ["ab"]),
        ({"prompt": [1] * 100}, [[1] * 64]),
        ({"input": [{"role": "user", "content": [{"type": "text", "text": "ab"}]}]}, ["ab"]),
        ({"input": "ab", "instructions": "c"}, [None, "c", None]),
        ({"input": []}, [[]]),
        ({"input": [7, 8]}, [[7, 8]]),
        ({}, [None]),
    ],
)
def test_the_head_of_a_prompt_is_found_on_every_path(
    request_: dict[str, Any], head: list[Any]
) -> None:
    assert lines._head(request_) == head


@given(pieces=st.lists(st.binary(max_size=30), max_size=20))
def test_whatever_bytes_come_are_checked(pieces: list[bytes]) -> None:
    checker = Checker(CHATS, MOST_BYTES, as_the_service_checks)
    for piece in pieces:
        checker.feed(piece)
    checker.end()
    assert checker.errors


def test_an_output_line_is_as_openai_has_it() -> None:
    made = lines.answered_line("batch_1", "req_1", "é", 200, b'{"a":\n 1}')
    assert made.endswith(b"\n")
    assert made.count(b"\n") == 1
    assert json.loads(made) == {
        "id": "batch_req_1",
        "custom_id": "é",
        "response": {"status_code": 200, "request_id": "req_1", "body": {"a": 1}},
        "error": None,
    }


def test_an_answer_that_is_no_json_is_a_text() -> None:
    made = lines.answered_line("batch_1", "req_1", "a", 502, b"<html>\n\xff")
    assert json.loads(made)["response"]["body"] == "<html>\n\ufffd"


@each("outcome", ["expired", "cancelled"])
def test_a_line_without_a_result_says_why(outcome: str) -> None:
    one = json.loads(lines.unanswered_line("batch_1", "a", outcome))
    assert (one["custom_id"], one["response"]) == ("a", None)
    assert one["error"]["code"] == f"batch_{outcome}"


def test_each_line_without_a_request_has_an_id_of_its_own_over_all_batches() -> None:
    named = [(batch, name) for batch in ("batch_1", "batch_2") for name in "ab"]
    for made in (
        [lines.unanswered_line(*its, "expired") for its in named],
        [lines.answered_line(batch, "", name, 400, b"{}") for batch, name in named],
    ):
        ids = {json.loads(line)["id"] for line in made}
        assert len(ids) == 4
        assert all(one.startswith("batch_req_") for one in ids)


def test_what_a_line_asks_is_its_body_as_it_was_sent() -> None:
    text = b'{"custom_id": "a", "body": {"x":  1.50}, "other": {}}'
    assert asked_by(text) == ("a", b'{"x":  1.50}')
    assert msgspec.json.decode(asked_by(text).body) == {"x": 1.5}
