"""What is next: of one card, and of ranks that must all begin alike."""
