"""What `hermes requests` and `hermes usage` print, and what they say when they cannot."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from serve_app.cli import console
from serve_app.cli.console import printable
from serve_app.cli.main import app
from serve_app.cli.requests import AnswerText, table
from serve_app.cli.usage import moment
from serve_app.local.service import Service
from tests.http_server import END, Asked, Script, Wire, chunk, head, sending, serving, whole
from tests.tables import each
from tests.unit.client.service import sending_all

ID = "req_0123456789abcdef"
CLOSED = "redis://127.0.0.1:1/0"
EVIL = "\x1b]0;owned\x07\x9b31m\u202e"
REQUEST = {
    "id": ID,
    "object": "request",
    "state": "completed",
    "reason": None,
    "class": "batch",
    "model": "m" + EVIL,
    "attempts": 2,
    "usage": {"prompt_tokens": 7, "output_tokens": 5},
    "admitted_at_ms": 1_000_000,
}


def hermes(url: str, *words: str, **env: str | None) -> Result:
    named = {"HERMES_URL": url or None, "HERMES_API_KEY": None, "OPENAI_API_KEY": None, **env}
    return CliRunner().invoke(app, words, prog_name="hermes-serve", env=named)


def answering(found: object, status: int = 200) -> Script:
    return sending(whole(status, json.dumps(found).encode()))


def failed(done: Result, status: int = 1) -> str:
    """The one line of a command that failed."""
    assert (done.exit_code, done.stdout) == (status, ""), done.output
    assert done.stderr.count("\n") == 1
    return done.stderr


# -- text ------------------------------------------------------------------------------------------


def test_nothing_that_controls_a_terminal_is_printed() -> None:
    assert printable(f"a{EVIL}b\r") == "a?]0;owned??31m?b?"
    harmless = "e\u0301 1\u00a0000 全角\u3000 👩\u200d🚀\n\tx"
    assert printable(harmless) == harmless


def test_a_table_has_a_row_for_each_request() -> None:
    waiting = {"id": "req_2", "state": "queued", "attempts": 0, "usage": None}
    heading, *rows = [
        re.split(r"\s{2,}", row) for row in table([REQUEST, waiting], 1_060).split("\n")
    ]
    assert heading == "request,state,class,model,age,attempts,tokens in+out".split(",")
    assert rows[0] == [ID, "completed", "batch", "m?]0;owned??31m?", "1m", "2", "7+5"]
    assert rows[1] == ["req_2", "queued", "-", "-", "-", "0", "-"]


# -- the text of an answer -------------------------------------------------------------------------


def chat(text: str, index: int = 0) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": {"content": text}}]}


COMPLETION = {"choices": [{"index": 0, "text": "said"}]}
MESSAGE = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "said"}}]}
OUTPUT = {"output": [{"type": "reasoning"}, {"content": [{"type": "output_text", "text": "said"}]}]}
DELTA = {"type": "response.output_text.delta", "delta": "said"}
TEXTS: list[tuple[str, Any, str]] = [
    ("", chat("said"), "said"),
    ("response", COMPLETION, "said"),
    ("response", MESSAGE, "said"),
    ("response", OUTPUT, "said"),
    ("response.output_text.delta", DELTA, "said"),
    ("", {"choices": []}, ""),
    ("response", {"data": []}, '{\n  "data": []\n}'),
]


@each("name, data, text", TEXTS)
def test_every_format_has_its_text(name: str, data: object, text: str) -> None:
    answer = AnswerText()
    assert answer.feed(name, json.dumps(data)) == text
    assert answer.empty == (not text)
    assert answer.failure == ""


def test_choices_that_alternate_are_printed_one_after_the_other() -> None:
    answer = AnswerText()
    parts = [chat("a"), chat("1", 1), chat("b"), chat("2", 1)]
    assert [answer.feed("", json.dumps(part)) for part in parts] == ["a", "", "b", ""]
    assert answer.feed("", "[DONE]") == ""
    assert answer.rest() == "\n\n[1] 12"


FAILURES = [("", {"error": {"message": "lost"}}), ("error", {"type": "error", "message": "lost"})]


@each("name, data", FAILURES)
def test_a_failure_is_known_in_every_format(name: str, data: object) -> None:
    answer = AnswerText()
    assert answer.feed(name, json.dumps(data)) == ""
    assert answer.failure == "lost"


# -- commands --------------------------------------------------------------------------------------

MOMENTS = [("", None), ("0", 0), ("1767225600", 1_767_225_600), ("2026-01-01", 1_767_225_600)]
MOMENTS += [("20260101", 1_767_225_600), ("2026-01-01T01:00+01:00", 1_767_225_600)]


@each("text, unix_s", MOMENTS)
def test_a_moment_is_a_date_in_utc_or_unix_seconds(text: str, unix_s: int | None) -> None:
    assert moment(text) == unix_s


@each("text", ["yesterday", "2026-13-01", "-1", "1.5", "٣", "20261301"])
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        moment(text)


WRONG = ["usage --from x", "usage --group-by user", "usage --by week", "usage --format xml"]
WRONG += ["usage --from 2 --to 2", "requests list --limit 0", "requests show", "requests tail ../x"]


@each("words", WRONG)
def test_a_command_line_that_cannot_be_meant_has_status_2(words: str) -> None:
    with serving(answering({})) as server:
        assert hermes(server.url, *words.split()).exit_code == 2
    assert not server.asked


NAMES = ["http://127.0.0.1:1", "127.0.0.1:1/", "http://127.0.0.1:1/v1"]


@each("url", NAMES)
def test_a_service_that_does_not_answer_is_one_line_with_its_address(url: str) -> None:
    told = failed(hermes(url, "requests", "tail", ID))
    assert told.startswith("requests: http://127.0.0.1:1 does not answer: ")
    assert "refused" in told


@each("url", ["ftp://x", "http://", "http://x:y", "http://x:0"])
def test_what_is_no_address_is_one_line_with_an_example(url: str) -> None:
    assert "http://127.0.0.1:8000" in failed(hermes(url, "usage"))


def test_neither_a_password_nor_a_key_is_printed() -> None:
    assert "s3cret" not in failed(hermes("http://me:s3cret@x", "usage"))
    told = failed(hermes("http://x", "usage", HERMES_API_KEY="s3cret\x07x"))
    assert told == "usage: HERMES_API_KEY holds no API key\n"


def test_the_key_of_this_service_goes_before_that_of_openai() -> None:
    both = {"HERMES_API_KEY": "a", "OPENAI_API_KEY": "b"}
    with serving(answering(REQUEST)) as server:
        assert hermes(server.url, "requests", "show", ID, **both).exit_code == 0
    assert server.asked[0].headers["authorization"] == "Bearer a"


def test_a_refusal_is_the_services_sentence() -> None:
    for status in (401, 403, 404, 503):
        body = {"error": {"message": f"Not{EVIL} this.\nNever."}}
        with serving(answering(body, status)) as server:
            told = failed(hermes(server.url, "requests", "cancel", ID))
        assert told.startswith("requests: Not?]0;owned??31m? this. Never.")
        assert ("HERMES_API_KEY" in told) == (status == 401)


@each("script", [answering([], 200), sending(whole(404, b"<html>")), answering({"detail": 1}, 404)])
def test_something_that_is_no_such_service_is_one_line(script: Script) -> None:
    with serving(script) as server:
        assert "is no such service" in failed(hermes(server.url, "requests", "list"))


def test_a_tail_prints_nothing_that_controls_a_terminal() -> None:
    said = b"id: 1\ndata: %b\n\nid: 2\ndata: [DONE]\n\n" % json.dumps(chat("a\x1b[2Jé")).encode()
    stream = head(x_request_id=ID, transfer_encoding="chunked") + chunk(said) + END

    def script(asked: Asked, wire: Wire) -> None:
        streamed = asked.path.endswith("/events")
        wire.send(stream if streamed else whole(200, json.dumps(REQUEST).encode()))

    with serving(script) as server:
        done = hermes(server.url, "requests", "tail", ID)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "a?[2Jé\n", "")


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Service]:
    """A service's state, of a process that runs in its folder."""
    with subprocess.Popen(["sleep", "600"], cwd=tmp_path) as process:
        yield Service(str(tmp_path), redis_url="redis://127.0.0.1:2/0", pids={"ray": process.pid})
        process.kill()


