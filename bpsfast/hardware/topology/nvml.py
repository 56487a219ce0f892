"""Asks NVIDIA's library (NVML) about this machine's GPUs and their NVLinks; no other module calls NVML.

NVML's answers become an `NvmlAnswer`, which a recorded machine has as data (``nvml`` in its answers.json). `nvlinks`
makes links of either.

References
----------
NVML's reference, "NvLink Methods"; NCCL, ``src/graph/xml.cc`` (`ncclTopoGetXmlFromGpu`).
"""
from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from ...orchestration.errors import ConfigError
from .graph import Link, LinkKind, Part, PartKind

_log = logging.getLogger("bpsfast.hardware.topology")

#: NVML_NVLINK_VERSION_* -> bytes/s per direction of one NVLink, as NVIDIA names it: 20 GB/s on P100, 25 from V100 to
#: H100, 50 since B200. Unknown versions count as the last.
_RATES_BYTES = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 25e9, 6: 25e9, 7: 50e9, 8: 50e9}
#: NVML_NVLINK_DEVICE_TYPE_* -> `NvLinks.kind`
_KINDS = {0: "gpu", 1: "cpu", 2: "switch"}


class NvLinks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The active NVLinks from one GPU to one other end.

    `kind`: "gpu", "switch", "cpu" (POWER) or "unknown"; `remote`: its PCI address, "" if a virtual machine hides it;
    `version`: NVML_NVLINK_VERSION_*; `speed_mb`: 1e6 bytes/s of one as NVML reports it, 0 if unknown.
    """

    kind: str
    remote: str
    version: int
    n_links: int
    speed_mb: int = 0

    @property
    def rate_bytes(self) -> float:
        """Bytes/s per direction of all of them: the nominal rate, or NVML's if it is lower (A6000: 14 GB/s a link)."""
        nominal = _RATES_BYTES.get(self.version, _RATES_BYTES[max(_RATES_BYTES)])
        return self.n_links * (min(nominal, self.speed_mb * 1e6) if self.speed_mb else nominal)


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One GPU: NVML's index, its name ("Tesla V100-SXM2-16GB"), its PCI address ("0000:3b:00.0")."""

    index: int
    name: str
    address: str
    nvlinks: tuple[NvLinks, ...] = ()


class NvmlAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All answers of NVML. `error`: why there are none; the rest is then empty."""

    error: str = ""
    gpus: tuple[Gpu, ...] = ()


def recorded_answer(answer: Any) -> NvmlAnswer:
    """Return the answer of a recorded machine, an empty one if none was recorded.

    Raises `ConfigError` if *answer* does not fit `NvmlAnswer`.
    """
    if answer is None:
        return NvmlAnswer("not recorded")
    try:
        return msgspec.convert(answer, NvmlAnswer)
    except msgspec.MsgspecError as exc:
        raise ConfigError(f"what NVML said on the recorded machine cannot be read: {exc}") from exc


def query_nvml() -> NvmlAnswer:
    """Query NVML about this machine. `error`, also logged, says what is missing: the package, the library or a GPU."""
    try:
        import pynvml
    except ImportError:
        return _none("the package nvidia-ml-py is not installed (pip install 'bpsfast[gpu]')")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as exc:
        return _none(str(exc))
    gpus = []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                gpus.append(_gpu(pynvml, index))
            except pynvml.NVMLError as exc:  # fell off the bus, or is not accessible
                _log.info("NVML says nothing of GPU %d: %s", index, exc)
        return NvmlAnswer(gpus=tuple(gpus))
    except pynvml.NVMLError as exc:
        return _none(str(exc))
    finally:
        pynvml.nvmlShutdown()


def nvlinks(answer: NvmlAnswer, gpus: Mapping[str, str]) -> tuple[list[Part], list[Link]]:
    """Return the NVSwitch, if there is one, and the NVLinks among *gpus* (PCI address -> name) and to it.

    All NVSwitches of a machine are one part, as in NCCL, because a GPU spreads its traffic over all of them. Links to
    GPUs that are not in *gpus* are omitted.
    """
    pairs: dict[tuple[str, str], list[NvLinks]] = {}
    switches = set()
    for gpu in answer.gpus:
        for found in gpu.nvlinks:
            other = "nvswitch0" if found.kind == "switch" else gpus.get(found.remote)
            if gpu.address not in gpus or other is None or found.n_links < 1:
                continue
            if found.kind == "switch":
                switches.add(found.remote)
            elif other < gpus[gpu.address] and _tells(answer, found.remote, gpu.address):
                continue  # the other end reports it as well
            one = gpus[gpu.address]
            pairs.setdefault((min(one, other), max(one, other)), []).append(found)
    links = [Link(one, other, LinkKind.NVLINK, sum(each.rate_bytes for each in found),
                  sum(each.n_links for each in found)) for (one, other), found in pairs.items() if one != other]
    model = f"{len(switches)} NVSwitch{'es' if len(switches) > 1 else ''}"
    return [Part("nvswitch0", PartKind.NVSWITCH, model=model)] if switches else [], links


def _tells(answer: NvmlAnswer, address: str, of: str) -> bool:
    """Whether the GPU at *address* reports links to the one at *of*."""
    return any(found.remote == of for gpu in answer.gpus if gpu.address == address for found in gpu.nvlinks)


def _none(reason: str) -> NvmlAnswer:
    _log.info("no NVLinks are known: %s", reason)
    return NvmlAnswer(reason)


def _gpu(library: Any, index: int) -> Gpu:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    counts: dict[tuple[str, str, int, int], int] = {}
    for number in range(library.NVML_NVLINK_MAX_LINKS):
        try:
            if not library.nvmlDeviceGetNvLinkState(handle, number):
                continue
            version = library.nvmlDeviceGetNvLinkVersion(handle, number)
        except library.NVMLError:
            break  # no such link, or a GPU without NVLinks
        key = *_other_end(library, handle, number), version, _speed_mb(library, handle)
        counts[key] = counts.get(key, 0) + 1
    links = tuple(NvLinks(kind, remote, version, n_links, speed) for (kind, remote, version, speed), n_links
                  in counts.items())
    return Gpu(index, library.nvmlDeviceGetName(handle), _address(library.nvmlDeviceGetPciInfo(handle)), links)


def _other_end(library: Any, handle: Any, number: int) -> tuple[str, str]:
    """Return kind and address of a link's other end; drivers before 450 do not report the kind."""
    try:
        remote = _address(library.nvmlDeviceGetNvLinkRemotePciInfo(handle, number))
    except library.NVMLError:
        remote = ""
    try:
        return _KINDS.get(library.nvmlDeviceGetNvLinkRemoteDeviceType(handle, number), "unknown"), remote
    except library.NVMLError:
        return "unknown", remote


def _speed_mb(library: Any, handle: Any) -> int:
    try:
        field = library.nvmlDeviceGetFieldValues(handle, [library.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])[0]
    except library.NVMLError:
        return 0
    return int(field.value.uiVal) if field.nvmlReturn == library.NVML_SUCCESS else 0


def _address(info: Any) -> str:
    """Return an address in the kernel's form; "" if all bits are set, as virtual machines do to hide it."""
    if info.bus > 0xff or info.domain == 0xffffffff:
        return ""
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"
