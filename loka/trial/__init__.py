"""Trying LoKA out on a model that a user holds: `loka.fp8`, the policy way in one call."""
