"""bpsfast for TensorFlow."""
