"""Speed of regions in every variant."""
