"""The claims of the README."""
from __future__ import annotations

from bpsfast.bench.claims import numbers
from bpsfast.bench.claims.claim import Claim

#: In the README's order.
CLAIMS = (
    Claim("push_pull_one_machine.jsonl", "MPI is faster below {from_kb:.0f} KB", numbers.peers),
    Claim("optimum_full.jsonl", "Eight workers and as many helpers are {above:.1f} % above the optimum",
          numbers.eight_and_eight),
    Claim("optimum_full.jsonl", "as many helpers as workers ({faster:.1f} % faster at most)", numbers.naive),
    Claim("push_pull_one_machine.jsonl", "gloo takes {least:.1f} to {most:.0f} times as long as", numbers.peers),
    Claim("push_pull_one_machine.jsonl", "Open MPI is faster, by up to {mpi:.0f} times for {at_kb:.0f} KB",
          numbers.peers),
    Claim("push_pull_one_machine.jsonl", "ours is the faster one from {from_kb:.0f} KB on", numbers.peers),
    Claim("ddp.jsonl", "makes {comm:.1f} times gloo's steps where communication bounds it, and "
          "{compute:.2f} times where", numbers.ddp),
    Claim("schedule.jsonl", "a step in 1/{fifo:.2f} of `fifo`'s time and 1/{ddp:.2f} of DistributedDataParallel's over "
          "gloo; the simulator says 1/{fifo_simulated:.2f} and 1/{ddp_simulated:.2f}", numbers.schedule),
    Claim("helpers.jsonl", "step is {times:.1f} times a median one", numbers.helpers),
    Claim("compressed.jsonl", "{topk:.1f} (`topk` 1 %), {onebit:.1f} (`onebit`), {int8:.1f} (`int8`)",
          numbers.speeds),
    Claim("accuracy.jsonl", "{topk:.2f} +- {topk_error:.2f}, {onebit:.2f} +- {onebit_error:.2f}, {int8:.2f} +- "
          "{int8_error:.2f}", numbers.accuracies),
    Claim("rows.jsonl", "share of the dense bytes | {share:.2f} %", numbers.of_table),
    Claim("autotune.jsonl", "distance to the best of a grid | {small:+.1f} %, {large:+.1f} %", numbers.tuned),
    Claim("neighbour.jsonl", "{quota50_median:+.1f} % at half load, {quota100_median:+.1f} % at full",
          numbers.neighbour),
    Claim("ladder.jsonl", "all left out: times of ours | {least:.0f} to {most:.0f}", numbers.ladder),
    Claim("frameworks.jsonl", "{large_least:+.0f} to {large_most:+.0f} %; {small_most:+.0f} to {small_least:+.0f} %",
          numbers.frameworks),
    Claim("expr3.json", "mean absolute error | {points:.1f} points", numbers.expr3),
)
