"""The claims of bench/README.md that ``make results`` measures in some minutes: codecs, compressed steps, rows."""
from __future__ import annotations

import statistics
from collections.abc import Callable

from bpsfast.bench.claims.claim import Claim, Numbers, Records

#: As the tables call them, and as the files do.
_CODECS = {"onebit": "onebit", "topk 1 %": "topk 1%", "topk 10 %": "topk 10%", "randomk 1 %": "randomk 1%",
           "float16": "float16", "int8": "int8", "dithering, 4 levels": "dithering 4"}
_COMPRESSED = {"`topk` 1 %, error feedback": "topk:k=0.01,error_feedback",
               "`randomk` 1 %, error feedback": "randomk:k=0.01,error_feedback", "`onebit`": "onebit",
               "`onebit`, error feedback": "onebit:error_feedback", "`int8`, error feedback": "int8:error_feedback",
               "`float16`": "float16"}


def _codec(name: str) -> Callable[[Records], Numbers]:
    def numbers(rows: Records) -> Numbers:
        by = {row["chosen"]["contestant"]: row for row in rows
              if (row["chosen"]["codec"], row["chosen"]["dtype"]) == (name, "float32")}
        found = {field: by[way]["measured"]["of_memcpy"] for field, way in
                 (("encode", "encode"), ("fed", "encode, error feedback"), ("decode", "decode"))}
        time_s = by["encode"]["measured"]["median_s"]
        return found | {"ms": 1e3 * time_s, "gbits": 8e-9 * by["encode"]["chosen"]["nbytes"] / time_s}

    return numbers


def _compressed(codec: str) -> Callable[[Records], Numbers]:
    def numbers(rows: Records) -> Numbers:
        found: Numbers = {}
        for row in rows:
            if row["chosen"]["codec"] == codec:
                n, measured = row["chosen"]["n_machines"], row["measured"]
                found |= {f"ms{n}": 1e3 * measured["median_s"], f"speed{n}": measured["speed"],
                          f"expected{n}": 1e3 * measured["expected_s"],
                          f"sent{n}": statistics.median(map(max, measured["sent_nbytes"])) / 1e6,
                          f"above{n}": 100 * measured["median_s"] / measured["expected_s"] - 100}
        return found

    return numbers


def _rows(rows: Records) -> Numbers:
    [row] = [row["measured"] for row in rows if row["section"] == "rows" and row["chosen"]["rank"] == 0]
    sent, memory = statistics.median(row["sent_nbytes"]), row["memory_nbytes"]["memory_segments"]
    return {"mb": sent / 1e6, "share": 100 * sent / row["nbytes"], "ms": 1e3 * statistics.median(row["samples_s"]),
            "memory": memory / 1e6}


CLAIMS = (
    *(Claim("codecs.jsonl", f"| {shown} | {{encode:.2f}} | {{fed:.2f}} | {{decode:.2f}} |", _codec(name))
      for shown, name in _CODECS.items()),
    Claim("codecs.jsonl", "element by element: {ms:.0f} ms for 4 MB, {gbits:.0f} Gbit/s", _codec("dithering 4")),
    Claim("compressed.jsonl", "| uncompressed | {ms2:,.0f} ms | 1 | {expected2:,.0f} ms | {sent2:#.3g} MB | "
          "{ms4:,.0f} ms | 1 | {expected4:,.0f} ms | {sent4:#.3g} MB |", _compressed("uncompressed")),
    *(Claim("compressed.jsonl", f"| {shown} | {{ms2:,.0f}} ms | {{speed2:.1f}} | {{expected2:,.0f}} ms | "
            "{sent2:#.3g} MB | {ms4:,.0f} ms | {speed4:.1f} | {expected4:,.0f} ms | {sent4:#.3g} MB |",
            _compressed(codec)) for shown, codec in _COMPRESSED.items()),
    Claim("compressed.jsonl", "steps without a codec are {above4:.0f} % above the formula",
          _compressed("uncompressed")),
    Claim("rows.jsonl", "{mb:.1f} MB, {share:.2f} % of the dense bytes, in {ms:.0f} ms; its node holds {memory:.0f} MB",
          _rows),
)
