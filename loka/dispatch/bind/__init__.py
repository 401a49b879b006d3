"""From a generated package to a bound model: checked, adapted, bound, all or nothing."""
