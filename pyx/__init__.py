"""The native data plane: memory that holds gradients, rings that announce them, an engine that sums, streams that send.

Modules here import C and the standard library only, share C by headers, and meet each other through the
buffer protocol or function addresses, never by importing one another's classes.
"""
