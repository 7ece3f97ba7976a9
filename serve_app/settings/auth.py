"""Settings of authentication: who may send requests."""

from __future__ import annotations

from pydantic import Field

from serve_app.settings.section import Section

DEFAULT_TENANT = "default"
"""The tenant of every request if no API key is required."""


class AuthSettings(Section):
    """Who may send requests."""

    required: bool = Field(
        False, description="Whether every request except /healthz and /readyz needs an API key"
    )
    keys_file: str = Field(
        "",
        description="File with tenants and the hashes of their API keys; the service reads it "
        "again when it changes",
    )
    critical_tenants: tuple[str, ...] = Field(
        (),
        strict=False,  # a list of YAML is no tuple
        description="Tenants that may send requests of the class `critical`, which go before all "
        "others: the operators' own. `default` stands for everybody if no API key is required",
    )
    admin_tenants: tuple[str, ...] = Field(
        (),
        strict=False,
        description="Tenants that may read what all tenants have used "
        "(`/v1/organization/usage/completions`); everybody may if no API key is required",
    )
