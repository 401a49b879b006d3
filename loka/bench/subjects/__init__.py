"""What is measured: models as they are, as the peers make them, and as generated packages make them."""
