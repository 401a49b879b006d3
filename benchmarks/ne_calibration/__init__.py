"""Probe's predicted changes of NE against those of training, over recipes from harmless to harmful."""
