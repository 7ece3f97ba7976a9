"""What the service itself recorded of a request, read after its end."""

from __future__ import annotations

import asyncio

import httpx

from scripts.chaos_testing.traffic import Told

_RETRY_S = 0.5


async def look_up(
    http: httpx.AsyncClient, told: Told, gate: asyncio.Semaphore, within_s: float = 50.0
) -> None:
    """The service's own record of a request afterwards.

    Args:
        within_s: by then the request must have ended by that record.
    """
    for _ in range(round(within_s / _RETRY_S)):
        try:
            async with gate:
                answer = await http.get(f"/v1/requests/{told.request_id}")
        except httpx.TransportError:
            await asyncio.sleep(_RETRY_S)
            continue
        if answer.status_code == 404:
            return  # no longer retained
        if answer.status_code == 200 and answer.json()["ended_at_ms"]:
            told.state = answer.json()
            return
        await asyncio.sleep(_RETRY_S)
    told.wrong.append("event 0 after event -1: it never ended by the service's own account")
