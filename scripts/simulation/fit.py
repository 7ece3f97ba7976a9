"""`scripts/simulate --fit`: an engine's parameters from what was measured, and their error."""

import math
from collections.abc import Callable, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from scripts.benchmark.stats import median
from scripts.simulation.engines import EngineParameters, Timing

from .points import Point, Times, predict

_MEASURES: dict[str, Callable[[Times], float]] = {
    "TTFT": lambda times: times.ttft_ms,
    "inter-token": lambda times: times.per_token_ms,
    "throughput": lambda times: times.tokens_per_s,
}
_FIRST_GUESS = Timing(
    step_ms=3.0,
    prefill_token_us=30.0,
    decode_sequence_us=100.0,
    context_token_ns=50.0,
    prefill_context_token_ps=1000.0,
    new_sequence_us=300.0,
    request_ms=2.0,
)
_STEPS = (2.0, 1.5, 1.2, 1.08, 1.03)


def errors(parameters: EngineParameters, point: Point) -> dict[str, float]:
    """How far the model is from what was measured, relative to it."""
    predicted = predict(parameters, point)
    return {
        name: abs(measure(predicted) / measure(point.measured) - 1)
        for name, measure in _measures(point).items()
    }


def _measures(point: Point) -> dict[str, Callable[[Times], float]]:
    """What was measured at a point."""
    return {
        name: measure
        for name, measure in _MEASURES.items()
        if not math.isnan(measure(point.measured))
    }


def fit(parameters: EngineParameters, points: Sequence[Point]) -> EngineParameters:
    """The timing with the least mean error (of logarithms) over the points that are not held out;
    found by changing one figure after another by smaller and smaller factors.
    """
    fitted = [point for point in points if not point.held_out]

    def cost(timing: Timing) -> float:
        trial = msgspec.structs.replace(parameters, timing=timing)
        total = 0.0
        for point in fitted:
            predicted = predict(trial, point)
            for measure in _measures(point).values():
                total += abs(math.log(measure(predicted) / measure(point.measured)))
        return total

    best, least = _FIRST_GUESS, cost(_FIRST_GUESS)
    for factor in _STEPS:
        for _ in range(6):
            before = least
            for name in Timing.__struct_fields__:
                for times in (factor, 1 / factor):
                    trial = msgspec.structs.replace(best, **{name: getattr(best, name) * times})
                    if (found := cost(trial)) < least:
                        best, least = trial, found
                        break
            if before - least < 1e-3 * before:
                break
    rounded = {name: float(f"{getattr(best, name):.4g}") for name in Timing.__struct_fields__}
    return msgspec.structs.replace(parameters, timing=Timing(**rounded))


def median_errors(parameters: EngineParameters, points: Sequence[Point]) -> dict[str, float]:
    """By measure, and of all of them (`all`)."""
    found = [errors(parameters, point) for point in points]
    by_measure = {name: median([one[name] for one in found if name in one]) for name in _MEASURES}
    return {**by_measure, "all": median([value for one in found for value in one.values()])}


def show(console: Console, parameters: EngineParameters, points: Sequence[Point]) -> None:
    """Print measured and modelled figures, and the medians of the errors."""
    table = Table(title=f"{parameters.name}: measured / modelled", title_justify="left")
    for column in ("prompts", "users", "TTFT ms", "token ms", "tokens/s", "errors", "held out"):
        table.add_column(column, justify="left" if column == "prompts" else "right")
    for point in points:
        real, modelled = point.measured, predict(parameters, point)
        off = errors(parameters, point)
        table.add_row(
            f"{point.shape} ({point.prompt_tokens} + {point.output_tokens})",
            str(point.users),
            f"{real.ttft_ms:.1f} / {modelled.ttft_ms:.1f}".replace("nan", "-"),
            f"{real.per_token_ms:.2f} / {modelled.per_token_ms:.2f}".replace("nan", "-"),
            f"{real.tokens_per_s:,.0f} / {modelled.tokens_per_s:,.0f}",
            " ".join(f"{off[name]:.0%}" if name in off else "-" for name in _MEASURES),
            "yes" if point.held_out else "",
        )
    console.print(table)
    for name, chosen in (
        ("all points", points),
        ("fitted points", [point for point in points if not point.held_out]),
        ("held-out points", [point for point in points if point.held_out]),
    ):
        medians = median_errors(parameters, chosen)
        text = ", ".join(f"{measure} {value:.1%}" for measure, value in medians.items())
        console.print(f"median error, {name}: {text}")
