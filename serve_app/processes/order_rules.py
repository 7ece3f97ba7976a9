"""Hands the settings of the order of work to its policies, which know no settings."""

from __future__ import annotations

from serve_app.policy.classes import ClassRules
from serve_app.policy.order import Rules
from serve_app.policy.tenants import TenantRules
from serve_app.settings.order import OrderSettings


def order_rules(settings: OrderSettings) -> Rules:
    """The rules of one ingress's scheduler."""
    return Rules(
        ClassRules(
            settings.interactive_share,
            settings.ageing_s,
            settings.aged_share,
            settings.interactive_credit,
        ),
        TenantRules(settings.tenant_weights, settings.prompt_weight, settings.output_weight),
        settings.claim_ahead,
        settings.short_first_ms_per_token,
    )
