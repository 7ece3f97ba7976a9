"""How long requests run, learnt from those that have ended. Pure.

A request takes so much time for each token that it reads and so much for each that it writes: the
least squares of the latest few hundred. How busy the engines are is part of it, so it changes with
the load.
"""

from __future__ import annotations

_MEMORY = 300
"""About as many of the latest requests count."""


class Pace:
    """Milliseconds per token. Until a request has ended, nothing takes any time."""

    def __init__(self) -> None:
        self.mean_ms = 0.0
        """Of all requests: in this time, about as many start as run at a time."""
        self._seen = 0
        self._prompt_ms = self._output_ms = 0.0
        self._products = [0.0] * 5

    def predict_ms(self, prompt_tokens: float, output_tokens: float) -> float:
        """How long a request with so many tokens will run."""
        return self._prompt_ms * prompt_tokens + self._output_ms * output_tokens

    def learn(self, prompt_tokens: float, output_tokens: float, took_ms: float) -> None:
        """A request has ended after so long."""
        self._seen = min(self._seen + 1, _MEMORY)
        p, o, t = prompt_tokens, output_tokens, max(0.0, took_ms)
        part, new = 1 / self._seen, (p * p, p * o, o * o, p * t, o * t)
        self.mean_ms += part * (t - self.mean_ms)
        self._products = [
            mean + part * (value - mean) for mean, value in zip(self._products, new, strict=True)
        ]
        self._prompt_ms, self._output_ms = _slopes(*self._products)


def _slopes(pp: float, po: float, oo: float, pt: float, ot: float) -> tuple[float, float]:
    """Time per token read and written, neither below 0, by the means of the products of tokens read
    (p), tokens written (o) and time (t).
    """
    determinant = pp * oo - po * po
    if determinant > 1e-6 * pp * oo:
        prompt, output = (pt * oo - ot * po) / determinant, (ot * pp - pt * po) / determinant
        if prompt >= 0 and output >= 0:
            return prompt, output
        if output < 0:
            return pt / pp, 0.0
    return (0.0, ot / oo) if oo else (pt / pp if pp else 0.0, 0.0)
