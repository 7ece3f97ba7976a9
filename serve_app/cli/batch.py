"""The commands `batch run`, `list`, `show` and `cancel`, over the service's HTTP API."""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from serve_app import timings
from serve_app.cli.console import (
    KEY_HELP,
    CommandFailed,
    Url,
    age,
    columns,
    in_one_line,
    new_app,
    one_sentence,
)
from serve_app.cli.requests import AsJson, described
from serve_app.cli.service_api import ServiceApi, path_of
from serve_app.clock import SYSTEM

OVER = ("completed", "failed", "expired", "cancelled")
_PAGE = 100
_HEADINGS = ("batch", "state", "done", "failed", "lines", "age", "ends in")
_NUMBERS = (2, 3, 4)

BatchId = Annotated[str, typer.Argument(metavar="ID", help="id of the batch")]

app = new_app(f"Run a file of requests as a batch; list, show or cancel batches.\n\n{KEY_HELP}")


@app.command("run")
def run_batch(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines, a request in each")],
    output: Annotated[Path, typer.Option("-o", "--output", help="where the answers go")],
    url: Url = "",
    within: Annotated[str, typer.Option(help="how long it may take: 1m to 7d")] = "24h",
    window: Annotated[
        str, typer.Option(help="the hours in which lines begin: '22:00-06:00 Europe/Berlin'")
    ] = "",
) -> None:
    """Upload a file, run its lines as a batch, show how far it is, and fetch the answers.

    Whatever ends this command, the batch goes on: run the same command again, and it goes on with
    the same batch. Beside the output it keeps `<output>.batch` meanwhile. Lines that failed are in
    `<output>.errors`; the exit status is 1 then.
    """
    with one_sentence("batch"), ServiceApi(url) as api:
        try:
            ended = _run(api, Run.of(file, output), {"completion_window": within, "window": window})
        except KeyboardInterrupt:
            raise CommandFailed("the batch goes on; run the same command again to wait") from None
        counts = ended.get("request_counts") or {}
        print(in_one_line(f"{ended['id']} {ended['status']}: {_done(counts)}"))
        if ended["status"] != "completed" or counts.get("failed"):
            raise typer.Exit(1)


@app.command("list")
def list_batches(
    url: Url = "",
    limit: Annotated[int, typer.Option(min=1, max=_PAGE, help="how many to show")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="print a line of JSON for each")] = False,
) -> None:
    """Show a table of your latest batches, newest first."""
    with one_sentence("batch"), ServiceApi(url) as api:
        found = api.ask("GET", "/v1/batches", limit=limit).get("data", [])
        if as_json:
            for one in found:
                print(json.dumps(one), flush=True)
        else:
            print(_table(found, SYSTEM.unix_s()))


@app.command("show")
def show_batch(batch_id: BatchId, url: Url = "", as_json: AsJson = False) -> None:
    """Show the state, counts, times and files of a batch."""
    with one_sentence("batch"), ServiceApi(url) as api:
        found = api.ask("GET", _path(batch_id))
        print(json.dumps(found, indent=2) if as_json else described(_shown(found)))


@app.command("cancel")
def cancel_batch(batch_id: BatchId, url: Url = "") -> None:
    """Cancel a batch; what is done is kept. Print its state then."""
    with one_sentence("batch"), ServiceApi(url) as api:
        found = api.ask("POST", f"{_path(batch_id)}/cancel")
        print(in_one_line(f"{batch_id} {found.get('status')}"))


class Run(NamedTuple):
    """A file that is run, and what a repeated command has to know of the earlier one."""

    file: Path
    output: Path
    key: str
    """The `Idempotency-Key` of the upload and of the batch."""

    @property
    def noted(self) -> Path:
        return self.output.with_name(f"{self.output.name}.batch")

    @property
    def errors(self) -> Path:
        return self.output.with_name(f"{self.output.name}.errors")

    @classmethod
    def of(cls, file: Path, output: Path) -> Run:
        """The run that an earlier command has begun with this output, or a new one.

        Raises:
            CommandFailed: there is no such file, or the earlier command has run another one.
        """
        try:
            with file.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            noted = cls(file, output, "").noted
            if noted.exists():
                key, earlier = noted.read_text().split()
                if earlier != digest:
                    why = f"{noted} belongs to a batch of another file"
                    raise CommandFailed(f"{why}; delete it, or choose another output")
            else:
                key = f"batch-run-{secrets.token_hex(16)}"
                noted.write_text(f"{key} {digest}\n")  # before the service knows of it
        except (OSError, ValueError) as error:
            raise CommandFailed(in_one_line(str(error))) from None
        return cls(file, output, key)


