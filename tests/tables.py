"""Tables of cases: one test goes through all rows, and its failure lists every row that is wrong.

A decorator for rows that are known beforehand (fixtures are made once, for all rows):

    @each("text, size", [("a", 1), ("bb", 2)])
    def test_a_text_has_a_size(text: str, size: int) -> None:
        assert len(text) == size

A collector for rows that only the test itself can find:

    def test_every_object_has_a_name(chart: Chart) -> None:
        with Failures() as failures:
            for item in chart.objects():
                with failures.of(item["kind"]):
                    assert item["metadata"]["name"]

A table without rows fails, too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import pytest

Test = Callable[..., Any]


class Failures:
    """What was wrong with which row; at its end it fails with all of that, if anything was."""

    def __init__(self) -> None:
        self._rows = 0
        self._wrong: list[tuple[str, BaseException]] = []

    @contextmanager
    def of(self, *row: object) -> Iterator[None]:
        """One row: what its block raises is noted, and the test goes on with the next row."""
        self._rows += 1
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            if "pytest-timeout" in str(error):  # no further row has a time-out
                raise
            self._wrong.append((", ".join(f"{value!r:.200}" for value in row), error))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None:
            return
        if not self._rows:
            raise AssertionError("a table without rows proves nothing")
        if self._wrong:
            lines = [f"{row}: {type(why).__name__}: {why}" for row, why in self._wrong]
            head = (
                f"{len(lines)} of {self._rows} rows are wrong (the first one's traceback is above)"
            )
            raise AssertionError("\n".join([head, *lines])) from self._wrong[0][1]


def each(names: str, rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Runs a test, which may be async, once for all rows, which are those of
    `pytest.mark.parametrize`.
    """
    arguments = [name.strip() for name in names.split(",")]
    cases = [tuple(row) if len(arguments) > 1 else (row,) for row in rows]

    def named(case: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(arguments, case, strict=True))

    def decorate(test: Test) -> Test:
        def run(*args: Any, **fixtures: Any) -> None:
            with Failures() as failures:
                for case in cases:
                    with failures.of(*case):
                        test(*args, **named(case), **fixtures)

        async def run_async(*args: Any, **fixtures: Any) -> None:
            with Failures() as failures:
                for case in cases:
                    with failures.of(*case):
                        await test(*args, **named(case), **fixtures)

        signature = inspect.signature(test)
        assert signature.parameters.keys() >= set(arguments), test.__name__
        others = [value for name, value in signature.parameters.items() if name not in arguments]
        is_async = inspect.iscoroutinefunction(test)
        wrapped: Test = functools.wraps(test)(run_async if is_async else run)
        wrapped.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return wrapped

    return decorate
