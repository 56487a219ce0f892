"""The device path of gradients inside the trainer: copies between a GPU and the segments, one round at a time."""
