"""No credential is shown by an error of Redis or by a log line, whoever wrote it."""

from __future__ import annotations

import logging

from serve_app.errors import AnswerLost, RedisRefuses, RedisUnavailable
from serve_app.observability import logs
from serve_app.redaction import redacted
from serve_app.settings import RedisSettings
from tests.tables import each

LONG, SHORT, OF_SENTINEL = 'zürich/"42"', "q7", "k9-of-sentinel"
URL = f"redis+sentinel://hermes:z%C3%BCrich%2F%2242%22@h/main?sentinel_password={OF_SENTINEL}"


def known() -> None:
    RedisSettings(url=URL)
    RedisSettings(url=f"redis://:{SHORT}@h")


@each(
    "said, shown",
    [
        (f"ERR no such login: hermes {LONG}", "ERR no such login: hermes ***"),
        (f"ERR x{LONG}x", "ERR x***x"),
        (URL, "redis+sentinel://hermes:***@h/main?sentinel_password=***"),
        (f"ERR AUTH {SHORT} called", "ERR AUTH *** called"),
        (f"ERR x{SHORT}x", f"ERR x{SHORT}x"),
        (
            f"unknown command 'AUTH', with args beginning with: 'hermes' '{LONG[:4]}",
            "unknown command 'AUTH'",
        ),
    ],
)
def test_what_an_error_shows(said: str, shown: str) -> None:
    known()
    assert redacted(said) == shown
    for error in (RedisUnavailable(said), AnswerLost(said)):
        assert str(error) == shown
    refused = RedisRefuses("AUTH", said)
    assert (refused.answer, str(refused)) == (shown, f"Redis refuses AUTH: {shown}")


@each("log_format", ["text", "json"])
def test_a_log_line_and_its_traceback_show_no_password(log_format: str) -> None:
    known()
    handler = logs._Handler()
    handler.setFormatter(logs._formatter(log_format, "r"))
    try:
        raise ValueError(f"'{LONG}'")
    except ValueError as error:
        fact = (type(error), error, error.__traceback__)
    record = logging.LogRecord("hermes", logging.ERROR, "", 1, "is %s", (LONG,), fact)
    line = handler.format(record)
    assert "is ***" in line
    assert "rich" not in line
