"""Writes docs/compatibility-openai.md: its tables are what the tests check and what the code
answers; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from serve_app.contract import Reason
from serve_app.errors import RequestRefused, error_body
from serve_app.ingress.validation.fields import WITHOUT_EFFECT

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility-openai.md"

DIFFERENCES = (
    ("ChatCompletionResponseMessage", "annotations", "always"),
    (
        "ChatCompletionResponseMessage",
        "function_call",
        "always (deprecated by OpenAI; tools are called through `tool_calls`)",
    ),
    (
        "CompletionUsage",
        "prompt_tokens_details",
        "unless the engine argument `enable_prompt_tokens_details` is on",
    ),
    ("CompletionUsage", "completion_tokens_details", "unless the model's reasoning is counted"),
    (
        "CreateChatCompletionStreamResponse",
        "choices[].finish_reason",
        "in every chunk but a choice's last (as OpenAI's own streams do)",
    ),
    ("CreateChatCompletionStreamResponse", "choices[].logprobs", "unless they were asked for"),
    (
        "CreateCompletionResponse",
        "choices[].finish_reason",
        "in every chunk of a stream but a choice's last",
    ),
    (
        "CreateCompletionResponse",
        "usage",
        "in chunks of a stream, unless asked for by `stream_options`",
    ),
)
"""What vLLM sends as null where OpenAI's schema has it left out: schema, place in it, and when."""

LEFT_OUT = (
    ("CreateChatCompletionResponse", "choices[].logprobs", "refusal"),
    ("CreateChatCompletionStreamResponse", "choices[].logprobs", "refusal"),
)
"""What vLLM leaves out where OpenAI's schema requires it (as null)."""

_HEAD = """# Where answers differ from OpenAI's schema

hermes-serve passes requests on to vLLM's own OpenAI server and that server's answers back
unchanged, so what differs from OpenAI's published schema is what vLLM answers differently.
`tests/service/test_openai_schema.py` asks what schemathesis makes of that schema (`POST
/chat/completions`, `POST /completions`, `GET /models`). It finds no 5xx, and no answer that breaks
the schema except as listed here. `.venv/bin/python -m scripts.local.openai_page` writes this page
from the exceptions of that test and from the code's own table of errors.

## Null where the schema has the field left out

To the `openai` SDK, null and a missing field are the same.

| place | when |
| --- | --- |
"""

_MORE = """
## Left out where the schema requires it

Null at OpenAI, where the model did not refuse; only where log probabilities are asked for:

"""

_STREAMS = """
With `stream_options.include_usage`, chunks before the last have no `usage`, where OpenAI documents
`usage: null`: they are vLLM's bytes, and are not written anew.

## More than the schema has

Answers have fields of vLLM's own beside OpenAI's: `stop_reason`, `token_ids`, `prompt_logprobs`,
`kv_transfer_params`, `max_model_len` of a model, and others. The schema allows that.

## Errors

Every error has OpenAI's shape and the header `x-hermes-reason`, also those that vLLM answers.
`code` is that reason, a text (only in an event that vLLM itself writes into a stream that has
begun, it is a number):

| `code` | status | `type` | the SDK tries again |
| --- | --- | --- | --- |
"""

_RULE = ("---", "---", "---")
_NAMES = "; ".join(
    f"`{path}`: {', '.join(f'`{name}`' for name in sorted(names))}"
    for path, names in WITHOUT_EFFECT.items()
)
_OTHERWISE = (
    (
        "an endpoint that the model cannot serve (`/v1/embeddings` of a chat model)",
        "403 or 404",
        "404 that names what the model can do",
    ),
    (
        "a picture, sound or file named by an `http(s)` URL",
        "fetched",
        "400, but for the hosts of `limits.media_domains`; as `data:` it is read",
    ),
    (
        "requests beyond the bounds of `limits.*` ([settings](settings.md))",
        "other bounds",
        "400 that names the field and the limit",
    ),
    (
        "a field that neither OpenAI documents nor vLLM knows for that path",
        "400 `Unknown parameter: …`",
        "the same, also where vLLM alone would ignore it (`guided_json`, `max_tokens` of a "
        "response): the client would believe that it counts. Taken are null, what "
        "`limits.allowed_fields` names, and inside of messages and other objects what vLLM takes",
    ),
    (
        f"what vLLM does not know of OpenAI's fields ({_NAMES})",
        "has its effect",
        "taken, because OpenAI's clients send it, and without effect",
    ),
    (
        "tools of the type `custom`",
        "served",
        "400: vLLM serves functions",
    ),
    (
        "no credentials",
        "401",
        "401 where `auth.required` is set, as all stage files and the chart do; else accepted",
    ),
    (
        "the request was cancelled with `DELETE /v1/requests/{id}`",
        "–",
        "499",
    ),
    (
        'a text for a number or a boolean (`"max_tokens": "64"`)',
        "400",
        "400, although vLLM alone would take it",
    ),
    (
        "`64.0` for an integer",
        "–",
        "as vLLM: taken",
    ),
    (
        "an integer of more than 64 bits in a schema",
        "–",
        "400; 500 from vLLM alone",
    ),
    (
        "half of a surrogate pair, a number beyond 1.8e308 or of more than 4300 digits",
        "–",
        "400",
    ),
    (
        "a body with a `Content-Encoding`",
        "–",
        "415",
    ),
)
"""What is answered otherwise: what, by OpenAI, and here."""

_LAST = """
## What the HTTP servers before it answer

- HAProxy (2.8) answers by itself, with a plain 400, what its parser refuses: what is no HTTP, and a
  head above 64 KiB (`tune.bufsize`). Its errorfiles do not reach these
  (`tests/unit/test_haproxy_start.py`). Many header fields pass and are a 431 of ours, as are more
  bytes than `ingress.max_header_bytes`. That no ingress answers is a 503 in OpenAI's shape, if
  HAProxy was started through `cluster/haproxy-start`.
- A streamed answer to HTTP/1.0 is chunked all the same: uvicorn, which Ray starts, chunks whatever
  the version, and HAProxy passes that on. nginx, which speaks 1.0 by default, understands it. Other
  answers have a `Content-Length`.

## Behind Ray's Python proxy

That proxy adds a second `x-request-id` header to answers, after ours; clients show both, separated
by a comma, and the first one is the request's ID. The second is the client's own, or one that the
proxy has made up if the client sent none. The service cannot tell these two apart and shows either
as `client_request_id`. A request that names `x-request-timeout-seconds` can be cut by the proxy
itself, with a plain 408. None of that happens behind HAProxy.
"""


def page() -> str:
    """The page as it should be."""
    null = "".join(f"| `{schema}.{place}` | {when} |\n" for schema, place, when in DIFFERENCES)
    left_out = "".join(f"- `{schema}.{place}.{name}`\n" for schema, place, name in LEFT_OUT)
    rows = "".join(f"| {' | '.join(cells)} |\n" for cells in [("what", "OpenAI", "here"), _RULE])
    rows += "".join(f"| {' | '.join(cells)} |\n" for cells in _OTHERWISE)
    errors = "".join(_errors()) + "\n" + rows
    return _HEAD + null + _MORE + left_out + _STREAMS + errors + _LAST


def _errors() -> Iterator[str]:
    for reason in sorted(Reason, key=lambda one: (RequestRefused(one, "").status, one)):
        refused = RequestRefused(reason, "")
        kind = error_body(reason, "")["error"]["type"]
        again = "no" if "x-should-retry" in refused.headers() else "yes"
        yield f"| `{reason}` | {refused.status} | `{kind}` | {again} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
