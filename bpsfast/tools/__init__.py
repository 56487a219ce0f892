"""Behind the command line: each sub-package or module serves one command of ``bpsfast``.

    commands     the commands, their options and their output
    doctor       why RDMA does not work
    perf, tune   measurements between machines, and better settings by measuring
    planner      predictions of the time of a step; simulator: the same by simulated events
    top, trace   a running job; what a job did
    inventory, bug_report, redaction    what is installed; an archive for a bug report

Design of traces, metrics and reports: ``bpsfast/docs/design/observability.md``.
"""
