"""Reads and writes the traces of a job: what every process did when, on one clock.

    write        writes the trace file of a process; `SendLog`, `limits`: what it records
    merge        merges all process files of a job into one trace (`load`, then `dump`; `reload` reads it back)
    summarise    summarizes where the time of a step went; `durations`: seconds per process and kind of work

Open a merged file or a process file in https://ui.perfetto.dev or chrome://tracing.
"""
from .base.trace_file import Origin, durations, read, write
from .base.trace_records import KINDS, Limits, Part, SendLog, limits
from .tools.trace.job_trace import Job, dump, load, merge, reload
from .tools.trace.summary import Summary, summarise

__all__ = [
    "KINDS", "Job", "Limits", "Origin", "Part", "SendLog", "Summary", "dump", "durations", "limits", "load", "merge",
    "read", "reload", "summarise", "write"]
