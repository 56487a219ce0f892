"""The checker of shell lines in pages rejects lines that cannot work."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import shell_lines
from tests.support.doc_pages import Page


@pytest.mark.parametrize(("line", "why"), [
    ("bpsfast run -n 4 --no-such-option -- python train.py", "no-such-option"),
    ("bpsfast run -n 4 -- python missing.py", "missing.py is not there"),
    ("bpsfast nothing", "no such command"),
    ("bpsfast bench nothing", "nothing"),
    ("bpsfast explain NoSuchCode", "nothing is known"),
    ("BPSFAST_NO_SUCH=1 bpsfast run -n 2 -- python train.py", "no setting"),
    ("export BPSFAST_LEASE_S=-1", "BPSFAST_LEASE_S"),
    ("export DMLC_NO_SUCH=1", "no variable"),
    ("torchrun --nproc 2 missing.py", "missing.py"),
    ("make no-such-target", "no-such-target"),
    ("pip install '.[nothing]'", "there are"),
    ("python -m bpsfast.nothing", "no module"),
    ("kubectl apply -f examples/nothing.yaml", "nothing.yaml"),
    ("mpirun -np 4 --host a:2,b:1 -x BPSFAST_SCHEDULER=a:7700 -x BPSFAST_JOB_KEY python train.py", "3 slots"),
    ("mpirun -np 4 --host a:2,b:2 -x BPSFAST_SCHEDULER=a:7700 python train.py", "needs a key"),
    ("srun --nodes 2 --ntasks 3 python train.py", "tasks on"),
    ("docker build -f examples/docker/nothing -t image .", "nothing"),
    ("docker run --rm image bpsfast info", "unpack"),
    ("docker run --rm --no-such built bpsfast info", "no-such"),
    ("curl something", "nothing checks"),
])
def test_a_line_that_cannot_work_is_refused(line: str, why: str) -> None:
    with pytest.raises((Exception, SystemExit)) as found:
        shell_lines.check(line, {"built"})
    assert re.search(why, str(found.value)) or isinstance(found.value, SystemExit), found.value


def test_lines_that_belong_together_are_one() -> None:
    assert shell_lines.lines("# words\nbpsfast run \\\n  -n 4\n\nbpsfast info  # more\n") == ["bpsfast run    -n 4",
                                                                                            "bpsfast info  # more"]


def test_blocks_have_what_stands_around_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.md"
    monkeypatch.setattr("tests.support.doc_pages.ROOT", tmp_path)
    path.write_text("# A head, `b`\n<!-- before:\na = 1\n-->\n```python\nb = a\n```\n<!-- after:\nc = b\n-->\n"
                    "<!-- runs -->\n```sh\nls\n```\n"
                    "[x](y.md#z) and `[no](link)` ![p](q.png) <https://z>\n")
    program, shell = Page(path).blocks()
    assert program.program == "a = 1\nb = a\nc = b\n" and (program.name, shell.mark) == ("page.md:5", "runs")
    assert Page(path).links() == ["y.md#z", "q.png"] and Page(path).anchors() == {"a-head-b"}
    path.write_text("<!-- before:\na = 1\n-->\nwords\n```python\nb\n```\n")
    with pytest.raises(AssertionError, match="stray comment"):
        Page(path).blocks()
    path.write_text("```sh\nls\n")
    with pytest.raises(AssertionError, match="does not end"):
        Page(path).blocks()
