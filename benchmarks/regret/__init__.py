"""Regret of deciding by one recording, judged by another one of the same machine."""
