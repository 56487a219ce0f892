"""Checks RD03, RD04, RD15 and RD16 of ``bpsfast doctor``: drivers, device files, kinds of devices and usable ports."""
from __future__ import annotations

from ...hardware.interfaces import Netdev
from .facts import Facts
from .finding import Check, Outcome, Severity, advice, failed, info, passed, skipped, warned

#: driver of a network card -> the kernel module that provides its RDMA device
_MODULES = {"mlx5_core": "mlx5_ib", "mlx4_en": "mlx4_ib", "mlx4_core": "mlx4_ib", "bnxt_en": "bnxt_re", "ice": "irdma",
            "i40e": "irdma", "qede": "qedr", "cxgb4": "iw_cxgb4", "ena": "efa", "hns3": "hns_roce_hw_v2",
            "mana": "mana_ib", "ionic": "ionic_rdma"}
#: driver of an RDMA device -> its limitation
_KINDS = {
    "rxe": "Soft-RoCE: the kernel emulates a card. Correct, but slower than TCP; for tests",
    "siw": "iWARP in software over TCP: no RDMA WRITE with immediate, so bpsfast uses TCP itself",
    "efa": "Amazon EFA: reliable datagrams (SRD) for libfabric, no RC queue pairs; bpsfast uses TCP over ENA",
    "erdma": "Alibaba eRDMA: connections by rdma_cm only; bpsfast uses TCP",
    "irdma": "Intel E810 or X722: iWARP or RoCE v2 by choice; bpsfast needs RoCE v2",
}


def provider(facts: Facts) -> Outcome:
    """RD03: check that libibverbs loads and lists the devices that the kernel has."""
    if not facts.host.devices:
        return _without_device(facts)
    report = facts.verbs
    if report is None:
        return skipped("libibverbs was not queried: this is a recorded machine")
    if report.error:
        return failed(report.error, host=facts.install, docker=_in_image(facts), check="ibv_devices")
    missing = [device.name for device in facts.host.devices if device.name not in report.devices]
    if missing:
        drivers = sorted({device.driver for device in facts.host.devices if device.name in missing})
        return failed(f"the kernel has {', '.join(missing)}, libibverbs {report.version} does not list "
                      f"{'it' if len(missing) == 1 else 'them'}: the provider for {', '.join(drivers)} is missing, or "
                      "does not match the version of the library",
                      host=facts.install, docker=_in_image(facts), check="ibv_devices   # warns about the provider")
    return passed(f"libibverbs {report.version} ({report.provider}) lists {', '.join(report.devices)}")


def device_nodes(facts: Facts) -> Outcome:
    """RD04: check that the device files exist and can be opened."""
    wrong, names = [], []
    for device in facts.host.devices:
        if device.uverbs is None:
            wrong.append(f"{device.name} has no uverbs device: the module ib_uverbs is not loaded")
            continue
        path = f"/dev/infiniband/{device.uverbs}"
        names.append(path)
        reason = (facts.host.tree.objection("dev/infiniband", device.uverbs)
                  if facts.host.tree.exists("dev/infiniband", device.uverbs) else "not there")
        if reason:
            wrong.append(f"{path} ({device.name}): {reason}")
    if not wrong:
        return passed(", ".join(names))
    if any("ib_uverbs" in each for each in wrong):
        return failed("; ".join(wrong), **facts.variants("sudo modprobe ib_uverbs", "on the host: modprobe ib_uverbs",
                                                         "on the node: modprobe ib_uverbs"))
    flags = " ".join(f"--device={name}" for name in [*names, "/dev/infiniband/rdma_cm"])
    denied = any("not there" not in each for each in wrong)
    host = ("sudo usermod -aG rdma $USER   # if `ls -l /dev/infiniband` shows that group; then log in again" if denied
            else "sudo modprobe ib_uverbs && sudo udevadm trigger")
    return failed("; ".join(wrong), **facts.variants(
        host, f"docker run {flags} ...   # not issm* or umad*: those are for subnet managers",
        "run an RDMA device plugin and ask for its resource in the pod (k8s-rdma-shared-dev-plugin)"),
        check="ls -l /dev/infiniband")


def kind(facts: Facts) -> Outcome:
    """RD15: check that the devices support reliable connections."""
    special: dict[str, list[str]] = {}
    for device in facts.host.devices:
        if device.driver in _KINDS:
            special.setdefault(_KINDS[device.driver], []).append(device.name)
    if special:
        return info("\n".join(f"{', '.join(names)}: {words}" for words, names in special.items()))
    return passed(", ".join(
        f"{device.name} ({device.driver}{', firmware ' + device.firmware if device.firmware else ''})"
        for device in facts.host.devices))


