"""What launchers tell the processes they start: one file for each kind of launcher, all alike (`environment`)."""
