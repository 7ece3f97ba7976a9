"""The batchers' names on the command line: `static:4` names one, and says how to make it."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from .batcher import Batcher
from .batches import Batches
from .hybrid import Hybrid
from .split import Split
from .tuned import Tuned
from .window import Window

DEFAULT = "serial,static:4,dynamic:32/50/8192,async:32,continuous,tuned,hybrid:64"
_FORM = re.compile(r"(?P<kind>[a-z]+)(?::(?P<numbers>[1-9]\d*(?:/[1-9]\d*)*))?")
_NUMBERS = {
    "serial": (0,),
    "static": (1,),
    "dynamic": (3,),
    "async": (1,),
    "continuous": (0,),
    "tuned": (0,),
    "hybrid": (0, 1),
    "split": (4,),
}
_HYBRID_SLOTS = 64


@dataclass(frozen=True)
class Specification:
    """One batcher of the command line. Every run makes a new one of it."""

    name: str
    kind: str
    numbers: tuple[int, ...]

    def make(self, users: int | None) -> Batcher:
        """A batcher in which nothing waits yet.

        ``users`` is how many jobs there can be at a time, if that is known: a static batch of more
        would never be complete, and is as large as all of them instead.
        """
        return _MAKERS[self.kind](self.numbers, users)


def _static(numbers: tuple[int, ...], users: int | None) -> Batcher:
    (size,) = numbers
    return Batches(size if users is None else min(size, users), None, None)


def _dynamic(numbers: tuple[int, ...], _: int | None) -> Batcher:
    size, wait_ms, tokens = numbers
    return Batches(size, wait_ms / 1e3, tokens)


def _split(numbers: tuple[int, ...], _: int | None) -> Batcher:
    window, *batches = numbers
    size, wait_ms, tokens = batches
    return Split(Window(window), Batches(size, wait_ms / 1e3, tokens))


_MAKERS: dict[str, Callable[[tuple[int, ...], int | None], Batcher]] = {
    "serial": lambda *_: Window(1),
    "static": _static,
    "dynamic": _dynamic,
    "async": lambda numbers, _: Window(numbers[0]),
    "continuous": lambda *_: Window(None),
    "tuned": lambda *_: Tuned(),
    "hybrid": lambda numbers, _: Hybrid(numbers[0] if numbers else _HYBRID_SLOTS),
    "split": _split,
}


def parse(text: str) -> tuple[Specification, ...]:
    """Batchers from `serial,static:4,…`, each once.

    Raises:
        ValueError: names the part that is no batcher, and the forms that are.
    """
    return tuple(dict.fromkeys(_parse_one(part) for part in text.split(",")))


def _parse_one(part: str) -> Specification:
    found = _FORM.fullmatch(part)
    kind = found["kind"] if found else ""
    written = found["numbers"] if found else None
    numbers = tuple(int(number) for number in written.split("/")) if written else ()
    if len(numbers) not in _NUMBERS.get(kind, ()):
        raise ValueError(
            f"'{part}' is no batcher: serial, static:N, dynamic:N/wait_ms/tokens, async:N, "
            "continuous, tuned, hybrid, hybrid:N or split:N/size/wait_ms/tokens"
        )
    return Specification(part, kind, numbers)