def test_a_service_that_runs_here_is_the_usual_one(
    state: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "STATE_DIR", tmp_path)
    for name in ("HERMES_URL", "HERMES_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    listed, trying = ("requests", "list"), ("check-redis", "--wait-s", "0")
    assert "http://127.0.0.1:8000 does not answer" in hermes("", *listed).stderr
    with serving(answering({"data": [REQUEST]})) as server:
        state.url = server.url
        state.save()
        assert ID in hermes("", *listed).stdout
        assert "http://127.0.0.1:1 does not" in hermes("http://127.0.0.1:1", *listed).stderr
        assert "127.0.0.1:2" in hermes("", *trying, HERMES_REDIS_URL=None).stderr
        assert "127.0.0.1:1" in hermes("", *trying, HERMES_REDIS_URL=CLOSED).stderr
        (tmp_path / "service.json").write_text("{")
        assert "is damaged" in failed(hermes("", *listed))


def test_lines_of_csv_and_json_say_the_same() -> None:
    result = {"project_id": "acme", "model": "a,b" + EVIL, "num_model_requests": 3}
    result |= {"input_tokens": 1_000, "states": {"completed": 2, "failed": 1}}
    pages = [
        {"data": [{"start_time": 0, "end_time": 3600, "results": [result]}], "next_page": "page_1"},
        {"data": [{"start_time": 3600, "end_time": 7200, "results": [result]}], "next_page": None},
    ]
    words = ("usage", "--by", "hour", "--group-by", "tenant,model,batch", "--format")
    found = {}
    for form in ("csv", "jsonl"):
        answers = [whole(200, json.dumps(page).encode()) for page in pages]
        with serving(sending_all(*answers)) as server:
            done = hermes(server.url, *words, form)
        assert done.exit_code == 0, done.output
        assert "group_by=project_id&group_by=model&group_by=batch" in server.asked[0].path
        assert "page=page_1" in server.asked[1].path
        found[form] = done.stdout
    rows = list(csv.DictReader(io.StringIO(found["csv"])))
    lines = [json.loads(line) for line in found["jsonl"].splitlines()]
    assert len(rows) == len(lines) == 2
    assert list(rows[0]) == list(lines[0])
    assert (lines[0]["model"], rows[0]["model"]) == ("a,b" + EVIL, "a,b?]0;owned??31m?")
    assert (lines[0]["batch"], rows[0]["batch"]) == (None, "")
    assert lines[1]["start_time"] == int(rows[1]["start_time"]) == 3600
    assert (lines[1]["failed"], lines[1]["expired"]) == (1, 0)
    assert "\x1b" not in "".join(found.values())
