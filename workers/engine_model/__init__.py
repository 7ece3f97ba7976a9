"""A model of vLLM's engine: what a step holds and how long it takes, without a clock of its own.

`scripts/simulate` turns it in virtual time. `tests/unit/test_engine_model.py` says what always
holds. Pure.
"""
