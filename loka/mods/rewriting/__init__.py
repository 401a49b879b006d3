"""What mods that rewrite forwards share: tools, the model while sites change, the values that planning gets."""
