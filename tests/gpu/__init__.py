"""Tests that need a GPU: two ranks share it. `make test-gpu`; where there is none, each is skipped.

With ``BPSTEST_DEVICE=host`` what can be rehearsed runs without one: the same tests with torch's CPU tensors as those of
the host device. That finds mistakes of these tests, for the day when there is a GPU.
"""
