"""Who is told by HTTP of what has ended (docs/webhooks.md)."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from serve_app.settings.sections import FORMS, HOST, SECRET, Section

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_URL = re.compile(r"https?://[^/\s@?#]+[^\s#]*")
_EVENT = re.compile(r"\*|(response|request|batch)\.(\*|[a-z_]+)")


class WebhookEndpoint(Section):
    """An endpoint that the operator has registered."""

    url: str
    """In `webhooks.endpoints.<name>`: where its events are posted to, https:// or http://, at any
    address"""
    secret: str
    """Where its secrets are: `env:NAME` or `file:/path`, with one or more `whsec_…`, each of which
    signs"""
    events: list[str] = Field(["*"])
    """The types of events that it gets, such as `response.failed` or `batch.*`"""
    tenants: list[str] = Field(["*"])
    """The tenants whose events it gets; `*` is any text"""

    @model_validator(mode="after")
    def _of_a_form(self) -> Self:
        if not _URL.fullmatch(self.url):
            raise ValueError("url takes a URL such as https://hooks.example.com/hermes")
        if not re.fullmatch(r"env:[A-Za-z_][A-Za-z0-9_]*|file:/.*", self.secret):
            raise ValueError(f"secret {FORMS[SECRET]}")
        if wrong := [one for one in self.events if not _EVENT.fullmatch(one)]:
            raise ValueError(f"events takes types such as response.completed, not '{wrong[0]}'")
        return self


class WebhookSettings(Section):
    """Events that are posted when responses, requests and batches end."""

    endpoints: dict[str, WebhookEndpoint] = Field({})
    """The operator's endpoints, by name"""
    hosts: list[Annotated[str, Field(pattern=HOST)]] = Field([])
    """Hosts that a request may name in `x-hermes-webhook`; `*.example.com` is any below it.
    Default: none"""
    secret: str = Field("", pattern=SECRET)
    """Where the secrets are that sign what such a webhook gets, as `webhooks.endpoints.secret`"""
    plain_http: bool = False
    """Whether a request may name an `http://` URL"""
    private_addresses: bool = False
    """Whether such a host may have a private address, such as 10.0.0.1 or 127.0.0.1"""
    max_waiting: int = Field(100_000, ge=100)
    """Most events that wait to be delivered, some 400 bytes of Redis each; beyond it the oldest is
    dead. Of one tenant a tenth"""
    give_up_after_s: float = Field(72 * 3600.0, gt=0)
    """How long an event is tried; then it is dead"""
    dead: int = Field(1_000, ge=0)
    """Most dead events that are kept"""

    @field_validator("endpoints")
    @classmethod
    def _named(cls, endpoints: dict[str, WebhookEndpoint]) -> dict[str, WebhookEndpoint]:
        if wrong := [name for name in endpoints if not _NAME.fullmatch(name)]:
            raise ValueError(f"the name '{wrong[0]}' takes letters, digits, '_' and '-'")
        return endpoints

    @model_validator(mode="after")
    def _signed(self) -> Self:
        if self.hosts and not self.secret:
            raise ValueError("secret is empty while hosts names hosts: nobody could check an event")
        return self

    @property
    def used(self) -> bool:
        return bool(self.endpoints or self.hosts)
