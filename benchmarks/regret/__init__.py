"""What deciding by one recording costs by another one of the same machine."""