def usability(facts: Facts) -> Outcome:
    """RD16: check that every listed port can be used, and give the reason for each one that cannot."""
    broken = {name: each.error for name, each in facts.opened.items() if each.error}
    names = [f"{device.name}/{port.number}" for device, port in facts.usable if device.name not in broken]
    reasons = "; ".join(f"{name}: {reason}" for name, reason in (broken | facts.choice.rejected).items())
    if broken:
        return failed(f"libibverbs lists it but cannot open it: {reasons}", check="dmesg | grep -iE 'infiniband|rdma'")
    if not names:
        return warned(f"no port can be used: {reasons}")
    usable = f"{', '.join(names)} can be used"
    return info(f"{usable}; not: {reasons}") if reasons else passed(usable)


CHECKS = (
    Check("RD03", "verbs provider", Severity.BLOCKS,
          ("No IB devices found", "couldn't load driver 'libmlx5-rdmav34.so'",
           "no userspace device-specific driver found"),
          "The package with the card's provider is missing, lies where libibverbs does not look, or has another ABI; "
          "or the kernel has no RDMA device at all.",
          "No program can use the card for RDMA, whatever the kernel shows.",
          "SoftRoCE/rxe-dev#48, #65 and #74", provider,
          advice(host="sudo apt install libibverbs1 ibverbs-providers   # rpm: libibverbs rdma-core",
                 docker="add the same packages to the image; those of the host are not used", check="ibv_devices")),
    Check("RD04", "device files", Severity.BLOCKS,
          ("Failed to open device", "works on the host only", "ibv_open_device: Permission denied"),
          "/dev/infiniband/uverbsN is not in the container, or belongs to another group. /sys is not part of the "
          "container, so devices look present there.",
          "The device is seen but cannot be opened.",
          "Mellanox/k8s-rdma-shared-dev-plugin#93, apache/brpc#2298", device_nodes,
          advice(docker="docker run --device=/dev/infiniband/uverbs0 --device=/dev/infiniband/rdma_cm ...",
                 k8s="run an RDMA device plugin and ask for its resource in the pod",
                 check="ls -l /dev/infiniband"), "device"),
    Check("RD15", "kind of device", Severity.INFORMS,
          ("100 Gbit/s on AWS, but no RC queue pairs", "ibv_create_qp: Operation not supported"),
          "EFA, eRDMA, iWARP and Soft-RoCE are RDMA devices without the features that this transport needs.",
          "The job runs over TCP; on EFA that is what the machine's Ethernet gives.",
          "bytedance/byteps#391, NVIDIA/nccl#622, openucx/ucx#9207", kind,
          advice(check="bpsfast devices"), "device"),
    Check("RD16", "usable ports", Severity.SLOW,
          ("fi_getinfo: -61 (No data available)", "a provider is listed, but nothing works"),
          "A listed device cannot always be opened and connected.",
          "Error numbers explain little; this check gives the reason for every unused port.",
          "ofiwg/libfabric#5149, #9649 and #9807", usability, advice(check="bpsfast devices"), "device"),
)


def _without_device(facts: Facts) -> Outcome:
    """Return the outcome without any RDMA device: whether a kernel module is missing for one."""
    missing: dict[str, list[Netdev]] = {}
    for card in facts.host.netdevs.values():
        module = _MODULES.get(card.driver or "")
        if module is not None and module not in facts.modules:
            missing.setdefault(module, []).append(card)
    if missing:
        cards = ", ".join(f"{card.name} ({card.driver})" for cards in missing.values() for card in cards)
        modules = " ".join(missing)
        return failed(f"no RDMA device, but {cards} can be one: the module {modules} is not loaded",
                      **facts.variants(f"sudo modprobe -a {modules}", f"on the host: modprobe -a {modules}",
                                       f"on the node: modprobe -a {modules}"), check="bpsfast devices")
    cards = ", ".join(f"{card.name} ({card.driver})" for card in facts.host.netdevs.values() if card.is_card)
    return info(f"no RDMA device here, so the transport is tcp; network cards: {cards or 'none'}")


def _in_image(facts: Facts) -> str:
    return "the image needs the libraries; those of the host are not used" if facts.container else ""
