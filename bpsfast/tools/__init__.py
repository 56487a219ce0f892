"""One archive for a bug report: what this machine and its bpsfast are, and logs that the user names, without what is
nobody's business.

    contents    what goes in: each entry by itself, so that one that cannot be had costs no other
    hidden      what must not go in, found in the environment and on this machine
    scrubber    puts stand-ins in its place, the same one each time
    archive     writes it, and looks through it before
"""
