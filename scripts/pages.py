"""Writes the tables of documents whose rows are in the code: settings, presets, errors.
The text around them is the documents' own; a test compares both.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel

from serve_app.contract import Reason
from serve_app.errors import RequestRefused, error_body
from serve_app.settings import Settings
from serve_app.settings.tree import PRESETS
from serve_app.settings.vllm_names import VLLM

DOCS = Path(__file__).resolve().parents[1] / "docs"
ADVICE: dict[Reason, str] = {
    Reason.INVALID_API_KEY: "The API key is missing or unknown: send a valid one.",
    Reason.KEY_NOT_PERMITTED: "The API key is valid but may not do this: use one of a tenant that "
    "may.",
    Reason.MALFORMED_JSON: "The body is not valid JSON: correct it.",
    Reason.INVALID_REQUEST: "A field is wrong or beyond a limit: correct the field that `param` "
    "names.",
    Reason.MODEL_NOT_FOUND: "The model is not served here: use one that `GET /v1/models` lists.",
    Reason.NOT_FOUND: "The path, request or response does not exist or has expired: check the id.",
    Reason.METHOD_NOT_ALLOWED: "The path takes other methods: use one that `Allow` names.",
    Reason.BODY_TOO_LARGE: "The body exceeds `ingress.max_body_bytes`, or a file "
    "`files.max_bytes`: send less.",
    Reason.HEADERS_TOO_LARGE: "The headers exceed `ingress.max_header_bytes`: send fewer or "
    "shorter ones.",
    Reason.UPLOAD_TIMEOUT: "The body did not arrive in time: send the request again.",
    Reason.UNSUPPORTED_MEDIA_TYPE: "Send the body as `application/json` (a file as "
    "`multipart/form-data`), and without `Content-Encoding`.",
    Reason.QUEUE_FULL: "As many requests of this class wait as may: retry after `Retry-After`.",
    Reason.OVERLOADED: "The request would wait for too long: retry after `Retry-After`, or send it "
    "with `Prefer: respond-async`.",
    Reason.STORAGE_FULL: "Redis has no memory for more requests: retry after `Retry-After`.",
    Reason.RESULTS_FULL: "Retained answers fill their share: delete old ones, or retry after "
    "`Retry-After`.",
    Reason.TENANT_LIMIT: "The tenant's share of the queue, or of an ingress's connections and "
    "buffers, or of files, is used up (the message says which): send fewer requests at a time, "
    "and retry.",
    Reason.RATE_LIMIT_EXCEEDED: "The tenant's requests or tokens of this minute are used up: retry "
    "after `Retry-After`.",
    Reason.CONCURRENCY_LIMIT: "As many of the tenant's requests wait or run as may: retry when one "
    "has ended.",
    Reason.QUOTA_EXCEEDED: "The tenant's tokens of this month are used up: ask the operator.",
    Reason.CONTEXT_LENGTH_EXCEEDED: "Prompt and answer exceed the model's context: shorten the "
    "prompt or `max_tokens`.",
    Reason.TOO_MANY_CONNECTIONS: "The ingress serves as many connections as it may: retry after "
    "`Retry-After`.",
    Reason.JOURNAL_UNAVAILABLE: "Redis cannot be used now: retry after `Retry-After`, with the "
    "same `Idempotency-Key`.",
    Reason.STORAGE_UNAVAILABLE: "The storage of files cannot be used now: retry after "
    "`Retry-After`.",
    Reason.NOT_CONFIGURED: "The service was started without what this needs: ask the operator for "
    "the setting that the message names.",
    Reason.PREVIOUS_RESPONSE_NOT_FOUND: "The previous response does not exist or has expired: send "
    "the whole conversation.",
    Reason.JOURNAL_LOST: "Redis lost a part of the request's journal: send it as a new request.",
    Reason.DEADLINE: "The deadline passed first: retry, or set a later one "
    "(`x-request-timeout-seconds`).",
    Reason.CANCELLED: "The request was cancelled by its client: nothing to do.",
    Reason.WITHDRAWN: "The window of the line's batch closed before it began: nothing to do, it "
    "runs in the next one.",
    Reason.CLIENT_DISCONNECTED: "The client disconnected and did not come back in time: send the "
    "request again.",
    Reason.ENGINE_ERROR: "The engine failed on this request: report it to the operator.",
    Reason.ATTEMPT_LOST: "An engine died and no other could resume the answer: send the request "
    "again.",
    Reason.POISON: "Several engines that ran this request have died: do not send it again.",
    Reason.EVENT_LOOP_BLOCKED: "The request blocked all others of its worker: make it smaller or "
    "simpler.",
    Reason.ANSWER_TOO_LARGE: "The answer exceeds `journal.max_answer_bytes`: ask for less at a "
    "time.",
    Reason.IDEMPOTENCY_CONFLICT: "The `Idempotency-Key` belongs to another request, file or "
    "batch: use a new key.",
    Reason.INTERNAL: "The service failed on this request: report it to the operator.",
}
"""What has happened and what the client should do, for docs/errors.md."""


def docstrings(section: type[BaseModel]) -> dict[str, str]:
    """What is written below each setting of a section."""
    (found,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(found, ast.ClassDef)
    return {
        one.target.id: " ".join(str(below.value.value).split())
        for one, below in pairwise(found.body)
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


def settings(section: type[BaseModel] = Settings, prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        child = next(
            (c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None
        )
        if child is not None:
            yield from settings(child, f"{prefix}{name}.")
        else:
            required = field.is_required()
            default = None if required else field.get_default(call_default_factory=True)
            as_yaml = default if isinstance(default, str) else json.dumps(default)
            shown = "" if default in (None, "") else f"`{as_yaml}`"
            about = docstrings(section).get(name, field.description or "")
            yield f"| `{prefix}{name}` | {shown} | {about} |"


def presets() -> Iterator[str]:
    """A row for each setting that a preset decides."""
    for setting, field in {
        "workers.max_running_requests": "sequences",
        "engine.args.max_num_batched_tokens": "batched_tokens",
        "engine.args.gpu_memory_utilization": "memory_share",
        "workers.autoscaling.target_ongoing_requests ÷ workers.max_running_requests": "busy_share",
    }.items():
        yield f"| `{setting}` | {' | '.join(str(getattr(p, field)) for p in PRESETS.values())} |"


def errors() -> Iterator[str]:
    for reason in sorted(Reason, key=lambda one: (RequestRefused(one, "").status, one)):
        refused = RequestRefused(reason, "")
        kind = error_body(reason, "")["error"]["type"]
        again = "no" if "x-should-retry" in refused.headers() else "yes"
        yield f"| `{reason}` | {refused.status} | `{kind}` | {again} | {ADVICE[reason]} |"


def without_effect() -> Iterator[str]:
    """A row for each path that takes fields which do nothing."""
    for path, names in VLLM["without_effect"].items():
        yield f"| `{path}` | {', '.join(f'`{name}`' for name in sorted(names))} |"


TABLES: tuple[tuple[str, str, Callable[[], Iterator[str]]], ...] = (
    ("settings.md", "| setting | default | meaning |", settings),
    ("settings.md", f"| setting | {' | '.join(f'`{name}`' for name in PRESETS)} |", presets),
    ("errors.md", "| `code` | status | `type` | retry | what to do |", errors),
    (
        "evidence/openai-schema.md",
        "| path | OpenAI's fields that vLLM does not know |",
        without_effect,
    ),
)
"""Document, first line of a table, and what gives its rows."""


def page(name: str) -> str:
    text = (DOCS / name).read_text()
    for document, head, rows in TABLES:
        if document == name:
            begin, _, rest = text.partition(f"{head}\n")
            rule, _, rest = rest.partition("\n")
            after = re.sub(r"\A(\|.*\n)*", "", rest)
            text = "\n".join([begin + head, rule, *rows(), after])
    return text


if __name__ == "__main__":
    for document in dict.fromkeys(name for name, _, _ in TABLES):
        (DOCS / document).write_text(page(document))
