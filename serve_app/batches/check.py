"""Checks the input file of a batch once, and writes the index that tells where its lines are.

Steps of a check run in the thread in which large bodies are validated, one of all checks at a time:
each is short, so that neither the event loop nor a large body waits long for the interpreter.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

from serve_app.batches import lines
from serve_app.batches.lines import Check, Checker, LineError, Row
from serve_app.batches.record import Batch, BatchFacts
from serve_app.batches.segments import folder
from serve_app.contract import OF_RESPONSES
from serve_app.errors import invalid
from serve_app.files.storage import Storage, each
from serve_app.ingress.conversations import goes_on
from serve_app.ingress.validation.bodies import Validator
from serve_app.policy.tenants import Tenant
from serve_app.policy.work import work_of

_STEP_BYTES = 16 << 10
"""Of a file that are checked in one step, in about a millisecond."""
_CHECKS_AT_ONCE = 4
_NEEDS_A_CLIENT = ("stream", "background")


class Checked(NamedTuple):
    """What a check has found. `errors`: why the batch fails, if it does."""

    lines: int
    tokens: int
    errors: Sequence[LineError] = ()


class Checks:
    """All methods raise `StorageUnavailable`.

    Args:
        most_bytes: of a line.
        tenant: whose batch it is, as its policy is now; None if the policy has no such tenant.
    """

    def __init__(
        self,
        storage: Storage,
        validator: Validator,
        most_bytes: int,
        tenant: Callable[[str], Tenant | None],
    ) -> None:
        self._storage = storage
        self._validator = validator
        self._most_bytes = most_bytes
        self._tenant = tenant
        self._all = asyncio.Semaphore(_CHECKS_AT_ONCE)
        self._own: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait until a file may be checked: a few at a time, of each tenant one."""
        async with self._own[tenant], self._all:
            yield

    async def check(self, batch: Batch) -> Checked:
        """Check a batch, unless that was done before, by whatever ingress. Raises
        `FileNotFoundError` if the storage lacks its file.
        """
        path = _index_path(batch)
        with suppress(FileNotFoundError):
            return Checked(*lines.totals(await self._storage.read(path, *lines.header_span())))
        checker = await self._checked(batch.facts)
        if checker.errors:
            return Checked(0, 0, checker.errors)
        index = await self._validator.apart(checker.index)
        await self._storage.put(path, each(index))
        return Checked(checker.lines, checker.tokens)

    async def rows(self, batch: Batch, first: int, many: int) -> list[Row]:
        """So many lines from this place in the order of work on, which there must be. Raises
        `FileNotFoundError` if the batch was not checked, or is over.
        """
        path = _index_path(batch)
        rows = await self._storage.read(path, *lines.rows_span(first, many))
        refusals = await self._storage.read(path, *lines.refusals_span(rows))
        return lines.rows_of(rows, refusals)

    async def _checked(self, facts: BatchFacts) -> Checker:
        only = await self._ids(facts.retried_path) if facts.retried_path else None
        checker = Checker(facts.endpoint, self._most_bytes, self._check(facts), only)
        async for piece in self._storage.get(facts.input_path):
            for begin in range(0, len(piece), _STEP_BYTES):
                step = piece[begin : begin + _STEP_BYTES]
                await self._validator.apart(checker.feed, step)
            if checker.stopped:
                break
        await self._validator.apart(checker.end)
        return checker

    async def _ids(self, path: str) -> set[bytes]:
        """Which lines an error file has."""
        found, rest = set[bytes](), b""
        async for piece in self._storage.get(path):
            *ended, rest = (rest + piece).split(b"\n")
            found |= await self._validator.apart(lines.ids_in, ended)
        return found

    def _check(self, facts: BatchFacts) -> Check:
        tenant, path = self._tenant(facts.tenant), facts.endpoint
        most_output = tenant.limits.max_output_tokens if tenant else 0

        def check(body: bytes) -> tuple[Mapping[str, Any], int]:
            request, body, _ = self._validator.validate_now(path, body, most_output)
            if tenant is not None:
                tenant.check_model(request.get("model") or facts.model, facts.model)
            for name in _NEEDS_A_CLIENT:
                if request.get(name) is True:
                    raise invalid(f"A line of a batch cannot have '{name}': remove it.", name)
            if path in OF_RESPONSES and goes_on(request):
                what = "A line of a batch cannot go on with an earlier response: send all of it."
                raise invalid(what, "previous_response_id")
            work = work_of(path, body, request, self._validator.most_tokens)
            return request, work.cost_tokens

        return check


def _index_path(batch: Batch) -> str:
    return folder(batch) + "index"
