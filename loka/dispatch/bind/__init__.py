"""Binding of a generated package to a model: checked, adapted, bound, all or nothing."""
