"""Log lines: one per fact, as text or as JSON with the same fields everywhere."""

from __future__ import annotations

import logging
import sys
from typing import Any

from serve_app.clock import SYSTEM, Clock
from serve_app.redaction import without_secrets
from serve_app.settings import TelemetrySettings


def about(
    request_id: str = "", tenant: str = "", reason: str = "", trace: str = ""
) -> dict[str, str]:
    """The request that a line is about, as `extra` of a logging call. `trace` is the request's
    `traceparent`.
    """
    ids = {"trace_id": trace.partition("-")[2].partition("-")[0], "request_id": request_id}
    fields = {**ids, "tenant": tenant, "reason": str(reason)}
    return {name: value for name, value in fields.items() if value}


def configure_logging(settings: TelemetrySettings, replica: str) -> None:
    """Write our own lines to stderr, which Ray stores per process."""
    logger = logging.getLogger("hermes")
    if not logger.handlers:
        # Not sys.stderr: Serve redirects that into its own log, which may buffer many lines.
        handler = _Handler(sys.__stderr__)
        handler.setFormatter(_formatter(settings.log_format, replica))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(settings.log_level)


class _Handler(logging.StreamHandler[Any]):
    """Writes no credential, whoever wrote the line or the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))


def _formatter(log_format: str, replica: str) -> logging.Formatter:
    if log_format == "text":
        return _TextFormatter(f"%(asctime)s %(levelname)s {replica} %(name)s %(message)s")
    from pythonjsonlogger.json import JsonFormatter

    return JsonFormatter(
        "{levelname}{name}{message}",
        style="{",
        timestamp=True,
        static_fields={"replica": replica},
        rename_fields={"levelname": "level", "name": "logger"},
    )


class _TextFormatter(logging.Formatter):
    """Writes one line per fact. Text from a client is escaped, and cannot forge a second one."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """Format a traceback, whose lines cannot be mistaken for the beginning of another fact."""
        return "\n".join(
            f"    {_escaped(line)}" for line in super().formatException(ei).split("\n")
        )


def _escaped(text: str) -> str:
    """Escape line ends, control characters and characters that change the direction of writing."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


class Outage:
    """Logs one line when an outage of Redis begins and one when it is over, whichever caller
    notices.
    """

    def __init__(self, log: logging.Logger, what: str, clock: Clock = SYSTEM) -> None:
        self._log = log
        self._what = what
        self._clock = clock
        self._since_s: float | None = None

    def failed(self, error: object) -> None:
        if self._since_s is None:
            self._since_s = self._clock.monotonic_s()
            self._log.warning("%s: %s", self._what, error)

    def over(self) -> None:
        if self._since_s is not None:
            lasted_s = self._clock.monotonic_s() - self._since_s
            self._log.info("%s: over, after %.1f s", self._what, lasted_s)
            self._since_s = None
