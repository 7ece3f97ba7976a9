"""What is measured on a real engine and predicted by the model: closed loops of users."""

import heapq
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scripts.benchmark.stats import median
from scripts.simulation.engine_model import EngineModel
from scripts.simulation.engine_model import Sequence as EngineSequence
from scripts.simulation.engines import EngineParameters

FITTED = (1, 4, 16, 64)
"""Users of the points that parameters are fitted to."""
HELD_OUT = (2, 8, 32)
"""Users of the points that only test them."""
SESSIONS = 8


@dataclass(frozen=True)
class Times:
    """Medians over requests, and the throughput. NaN: not measured."""

    ttft_ms: float
    per_token_ms: float
    tokens_per_s: float


@dataclass(frozen=True)
class Point:
    """One load on a real engine, and what it measured."""

    shape: str
    users: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int
    """Tokens at the beginning that prompts of one of `SESSIONS` sessions share."""
    measured: Times

    @property
    def held_out(self) -> bool:
        """Whether parameters are tested on it and not fitted to it."""
        return self.users in HELD_OUT


def median_point(rounds: Sequence[Point]) -> Point:
    """One point that was measured several times."""
    times = (
        median([getattr(point.measured, name) for point in rounds])
        for name in Times.__dataclass_fields__
    )
    return replace(rounds[0], measured=Times(*times))


class _Users:
    """Users in a closed loop on a model."""

    def __init__(self, parameters: EngineParameters, point: Point, seed: int = 1) -> None:
        self.model = EngineModel(parameters)
        self.point = point
        self.now_s = 0.0
        self.wanted_s: dict[EngineSequence, float] = {}
        self.first_s: dict[EngineSequence, float] = {}
        self._rng = random.Random(seed)
        self._request_s = parameters.timing.request_ms / 1e3
        self._coming: list[tuple[float, int, EngineSequence]] = []
        self._made = 0
        for _ in range(point.users):
            self._ask()

    def _ask(self) -> None:
        point = self.point
        self._made += 1
        session = self._rng.randrange(SESSIONS) + 1
        blocks = point.shared_tokens // self.model.parameters.block_size
        sequence = EngineSequence(
            point.prompt_tokens,
            point.output_tokens,
            base=-self._made << 20,
            prefix=tuple(range(session << 20, (session << 20) + blocks)),
        )
        self.wanted_s[sequence] = self.now_s
        heapq.heappush(self._coming, (self.now_s + self._request_s, self._made, sequence))

    def turn(self) -> list[EngineSequence]:
        """Steps until somebody comes or is answered. Returns who was answered."""
        if self.model.idle:
            self.now_s = max(self.now_s, self._coming[0][0])
        while self._coming and self._coming[0][0] <= self.now_s:
            self.model.add(heapq.heappop(self._coming)[2])
        step = self.model.schedule()
        assert step is not None
        steps = step.repeats
        if self._coming:
            steps = step.steps_by(self._coming[0][0] - self.now_s)
        self.now_s += step.duration_s(steps)
        ended = self.model.complete(step, steps)
        for sequence, _ in step.chunks:
            if sequence.produced == 1:
                self.first_s[sequence] = self.now_s
        for _ in ended:
            self._ask()
        return ended


def predict(parameters: EngineParameters, point: Point) -> Times:
    """The same load on the model. The first round of answers warms the prefix cache up."""
    users = _Users(parameters, point)
    answered: list[tuple[EngineSequence, float]] = []
    rounds = max(3, 24 // point.users)
    while len(answered) < point.users * rounds:
        answered += [(sequence, users.now_s) for sequence in users.turn()]
    began_s = answered[point.users - 1][1]
    late = answered[point.users :]
    ttft = [users.first_s[one] - users.wanted_s[one] for one, _ in late]
    tokens = point.output_tokens
    each = [(end_s - users.first_s[one]) / max(1, tokens - 1) for one, end_s in late]
    rate = len(late) * tokens / (late[-1][1] - began_s)
    return Times(median(ttft) * 1e3, median(each) * 1e3, rate)


def save(path: Path, points: Sequence[Point], how: dict[str, object]) -> None:
    """Keep what was measured."""
    fields = [asdict(point) for point in points]
    for point in fields:
        point["measured"] = {name: _known(value) for name, value in point["measured"].items()}
    document = {**how, "points": fields}
    path.write_text(json.dumps(document, indent=1) + "\n")


def load(path: Path) -> list[Point]:
    """What was measured once."""
    found = json.loads(path.read_text())["points"]
    return [Point(**{**fields, "measured": _times(fields["measured"])}) for fields in found]


def _times(fields: dict[str, float | None]) -> Times:
    return Times(**{name: math.nan if value is None else value for name, value in fields.items()})


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
