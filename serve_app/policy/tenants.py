"""Who sends requests, and what the policy of each gives and permits. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from serve_app.contract import Reason
from serve_app.errors import RequestRefused
from serve_app.policy.classes import PUBLIC_CLASSES
from serve_app.policy.tenant_limits import NO_LIMITS, Limits


class Role(StrEnum):
    """What an API key may be used for."""

    INFERENCE = "inference"
    """Requests, and what belongs to them."""
    METRICS = "metrics"
    """`/metrics`, which covers all tenants."""
    ADMIN = "admin"
    """What covers all tenants: usage, dead letters, capacity."""
    GATEWAY = "gateway"
    """Requests of any tenant of the policy, which `auth.tenant_header` names."""


class Tenant(NamedTuple):
    """Whose request it is, and what its API key and its policy permit."""

    id: str
    key_id: str = ""
    """How the API key is named where the key itself must not stand: `key_` and the first 12 digits
    of its hash. Empty if no API key is required.
    """
    classes: Sequence[str] = PUBLIC_CLASSES
    """The most urgent first."""
    roles: Collection[Role] = (Role.INFERENCE,)
    limits: Limits = NO_LIMITS
    models: Collection[str] = ()
    """The only ones that it may use, with `*` for any text; empty: all."""
    overload: Literal["refuse", "async"] = "refuse"
    """Whether its requests become background work while the breaker is open."""

    @property
    def admin(self) -> bool:
        return Role.ADMIN in self.roles

    def may_use(self, model: str, served: str) -> bool:
        """Whether it may use a model by a name, of which `served` is the model's own."""
        names = {model, served}
        return not self.models or any(fnmatchcase(n, one) for n in names for one in self.models)

    def check_model(self, model: str, served: str) -> None:
        """Refuse a model that it may not use as one that does not exist: `model_not_found`."""
        if not self.may_use(model, served):
            message = f"The model '{model}' does not exist or you do not have access to it."
            raise RequestRefused(Reason.MODEL_NOT_FOUND, message, param="model")

    def check_admin(self, what: str, instead: str = "") -> None:
        """Refuse what is for operators to all other tenants: `key_not_permitted`."""
        if not self.admin:
            message = f"{what} for the role admin, and those in auth.admin_tenants{instead}."
            raise RequestRefused(Reason.KEY_NOT_PERMITTED, message)
