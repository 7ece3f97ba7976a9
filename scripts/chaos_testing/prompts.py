"""What the clients ask. Each prompt has one text, so a mix-up shows."""

from __future__ import annotations

PROMPTS = [
    "Tell me a story about a lighthouse.",
    "Count to ten.",
    "Explain fencing to a child.",
    "Write a poem about the sea.",
    "Say hello in three languages.",
    "Why is the sky blue?",
    "How do I bake bread?",
    "Describe your week.",
]
