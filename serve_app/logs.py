"""Log lines: one for a fact, as text or as JSON with the same fields everywhere."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from serve_app.settings import TelemetrySettings


def about(request_id: str = "", tenant: str = "", reason: str = "", trace: str = "") -> dict[str, str]:
    """What a line is about, as `extra` of a logging call. `trace`: the request's `traceparent`."""
    trace_id = trace.partition("-")[2].partition("-")[0]
    fields = {"request_id": request_id, "tenant": tenant, "reason": str(reason), "trace_id": trace_id}
    return {name: value for name, value in fields.items() if value}


def configure_logging(settings: TelemetrySettings, replica: str) -> None:
    """Our own lines on stderr, which Ray keeps by process."""
    logger = logging.getLogger("hermes")
    if not logger.handlers:
        # Not sys.stderr: Serve redirects it into its own log, which it may hold back for a thousand lines.
        handler = logging.StreamHandler(sys.__stderr__)
        handler.setFormatter(_formatter(settings.log_format, replica))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(settings.log_level)


def _formatter(log_format: str, replica: str) -> logging.Formatter:
    if log_format == "text":
        return _TextFormatter(f"%(asctime)s %(levelname)s {replica} %(name)s %(message)s")
    from pythonjsonlogger.json import JsonFormatter

    return JsonFormatter(
        "{levelname}{name}{message}", style="{", timestamp=True, static_fields={"replica": replica},
        rename_fields={"levelname": "level", "name": "logger"},
    )  # fmt: skip


class _TextFormatter(logging.Formatter):
    """One line for a fact, whatever a client has written into it: nobody can forge a second one."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """A traceback has several lines; none of them can be taken for the beginning of another fact."""
        return "\n".join(f"    {_escaped(line)}" for line in super().formatException(ei).split("\n"))


def _escaped(text: str) -> str:
    """Without line ends, control characters, and what turns the direction of writing."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class Outage:
    """Redis is away for all at once: one line when it begins, one when it is over, whoever notices."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log = log
        self._what = what
        self._since_s: float | None = None

    def failed(self, error: object) -> None:
        """It did not work."""
        if self._since_s is None:
            self._since_s = time.monotonic()
            self._log.warning("%s: %s", self._what, error)

    def over(self) -> None:
        """It worked."""
        if self._since_s is not None:
            self._log.info("%s: over, after %.1f s", self._what, time.monotonic() - self._since_s)
            self._since_s = None
