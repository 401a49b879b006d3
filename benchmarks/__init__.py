"""Studies that judge LoKA itself, run once in a while: each prints or writes what docs/results/ keeps."""
