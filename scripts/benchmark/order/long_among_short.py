"""Short requests, alone and beside a long generation in every slot of the engine, in turns."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from ..connection import Exchange
from ..load import Generator, Load
from ..prompts import RequestMaker
from .figures import ShortRow
from .long_answers import LongAnswer, LongAnswers, attempts_of


@dataclass(frozen=True)
class Turns:
    """How the turns go: ``slots`` long generations of ``long_tokens``, and short requests as
    ``load`` says; ``url`` and ``api_key`` of the service that knows how many attempts each took.
    """

    url: str
    api_key: str
    slots: int
    long_tokens: int
    rounds: int
    load: Load


class LongAmongShort:
    """Measures in turns; the same long requests in each, whose texts are known from before."""

    def __init__(self, short: RequestMaker, long: RequestMaker, turns: Turns) -> None:
        self._short = short
        self._long = long
        self._turns = turns
        self._requests = [long.next(turns.long_tokens) for _ in range(turns.slots)]
        self.unbroken: list[LongAnswer] = []

    async def measure(self) -> AsyncIterator[ShortRow]:
        """First the long ones with nothing beside them: nobody waits, so nothing interrupts them.
        Then, round by round, the short ones alone and beside the long ones.
        """
        self.unbroken = await LongAnswers(
            self._long, self._requests, self._turns.load.timeout_s
        ).all_ended()
        for number in range(1, self._turns.rounds + 1):
            yield ShortRow.of(number, False, await self._short_ones(number))
            yield await self._beside_long(number)

    async def _beside_long(self, number: int) -> ShortRow:
        long_ones = LongAnswers(self._long, self._requests, self._turns.load.timeout_s)
        try:
            await long_ones.all_begun()
            row = ShortRow.of(number, True, await self._short_ones(number))
            answers = await long_ones.all_ended()
        except asyncio.CancelledError:
            await long_ones.break_off()
            raise
        attempts = await attempts_of(self._turns.url, self._turns.api_key, answers)
        return replace(with_long(row, answers, self.unbroken), long_attempts=attempts)

    async def _short_ones(self, number: int) -> list[Exchange]:
        """The same arrivals in both turns of a round."""
        load = replace(self._turns.load, seed=self._turns.load.seed + number)
        return (await Generator(self._short, load).run()).exchanges


def with_long(
    row: ShortRow, answers: Sequence[LongAnswer], unbroken: Sequence[LongAnswer]
) -> ShortRow:
    """``row`` with what the long generations beside it did. A text that did not end, or with
    another finish reason, is one that differs.
    """
    same = [
        (answer.text, answer.finish_reason, answer.error)
        == (expected.text, expected.finish_reason, None)
        for answer, expected in zip(answers, unbroken, strict=True)
    ]
    return replace(
        row,
        long_s=round(max(answer.took_s for answer in answers), 3),
        long_gap_s=round(max(answer.longest_gap_s for answer in answers), 3),
        long_errors=[answer.error for answer in answers if answer.error is not None],
        texts_differ=same.count(False),
    )
