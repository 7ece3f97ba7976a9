"""Settings of the order of work: who goes first, and how the rest is shared."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from serve_app.settings.section import Section


class OrderSettings(Section):
    """Which waiting request goes next (docs/order-of-work.md)."""

    interactive_share: float = Field(
        0.7,
        gt=0,
        lt=1,
        description="Share of the work, in token cost, that `realtime` and `standard` get together "
        "while `batch` waits too; 0.3 for an offline service",
    )
    ageing_s: float = Field(
        10.0,
        ge=0,
        description="A `standard` request that has waited this long is no longer behind every "
        "`realtime` request",
    )
    aged_share: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="Share of the interactive work that such `standard` requests get",
    )
    interactive_credit: float = Field(
        4.0,
        ge=0,
        description="How much of its unused share interactive work may use later, before `batch`, "
        "in multiples of what runs at a time",
    )
    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {},
        description="Weight of a tenant, if it is not 1: of two tenants that wait, one with the "
        "weight 4 gets four times as much work done as one with the weight 1",
    )
    prompt_weight: float = Field(1.0, gt=0, description="Cost of a prompt token")
    output_weight: float = Field(2.0, gt=0, description="Cost of an output token")
    short_first_ms_per_token: float = Field(
        2.0,
        ge=0,
        description="Short requests of a tenant go before its long ones: a request ranks as if it "
        "had come so much later for each token of its predicted cost, of which its prompt counts "
        "a quarter. 0: the oldest goes first",
    )
    claim_ahead: float = Field(
        4.0,
        ge=0.25,
        le=64,
        description="How many requests of each class an ingress claims before they can start, in "
        "multiples of its share of the engines' capacity: tenants share fairly among these",
    )
