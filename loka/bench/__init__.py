"""Measuring: speed side by side with the peers, recordings for plans, mods one by one, quality over seeds."""
