"""bpsfast.keras on each backend, on two nodes of two ranks and a helper, and with other numbers of ranks."""
from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.support import keras_ranks as ranks  # isort: skip
from tests.support.jobs import Job

BACKENDS = {"torch": ["torch"], "jax": ["jax", "jaxlib", "optax"], "tensorflow": ["tensorflow"]}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # beside other tests the imports take a minute


def job_of(backend, shape, **settings):
    """Start a job whose ranks' Keras computes with *backend*."""
    lacking = [name for name in BACKENDS[backend] if importlib.util.find_spec(name) is None]
    if lacking:
        pytest.skip(f"no {' and no '.join(lacking)}: pip install it to test that backend of Keras")
    before = os.environ.get("KERAS_BACKEND")
    os.environ["KERAS_BACKEND"] = backend
    try:
        return Job(shape, **settings)
    finally:
        os.environ["KERAS_BACKEND"] = before


@pytest.fixture(scope="module", params=list(BACKENDS))
def four(request):
    """Two nodes with two ranks each, and a helper."""
    job = job_of(request.param, (2, 2), helpers=1, transport="tcp", min_compress_bytes=64)
    job.backend = request.param
    yield job
    end(job)


def end(job):
    """End *job* in order; processes with several frameworks are slow."""
    try:
        job.call("shutdown")
        for process in job.ranks:
            process.wait(60)
        job._attached = False
        job.close()
    finally:
        job.kill()


def same(values):
    assert len(set(values)) == 1, values
    return values[0]


def test_ops(four):
    assert all(four.run(ranks.ops, timeout_s=300))  # with the import of the backend


def test_the_example_is_that_of_one_process(four):
    found = four.run(ranks.digits, timeout_s=100)
    together = same([each[1] for each in found])
    assert found[0][2] == together != found[1][2], "and the order of addition matters"
    assert same([each[0] for each in found]) > 0.85


def test_the_mean_is_that_of_the_reference(four):
    assert all(four.run(ranks.associated))


def test_bad_input_is_refused_before_anything_is_sent(four):
    for found, total in four.run(ranks.refused):
        assert [kind for kind, _ in found] == ["MismatchError", "MismatchError", "UnsupportedError", "ConfigError",
                                              "UnsupportedError", "ConfigError", "ConfigError"], found
        assert "line/kernel" in found[0][1] and "(3, 3)" in found[0][1] and "compiled" in found[2][1]
        assert total == 4


def test_models_that_differ(four):
    for rank, ((kind, text), total) in enumerate(four.run(ranks.differing)):
        assert kind == ("MismatchError" if rank == 1 else "") and total == 4
        assert rank != 1 or "wide/kernel" in text


def test_passes_are_summed_once(four):
    for found, wanted, n_rounds, _ in (outcomes := four.run(ranks.passes)):
        assert found == pytest.approx(wanted, rel=1e-5) and n_rounds == 2
    same([each[3] for each in outcomes])


def test_all_ranks_skip_what_overflows_on_one(four):
    before, skipped, scale, after, n_steps = same(four.run(ranks.overflow))
    assert before == skipped != after and scale == 4 and n_steps == 2


def test_mixed_precision(four):
    for (kind, text), *_ in (outcomes := four.run(ranks.half_precision)):
        assert kind == "UnsupportedError" and "other order" in text and "auto_scale_loss" in text
    for values in zip(*(each[1:] for each in outcomes)):
        same(values)


def test_saved_and_loaded(four, tmp_path):
    for values in zip(*four.run(ranks.saved, str(tmp_path))):
        same(values)


def test_callbacks(four):
    (weight, losses, _), *_ = outcomes = four.run(ranks.fitted)
    assert weight == 3, "that of rank 1, before the first batch"
    same([each[2] for each in outcomes])
    same([tuple(each[1]) for each in outcomes])
    assert len(losses) == 3


def test_moving_averages_of_weights(four):
    mean = sum((rank + 1.0) ** 2 for rank in range(4)) / 4  # of x x, by which the gradient is 2 w
    first = 2.0 - 0.1 * 2 * 2.0 * mean  # the average begins as the weight after the first step
    second = 0.5 * first + 0.5 * (first - 0.1 * 2 * first * mean)
    for found in four.run(ranks.averaged, timeout_s=300):
        assert found == pytest.approx([first, second] * 2, rel=1e-5)


def test_momentum_is_corrected(four):
    for weight, wanted, gathered, wanted_gathered in four.run(ranks.corrected):
        assert weight == pytest.approx(wanted, rel=1e-5) and gathered == pytest.approx(wanted_gathered, rel=1e-5)


def test_compression(four):
    outcomes = four.run(ranks.compressed)
    for values in zip(*(digests for digests, *_ in outcomes)):
        same(values)
    for _, has_codec, rate in outcomes:
        assert has_codec
        if four.backend != "jax":  # where it is inside the program
            assert rate == pytest.approx(0.05)


def test_several_optimizers_and_models(four):
    for values in zip(*four.run(ranks.several)):
        same(values)


def test_horovods_names(four):
    found = four.run(ranks.by_other_names)
    assert same([weight for weight, _ in found]) == pytest.approx(found[0][1], rel=1e-5)


@pytest.mark.parametrize("shape", [(1,), (2, 1)], ids=["one", "three"])
def test_other_numbers_of_ranks(shape):
    job = job_of("torch", shape, transport="auto" if shape == (1,) else "tcp")
    try:
        assert all(job.run(ranks.ops, timeout_s=200)) and all(job.run(ranks.associated))
        if shape == (1,):
            assert job.run(ranks.alone) == [pytest.approx(1.6)]
        else:
            for values in zip(*job.run(ranks.several)):
                same(values)
    finally:
        end(job)


def test_a_rank_without_a_metric():
    job = job_of("torch", (2,), timeout_s=2)
    try:
        (kind, text), _ = (outcome.value for outcome in job.attempt(ranks.missing, timeout_s=200))
        assert kind == "StallError" and "val_loss" in text and "rank 1" in text
    finally:
        job.kill()


def test_the_core_does_not_want_keras():
    root = Path(__file__).resolve().parents[2]
    assert "keras" not in (root / "setup.cfg").read_text().partition("[options.extras_require]")[0].partition(
        "install_requires")[2]
