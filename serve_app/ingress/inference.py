"""The endpoint of all inference paths: read, validate, submit, answer."""

from __future__ import annotations

import codecs
import re
from collections.abc import Awaitable, Sequence

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from serve_app.contract import INPUT_TOKENS, RESPONSES
from serve_app.errors import RequestRefused
from serve_app.ingress.acceptance import Acceptance
from serve_app.ingress.answer import Answer, Answering
from serve_app.ingress.api_keys import Caller
from serve_app.ingress.conversations import Conversations, goes_on
from serve_app.ingress.objects_api import accepted, queued
from serve_app.ingress.refusals import refusal_answer
from serve_app.ingress.slow_readers import SlowReaders
from serve_app.ingress.submissions import Submissions, in_background
from serve_app.ingress.uploads import Uploads
from serve_app.ingress.validation.headers import check_content_encoding, check_content_type
from serve_app.ingress.validation.validator import Validator
from serve_app.observability.tracing import SERVER, Span, Tracing

_NAMED, _NAME_CHARS = 8, 64
"""How many ignored fields an answer names, and how much of each name."""
_UNSAFE = re.compile(r"[^!-+\--~]")
"""What is no printable ASCII, a space, or the comma between the names."""


class InferenceEndpoint:
    """A plain ASGI endpoint: the hot path uses neither dependency injection nor a response
    class.
    """

    def __init__(
        self,
        uploads: Uploads,
        validator: Validator,
        conversations: Conversations,
        submissions: Submissions,
        acceptance: Acceptance,
        answering: Answering,
        slow_readers: SlowReaders,
        tracing: Tracing,
    ) -> None:
        self._uploads = uploads
        self._validator = validator
        self._conversations = conversations
        self._submissions = submissions
        self._acceptance = acceptance
        self._answering = answering
        self._slow_readers = slow_readers
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        what = {
            "http.request.method": "POST",
            "http.route": scope["path"],
            "url.path": scope["path"],
        }
        caller = headers.get("traceparent", "")
        with self._tracing.begin(f"POST {scope['path']}", caller, what, SERVER) as span:
            answer, ignored = await self._accept(scope, receive, headers, span)
            if ignored:
                send = _naming(ignored, send)
            if isinstance(answer, Response):
                await answer(scope, receive, send)
                span.tell({"http.response.status_code": answer.status_code})
                return
            try:
                await self._slow_readers.serve(answer, scope, receive, send)
                span.tell({"http.response.status_code": answer.status})
            except RequestRefused as refusal:
                span.refused(refusal.status, refusal.reason)
                refused = refusal_answer(refusal, answer.own_headers())
                await refused(scope, receive, send)
            except Exception:
                scope["state"]["begun"] = answer.status > 0
                raise

    async def _accept(
        self, scope: Scope, receive: Receive, headers: dict[str, str], span: Span
    ) -> tuple[Answer | Response, Sequence[str]]:
        """The answer, and the names of the fields that were left out of the request."""
        check_content_type(headers.get("content-type", ""))
        check_content_encoding(headers.get("content-encoding", ""))
        path, state = scope["path"], scope["state"]
        caller = Caller(state["tenant"], state["key"])
        query = scope["query_string"].decode("latin-1")
        with self._uploads.of(caller.tenant) as upload:
            body = (await upload.body(headers, receive)).removeprefix(codecs.BOM_UTF8)
            request, body, ignored = await self._validator.parse(path, body)
            if path in (RESPONSES, INPUT_TOKENS) and goes_on(request):
                body = await self._conversations.whole(caller.tenant, body, request)
                upload.grew(len(body))
                request, body, _ = await self._validator.parse(path, body)
            submission = self._submissions.of(
                caller, path, query, headers, body, request, span.traceparent
            )
            background = in_background(path, request)
            facts = submission.facts
            if facts.detached and not (background and facts.streamed):
                request_id, facts = await self._acceptance.accept_detached(submission)
                span.tell({"hermes.request_id": request_id, "hermes.class": facts.request_class})
                if background:
                    return await queued(request_id, facts, body), ignored
                return accepted(request_id, facts), ignored
            follower, facts = await self._acceptance.accept(submission)
        span.tell({"hermes.request_id": follower.request_id, "hermes.class": facts.request_class})
        continued = facts.streamed and submission.seen > 0
        answer = Answer(self._answering, follower, path, facts, facts.streamed, continued)
        return answer, ignored


def _naming(ignored: Sequence[str], send: Send) -> Send:
    """Sends the answer with a header that names the fields that were left out."""
    names = [_UNSAFE.sub("?", name[:_NAME_CHARS]) for name in ignored[:_NAMED]]
    if len(ignored) > _NAMED:
        names.append(f"and {len(ignored) - _NAMED} more")
    header = (b"x-hermes-ignored", ", ".join(names).encode())

    def send_named(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], header]}
        return send(message)

    return send_named
