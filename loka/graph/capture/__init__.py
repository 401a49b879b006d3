"""Torch's own capture of forwards: `dynamo.capture` gives a forward as one graph."""