def _run(api: ServiceApi, run: Run, wanted: Mapping[str, str]) -> dict[str, Any]:
    """The batch when it has ended, and its answers are written."""
    given = {name: value for name, value in wanted.items() if value}
    uploaded = api.upload("/v1/files", {"purpose": "batch"}, run.file, run.key)
    asked = {"input_file_id": uploaded["id"], "endpoint": _endpoint(run.file), **given}
    batch = api.post("/v1/batches", asked, run.key)
    batch = _followed(api, batch, Progress(SYSTEM.monotonic_s))
    for name, to in (("output_file_id", run.output), ("error_file_id", run.errors)):
        if batch.get(name):
            api.download(f"/v1/files/{batch[name]}/content", to)
    for error in (batch.get("errors") or {}).get("data", ()):
        where = f"line {error['line']}: " if error.get("line") else ""
        typer.echo(in_one_line(f"{where}{error.get('message')}"), err=True)
    run.noted.unlink(missing_ok=True)
    return batch


def _endpoint(file: Path) -> str:
    """That of the first line; what is wrong with it is for the service to say."""
    with file.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
    try:
        return str(json.loads(first)["url"])
    except (ValueError, KeyError, TypeError):
        return "/v1/chat/completions"


class Progress:
    """What a batch has done, and when it will probably be done.

    Args:
        now_s: seconds of a clock that only goes forward.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._began: tuple[float, int, int] | None = None

    def line(self, batch: Mapping[str, Any]) -> str:
        counts = batch.get("request_counts") or {}
        done = counts.get("completed", 0) + counts.get("failed", 0)
        tokens, now_s = (batch.get("usage") or {}).get("total_tokens", 0), self._now_s()
        began_s, done_then, tokens_then = self._began = self._began or (now_s, done, tokens)
        words = [f"{batch['status']}: {_done(counts)}" if counts.get("total") else batch["status"]]
        if now_s > began_s and done > done_then:
            words.append(f"{(tokens - tokens_then) / (now_s - began_s):.0f} tokens/s")
            left_s = (counts.get("total", 0) - done) * (now_s - began_s) / (done - done_then)
            words.append(f"some {age(left_s)} left")
        return in_one_line(", ".join(words))


def _done(counts: Mapping[str, int]) -> str:
    failed = f", {counts['failed']} failed" if counts.get("failed") else ""
    return f"{counts.get('completed', 0)} of {counts.get('total', 0)} lines done{failed}"


def _followed(api: ServiceApi, batch: dict[str, Any], progress: Progress) -> dict[str, Any]:
    said = ""
    while batch["status"] not in OVER:
        if (line := progress.line(batch)) != said:
            typer.echo(line, err=True)
            said = line
        threading.Event().wait(timings.PROGRESS_LOOK_S)
        batch = api.ask("GET", _path(batch["id"]))
    return batch


def _shown(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch with times as requests have them, and without what its tokens consist of."""
    made = dict[str, Any]()
    for name, value in batch.items():
        if name.endswith("_at"):
            made[f"{name}_ms"] = value and value * 1000
        elif name == "usage":
            made[name] = {kind: many for kind, many in value.items() if isinstance(many, int)}
        else:
            made[name] = value
    return made


def _path(batch_id: str) -> str:
    return path_of(batch_id, "/v1/batches")


def _table(batches: Sequence[Mapping[str, Any]], now_s: float) -> str:
    if not batches:
        return "no batches"
    rows: list[Sequence[str]] = [_HEADINGS]
    for one in batches:
        counts, over = one.get("request_counts") or {}, one.get("status") in OVER
        numbers = (str(counts.get(name, 0)) for name in ("completed", "failed", "total"))
        ends = "-" if over else age(one.get("expires_at", now_s) - now_s)
        row = (one["id"], one["status"], *numbers, age(now_s - one["created_at"]), ends)
        rows.append([*map(in_one_line, row)])
    return columns(rows, _NUMBERS)
