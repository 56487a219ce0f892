"""Launching: who a process is (`roles`), daemons it starts (`daemons`), whole jobs here (`job`, `supervisor`) and on
other hosts (`over_ssh`).
"""
