"""How many tokens a prompt really has, learnt from those that engines have read. Pure.

A prompt is estimated by its bytes before it is tokenised. How far that is off depends on language
and tokenizer, which are much the same for one tenant's requests of one kind.
"""

from __future__ import annotations

from serve_app.policy.waiting import Claimed

_MEMORY = 100
"""About as many of the latest requests count."""
_GROUPS = 10_000
_MOST = 16.0


class Prompts:
    """The ratio of real to estimated tokens, by tenant and kind; 1 until one has ended."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str], tuple[int, float, float]] = {}

    def predict(self, request: Claimed, estimated_tokens: int) -> float:
        """What an engine will probably read."""
        group = self._groups.get((request.tenant, request.kind))
        if group is None:
            return float(estimated_tokens)
        _, estimated, real = group
        return estimated_tokens * min(real / estimated, _MOST)

    def learn(self, request: Claimed, estimated_tokens: int, tokens: int) -> None:
        """A request has ended.

        Args:
            tokens: what the engine has read; 0 if that is not known.
        """
        if not (tokens and estimated_tokens):
            return
        key = request.tenant, request.kind
        seen, estimated, real = self._groups.pop(key, (0, 0.0, 0.0))
        seen = min(seen + 1, _MEMORY)
        part = 1 / seen
        estimated += part * (estimated_tokens - estimated)
        real += part * (tokens - real)
        self._groups[key] = seen, estimated, real  # at the end, as the latest used
        if len(self._groups) > _GROUPS:
            del self._groups[next(iter(self._groups))]
