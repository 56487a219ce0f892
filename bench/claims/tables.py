"""The claims of bench/README.md."""
from __future__ import annotations

from bpsfast.bench.claims import numbers
from bpsfast.bench.claims.claim import Claim

#: As the tables call them, and as the files do.
_CODECS = {"onebit": "onebit", "topk 1 %": "topk 1%", "topk 10 %": "topk 10%", "randomk 1 %": "randomk 1%",
           "float16": "float16", "int8": "int8", "dithering, 4 levels": "dithering 4"}
_COMPRESSED = {"`topk` 1 %, error feedback": "topk:k=0.01,error_feedback",
               "`randomk` 1 %, error feedback": "randomk:k=0.01,error_feedback", "`onebit`": "onebit",
               "`onebit`, error feedback": "onebit:error_feedback", "`int8`, error feedback": "int8:error_feedback",
               "`float16`": "float16"}
_ACCURACIES = {"topk": "`topk` 1 %", "randomk": "`randomk` 1 %", "onebit": "`onebit`",
               "dithering": "`dithering`, 4 levels", "int8": "`int8`", "float16": "`float16`", "bfloat16": "`bfloat16`"}
_RUNGS = ("register per step", "rendezvous per step", "memcpy at both ends", "loopback through NIC", "unaligned",
          "two SGEs", "no concurrent TX", "vanilla", "tcp", "tcp, shared memory")

CLAIMS = (
    *(Claim("codecs.jsonl", f"| {shown} | {{encode:.2f}} | {{fed:.2f}} | {{decode:.2f}} |", numbers.codec(name))
      for shown, name in _CODECS.items()),
    Claim("codecs.jsonl", "element by element: {ms:.0f} ms for 4 MB, {gbits:.0f} Gbit/s", numbers.codec("dithering 4")),
    Claim("compressed.jsonl", "| uncompressed | {ms2:,.0f} ms | 1 | {expected2:,.0f} ms | {sent2:#.3g} MB | "
          "{ms4:,.0f} ms | 1 | {expected4:,.0f} ms | {sent4:#.3g} MB |", numbers.compressed("uncompressed")),
    *(Claim("compressed.jsonl", f"| {shown} | {{ms2:,.0f}} ms | {{speed2:.1f}} | {{expected2:,.0f}} ms | "
            "{sent2:#.3g} MB | {ms4:,.0f} ms | {speed4:.1f} | {expected4:,.0f} ms | {sent4:#.3g} MB |",
            numbers.compressed(codec)) for shown, codec in _COMPRESSED.items()),
    Claim("compressed.jsonl", "steps without a codec are {above4:.0f} % above the formula",
          numbers.compressed("uncompressed")),
    Claim("rows.jsonl", "{mb:.1f} MB, {share:.2f} % of the dense bytes, in {ms:.0f} ms; its node holds {memory:.0f} MB",
          numbers.of_table),
    Claim("frameworks.jsonl", "64 MB take {large_least:.0f} to {large_most:.0f} % longer than NumPy's; 161 tensors of "
          "1 kB, which the adapters hand over as one call, {least_less:.0f} to {most_less:.0f} % less",
          numbers.frameworks),
    Claim("schedule.jsonl", "takes a step in 1/{fifo:.2f} of `fifo`'s time (simulated {fifo_simulated:.2f}) and "
          "1/{ddp:.2f} of DDP's", numbers.schedule),
    Claim("breakdown.jsonl", "the optimal split makes a step {split:.2f} times as fast as DistributedDataParallel's "
          "over gloo, priority and credit {priority:.2f} times, and without a barrier it is {crossing:.2f} times as "
          "fast. All four are within {off:.1f} % of the simulator", numbers.breakdown),
    Claim("accuracy.jsonl", "uncompressed training reaches {uncompressed:.2f} %", numbers.accuracies),
    *(Claim("accuracy.jsonl", f"| {shown} | 1/{{{name}_fewer:.1f}} | {{{name}:+.2f}} +- {{{name}_error:.2f}} |",
            numbers.accuracies) for name, shown in _ACCURACIES.items()),
    Claim("autotune.jsonl", "it ends at {small:+.1f} % and {large:+.1f} %, and no step took more than {slowest:.2f} "
          "times the defaults'", numbers.tuned),
    *(Claim("ladder.jsonl", f"| `{rung}` | {{vgg19:.2f}} | {{resnet50:.2f}} | {{inception:.2f}} |", numbers.rung(rung))
      for rung in _RUNGS),
    Claim("ladder.jsonl", "Vanilla loses to tcp with all three, by {tcp_least:.0f} to {tcp_most:.0f} times",
          numbers.ladder),
    *(Claim("neighbour.jsonl", f"| {load} % | `{helper}` | {{{helper}{load}_served:.3f}} | "
            f"{{{helper}{load}_median:+.1f}} % | {{{helper}{load}_p95:+.0f}} % |", numbers.neighbour)
      for load in (50, 100) for helper in ("quota", "free")),
)
