"""The commands `requests list`, `show`, `tail` and `cancel`, over the service's HTTP API."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from serve_app.cli.console import (
    KEY_HELP,
    CommandFailed,
    Url,
    age,
    columns,
    in_one_line,
    new_app,
    one_sentence,
    printable,
    when,
)
from serve_app.cli.service_api import ServiceApi, path_of
from serve_app.clock import SYSTEM

_PAGE = 100
_HEADINGS = ("request", "state", "class", "model", "age", "attempts", "tokens in+out")
_NUMBERS = (4, 5, 6)

RequestId = Annotated[str, typer.Argument(metavar="ID", help="id of the request")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]

app = new_app(f"List requests, show one, read its answer, or cancel it.\n\n{KEY_HELP}")


@app.command("list")
def list_requests(
    url: Url = "",
    state: Annotated[str, typer.Option(help="only those in this state")] = "",
    request_class: Annotated[str, typer.Option("--class", help="only those of this class")] = "",
    limit: Annotated[int, typer.Option(min=1, help="how many to show")] = 20,
    every: Annotated[bool, typer.Option("--all", help="show all that the service lists")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print a line of JSON for each")] = False,
) -> None:
    """Show a table of your latest requests, newest first."""
    with one_sentence("requests"), ServiceApi(url) as api:
        wanted = {"state": state, "class": request_class}
        found = listed(api, wanted, math.inf if every else limit)
        if as_json:
            for one in found:
                print(json.dumps(one), flush=True)
        else:
            print(table(list(found), SYSTEM.unix_s()))


@app.command("show")
def show_request(request_id: RequestId, url: Url = "", as_json: AsJson = False) -> None:
    """Show the state, attempts, times and tokens of a request."""
    with one_sentence("requests"), ServiceApi(url) as api:
        found = api.ask("GET", path_of(request_id))
        print(json.dumps(found, indent=2) if as_json else described(found))


@app.command("tail")
def tail_request(request_id: RequestId, url: Url = "") -> None:
    """Print the text of an answer as it comes, from its beginning.

    Connects again for a minute whenever the connection breaks, and goes on after the last event. An
    answer that is not streamed is printed when it ends. Control characters are printed as `?`.
    """
    with one_sentence("requests"), ServiceApi(url) as api:
        api.ask("GET", path_of(request_id))  # fails at once; the events are asked for repeatedly
        answer = AnswerText()
        for name, data in api.events(request_id):
            print(printable(answer.feed(name, data)), end="", flush=True)
        print(printable(answer.rest()), flush=True)
        if answer.failure:
            raise CommandFailed(in_one_line(answer.failure))
        if answer.empty:
            typer.echo(f"no text: GET {path_of(request_id)}/response has the answer", err=True)


@app.command("cancel")
def cancel_request(request_id: RequestId, url: Url = "") -> None:
    """Cancel a request, which frees its place in the engine; print its state then."""
    with one_sentence("requests"), ServiceApi(url) as api:
        found = api.ask("DELETE", path_of(request_id))
        print(in_one_line(f"{request_id} {found.get('state')}"))


def listed(
    api: ServiceApi, wanted: Mapping[str, str], at_most: float
) -> Iterator[Mapping[str, Any]]:
    """The latest requests, page after page."""
    after = ""
    while at_most > 0:
        page = api.ask("GET", "/v1/requests", limit=min(at_most, _PAGE), after=after, **wanted)
        found, after = page.get("data", []), page.get("last_id") or ""
        yield from found
        at_most -= len(found)
        if not (page.get("has_more") and after):
            return


def table(requests: Sequence[Mapping[str, Any]], now_s: float) -> str:
    if not requests:
        return "no requests"
    rows = [_HEADINGS]
    for one in requests:
        used, admitted_ms = one.get("usage") or {}, one.get("admitted_at_ms")
        row = (
            *(str(one.get(name) or "-") for name in ("id", "state", "class", "model")),
            age(now_s - admitted_ms / 1000) if admitted_ms else "-",
            str(one.get("attempts", "-")),
            f"{used.get('prompt_tokens')}+{used.get('output_tokens')}" if used else "-",
        )
        rows.append(tuple(map(in_one_line, row)))  # type: ignore[arg-type]
    return columns(rows, _NUMBERS)


def described(request: Mapping[str, Any]) -> str:
    """A request as lines of a name and a value; what is unknown is left out."""
    rows = []
    for name, value in request.items():
        if name == "object" or value is None:
            continue
        if name.endswith("_at_ms"):
            name, value = name.removesuffix("_at_ms"), f"{when(value / 1000)} UTC"
        elif isinstance(value, dict):
            value = ", ".join(f"{key} {one}" for key, one in value.items())
        rows.append((in_one_line(name.replace("_", " ")), in_one_line(str(value))))
    return columns(rows)


class AnswerText:
    """Gives the text of the first choice as it comes, and that of the others at the end, because
    the events of several choices alternate.
    """

    def __init__(self) -> None:
        self.failure = ""
        """Why the answer failed, in the service's words."""
        self.empty = True
        """Whether there was no text so far."""
        self._others: defaultdict[int, list[str]] = defaultdict(list)

    def feed(self, name: str, data: str) -> str:
        """The new text of an event of this name."""
        try:
            found = json.loads(data)
        except ValueError:
            return ""  # a comment, or [DONE]
        if error := found.get("error") or (found if name == "error" else None):
            self.failure = str(error.get("message") or "the answer failed")
            return ""
        texts = list(_texts(found))
        if name == "response" and not texts:  # embeddings, tokens, …
            texts = [(0, json.dumps(found, indent=2))]
        self.empty = self.empty and not any(text for _, text in texts)
        for index, text in texts:
            if index:
                self._others[index].append(text)
        return "".join(text for index, text in texts if not index)

    def rest(self) -> str:
        """The texts of the other choices, each behind its number."""
        return "".join(
            f"\n\n[{index}] {''.join(parts)}" for index, parts in sorted(self._others.items())
        )


def _texts(found: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """The texts in an event or in a whole answer, with the numbers of their choices."""
    if found.get("type") == "response.output_text.delta":
        yield 0, found["delta"]
    if found.get("type") == "content_block_delta":
        yield 0, found["delta"].get("text") or ""
    if found.get("type") == "message":
        yield from ((0, block.get("text") or "") for block in found["content"])
    for choice in found.get("choices") or ():
        part = choice.get("delta") or choice.get("message") or choice
        yield choice.get("index", 0), part.get("content") or part.get("text") or ""
    for item in found.get("output") or ():
        for part in item.get("content") or ():
            yield 0, part.get("text") or ""
