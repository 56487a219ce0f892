"""Machines that were written down: what the checks read of /sys, /proc, /dev and /etc, one text file for each.

    # a comment
    [sys/class/infiniband/mlx5_0]        the folder of what follows
    fw_ver 22.39.1002                    a file and its content, which ends with a line feed on the machine
    device -> ../../../devices/...       a link
    queues/rx-0/                         an empty folder
    status <<END                         a file of several lines, up to END
    Name: python3
    END

`rxe` is Linux 6.1 with two Soft-RoCE devices, as the tests' guest has it. The others are written after the kernel's
sources and public reports: `mlx5_roce` a container on a GPU machine with two ConnectX-6 Dx and half of the usual
troubles, `infiniband` a healthy cluster node with HDR InfiniBand in a SLURM job, `efa` an AWS instance, `none` a
virtual machine without any of it. `answers.json` holds what no file tells (`bpsfast.nic.recorded`).

`INSIDES` are machines with GPUs, and one without, written by hand for the graph of what is inside a machine: only what
that reads. Where their figures come from stands at the top of each.
"""
from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
NAMES = ("mlx5_roce", "infiniband", "efa", "rxe", "none")
INSIDES = ("dgx1", "pcie_2x4", "p3_16xlarge", "hgx_h100", "asymmetric_3_5", "cpu_two_socket")


def unpack(name: str, root: Path) -> Path:
    """Make the files of the tree *name* below *root*; return it."""
    lines = iter((FOLDER / f"{name}.tree").read_text().splitlines())
    folder = root
    for line in lines:
        if line.startswith("["):
            folder = root / line.strip("[]")
        elif line and not line.startswith("#"):
            entry, _, content = line.partition(" ")
            if content.startswith("<<"):
                content = "\n".join(iter(lambda: next(lines), content.removeprefix("<<")))
            _put(folder / entry, content, is_folder=entry.endswith("/"))
    return root


def _put(path: Path, content: str, is_folder: bool) -> None:
    (path if is_folder else path.parent).mkdir(parents=True, exist_ok=True)
    if content.startswith("-> "):
        path.symlink_to(content.removeprefix("-> "))
    elif not is_folder:
        path.write_text(content + "\n")
