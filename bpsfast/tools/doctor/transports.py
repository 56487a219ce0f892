"""Checks RD17, RD19 and RD22 of ``bpsfast doctor``: the transport setting, TCP settings, and protection of jobs."""
from __future__ import annotations

from ..._version import __version__
from ...base.encryption import check_library
from ...orchestration.errors import ConfigError
from .facts import Facts
from .finding import Check, Outcome, Severity, advice, failed, info, passed, warned

_GOOD_BUFFER_NBYTES = 4 << 20
#: Rate (Mbit/s) from which the kernel's defaults are too small for one connection.
_FAST_MBPS = 25_000
_LARGER_BUFFERS = "sudo sysctl -w net.ipv4.tcp_rmem='4096 131072 16777216' net.ipv4.tcp_wmem='4096 65536 16777216'"


def setting(facts: Facts) -> Outcome:
    """RD17: check that the settings use the devices of this machine."""
    wanted, origin = facts.settings.transport, facts.origins.get("transport", "default")
    names = ", ".join(rail.name for rail in facts.choice.rails)
    if facts.choice_error:
        return failed(f"{facts.choice_error} (from {facts.origins.get('rdma_devices', 'the settings')})",
                      job="unset BPSFAST_RDMA_DEVICES BPSFAST_RDMA_GID_INDEX BPSFAST_RDMA_PKEY",
                      check="bpsfast devices")
    peer = facts.peer_report
    if peer is not None and peer.version != __version__:
        return failed(f"bpsfast {__version__} here, {peer.version} at {facts.peer_name}: a job needs the same version",
                      host="pip install the same version on both machines")
    if peer is not None and peer.transport != wanted:
        return failed(f"transport {wanted} here (by {origin}), {peer.transport} at {facts.peer_name}: a job needs the "
                      "same",
                      job="set BPSFAST_TRANSPORT to the same value on all machines, or on none")
    if wanted == "rdma" and not names:
        return failed(f"transport rdma is set (by {origin}), but no RDMA port can be used",
                      job="BPSFAST_TRANSPORT=auto   # tcp where there is no RDMA")
    if wanted in ("tcp", "shm") and names:
        return warned(f"transport {wanted} (by {origin}) leaves {names} unused",
                      job="BPSFAST_TRANSPORT=auto   # rdma where both ends can")
    if wanted == "rdma":
        return passed(f"rdma (by {origin}) over {names}")
    if wanted == "auto" and names:
        return passed(f"auto ({origin}): rdma over {names} where the peer can, else tcp")
    return info(f"{wanted} ({origin}): tcp between machines") if wanted == "auto" else passed(f"{wanted} (by {origin})")


def tcp(facts: Facts) -> Outcome:
    """RD19: check that the kernel's TCP settings suit the network card."""
    tree = facts.host.tree
    most = [int(((tree.text(f"proc/sys/net/ipv4/tcp_{which}mem") or "").split() or ["0"])[-1]) for which in "rw"]
    control = tree.text("proc/sys/net/ipv4/tcp_congestion_control") or "unknown"
    cards = [card for card in facts.host.netdevs.values() if card.is_card and card.state == "up"]
    fastest = max((card.speed_mbps or 0 for card in cards), default=0)
    read, write = (f"{nbytes / (1 << 20):g} MiB" if nbytes else "unknown" for nbytes in most)
    found = f"{control}, buffers up to {read} in, {write} out, {facts.settings.tcp_streams} streams"
    wrong, actions = [], {}
    if fastest >= _FAST_MBPS:
        if any(0 < nbytes < _GOOD_BUFFER_NBYTES for nbytes in most):
            wrong.append(f"buffers are small for {fastest / 1000:g} Gb/s")
            actions["host"] = _LARGER_BUFFERS
        if facts.settings.tcp_streams < 2:
            wrong.append(f"one stream does not fill {fastest / 1000:g} Gb/s")
            actions["job"] = "BPSFAST_TCP_STREAMS=4"
        single = [card.name for card in cards if (card.speed_mbps or 0) >= _FAST_MBPS and card.n_rx_queues == 1]
        if single:
            wrong.append(f"{', '.join(single)} has one receive queue, so one core takes all packets")
            actions["check"] = f"ethtool -l {single[0]}   # then: sudo ethtool -L {single[0]} combined 8"
    if wrong:
        return warned(f"{found}: {'; '.join(wrong)}", **actions)
    return passed(found + (f"; fastest card {fastest / 1000:g} Gb/s" if fastest else ""))


def protection(facts: Facts) -> Outcome:
    """RD22: check that the settings protect jobs and gradients from strangers."""
    settings, origins = facts.settings, facts.origins
    if settings.insecure:
        return warned(f"BPSFAST_INSECURE=1 (by {origins.get('insecure', 'the settings')}): anyone who reaches a port "
                      "of a job on several machines can join it, read and change its sums; nothing is encrypted",
                      job="unset BPSFAST_INSECURE; export BPSFAST_JOB_KEY=...   # everywhere: openssl rand -hex 32")
    has_key = "a job key is given" if settings.job_key or settings.job_key_file else (
        "no job key here (bpsfast run draws one)")
    if settings.encryption == "off":
        return info(f"encryption=off (by {origins.get('encryption', 'the settings')}): anyone on the network between "
                    f"machines can read and change gradients; {has_key}",
                    job="unset BPSFAST_ENCRYPTION   # auto: on over tcp")
    try:
        check_library()
    except ConfigError as exc:
        return failed(str(exc), host="sudo apt-get install libssl3", job="BPSFAST_ENCRYPTION=off   # on all machines")
    what = "tcp between machines is encrypted" + ("" if settings.encryption == "on" else ", RDMA is not")
    return passed(f"{what}; {has_key}")


CHECKS = (
    Check("RD22", "protection", Severity.INFORMS,
          ("there is no job key, and without one whoever reaches its port could join the job",
           "setting insecure differs", "setting encryption differs"),
          "Jobs over several machines listen on the network: the job key identifies members, and encryption protects "
          "data on the network.",
          "With BPSFAST_INSECURE=1 anyone who reaches a port can read and change sums; a member can run code on all "
          "machines of its job.",
          "PyTorch's security policy: torch.distributed is for internal communication only, without authentication or "
          "encryption", protection,
          advice(job="export BPSFAST_JOB_KEY=...   # the same on all machines: openssl rand -hex 32",
                 check="bpsfast info --effective")),
    Check("RD17", "transport setting", Severity.SLOW,
          ("only TCP is used although there is InfiniBand", "NCCL_IB_DISABLE", "UCX_TLS without rc"),
          "A variable, a profile or a typing error excludes the card.",
          "The job runs slowly without any message.", "rapidsai/ucx-py#245 and #361, openucx/ucx#4966 and #5320",
          setting, advice(job="BPSFAST_TRANSPORT=rdma   # an error instead of TCP when RDMA cannot be used",
                          check="bpsfast env; bpsfast devices")),
    Check("RD19", "TCP", Severity.SLOW, ("TCP reaches 10 Gbit/s of 100",),
          "Small socket buffers, one stream, or one receive queue for a fast card.",
          "Every job falls back to TCP, which also carries its control messages.",
          "bytedance/byteps#163 and #237", tcp,
          advice(host=_LARGER_BUFFERS, job="BPSFAST_TCP_STREAMS=4",
                 check="sysctl net.ipv4.tcp_rmem net.ipv4.tcp_wmem; ethtool -l IFACE")),
)
