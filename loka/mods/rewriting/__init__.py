"""Mods that rewrite forwards, and what they share: tools, the tracer, and the model while its sites change."""
