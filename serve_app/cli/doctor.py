"""The command `doctor`: every fault of this machine and of the service, each with its fix."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from serve_app.cli.console import (
    DASHBOARD,
    Url,
    columns,
    in_one_line,
    new_app,
    one_sentence,
    running_service,
)
from serve_app.cli.console import (
    redis_url as its_redis_url,
)
from serve_app.clock import SYSTEM
from serve_app.local import checks
from serve_app.local.checks import Finding, Machine
from serve_app.timings import DOCTOR_S

app = new_app()


@app.command("doctor")
def doctor(
    model: Annotated[str, typer.Option(help="a folder or a hub id: whether it fits")] = "",
    max_model_len: Annotated[
        int, typer.Option(min=0, help="tokens of its longest context (0: the longest that fits)")
    ] = 0,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs of a replica")] = 1,
    port: Annotated[int, typer.Option(min=1, max=65535, help="port of the service")] = 8000,
    redis_url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            show_default=False,
            help="the service's Redis (default: $HERMES_REDIS_URL, otherwise that of a running "
            "`hermes-serve up`)",
        ),
    ] = "",
    url: Url = "",
    address: Annotated[
        str, typer.Option(help="where `deploy` would find a Ray's dashboard")
    ] = DASHBOARD,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Find what keeps a service from starting on this machine, or from working well.

    Looks at Python, disk, memory, limits, GPUs, packages, Redis, another Ray, the port, a model's
    size, the running service and variables that mislead. Starts and changes nothing, and takes a
    few seconds. The exit status is 1 if there is a fault; each has one sentence, with its fix.
    """
    with one_sentence("doctor"):
        service = running_service()
        its = Machine(
            port,
            model,
            max_model_len,
            tensor_parallel_size,
            redis_url or its_redis_url(),
            "--redis-url" if redis_url else "HERMES_REDIS_URL",
            url,
            service.url if service else "",
            address,
        )
        found = examined(its)
        faults = [one for one in found if one.fault]
        if as_json:
            print(json.dumps([one._asdict() for one in found], indent=2))
        else:
            rows = [("✗" if one.fault else "✓", one.check, one.fault or one.fact) for one in found]
            print(columns([tuple(map(in_one_line, row)) for row in rows]))
    if faults:
        raise typer.Exit(1)


def examined(its: Machine) -> list[Finding]:
    """What all checks find, at the same time: the faults of each, or else its facts. A check that
    does not end is a fault.
    """
    found: dict[str, list[Finding]] = {}

    def look(check: Callable[[Machine], Iterable[Finding]]) -> None:
        try:
            found[check.__name__] = list(check(its))
        except (OSError, RuntimeError) as error:
            found[check.__name__] = [Finding(check.__name__, str(error))]

    ends_s = SYSTEM.monotonic_s() + DOCTOR_S
    look(checks.gpus)  # first, because others ask for the cards
    threads = [threading.Thread(target=look, args=[one], daemon=True) for one in checks.OTHERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends_s - SYSTEM.monotonic_s()))
    late = f"no answer within {DOCTOR_S:g} s: look at what it depends on, such as DNS or a disk"
    shown = []
    for check in (checks.gpus, *checks.OTHERS):
        its_own = found.get(check.__name__, [Finding(check.__name__, late)])
        faults = [one for one in its_own if one.fault]
        shown += faults or [one for one in its_own if one.fact]
    return shown
