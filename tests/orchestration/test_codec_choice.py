"""What is compressed where that is to pay: by hand, against every subset, and against all or nothing."""
from __future__ import annotations

import subprocess
import sys
from itertools import chain, combinations

import pytest
from hypothesis import given, settings as limits, strategies as st

from bpsfast.orchestration.codec import KINDS, CodecSpec
from bpsfast.orchestration.messages import TensorSpec
from bpsfast.orchestration.placement import codec_choice
from bpsfast.orchestration.placement.codec_choice import RATIOS, Load, choose, loads_of, settled
from bpsfast.orchestration.placement.shares import Machine

MBIT = 1e6 / 8
ONEBIT = CodecSpec(kind="onebit", auto=True)
FED = CodecSpec(kind="topk", k=0.01, error_feedback=True, auto=True)


def machines(n, k=0, rate=100 * MBIT):
    return [Machine(True, rate)] * n + [Machine(False, rate)] * k


def spec(name, n_elements, codec=ONEBIT, **fields):
    return TensorSpec(name=name, dtype="float32", shape=(n_elements,), codec=codec, **fields)


def settle(specs, machines, rate=5e9, policy="optimal"):
    return settled(specs, machines, [rate] * len(machines), policy, 4096000, 4096000)


def test_the_kernels_time_is_that_of_a_member_and_an_owner():
    load = Load("a", 32_000_000, 1_000_000, ONEBIT)
    found = choose([load], machines(4, rate=4e9), [2e9] * 4)
    encode_s, decode_s = (32e6 / 2e9 / ratio for ratio in (RATIOS["onebit"].encode, RATIOS["onebit"].decode))
    # encodes its partial, and a quarter of the results; decodes all results, and four partials of a quarter
    assert found.kernels_s == 0.0 and not found.names, "a wire of 32 Gbit/s takes less"
    assert found.all_s == pytest.approx(50e-6 + 1.25 * encode_s + 2 * decode_s)
    slow = choose([load], machines(4, rate=1e7), [2e9] * 4)
    assert slow.names == {"a"} and slow.kernels_s == pytest.approx(found.all_s)
    assert (slow.plain_s, slow.wire_s) == pytest.approx((1.5 * 3.2, 1.5 * 0.1))
    assert (slow.plain_nbytes, slow.wire_nbytes) == (32_000_000, 1_000_000)


def test_helpers_own_nothing_that_has_state():
    plain, fed = (choose([Load("a", 4 << 20, 1 << 17, codec)], machines(4, 4), [5e9] * 8) for codec in (ONEBIT, FED))
    assert plain.wire_s == pytest.approx((1 << 17) / (100 * MBIT))
    assert fed.wire_s == pytest.approx(1.5 * (1 << 17) / (100 * MBIT)), "a ring's time: machines with ranks alone"
    assert plain.plain_s == fed.plain_s == pytest.approx((4 << 20) / (100 * MBIT))


@pytest.mark.parametrize("policy", ["optimal", "colocated", "ps", "hash:mixed"])
def test_slow_links_have_all_compressed_and_fast_ones_nothing(policy):
    loads = [Load(f"t{i}", 4 << 20, 1 << 17, FED) for i in range(8)]
    assert len(choose(loads, machines(4, 2), [5e9] * 6, policy).names) == 8
    assert not choose(loads, machines(4, 2, rate=50e9), [5e9] * 6, policy).names


def test_between_them_as_much_is_compressed_as_the_kernels_can_while_the_rest_travels():
    loads = [Load(f"t{i}", 4 << 20, 1 << 17, FED) for i in range(64)]
    found = choose(loads, machines(2, rate=0.8e9), [5e9] * 2)
    assert 0 < len(found.names) < 64
    assert found.wire_s == pytest.approx(found.kernels_s, rel=0.2)
    assert found.time_s < min(found.plain_s, found.all_s)


def test_a_frame_that_is_longer_than_the_tensor_never_pays():
    assert not choose([Load("a", 4, 16, ONEBIT)], machines(2), [5e9] * 2).names


LOADS = st.lists(st.tuples(st.integers(1 << 10, 1 << 24), st.floats(0.01, 1.2), st.sampled_from(KINDS), st.booleans()),
                 min_size=1, max_size=7).map(lambda drawn: [
                     Load(f"t{i}", nbytes, int(share * nbytes), CodecSpec(kind=kind, k=0.01, error_feedback=fed))
                     for i, (nbytes, share, kind, fed) in enumerate(drawn)])
PLACES = st.builds(lambda n, k, rates: [Machine(i < n, 1e6 * rates[i % len(rates)]) for i in range(n + k)],
                   st.integers(2, 6), st.integers(0, 3), st.lists(st.floats(1, 1e4), min_size=1, max_size=9))


def time_of(loads, chosen, places, copy_rates, policy, fixed_nbytes):
    """The time if just *chosen* were possible to compress, and all of them were."""
    left = fixed_nbytes + sum(load.nbytes for load in loads if load not in chosen)
    found = choose(chosen, places, copy_rates, policy, left)
    return found.all_s


