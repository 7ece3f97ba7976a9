"""Grammars that would end the engine's process."""

from __future__ import annotations

import re

from vllm.v1.structured_output.utils import grammar_is_likely_lark
from xgrammar import Grammar

from workers.schemas import NotObeyed

_ALIAS = re.compile(r"([\w.-]+) ::= \(\(([\w.-]+)(?:\{[\d, -]+\})?\)\)(?: \(=.*)?")
"""A rule, as xgrammar writes it, that is nothing but another rule, or its repetition."""


def check_ends(text: str, is_tag: bool = False) -> None:
    """Refuse a rule that is nothing but itself, or repetitions of itself, such as
    `root ::= (root){0,20}`: on it xgrammar (0.2.8) crashes while it compiles. A text that xgrammar
    cannot read is left to vLLM, which reads it, too.

    Args:
        text: a grammar in EBNF or in Lark's syntax, or a structural tag.

    Raises:
        NotObeyed: there is such a rule.
    """
    of_grammar = Grammar.from_lark if grammar_is_likely_lark(text) else Grammar.from_ebnf
    read = Grammar.from_structural_tag if is_tag else of_grammar
    try:
        rules = str(read(text)).splitlines()
    except Exception:  # of whatever type
        return
    same = {found[1]: found[2] for rule in rules if (found := _ALIAS.fullmatch(rule))}
    known: set[str] = set()
    for name in same:
        through: set[str] = set()
        while name in same and name not in known:
            known.add(name)
            through.add(name)
            name = same[name]
        if name in through:
            raise NotObeyed(f"The rule '{name[:80]}' of the grammar never ends: it is only itself.")
