"""Settings of routing: which replica a request is sent to."""

from __future__ import annotations

from pydantic import Field

from serve_app.settings.section import Section


class RoutingSettings(Section):
    """Consistent hashing with bounded loads."""

    load_factor: float = Field(
        1.25, gt=1.0, description="c: no replica holds more than ceil(c * mean) requests in flight"
    )
    virtual_nodes: int = Field(128, ge=1, description="Points of each replica on the hash ring")
