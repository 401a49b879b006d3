"""Code shared by mods that rewrite forwards: tools, the model while sites change, values for planning."""