@limits(max_examples=150, deadline=None)
@given(LOADS, PLACES, st.floats(1e8, 1e11), st.sampled_from(["optimal", "colocated", "ps"]), st.integers(0, 1 << 24))
def test_no_choice_is_worse_than_all_or_nothing(loads, places, rate, policy, fixed_nbytes):
    if policy == "ps" and all(machine.has_ranks for machine in places):
        policy = "optimal"
    copy_rates = [rate] * len(places)
    found = choose(loads, places, copy_rates, policy, fixed_nbytes)
    shorter = {load.name for load in loads if load.frame_nbytes < load.nbytes}
    chosen = [load for load in loads if load.name in found.names]
    assert found.names <= shorter
    assert found.time_s == pytest.approx(time_of(loads, chosen, places, copy_rates, policy, fixed_nbytes))
    assert found.time_s <= 1.01 * min(found.plain_s, found.all_s), "what is as good within 1 % may be less compressed"


@limits(max_examples=150, deadline=None)
@given(LOADS, st.integers(2, 6), st.floats(1e6, 1e10), st.floats(1e8, 1e11), st.integers(0, 1 << 24))
def test_on_machines_that_are_alike_no_subset_is_better_by_more_than_one_tensors_kernels(
        loads, n, nic, rate, fixed_nbytes):
    places, copy_rates = machines(n, rate=nic), [rate] * n
    found = choose(loads, places, copy_rates, "optimal", fixed_nbytes)
    shorter = [load for load in loads if load.frame_nbytes < load.nbytes]
    subsets = chain.from_iterable(combinations(shorter, size) for size in range(len(shorter) + 1))
    best_s = min(time_of(loads, list(subset), places, copy_rates, "optimal", fixed_nbytes) for subset in subsets)
    one_s = max((time_of(loads, [load], places, copy_rates, "optimal", 0) for load in shorter), default=0.0)
    assert found.time_s <= 1.01 * (best_s + one_s)


def test_settled_tensors_have_a_codec_for_certain_or_none():
    fixed = spec("fixed", 1 << 20, CodecSpec(kind="int8"))
    plain = spec("plain", 1 << 20, None)
    specs = [spec("big", 1 << 20, FED), fixed, spec("tiny", 100), plain]
    found, words, remark = settle(specs, machines(2))
    assert [each.codec for each in found] == [CodecSpec(kind="topk", k=0.01, error_feedback=True), fixed.codec, None,
                                              None]
    assert words.startswith("compression pays for 1 of 2 tensors: ") and not remark
    found, words, _ = settle(specs, machines(2, rate=100e9))
    assert [each.codec for each in found] == [None, fixed.codec, None, None]
    assert words.startswith("compression pays for 0 of 2 tensors: ")


def test_without_choices_nothing_is_said():
    specs = [spec("fixed", 100, CodecSpec(kind="int8")), spec("plain", 100, None)]
    assert settle(specs, machines(2)) == (specs, "", "")


def test_one_machine_with_ranks_has_nobody_to_send_to():
    found, words, remark = settle([spec("a", 1 << 20)], machines(1, 2))
    assert found[0].codec is None and (words, remark) == ("", "")


@pytest.mark.parametrize(("rate", "copy_rate"), [(0.0, 5e9), (100 * MBIT, 0.0)])
def test_where_a_rate_is_not_known_nothing_is_compressed_and_a_remark_says_what_to_set(rate, copy_rate):
    found, words, remark = settle([spec("a", 1 << 20)], machines(2, rate=rate), copy_rate)
    assert found[0].codec is None and not words
    assert "cannot be told" in remark and "BPSFAST_NIC_RATE" in remark


def test_loads_count_frames_by_the_partition_and_what_travels_besides():
    few = CodecSpec(kind="topk", k=100, auto=True)
    loads, fixed_nbytes = loads_of([spec("a", 3 << 18, few), spec("b", 1 << 18, None), spec("c", 1 << 18, few)],
                                   1 << 20, 4096)
    assert [(load.name, load.nbytes, load.frame_nbytes) for load in loads] == [
        ("a", 3 << 20, 3 * (8 + 800)), ("c", 1 << 20, 2 * (8 + 800))], "each partition has its own 100"
    assert fixed_nbytes == 1 << 20


def test_every_kind_has_ratios():
    assert set(codec_choice.RATIOS) == set(KINDS)
    assert all(0 < ratio.fed_encode <= ratio.encode and ratio.decode > 0 for ratio in RATIOS.values())


@pytest.mark.parametrize(("settings", "words"), [
    (("nic_rate=0.05", "log_level=INFO"), "compression pays for 1 of 1 tensors: "),
    (("nic_rate=400", "log_level=INFO"), "compression pays for 0 of 1 tensors: "),
    ((), "WARNING: compression: whether it pays cannot be told"),
])
def test_a_job_says_what_was_chosen(settings, words):
    program = ("import bpsfast, numpy as np; bpsfast.init(); c = bpsfast.compression\n"
               "bpsfast.push_pull(np.ones(1 << 20, np.float32), name='x', compression=c.where_it_pays(c.onebit()))\n"
               "bpsfast.shutdown()")
    told = [word for setting in ("transport=tcp", *settings) for word in ("--set", setting)]
    done = subprocess.run([sys.executable, "-m", "bpsfast", "run", "-n", "2", "--nodes", "2", *told, "--",
                           sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "compression" in line]
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(said) == 1 and words in said[0] and said[0].startswith("[node 0]"), said
