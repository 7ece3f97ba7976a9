"""The endpoint of all inference paths: read, validate, submit, answer. Headers and fields determine
what is submitted.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.admission.admission import Submission
from serve_app.clock import RedisClock
from serve_app.contract import CHATS, COUNTING, OF_RESPONSES, RESPONSES, Reason
from serve_app.errors import RequestRefused, invalid
from serve_app.ingress.connection_limits import Uploads, check_content_type
from serve_app.ingress.conversations import Conversations, goes_on
from serve_app.ingress.exchange import Exchange, Exchanges
from serve_app.ingress.objects_api import accepted, queued
from serve_app.ingress.validation.bodies import Validator
from serve_app.ingress.validation.structure import PIECE_BYTES
from serve_app.journal.entries import RequestFacts, RequestLine
from serve_app.journal.events import last_event_id
from serve_app.observability.tracing import SERVER, Span, Tracing
from serve_app.policy.classes import CLASSES, DEFAULT_CLASS, PUBLIC_CLASSES, SERVICE_TIERS
from serve_app.policy.overload import Overload
from serve_app.policy.placement import session_key
from serve_app.policy.tenants import Tenant
from serve_app.policy.work import work_of
from serve_app.settings import Settings
from serve_app.webhooks.events import HEADER, REQUEST, RESPONSE, check_url

_NAMED, _NAME_CHARS = 8, 64
"""How many ignored fields an answer names, and how much of each name."""
_UNSAFE = re.compile(r"[^!-+\--~]")
"""What is no printable ASCII, a space, or the comma between the names."""
_KEPT_HEADERS = ("content-type", "accept")
"""Those that the engine's server may need; credentials and cookies never enter the journal."""
_STORED_PATHS = (RESPONSES, CHATS)
_MAX_ID_CHARS = 128
"""Of a client's own id for its request: it is in logs and in answers."""


@dataclass(eq=False)
class InferenceEndpoint:
    """A plain ASGI endpoint: the hot path uses neither dependency injection nor a response
    class.
    """

    uploads: Uploads
    validator: Validator
    conversations: Conversations
    submissions: Submissions
    exchanges: Exchanges
    tracing: Tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, headers = scope["path"], scope["state"]["headers"]
        what = {
            "http.request.method": "POST",
            "http.route": path,
            "url.path": path,
            "hermes.tenant": scope["state"]["caller"].id,
        }
        parent = headers.get("traceparent", "")
        with self.tracing.begin(f"POST {path}", parent, what, SERVER) as span:
            answer = await self._submit(scope, receive, headers, span)
            await answer(scope, receive, send)
            if isinstance(answer, Exchange) and answer.refusal is not None:
                span.refused(answer.refusal.status_at(path), answer.refusal.reason)
            else:
                span.tell({"http.response.status_code": answer.status_code})

    async def _submit(
        self, scope: Scope, receive: Receive, headers: dict[str, str], span: Span
    ) -> Exchange | Response:
        """The answer, which names the fields that were left out of the request."""
        check_content_type(headers.get("content-type", ""))
        path: str = scope["path"]
        caller: Tenant = scope["state"]["caller"]
        query = scope["query_string"].decode("latin-1")
        with self.uploads.of(caller.id) as upload:
            body = (await upload.body(headers, receive)).removeprefix(codecs.BOM_UTF8)
            most_output = caller.limits.max_output_tokens
            request, body, ignored = await self.validator.validate(path, body, most_output)
            model = request.get("model")
            served = self.submissions.settings.model.name
            caller.check_model(model or served, served)
            if path in OF_RESPONSES and goes_on(request):
                body = await self.conversations.whole(caller.id, body, request)
                upload.grew(len(body))
                request, body, _ = await self.validator.validate(path, body, most_output)
            submission = self.submissions.of(
                caller,
                path,
                query,
                headers,
                body,
                request,
                span.traceparent,
                model,
                self.validator.most_tokens,
            )
            background = _in_background(path, request)
            if submission.facts.detached and not (background and submission.facts.streamed):
                request_id, facts, more = await self.exchanges.submit_detached(submission)
                span.tell({"hermes.request_id": request_id, "hermes.class": facts.request_class})
                if background:
                    answer = await queued(request_id, facts, body)
                else:
                    answer = accepted(request_id, facts)
                answer.headers.update({**more, **_naming(ignored)})
                return answer
            exchange = await self.exchanges.submit(submission)
        assert exchange.facts is not None
        told = {"hermes.request_id": exchange.follower.request_id}
        span.tell({**told, "hermes.class": exchange.facts.request_class})
        exchange.more_headers = _naming(ignored)
        return exchange


