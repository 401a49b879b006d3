"""LoKA: FP8 training and inference for large recommendation models, from a policy that people can read."""

__version__ = "0.1.0"
