"""Gradient lists of published networks: names and shapes of all parameters, in forward order (`catalog.load`)."""
