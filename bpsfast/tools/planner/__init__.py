"""What a step would take before it is run: machines and a model in, predictions of each layout out (`plan.make`)."""
