"""What is left of a job whose scheduler is lost, and how another one goes on with it. Pure."""
