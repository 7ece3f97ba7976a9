"""`scripts/simulate`: the service's own order of work on modelled engines, in virtual time.

`service.py` puts the live dispatcher, scheduler and placement together with a queue in memory and
the engine model; `workloads.py` makes the work, `presets.py` names it, and `figures.py` says what
came of it.
"""
