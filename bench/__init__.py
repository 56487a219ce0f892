"""The benchmarks behind ``bpsfast bench``: each answers one question, against baselines of the same run."""
