"""The measurements of BytePS's authors: the figures of OSDI'20 that the simulator is compared with.

Values are read from figures (with errors of about 0.4 % of linear at 256 GPUs, 1.4 % at 64, 3 % at 32) unless the text
prints them. Clusters have machines of 8 V100 (one GPU in figure 12) and one card of 100 Gbit/s, of which a transfer
between two machines gets about 90.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

#: Goodput of a transfer between two machines, bytes/s: 90 Gbit/s (section 6.2).
CARD_RATE = 90e9 / 8
#: Rate of a PCIe link between two GPUs of one switch, and between two switches (figure 7), bytes/s.
PCIE_RATE, CROSS_SWITCH_RATE = 105e9 / 8, 80e9 / 8
#: Summing on a helper: more than 200 Gbit/s (figure 9), bytes/s.
SUM_RATE = 200e9 / 8
GPUS = 8

#: Figure 12: goodput in Gbit/s of 8 machines by k = 0..8.
FIGURE_12: Mapping[str, tuple[float, ...]] = {
    "BytePS": (49, 51, 55, 60, 64, 70, 75, 79, 86),
    "all-reduce": (36,) * 9,
    "PS": (7, 12, 20, 25, 31, 34, 37, 42, 45),  # k = 1.. 8, 8 again below: see `figure_12_ps`
}

#: Figure 13: speed relative to all-reduce of 8 machines for k = 0..8; (machine, model).
FIGURE_13: Mapping[tuple[str, str], tuple[float, ...]] = {
    ("PCIe", "gpt2"): (1.14, 1.15, 1.17, 1.19, 1.21, 1.21, 1.20, 1.24, 1.24),
    ("PCIe", "ugatit"): (1.31, 1.31, 1.32, 1.35, 1.38, 1.39, 1.37, 1.40, 1.40),
    ("NVLink", "gpt2"): (1.11, 1.13, 1.13, 1.16, 1.21, 1.18, 1.23, 1.25, 1.26),
    ("NVLink", "ugatit"): (1.29, 1.31, 1.30, 1.35, 1.37, 1.36, 1.38, 1.44, 1.45),
}

#: Figure 14: speed relative to all-reduce of 8 machines without helpers, for each strategy; (machine, model).
FIGURE_14: Mapping[tuple[str, str], Mapping[str, float]] = {
    ("PCIe", "gpt2"): {"strawman": 1.04, "CPU-assisted": 1.14},
    ("PCIe", "ugatit"): {"strawman": 1.10, "CPU-assisted": 1.30},
    ("NVLink", "gpt2"): {"root = all": 1.05, "root = 0": 1.02, "root = 2,3": 1.13, "root = 2": 1.13},
    ("NVLink", "ugatit"): {"root = all": 1.16, "root = 0": 1.09, "root = 2,3": 1.34, "root = 2": 1.34},
}


class Job(NamedTuple):
    """One job of figures 15 and 16: `batch` for each GPU; `linear`, units a second on 256 GPUs, scaled from one GPU.

    `efficiency`: system -> efficiencies at 32, 64, 128, 256 GPUs. `backward_share`: backward's share of the compute
    time, from the authors' slides if they time the model, else two thirds.
    """

    model: str
    framework: str
    batch: int
    linear: float
    efficiency: Mapping[str, tuple[float, float, float, float]]
    backward_share: float = 2 / 3

    @property
    def compute_s(self) -> float:
        """Return the time of a step without communication."""
        return self.batch * 256 / self.linear


SCALES = (4, 8, 16, 32)  # machines
JOBS: tuple[Job, ...] = (
    Job("resnet50", "TensorFlow", 256, 92.2e3, {
        "PS": (.83, .81, .72, .57), "all-reduce": (.96, .96, .95, .883),
        "BytePS k=0": (.98, .97, .98, .970), "BytePS k=n": (.99, .98, .98, .975)}, 64 / 96),
    Job("vgg16", "MXNet", 96, 57.6e3, {
        "PS": (.54, .49, .44, .36), "all-reduce": (.86, .84, .82, .66),
        "BytePS k=0": (.98, .99, .94, .91), "BytePS k=n": (1.0, .99, .98, .97)}, 100 / 149),
    Job("ugatit", "PyTorch", 2, 551.0, {
        "all-reduce": (.52, .52, .42, .40), "BytePS k=0": (.69, .67, .66, .62),
        "BytePS k=n": (.76, .76, .75, .745)}),
    Job("transformer", "TensorFlow", 3072, 3.96e6, {
        "PS": (.63, .55, .40, .27), "all-reduce": (.76, .78, .72, .69),
        "BytePS k=0": (.93, .89, .84, .84), "BytePS k=n": (.95, .96, .92, .918)}, 114 / 209),
    Job("bert-large", "MXNet", 8192, 4.28e6, {
        "PS": (.61, .58, .53, .50), "all-reduce": (.74, .72, .71, .68),
        "BytePS k=0": (.93, .92, .88, .88), "BytePS k=n": (.93, .93, .93, .92)}, 508 / 847),
    Job("gpt2", "PyTorch", 80, 42.5e3, {
        "all-reduce": (.83, .83, .66, .65), "BytePS k=0": (.91, .91, .90, .88),
        "BytePS k=n": (.95, .93, .94, .95)}),
)
#: BERT-large, steps a second relative to Horovod at 32 GPUs (slides): (32 GPUs, 256 GPUs).
BERT_LARGE: Mapping[str, tuple[float, float]] = {"all-reduce": (1.00, 0.71), "BytePS": (1.35, 1.34)}
#: Speed relative to Horovod: 20 Gbit/s TCP, NVLink machines, batch 64, float32 (README).
TCP_GAINS: Mapping[str, float] = {"resnet50": 1.44, "vgg16": 2.00}
