"""Studies of LoKA itself, run occasionally; docs/results/ keeps what they print or write."""
