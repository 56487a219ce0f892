"""Results of tuning in the user's cache: whole or not there, and found again by what they are of."""
from __future__ import annotations

from pathlib import Path

import pytest

from bpsfast.trainer import tuning_trials
from bpsfast.trainer.tuning_search import TuningPoint
from bpsfast.trainer.tuning_trials import Trial, key

TRIALS = Trial(TuningPoint(1, 2, 3, 2), 0.5, 3, "present"), Trial(TuningPoint(4, 5, 6, 1), None, 0, "default")
RESULT = tuning_trials.Result(chosen=TuningPoint(1, 2, 3, 2), trials=TRIALS, n_steps=9, is_over=True)


def test_what_is_written_is_read(tmp_path):
    file = tmp_path / "a" / "b.json"
    tuning_trials.write(file, RESULT)
    tuning_trials.write(file, RESULT)
    assert tuning_trials.read(file) == RESULT and list(file.parent.iterdir()) == [file]
    assert tuning_trials.plain(RESULT)["trials"][1] == {
        "point": {"partition_nbytes": 4, "fusion_nbytes": 5, "credit_nbytes": 6, "n_streams": 1}, "step_s": None,
        "n_steps": 0, "reason": "default"}


@pytest.mark.parametrize("content", ["", "{}", '{"chosen": 3}'])
def test_anything_else_is_as_nothing(tmp_path, caplog, content):
    file = tmp_path / "x.json"
    assert tuning_trials.read(file) is None and not caplog.records
    file.write_text(content)
    assert tuning_trials.read(file) is None and str(file) in caplog.text


def test_a_folder_that_cannot_be_had_harms_nobody(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    tuning_trials.write(tmp_path / "file" / "x.json", RESULT)
    assert "cannot be written" in caplog.text


def test_folders(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    assert tuning_trials.folder("") == Path("/nowhere/bpsfast/tuned") and tuning_trials.folder("/else") == Path("/else")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tuning_trials.folder("") == Path.home() / ".cache" / "bpsfast" / "tuned"


def test_models_and_clusters_have_keys_of_their_own():
    tensors = [("a", (2, 3), "float32")]
    keys = {key(tensors, [[(1, 0.0)], []]), key([("a", (3, 2), "float32")], [[(1, 0.0)], []]),
            key([("a", (2, 3), "float16")], [[(1, 0.0)], []]), key(tensors, [[(2, 0.0)], []]),
            key(tensors, [[(1, 1e9)], []])}
    assert len(keys) == 5 and key(tensors, [[(1, 0.0)], []]) in keys
