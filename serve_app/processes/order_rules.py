"""Hands the settings of the order of work to its policies, which know no settings."""

from __future__ import annotations

from serve_app.policy.classes import ClassRules
from serve_app.policy.order import Rules
from serve_app.policy.tenants import TenantRules
from serve_app.settings import Settings


def order_rules(settings: Settings) -> Rules:
    order = settings.order
    return Rules(
        ClassRules(
            order.interactive_share, order.ageing_s, order.aged_share, order.interactive_credit
        ),
        TenantRules(order.tenant_weights, order.prompt_weight, order.output_weight),
        order.claim_ahead,
        order.short_first_ms_per_token,
        settings.workers.max_running_requests,
    )
