"""Trains the demo model that sees: it tells the shapes and colours of a drawing."""