@dataclass(eq=False)
class Submissions:
    """Creates the submissions of one ingress.

    Args:
        wake_channel: the channel on which it learns of new journal entries.
        overload: says for which classes the breaker to background work is open.
    """

    settings: Settings
    wake_channel: str
    clock: RedisClock
    overload: Overload = field(default_factory=Overload)

    def of(
        self,
        caller: Tenant,
        path: str,
        query: str,
        headers: Mapping[str, str],
        body: bytes,
        request: Mapping[str, Any],
        trace: str,
        model: str | None = None,
        longest: int = 0,
    ) -> Submission:
        """The submission of one validated request. `headers`: by lower-case name. `trace`: its
        `traceparent`; empty if it is not traced. `model`: as the client calls it, if it does.
        `longest`: see `work_of`.

        Raises:
            RequestRefused: `invalid_request`, for a malformed header; `key_not_permitted`, for a
                class that the tenant may not use.
        """
        key = headers.get("idempotency-key", "")
        request_class = _request_class(caller, path, headers, request)
        background = _in_background(path, request)
        detached = self._gives_way(caller, headers, request_class)
        detached |= background or _prefers_async(headers.get("prefer", ""))
        stored = self._stores(path, request, background)
        tells, webhook = self._told(caller, path, headers, detached)
        now_ms = self.clock.now_ms()
        facts = RequestFacts(
            request_class=request_class,
            tenant=caller.id,
            session=session_key(headers, request),
            model=self.settings.model.name,
            streamed=request.get("stream") is True,
            admitted_ms=now_ms,
            deadline_ms=now_ms + int(self._timeout_s(headers, detached) * 1000),
            wake_channel=self.wake_channel,
            client_request_id=headers.get("x-request-id", "")[:_MAX_ID_CHARS],
            trace=trace,
            key=caller.key_id,
            detached=detached,
            retention_s=self._retention_s(headers) if detached or stored else 0.0,
            body_bytes=len(body) if stored else 0,
            alias=model if model and model != self.settings.model.name else "",
            tells=tells,
            webhook=webhook,
        )
        kept = [(name, headers[name]) for name in _KEPT_HEADERS if name in headers]
        return Submission(
            facts,
            RequestLine("POST", path, query, kept),
            body,
            work_of(path, body, request, longest),
            idempotency_key=key,
            value=_meaning(body, request) if key else b"",
            seen=last_event_id(headers.get("last-event-id")) if key else 0,
            if_there_is_room=not detached and request.get("store") is None,
            limits=caller.limits,
        )

    def again(self, earlier: RequestFacts) -> RequestFacts:
        """The facts of a request that is sent again without a client, with as much time as it had;
        `model_not_found` if it is for another service of the namespace.
        """
        model = self.settings.model.name
        if earlier.model != model:
            message = f"The request is for '{earlier.model}'; '{model}' is served here."
            raise RequestRefused(Reason.MODEL_NOT_FOUND, message, param="model")
        now_ms = self.clock.now_ms()
        return msgspec.structs.replace(
            earlier,
            admitted_ms=now_ms,
            deadline_ms=now_ms + earlier.deadline_ms - earlier.admitted_ms,
            wake_channel=self.wake_channel,
            detached=True,
            retention_s=earlier.retention_s or self.settings.journal.background_retention_s,
            twins="",
            batch="",
        )

    def _stores(self, path: str, request: Mapping[str, Any], background: bool) -> bool:
        """Whether a client wants its request and the answer stored."""
        wanted = request.get("store")
        if wanted is None:
            wanted = path == RESPONSES and self.settings.journal.store_responses
        return background or (path in _STORED_PATHS and wanted is True)

    def _gives_way(self, caller: Tenant, headers: Mapping[str, str], request_class: str) -> bool:
        """Whether a request goes on without its client because the breaker of its class is open."""
        wanted = headers.get("x-hermes-overload", caller.overload)
        if wanted not in ("async", "refuse"):
            what = f"must be async or refuse, not '{wanted[:40]}'"
            raise invalid(f"The header x-hermes-overload {what}.", "x-hermes-overload")
        return wanted == "async" and request_class in self.overload.open

    def _told(
        self, caller: Tenant, path: str, headers: Mapping[str, str], detached: bool
    ) -> tuple[str, str]:
        """What ends for receivers of webhooks, and the URL that the client has named. An answer
        that its client waits for is told to nobody.
        """
        settings, url = self.settings.webhooks, headers.get(HEADER, "")
        if url:
            check_url(settings, url)
            if not detached and headers.get("x-hermes-overload", caller.overload) != "async":
                raise invalid(
                    f"The header {HEADER} is for requests that go on without their client: send it "
                    "with Prefer: respond-async, or background: true.",
                    HEADER,
                )
        if not detached or not (url or settings.endpoints):
            return "", ""
        return RESPONSE if path == RESPONSES else REQUEST, url

    def _timeout_s(self, headers: Mapping[str, str], detached: bool) -> float:
        ingress = self.settings.ingress
        usual_s, most_s = ingress.request_timeout_s, ingress.max_request_timeout_s
        if detached:
            usual_s = most_s = ingress.background_timeout_s
        return min(_seconds(headers, "x-request-timeout-seconds") or usual_s, most_s)

    def _retention_s(self, headers: Mapping[str, str]) -> float:
        wanted_s, journal = _seconds(headers, "x-hermes-retention-seconds"), self.settings.journal
        return min(wanted_s or journal.background_retention_s, journal.max_retention_s)


