"""The command `hermes-serve`; `main.py` lists what it can do."""
