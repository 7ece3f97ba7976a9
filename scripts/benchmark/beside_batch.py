"""`scripts/bench --beside-batch`: what interactive requests wait for while a batch takes what they
leave.
"""

import random
import re
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import httpx
import msgspec
import uvloop

from .measurement import OF_REQUESTS, Row, describe, maker_for, wanted_chars, warm_up
from .report import Column, heading, line, ratio_table, ratios, summary, write_document
from .run import Load, RequestMaker, SystemFailed, fetch, put
from .systems import System

_PER_S = 6.0
_LINES, _LINE_TOKENS = 5_000, (32, 480)
"""Equal lines would begin and end all together, and free no slot in between."""
_LOOK_EVERY_S, _WITHIN_S, _WARM_USERS = 0.2, 120.0, 4
_ALONE, _BESIDE = "alone", "beside a batch"
_ENDED = re.compile(r'^hermes_requests_ended_total\{[^}]*class="batch"[^}]*\} (\S+)$', re.MULTILINE)

COLUMNS = (
    *OF_REQUESTS,
    Column("lines/s", lambda row: row.lines_per_s, ".1f", spread=True),
)
MEASURES = {
    "TTFT p50": lambda row: row.ttft.p50_ms,
    "TTFT p99": lambda row: row.ttft.p99_ms,
    "end-to-end p50": lambda row: row.end_to_end.p50_ms,
}


@contextmanager
def a_batch(system: System, maker: RequestMaker) -> Iterator[None]:
    """One runs meanwhile, with more lines than there is time for."""
    rng = random.Random(_LINES)
    bodies = (msgspec.json.decode(maker.next(rng.randint(*_LINE_TOKENS))) for _ in range(_LINES))
    lines = [
        {
            "custom_id": f"{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {name: body[name] for name in body if not name.startswith("stream")},
        }
        for number, body in enumerate(bodies)
    ]
    text = b"".join(msgspec.json.encode(one) + b"\n" for one in lines)
    headers = {"authorization": maker.headers["authorization"]}
    with httpx.Client(base_url=system.url, headers=headers, timeout=_WITHIN_S) as http:

        def ask(path: str, **given: object) -> dict[str, str]:
            answer = http.post(path, **given)  # type: ignore[arg-type]
            if answer.is_error:
                raise SystemFailed(f"{system.url}/{path}: {answer.text[:200]}")
            return dict(answer.json())

        files = {"file": ("lines.jsonl", text)}
        file_id = ask("files", data={"purpose": "batch"}, files=files)["id"]
        asked = {"input_file_id": file_id, "endpoint": "/v1/chat/completions"}
        made = ask("batches", json={**asked, "completion_window": "24h"})
        try:
            begun = _ended(system)
            _wait("the batch runs", lambda: _ended(system) > begun)
            yield
        finally:
            ask(f"batches/{made['id']}/cancel")
            _wait(
                "the batch ends",
                lambda: http.get(f"batches/{made['id']}").json()["status"] == "cancelled",
            )


def _ended(system: System) -> float:
    """Lines whose requests have ended."""
    return sum(map(float, _ENDED.findall(fetch(system.page))))


def _wait(what: str, is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + _WITHIN_S
    while not is_so():
        if time.monotonic() > until_s:
            raise SystemFailed(f"not within {_WITHIN_S:g} s: {what}")
        time.sleep(_LOOK_EVERY_S)


def measure_beside_batch(options: Namespace, arguments: Sequence[str], system: System) -> int:
    """Measure it round by round on ``system``; the command's exit status."""
    chars = wanted_chars(options, system)
    warm_up(options, system, chars, _WARM_USERS)
    chats, lines = (maker_for(options, system, chars, options.seed + more) for more in (0, 1))
    load = Load(rate_per_s=options.rate or _PER_S, window_s=options.duration_s)
    print(heading(COLUMNS), flush=True)
    rows: list[Row] = []
    for number in range(1, options.rounds + 1):
        # The same arrivals in both turns of a round.
        seeded = replace(load, seed=f"{options.seed}/{number}")

        def turn(name: str, seeded: Load = seeded, number: int = number) -> None:
            before, began_s = _ended(system), time.monotonic()
            row = describe(name, number, uvloop.run(put(chats, seeded, options.max_tokens)))
            row.lines_per_s = (_ended(system) - before) / (time.monotonic() - began_s)
            rows.append(row)
            print(line(COLUMNS, row), flush=True)

        turn(_ALONE)
        with a_batch(system, lines):
            turn(_BESIDE)
    found = ratios(rows, [(_BESIDE, _ALONE)], MEASURES)
    print(f"\n{summary(COLUMNS, rows)}\n\n{ratio_table(found)}")
    write_document(options, ["scripts/bench", *arguments], rows=rows)
    return 1 if any(row.errors for row in rows) else 0
