"""Who trains in an elastic job."""
