"""Whatever JSON a client sends: it is refused in our words or becomes a submission that Redis can
hold; nothing else is raised, and no process dies.
"""

from __future__ import annotations

import itertools
import json
from contextlib import suppress
from typing import Any

import hiredis

from serve_app.clock import RedisClock
from serve_app.errors import RequestRefused
from serve_app.ingress.inference import Submissions
from serve_app.ingress.validation.bodies import check_context, parse
from serve_app.ingress.validation.fields import INFERENCE_PATHS, PATHS
from serve_app.policy.tenants import Tenant
from serve_app.request_queue import encode_entry
from serve_app.settings import Settings
from tests.tables import Failures

MODEL = "hermes-tiny"
SUBMISSIONS = Submissions(Settings(), "wake", RedisClock())
HELLO = {"role": "user", "content": "Hello"}
FIELDS = (
    "model messages prompt input tokens stream stream_options temperature top_p top_k min_p "
    "max_tokens min_tokens n max_completion_tokens max_output_tokens best_of presence_penalty "
    "frequency_penalty repetition_penalty logprobs top_logprobs prompt_logprobs logit_bias seed "
    "stop stop_token_ids bad_words allowed_token_ids user service_tier prompt_cache_key "
    "cache_salt tools tool_choice response_format structured_outputs text chat_template "
    "chat_template_kwargs use_beam_search length_penalty truncate_prompt_tokens priority "
    "request_id vllm_xargs echo suffix instructions metadata dimensions encoding_format unknown"
).split()
NUMBERS = "0 -1 1.5 2147483648 18446744073709551616 1e308 5e-324 1e999 -0.0 NaN 01".split()
TEXTS = [json.dumps(text) for text in ("", "a\r\nb", "\0\u2028%s{{7*7}}", "\ud800", "é😀" * 9_000)]
ITEMS = [
    *("null", "true", *NUMBERS, "9" * 400, "9" * 5_000, *TEXTS),
    *("[]", "{}", "[" * 90 + "]" * 90, '{"a":' * 90 + "0" + "}" * 90),
]
NAMES = "role content type function name url image_url json regex schema format".split()
VALUES = [
    *ITEMS,
    *(f"[{item}]" for item in ITEMS),
    *(
        f"[{', '.join([item] * 3_000)}]"
        for item in ("null", "70000", '""', "{}", json.dumps(HELLO))
    ),
    *("{" + f'"{name}": {item}' + "}" for name in NAMES for item in ITEMS[:9]),
    *(json.dumps([{"role": "user", "content": [{"type": kind, kind: "x"}]}]) for kind in NAMES),
]
HEADERS = (
    "x-request-timeout-seconds x-hermes-class x-session-id idempotency-key traceparent "
    "x-request-id last-event-id"
).split()
HEADER_VALUES = ["", "0", "-1", "nan", "1e400", "9" * 5_000, "1_000", "²", "standard", "é"]


def good(path: str) -> dict[str, Any]:
    return {"model": MODEL, **PATHS[path]["example"]}


def submit(path: str, body: bytes, headers: dict[str, str]) -> None:
    """What an ingress does with a request until Redis has it; it may refuse it."""
    with suppress(RequestRefused):
        request, body, _ = parse(path, body, MODEL)
        check_context(path, request, 4_096)
        made = SUBMISSIONS.of(Tenant("tenant"), path, "", headers, body, request, "")
        entry = encode_entry("req_1", made.facts.tenant, made.facts.session, 1, made.work)
        hiredis.pack_command(("XADD", "key", "*", *itertools.chain(*entry.items())))


def test_any_value_of_any_field_is_refused_or_taken() -> None:
    with Failures() as failures:
        for path, field, value in itertools.product(INFERENCE_PATHS, FIELDS, VALUES):
            body = json.dumps(good(path))[:-1] + f', "{field}": {value}}}'
            with failures.of(path, field, value):
                submit(path, body.encode(errors="surrogatepass"), {})


def test_any_value_of_a_header_is_refused_or_taken() -> None:
    with Failures() as failures:
        for path, name, value in itertools.product(INFERENCE_PATHS, HEADERS, HEADER_VALUES):
            body = json.dumps(good(path)).encode()
            with failures.of(path, name, value):
                submit(path, body, {"idempotency-key": "k", name: value})
