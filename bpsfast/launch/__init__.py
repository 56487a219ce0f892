"""Launching: who a process is (`roles`), the daemons it starts (`daemons`), and whole jobs (`job`, `supervisor`)."""
