"""What `pyx/verbs_abi.h` declares is what <infiniband/verbs.h> does, where that is installed."""
from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support import sanitized

HEADER = sanitized.ROOT / "pyx" / "verbs_abi.h"
TEXT = HEADER.read_text()
CONSTANTS = sorted(set(re.findall(r"\b(BPS_[A-Z_0-9]+) = ", TEXT)))
OFFSETS = re.findall(r"^BPS_AT\((\w+), ([\w.]+), \d+\);", TEXT, re.M)
SIZES = re.findall(r"^BPS_SIZE\((\w+), \d+\);", TEXT, re.M)
#: Fields that lie in unions there, or have another name.
NAMES = {("send_wr", "remote_addr"): "wr.rdma.remote_addr", ("send_wr", "rkey"): "wr.rdma.rkey",
         ("device", "ops"): "_ops"}
#: Fields of ours that stand for several there, or for none.
_OF_OURS = re.compile(r"pad\d|unused\d|other_operations")
#: The library fills as much of it as stands here, and has more fields by now.
LONGER = "port_attr"


def fields() -> list[tuple[str, str]]:
    """Return (struct, field) for every field that the header declares, but for those inside the table of functions."""
    text = re.sub(r"/\*.*?\*/", "", TEXT, flags=re.S)
    found = []
    for kind, body in re.findall(r"^struct bps_ibv_(\w+) \{\n(.*?)^\};", text, re.M | re.S):
        flat = re.sub(r"struct \{.*?\} ", "void *", body, flags=re.S)
        for declaration in flat.split(";"):
            names = re.findall(r"(\w+)(?:\[\w+\])?\s*(?=,|$)", declaration.strip())
            found += [(kind, name) for name in names if not _OF_OURS.fullmatch(name)]
    return found


def compiled(lines: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Compile *lines* behind both headers; skip where the library's is missing."""
    try:
        gcc = sanitized.compiler()
    except sanitized.Unavailable as exc:
        pytest.skip(str(exc))
    source = folder / "header.c"
    source.write_text("#if !__has_include(<infiniband/verbs.h>)\n#error no header\n#endif\n#include <stddef.h>\n"
                      "#include <infiniband/verbs.h>\n#include \"verbs_abi.h\"\n" + "\n".join(lines) + "\n")
    command = [gcc, "-std=gnu11", "-fsyntax-only", f"-I{HEADER.parent}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "no header" in done.stderr:
        pytest.skip("<infiniband/verbs.h> is not installed (Debian, Ubuntu: apt-get install libibverbs-dev)")
    return done


FIELDS = fields()


def same(ours: str, theirs: str) -> str:
    return f'_Static_assert((long)({ours}) == (long)({theirs}), "{ours} is not {theirs}");'


def test_offsets_sizes_and_constants_are_those_of_the_library(tmp_path):
    assert len(OFFSETS) > 20 and len(SIZES) > 9 and len(CONSTANTS) > 50
    assert len(FIELDS) > 150 and {("wc", "byte_len"), ("qp_attr", "rnr_retry"), ("context", "ops")} < set(FIELDS)
    lines = [same(name, name.replace("BPS_", "IBV_", 1)) for name in CONSTANTS]
    lines += [same(f"offsetof(struct bps_ibv_{kind}, {field})",
                   f"offsetof(struct ibv_{kind}, {NAMES.get((kind, field), field)})")
              for kind, field in dict.fromkeys(OFFSETS + FIELDS)]
    lines += [same(f"sizeof(struct bps_ibv_{kind})", f"sizeof(struct ibv_{kind})") for kind in SIZES if kind != LONGER]
    lines += [f'_Static_assert(sizeof(struct bps_ibv_{LONGER}) <= sizeof(struct ibv_{LONGER}), "longer");']
    done = compiled(lines, tmp_path)
    assert done.returncode == 0, done.stderr


def test_what_is_not_the_same_is_found(tmp_path):
    done = compiled([same("offsetof(struct bps_ibv_wc, imm_data)", "offsetof(struct ibv_wc, wc_flags)"),
                     same("BPS_QPS_RTS", "IBV_QPS_RTR")], tmp_path)
    assert done.returncode != 0 and done.stderr.count("is not") >= 2, done.stderr


@pytest.mark.parametrize(("kind", "field"), [("qp_attr", "retry_cnt"), ("wc", "byte_len"), ("port_attr", "lid")])
def test_a_field_that_moves_is_found(kind, field, tmp_path):
    """As if one more byte came before it."""
    theirs = f"offsetof(struct ibv_{kind}, {field})"
    assert compiled([same(f"offsetof(struct bps_ibv_{kind}, {field})", theirs)], tmp_path).returncode == 0
    assert compiled([same(f"offsetof(struct bps_ibv_{kind}, {field}) + 1", theirs)], tmp_path).returncode != 0
