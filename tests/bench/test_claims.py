"""The numbers of READMEs are those of their result files; new results are written into them."""
from __future__ import annotations

import functools
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings, strategies as st

from bpsfast.bench import claims, drawn
from bpsfast.bench.claims import CLAIMS, ROOT, Claim, Difference, differences, renew, renewed
from bpsfast.orchestration.errors import ConfigError

PAGES = {page: (ROOT / page).read_text() for page in CLAIMS}
README = PAGES["README.md"]
#: Inputs of the measurements, not results.
CONDITIONS = {"two", "VGG-16", "161", "64", "64 MB", "32 MB", "256 GPUs", "4", "2", "1 %", "0"}


@pytest.mark.parametrize("page", CLAIMS)
def test_pages_say_what_their_files_say(page: str) -> None:
    assert [str(each) for each in differences(PAGES[page], CLAIMS[page])] == []


def test_every_number_of_the_readmes_measurements_is_a_claims() -> None:
    text = README.partition("## What was measured\n")[2].partition("\n## ")[0]
    for claim in CLAIMS["README.md"]:
        text = claim.pattern().sub("", text)
    text = re.sub(r"`[^`]*`|\[[^]]*\]\([^)]*\)", "", text)
    rest = {match.strip() for match in re.findall(r"(?:[\w-]*-)?\d[\d.,]*(?: (?:MB|GPUs|%))?", text)}
    assert {number.rstrip(".,") for number in rest} <= CONDITIONS


def test_each_file_that_the_readme_names_has_a_claim_or_is_a_sample_beside_one() -> None:
    named = set(re.findall(r"bench/results/(\w+\.jsonl?)", README))
    of_one_bench = {name for name in named if name.startswith("optimum_")}
    assert named - of_one_bench == {claim.file for claim in CLAIMS["README.md"]} - {"optimum_full.jsonl"}


#: What `Claim.measured` returns; the files are read once.
_measured = functools.cache(Claim.measured)


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(sorted(CLAIMS)), st.lists(st.decimals(-9999, 9999, places=2), min_size=199, max_size=199))
def test_other_numbers_are_replaced_where_they_stand(page: str, numbers: list[object]) -> None:
    others = iter(numbers)
    wrong = PAGES[page]
    for claim in CLAIMS[page]:
        match = claim.pattern().search(wrong)
        assert match is not None
        for group in range(len(match.groups()), 0, -1):
            wrong = wrong[:match.start(group)] + f"{next(others):,}" + wrong[match.end(group):]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Claim, "measured", lambda claim, results: _measured(claim, results))
        assert renewed(wrong, differences(wrong, CLAIMS[page])) == PAGES[page]


def test_words_that_are_not_there_are_named() -> None:
    with pytest.raises(ConfigError, match=r"stand 0 times in the text.*step is \{times:.1f\} times a median one"):
        list(differences(README.replace("a median one", "an ordinary one"), CLAIMS["README.md"]))
    with pytest.raises(ConfigError, match=r"stand 2 times in the text.*step is \{times"):
        list(differences(README + "step is 1.5\ntimes a median one", CLAIMS["README.md"]))


@pytest.mark.parametrize("name", ["helpers.jsonl", "expr3.json"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    shutil.copytree(drawn.RESULTS, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match=rf"{name} is missing: `.*` writes it"):
        list(differences(README, CLAIMS["README.md"], tmp_path))


def test_zero_has_no_sign() -> None:
    claim = Claim("rows.jsonl", "{a:.2f} and {b:+.1f} and {c:.2f}", lambda rows: {"a": -1e-15, "b": -0.01, "c": -0.006})
    assert claim.measured(drawn.RESULTS) == ["0.00", "0.0", "-0.01"]


def test_the_command_says_what_differs_and_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for page, text in PAGES.items():
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text(text.replace("the simulator says 1/1.", "the simulator says 1/9."))
    wrong = (tmp_path / "README.md").read_text()
    monkeypatch.setattr(claims.renew, "__defaults__", (tmp_path, drawn.RESULTS, True))
    said = CliRunner().invoke(claims.main)
    assert said.exit_code == 1 and "README.md: schedule.jsonl: 1." in said.stdout
    assert "1.50, 9." in said.stdout and (tmp_path / "README.md").read_text() == wrong
    said = CliRunner().invoke(claims.main, ["--write"])
    assert said.exit_code == 0 and "the others are now" in said.stdout
    assert {page: (tmp_path / page).read_text() for page in PAGES} == PAGES and renew(tmp_path) == []


def test_a_difference_says_file_and_both_numbers() -> None:
    claim = next(claim for claim in CLAIMS["README.md"] if claim.file == "rows.jsonl")
    assert str(Difference(claim, ["1"], ["2"])).startswith("rows.jsonl: 2 where the page says 1 (")
