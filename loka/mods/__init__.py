"""Mods: changes to a model, or to how its forwards compute, that make more of it safe and fast in FP8.

One folder a mod: `MOD.py` carries it out and needs torch alone, `MOD_planning.py` says what a policy may write, what
the mod finds in a model and what it says of itself. `registry` lists them; what several share lies beside it.
"""
