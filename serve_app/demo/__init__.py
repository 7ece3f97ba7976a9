"""`hermes-serve demo`: one streamed tool call, and the death of everything that carries it."""
