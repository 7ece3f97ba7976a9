"""`scripts/simulate --fit` and `--errors`: measure, fit, and report the error."""

import json
import time
from argparse import Namespace
from pathlib import Path

import msgspec
from rich.console import Console

from scripts.benchmark import interrupts, report
from scripts.simulation.engines import EngineParameters, Timing, decode_parameters
from serve_app.errors import SettingsError

from . import points
from .engines import load_engine
from .fit import fit, median_errors, show
from .points import Point

MEASURED = Path(__file__).parent / "measured"


def fit_engine(options: Namespace, console: Console) -> None:
    """Measure a real engine (or read what was measured), fit the model to it, and say how well.

    Raises:
        SystemFailed: the engine did not start, or did not answer.
        SettingsError: no file is named.
    """
    path: Path | None = options.measured
    if path is None:
        raise SettingsError("--fit needs --measured FILE, which it writes if it is absent")
    if not path.exists():
        _measure(options, path)
    document = json.loads(path.read_text())
    found = points.load(path)
    fitted = fit(_limits(path.stem, document), found)
    medians = median_errors(fitted, [point for point in found if point.held_out])
    source = (
        f"Fitted by scripts/simulate --fit to {path.name}, measured on "
        f"{document['machine']['cpu']}, {document['machine']['cores']} cores, "
        f"{document['finished']}; median error on points that were held out: {medians['all']:.1%}"
    )
    fitted = msgspec.structs.replace(fitted, source=source)
    show(console, fitted, found)
    out = options.out or path.with_suffix(".fitted.json")
    out.write_text(json.dumps(msgspec.to_builtins(fitted), indent=2) + "\n")
    console.print(f"wrote {out}")


def show_errors(options: Namespace, console: Console) -> None:
    """How far an engine of `--engine` is from what was measured.

    Raises:
        SettingsError: nothing was measured.
    """
    path = options.measured or MEASURED / f"{Path(options.engine).stem}.json"
    if not path.exists():
        raise SettingsError(f"{path} is absent: scripts/simulate --fit measures it")
    show(console, load_engine(options.engine), points.load(path))


def _measure(options: Namespace, path: Path) -> None:
    from . import measure

    interrupts.install()
    with measure.engine(options.url, options.model_name) as (bench, system):
        limits = {**measure.LIMITS, **measure.kv_limits(system)}
        found: list[Point] = measure.measure(bench, system, options.point_s, options.rounds)
    how: dict[str, object] = {
        "engine": limits,
        "machine": report.machine(),
        "versions": report.versions(),
        "finished": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    points.save(path, found, how)


def _limits(name: str, document: dict[str, object]) -> EngineParameters:
    limits = document["engine"]
    assert isinstance(limits, dict)
    timing = msgspec.to_builtins(Timing(step_ms=1.0))
    return decode_parameters({"name": name, "timing": timing, **limits})
