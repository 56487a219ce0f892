"""``bpsfast bench worker_loss``: what it costs that a job goes on without lost ranks, and how long a loss stops it.

`parts` runs it. This module imports nothing, because the ranks of every trial import it, too.
"""
