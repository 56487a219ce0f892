"""The benchmarks behind ``bpsfast bench``: one file per question, each against baselines of the same run."""
