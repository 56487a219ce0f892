"""Gradients in fewer bytes between nodes."""
