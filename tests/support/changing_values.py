"""A program that encodes elements while another thread writes them; nothing else changes, and frames can be decoded.

It repeats all codecs as many times as its argument.
"""
from __future__ import annotations

import itertools
import sys
import threading

import numpy as np

from tests.kernels.test_codec_kernels import Kernels, draw_values
from tests.support.codec_kernel_calls import CODECS

N = 4099


def main(n_times: int) -> None:
    over = threading.Event()
    x = np.zeros(N, np.float32)
    patterns = [draw_values(pattern, N, x.dtype, seed=1) for pattern in ("moderate", "few", "tiny", "zeros")]

    def write() -> None:
        for values in itertools.cycle(patterns):
            x[:] = values
            if over.is_set():
                return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for codec in CODECS:
            kernel = Kernels(codec, "float32", N)
            for _ in range(n_times):
                frame = kernel.encode(x)
                if codec.kind != "dithering":  # an element above its norm may have an invalid level
                    assert frame is not None and kernel.decode(frame, np.empty_like(x), add=False) == 0, codec
    finally:
        over.set()
        writer.join()


if __name__ == "__main__":
    main(int(sys.argv[1]))