def _request_class(
    caller: Tenant, path: str, headers: Mapping[str, str], request: Mapping[str, Any]
) -> str:
    """The class that the header names; without it, that of the service tier or the highest one that
    the caller may use. What only counts may take a spare slot, so it does not wait behind what is
    computed.
    """
    named = headers.get("x-hermes-class")
    if named is None:
        tier = "priority" if path in COUNTING else str(request.get("service_tier"))
        usual = SERVICE_TIERS.get(tier, DEFAULT_CLASS)
        return usual if usual in caller.classes else caller.classes[0]
    if named in caller.classes:
        return named
    own = ", ".join(one for one in caller.classes if one in PUBLIC_CLASSES)
    param = "x-hermes-class"
    if named not in CLASSES:
        message = f"The header x-hermes-class must be one of {own}, not '{named[:40]}'."
        raise RequestRefused(Reason.INVALID_REQUEST, message, param=param)
    message = f"Requests of the class '{named}' are not permitted to this API key; please use one "
    raise RequestRefused(Reason.KEY_NOT_PERMITTED, f"{message}of {own}.", param=param)


def _in_background(path: str, request: Mapping[str, Any]) -> bool:
    """Whether this is a response that goes on without its client, as OpenAI has it."""
    return path == RESPONSES and request.get("background") is True


def _prefers_async(prefer: str) -> bool:
    """Whether a `Prefer` header (RFC 7240) asks for an answer at once, and the work later."""
    return any(one.strip().lower() == "respond-async" for one in prefer.split(","))


def _seconds(headers: Mapping[str, str], name: str) -> float | None:
    """The number of seconds in a header; None if there is no such header."""
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise invalid(
            f"The header {name} must be a positive number of seconds, not '{text[:40]}'.",
            param=name,
        )
    return value


def _meaning(body: bytes, request: Mapping[str, Any]) -> bytes:
    """Equal for bodies that differ in spaces, in the order of fields or in how numbers and texts
    are written; empty for a body of which the request may hold only a part.
    """
    if len(body) > PIECE_BYTES:
        return b""
    return msgspec.json.encode(request, order="deterministic")


def _naming(ignored: Sequence[str]) -> dict[str, str]:
    """A header that names the fields that were left out, if there are any."""
    names = [_UNSAFE.sub("?", name[:_NAME_CHARS]) for name in ignored[:_NAMED]]
    if len(ignored) > _NAMED:
        names.append(f"and {len(ignored) - _NAMED} more")
    return {"x-hermes-ignored": ", ".join(names)} if names else {}
