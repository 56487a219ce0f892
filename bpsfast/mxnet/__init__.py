"""bpsfast for MXNet."""
