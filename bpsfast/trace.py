"""Traces: what every process of a job did when, on one clock, to be looked at and to be summed up.

    records         native records and sends of one process -> spans
    clock           the clocks of several machines -> the scheduler's
    process_file    spans of one process <-> its file
    chrome          spans -> events of Chrome's Trace Event Format
    flows           arrows from an input through its sums to where the result is taken
    urgency         writes that left before more urgent ones that waited
    merge           all process files of a job -> one trace
    summary         where the time of a step went

Open the merged file (and each process file too) in https://ui.perfetto.dev or chrome://tracing.
"""
from .base.trace_file import Origin, durations, read, write
from .base.trace_records import KINDS, Limits, Part, SendLog, limits
from .tools.trace.job_trace import Job, dump, load, merge, reload
from .tools.trace.summary import Summary, summarise

__all__ = [
    "KINDS", "Job", "Limits", "Origin", "Part", "SendLog", "Summary", "dump", "durations", "limits", "load", "merge",
    "read", "reload", "summarise", "write",
]
