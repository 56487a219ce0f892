"""The table of models: every cell from the lists and the printed figures, contradictions named."""
from __future__ import annotations

import pytest

from bpsfast.tools.planner import authors_table


def test_ideal_times_are_all_bytes_once():
    ideal = {line.name: line.ideal_ms for line in authors_table.lines()}
    assert ideal["resnet50"] == pytest.approx(25_557_032 * 32 / 100e9 * 1e3)
    assert ideal["bert-large"] == pytest.approx(336_226_108 * 16 / 100e9 * 1e3)


def test_bytes_to_convergence_are_pushed_and_pulled_in_each_step():
    shuffled = {line.name: line.shuffled_tb for line in authors_table.lines()}
    assert shuffled["vgg16"] == pytest.approx(2 * 4 * 138_357_544 * 370_000 / 1e12)


def test_printed_cells_that_contradict_are_marked_and_others_are_not():
    wrong = {line.name: (bool(line.parameters_contradicted), bool(line.ideal_contradicted))
             for line in authors_table.lines()}
    assert wrong == {"resnet50": (False, False), "vgg16": (False, True), "transformer": (False, False),
                     "bert-base": (False, True), "bert-large": (True, False)}
    cells = {row[0]: row for row in authors_table.rows(authors_table.lines())}
    assert cells["VGG-16"][5] == "44.6 ms !" and cells["BERT-large"][3] == "387M !" and cells["ResNet-50"][3] == "26M"


@pytest.mark.parametrize("words", [
    "! VGG-16: 44.6 ms are printed, 138M parameters of float32 take 44.00 to 44.32 ms",
    "! BERT-base: 23.7 ms are printed, 110.1M parameters of float16 take 17.62 ms; it would be 148M",
    "! BERT-large: 387M parameters are printed, but the published network has 336.2M (+15%)"])
def test_the_text_says_why(words):
    assert words in authors_table.text().splitlines()


def test_data_is_in_base_units():
    first = authors_table.data()[0]
    assert first["printed_ideal_s"] == pytest.approx(0.00832) and first["forward_s"] == pytest.approx(0.032)
    assert first["recipe"] and authors_table.data()[2]["printed_n_parameters"] is None
