"""What the ranks of `bench schedule` load, and nobody else: torch."""
