"""Launching: who a process is (`roles`), the daemons it starts (`daemons`), whole jobs here (`job`, `supervisor`) and on
other hosts (`over_ssh`).
"""
