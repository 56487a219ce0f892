"""What a rank's environment says: whether threads are bound already, and which GPU is the rank's own."""
from __future__ import annotations

from collections.abc import Mapping

#: variable -> values by which an OpenMP library binds no thread; any other makes it bind them to places that it has
#: found when it was loaded, and that are not those of a plan made later
_UNBOUND = {
    "OMP_PROC_BIND": ("false",),
    "OMP_PLACES": (),
    "GOMP_CPU_AFFINITY": (),
    "KMP_AFFINITY": ("none", "disabled"),
}
#: the first that is set says which devices a process sees, as CUDA and ROCm read them
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def binder(environ: Mapping[str, str]) -> str:
    """Return the variable by which the user has threads of this process bound, "" if there is none."""
    for variable, unbound in _UNBOUND.items():
        text = environ.get(variable, "").strip().lower()
        if text and not set(unbound) & set(text.split(",")):
            return variable
    return ""


def default_gpu(environ: Mapping[str, str], local_rank: int) -> int:
    """Return the number of the GPU that local rank *local_rank* uses by custom; -1: none, or nobody knows.

    Of several that it sees the one with its own number; the only one, if it sees one.
    """
    for variable in _VISIBLE:
        if variable in environ:
            words = [word.strip() for word in environ[variable].split(",")]
            word = words[0] if len(words) == 1 else words[local_rank] if local_rank < len(words) else ""
            return int(word) if word.isascii() and word.isdecimal() and len(word) < 4 else -1  # GPU-UUID, MIG-UUID, -1
    return local_rank
