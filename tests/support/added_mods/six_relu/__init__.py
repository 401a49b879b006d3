"""ReLU6 in the places of ReLU."""
