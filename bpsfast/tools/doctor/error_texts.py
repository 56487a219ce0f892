"""The meaning of errnos and of messages that perftest, rdma-core, the kernel, UCX, NCCL and Mooncake print.

A message is recognized by a pattern without names and numbers, so that a rank, a time stamp or a device before it does
not matter. `bpsfast explain` shows the meanings of all messages in a pasted text.

References
----------
The messages are those of perftest 4.5 to 25.x, rdma-core 17 to 55 (libibverbs, librdmacm, ibv_*_pingpong, rping), Linux
4.18 to 6.12 (mlx5_core, mlx5_ib, rdma_rxe, siw, ib_core, ipoib), UCX, NCCL and Mooncake.
"""
from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ErrnoMeaning:
    """The meaning of one errno: number, name, the C library's text, its meaning for RDMA, advice."""

    number: int
    name: str
    text: str
    means: str
    advice: str


_WORDS: dict[int, tuple[str, str]] = {
    errno.EPERM: ("the process lacks a capability or may not lock memory", "bpsfast explain RD01; in a container RD04"),
    errno.ENOENT: ("the device, or the queue pair that a firmware command named, does not exist", "bpsfast devices"),
    errno.EIO: ("the card or its firmware failed, or the device went away", "dmesg | grep -iE 'mlx|infiniband|rdma'"),
    errno.ENXIO: ("the device has no such port, or its driver was unloaded", "bpsfast devices"),
    errno.EAGAIN: ("a queue is full, or no data is available yet", "try again; in a log it is harmless"),
    errno.ENOMEM: ("on registration: memory may not be locked (RLIMIT_MEMLOCK), or there are too many mappings; on "
                   "creation of a queue: more entries than the card has (max_qp_wr, max_cqe)",
                   "bpsfast explain RD01, then RD02; ibv_devinfo -v shows the card's limits"),
    errno.EACCES: ("the device file belongs to another group, or memory was registered without the right that a "
                   "request needs", "ls -l /dev/infiniband; bpsfast explain RD04"),
    errno.EFAULT: ("the memory to register is not mapped, or read-only memory was to become writable",
                   "register memory that exists, and writable for remote writes"),
    errno.EBUSY: ("the object is still in use: a queue by queue pairs, a domain by regions",
                  "close children before their parent"),
    errno.ENODEV: ("there is no such device, or its port is gone", "bpsfast devices; bpsfast explain RD03"),
    errno.EINVAL: ("an attribute is invalid: usually the GID (wrong row, RoCE v1 with v2, IPv4 with IPv6), the path "
                   "MTU (above the port's), or the state (RTR only after INIT)",
                   "bpsfast gids --peer HOST; bpsfast explain RD05 and RD08"),
    errno.ENOSPC: ("a table of the card is full",
                   "use fewer queue pairs or regions; those of other jobs on the card count, too"),
    errno.ENOSYS: ("the kernel has no RDMA, or the provider does not implement the verb",
                   "bpsfast explain RD03 and RD15"),
    errno.ENODATA: ("no match for the request; libfabric reports this, without the reason, when no provider can be "
                    "used", "bpsfast doctor gives the reason for each port (RD16)"),
    errno.EPROTONOSUPPORT: ("the device has no such kind of queue pair (EFA has no RC)", "bpsfast explain RD15"),
    errno.EOPNOTSUPP: ("the device cannot do this operation, or this kind of queue pair", "bpsfast explain RD15"),
    errno.EMSGSIZE: ("a message is larger than the port allows, or a packet than the interface's MTU",
                     "bpsfast explain RD08"),
    errno.EADDRINUSE: ("another process listens on that port", "choose another port, or end that process"),
    errno.EADDRNOTAVAIL: ("the address does not belong to this machine, or a name does not resolve",
                          "ip addr; bpsfast explain RD18"),
    errno.ENETUNREACH: ("there is no route; from ibv_modify_qp: the GID's interface has no route to the peer's GID",
                        "ip route get PEER; bpsfast explain RD05 and RD07"),
    errno.ECONNRESET: ("the peer's process ended or closed the connection", "see the peer's log"),
    errno.ETIMEDOUT: ("no answer; from ibv_modify_qp to RTR: the peer's hardware address was not found (ARP, neighbour "
                      "discovery), so the GID or the network is wrong",
                      "ping the peer's address of that interface; bpsfast explain RD05 and RD06"),
    errno.ECONNREFUSED: ("the machine is reachable, but no process listens on that port",
                         "start the other side first; check host and port"),
    errno.EHOSTUNREACH: ("no answer to ARP on the last network, or a firewall rejects the packets",
                         "ping the peer's address; bpsfast explain RD07 and RD14"),
}


def every() -> list[ErrnoMeaning]:
    """Return all errnos with a meaning."""
    return [ErrnoMeaning(number, errno.errorcode[number], os.strerror(number), *words)
            for number, words in _WORDS.items()]


def explain(number: int) -> ErrnoMeaning | None:
    """Return the meaning of an errno (a positive number), or None if it is unknown or unrelated to RDMA."""
    return next((meaning for meaning in every() if meaning.number == number), None)


@dataclass(frozen=True)
class LogMessage:
    """One kind of message: who prints it, its pattern, its meaning, advice."""

    source: str
    pattern: re.Pattern[str]
    means: str
    advice: str


_ADDRESSES = ("bpsfast gids --peer HOST on both machines (perftest: the same -x INDEX kind and -m MTU on both); "
              "InfiniBand needs a subnet manager; bpsfast explain RD05, RD08 and RD13")
_OTHER_END = "see the output of the other end: its first error is the cause"
_LIMITS = ("ulimit -l must print unlimited (bpsfast explain RD01); else use fewer or shorter queues: ibv_devinfo -v "
           "shows the limits")
_CABLE = "check cable and module (ethtool -m IFACE; mlxlink -d DEVICE -m), then the switch port; bpsfast explain RD13"
_FIRMWARE = ("dmesg | grep mlx5 shows what happened before; firmware (ethtool -i IFACE) and driver must be of one "
             "release. Report it to the card's maker with the syndrome")

#: source, pattern, meaning, advice; the first pattern that matches a line counts
_MESSAGES: tuple[tuple[str, str, str, str], ...] = (
    # -- queue pairs ---------------------------------------------------------------------------------------------------
    ("perftest, rdma-core, Mooncake", r"qp\b.{0,40}\bto\b.{0,15}\bRTR\b|INIT ?(?:to|->|=>) ?RTR\b",
     "the queue pair could not be connected to the peer's: its address (GID or LID), the path MTU or the kind of GID "
     "(RoCE v1 or v2, IPv4 or IPv6) does not fit this port. If it timed out, the peer's hardware address was not found",
     _ADDRESSES),
    ("perftest, rdma-core, Mooncake", r"qp\b.{0,40}\bto\b.{0,15}\bRTS\b|RTR ?(?:to|->|=>) ?RTS\b",
     "the queue pair is connected to the peer's, but may not send: the timeout, the retry counts or the number of "
     "outstanding reads is out of range, or the queue pair has failed meanwhile",
     "fewer outstanding reads (perftest -o), defaults for the rest; then " + _OTHER_END),
    ("perftest, rdma-core, Mooncake", r"qp\b.{0,40}\bto\b.{0,15}\bINIT\b|RESET ?(?:to|->|=>) ?INIT\b",
     "the port rejects the queue pair: there is no port of that number, its P_Key is not in the table, or it is down",
     "bpsfast devices shows ports and their state (perftest -i PORT); bpsfast explain RD13"),
    ("NCCL, UCX, Mooncake", r"ibv_modify_qp\w*\b.{0,60}(?:fail|error)|failed to modify QP",
     "a queue pair could not be set up; usually the step that connects it to the peer's fails, because the peer's "
     "address (GID), path MTU or kind of GID does not fit this port", _ADDRESSES),
    ("perftest", r"unable to connect the HCA'?s through the link",
     "both ends have exchanged addresses, but a queue pair could not be connected: the line before it names the step "
     "(to RTR: address, GID or MTU do not fit)", _ADDRESSES),
    ("perftest", r"incompatibility issue with GID types|try to use a different IP version",
     "one end chose an IPv4 GID, the other one an IPv6 GID",
     "give both ends -x with rows of the same kind: bpsfast gids --peer HOST; bpsfast explain RD05"),
    ("perftest", r"requested mtu is higher than active mtu|mtu.{0,40}(?:mismatch|differ)",
     "the path MTU that was asked for (-m) is above that of the port, which for RoCE follows from the interface's",
     "leave -m out, or raise the interface's MTU on both machines: bpsfast explain RD08"),
    ("perftest, kernel",
     r"\bGRH\b.{0,40}(?:require|need|must|missing)|(?:require|need|must|missing)\w*.{0,40}\bGRH\b|is_grh_required|"
     r"grh_required",
     "packets need a global header (GRH), so queue pairs must be addressed by GID: always on RoCE, and behind "
     "InfiniBand routers and virtual functions",
     "give perftest a row of the GID table, -x INDEX, on both ends: bpsfast gids"),
    ("perftest, rdma-core",
     r"(?:couldn'?t|unable to|failed to|error|cannot) (?:to )?create (?:a |the |rdma )*(?:new |old )?(?:(?:send|recv|"
     r"receiver|extended) )?(?:CQ|QP|SRQ|completion queue|queue pair)|ibv_create_(?:cq|qp|srq)\w*\W.{0,60}(?:fail|"
     r"error|null)|create[_ ]QP.{0,30}failed",
     "the device refused to create a queue: memory may not be locked, or the queue is longer, or takes more inline "
     "bytes, than the device supports", _LIMITS + " (perftest: smaller -t, -r, -I, -q)"),
    # -- memory --------------------------------------------------------------------------------------------------------
    ("UCX, NCCL, rdma-core", r"RLIMIT_MEMLOCK|max locked memory|memlock (?:limit|is)|ulimit -l",
     "the limit of locked memory is too low: registered memory is locked memory",
     "bpsfast explain RD01: limits.d for logins, LimitMEMLOCK for services, --ulimit memlock=-1 for containers"),
    ("perftest, rdma-core, NCCL, UCX, kernel",
     r"couldn'?t (?:allocate|register) (?:an? )?MR|fail\w* to (?:create|reg(?:ister)?) (?:an? |the )?(?:mr|"
     r"memory region)\b|reg_mr failed|\bibv_(?:exp_)?reg_(?:dmabuf_)?mr\w*\b.{0,80}(?:fail|error|null)|"
     r"async reg mr failed|reg create failed|ib_umem_get",
     "memory could not be registered: it may not be locked (RLIMIT_MEMLOCK), there are too many regions or mappings, "
     "the address is not mapped, or it is GPU memory that the card cannot reach",
     "ulimit -l must print unlimited: bpsfast explain RD01, then RD02; with GPU memory RD12"),
    ("kernel", r"nvidia[-_]peermem|nv_peer_mem|nvidia_p2p_get_pages|ib_register_peer_memory_client",
     "the module that lets the card reach GPU memory did not load, or does not match the driver of the GPU or of the "
     "card", "sudo modprobe nvidia-peermem, after the RDMA driver; bpsfast explain RD12"),
    # -- devices and drivers -------------------------------------------------------------------------------------------
    ("perftest, rdma-core",
     r"IB device \S+ not found|unable to find the Infiniband/RoCE device|did not detect devices|no (?:IB|RDMA|"
     r"infiniband) devices? (?:were |was )?(?:found|detected)|NET/IB : No device found|failed to get IB devices list",
     "libibverbs finds no such device: there is none, its provider is not installed, or it is not visible in this "
     "container", "bpsfast devices; bpsfast explain RD03, in a container RD04"),
    ("rdma-core", r"couldn'?t load driver '\S+'|libibverbs: warning: couldn'?t (?:open|read|stat)",
     "the provider of one kind of card is not installed, which matters only for a card of that kind",
     "nothing is wrong if `bpsfast devices` shows the card; else install rdma-core's providers: bpsfast explain RD03"),
    ("rdma-core", r"no userspace device-specific driver found",
     "the kernel has the card, but rdma-core has no provider for it",
     "install ibverbs-providers (rdma-core): bpsfast explain RD03"),
    ("rdma-core", r"does not support the kernel ABI|kernel ABI version|couldn'?t read (?:ABI|uverbs ABI) version",
     "rdma-core and the kernel's RDMA modules are of incompatible releases (a vendor's OFED beside the distribution's)",
     "install both from one source; in a container the host's release: bpsfast explain RD15"),
    ("rdma-core", r"fork\(\)-safety requested but init failed|ibv_fork_init",
     "protection of registered memory across fork was requested and is not available", "bpsfast explain RD10"),
    ("perftest, rdma-core", r"couldn'?t get context for|failed to open device|ibv_open_device.{0,40}(?:fail|null)",
     "the device exists, but may not be opened: permissions of /dev/infiniband/uverbs*, or the container lacks these "
     "files", "ls -l /dev/infiniband; bpsfast explain RD04"),
    ("perftest, rdma-core",
     r"couldn'?t allocate PD|ibv_alloc_pd failed|unable to allocate PD|couldn'?t open XRC|error opening XRC domain",
     "the device gave no protection domain: it is being reset, or its tables are full",
     "dmesg | tail; bpsfast devices"),
    ("perftest",
     r"multiple QPs only avail[ai]ble|multi QP is not supported|available (?:only )?on (?:bw|BW|latency) tests|"
     r"(?:is )?available only (?:on|in) \w+ tests|only (?:valid|supports?) .{0,20}BW tests|supported in BW tests only",
     "perftest's latency and bandwidth tests take different options: -q (queue pairs), -b and -l are for bandwidth "
     "only, whatever their value",
     "leave that option out, or use the _bw test; `bpsfast perf lat` takes what both have"),
    ("perftest", r"invalid command line|parser function exited with error",
     "one of the options is unknown to perftest, or not allowed in this test",
     "the lines before it name the option; see NAME --help"),
    ("perftest", r"conflicting CPU frequency values|CPU frequency is not max",
     "cores run at different rates, so cycles cannot be converted to time",
     "-F ignores it; for good numbers: cpupower frequency-set -g performance"),
    ("perftest", r"not compatible with versions older|exchange (?:Page Size|Cache Line Size) data|"
     r"different versions?\b.{0,40}perftest",
     "both ends run incompatible releases of perftest", "install the same release on both"),
    # -- control connections -------------------------------------------------------------------------------------------
    ("perftest, rdma-core",
     r"couldn'?t connect to \S+|unable to open file descriptor for socket|unable to init the socket connection|"
     r"unable to set ?up socket connection",
     "the TCP connection over which both ends prepare the test failed: the server is not started or has ended, the "
     "port differs (-p, 18515), or a firewall is between them",
     "start the server first, give both the same -p; nc -vz HOST 18515; bpsfast explain RD14"),
    ("perftest, rdma-core",
     r"couldn'?t (?:read|write|send|read/write|send/recv)(?: the)? (?:remote|local) address|ethernet_(?:read|"
     r"write)_\w+|unable to (?:read|write) (?:from|to) (?:the )?socket|failed to exchange data between|"
     r"failed to sync between|unable to send my QP number|couldn'?t read reports|failed to close connection between",
     "the other end ended, or was started with other options (-R, another test or release), while both prepared or "
     "ended the test", _OTHER_END + "; start both with the same options"),
    ("perftest, rdma-core", r"couldn'?t listen to port|failed to bind socket|\baccept\(\) failed",
     "perftest's TCP port is in use, usually by a server that was left running",
     "ss -ltnp | grep 18515; choose another -p on both ends"),
    # -- librdmacm -----------------------------------------------------------------------------------------------------
    ("librdmacm", r"RDMA_CM_EVENT_ADDR_ERROR|ADDR_ERROR|rdma_resolve_addr\W.{0,40}fail|rdma_resolve_addr failed|"
     r"failed to resolve RDMA CM address",
     "no RDMA device here is on the network of that address, or its hardware address was not found",
     "give the peer's address on the card's own network: ip route get PEER; bpsfast explain RD07"),
    ("librdmacm", r"RDMA_CM_EVENT_ROUTE_ERROR|rdma_resolve_route|failed to resolve RDMA CM route|resolve route failed",
     "the address is known, but no path to it: on InfiniBand the subnet manager does not answer",
     "sudo sminfo; bpsfast explain RD13"),
    ("librdmacm", r"RDMA_CM_EVENT_REJECTED",
     "the peer refused the connection: no program listens on that port with rdma_cm, or the listener rejected the "
     "request's parameters", "start the server first, both ends with -R and the same -p"),
    ("librdmacm", r"RDMA_CM_EVENT_UNREACHABLE|RDMA_CM_EVENT_CONNECT_ERROR|failed to connect (?:through )?RDMA CM|"
     r"rdma_(?:connect|accept)\W.{0,30}failed|unexpected CM event|failure (?:connecting|accepting)",
     "the connection request got no answer, or a queue pair failed while it was being connected",
     "ping the peer's address of that interface; UDP 4791 open? bpsfast explain RD07 and RD14"),
    ("librdmacm", r"RDMA_CM_EVENT_DISCONNECTED|failed to disconnect RDMA CM",
     "the other end closed the connection; this is normal at the end of a test", _OTHER_END),
    ("librdmacm", r"RDMA CM event error|failed to (?:get|handle|ACK) RDMA CM event|rdma_get_cm_events?\b.{0,30}fail",
     "the connection manager reported an unexpected event: the line after it names the event",
     "bpsfast explain with that line: RDMA_CM_EVENT_..."),
    ("librdmacm", r"RDMA_CM_EVENT_DEVICE_REMOVAL",
     "the device disappeared: its driver was reloaded, or the card was reset or unplugged",
     "dmesg | tail; bpsfast devices"),
    ("librdmacm",
     r"rdma_create_event_channel|failed to create (?:RDMA CM )?event channel|librdmacm: fatal: (?:unable to open|"
     r"no RDMA)|/dev/infiniband/rdma_cm|librdmacm: .{0,20}couldn'?t read ABI",
     "the connection manager's device is missing or may not be opened",
     "sudo modprobe rdma_ucm; in a container pass /dev/infiniband/rdma_cm; bpsfast explain RD14"),
    ("librdmacm", r"rdma_bind_addr failed|failed to bind RDMA CM address|bind address failed|rdma_listen failed",
     "the address does not belong to this machine's RDMA card, or the port is in use",
     "ip addr; ss -ltnp; choose another -p on both ends"),
    # -- the end of a run ----------------------------------------------------------------------------------------------
    ("perftest", r"did not get message for \d+ seconds",
     "the other end stopped sending, usually because it failed", _OTHER_END),
    ("perftest",
     r"failed to complete run_iter_\w+ function|error occurred while running|completion with error (?:at|in)",
     "a consequence: the status in the line beside it is the cause", "bpsfast explain with that line: Failed status N"),
    ("perftest, rdma-core",
     r"couldn'?t post (?:send|recv|receive)|ibv_post_(?:send|recv) failed|failed to post (?:send|rec)",
     "a request was refused when it was posted: the queue is full or in the error state, or the queue pair does not "
     "support the request (too many inline bytes or buffers)",
     "the first error of the queue pair is the cause; try a smaller -I, or a larger -t or -r"),
    ("perftest, rdma-core",
     r"poll(?: on)?(?: (?:send|recv|receive))? CQ failed|failed to (?:poll|get)[ _]cq|failed to get cq_event",
     "the device returned no completions: it was reset or disappeared, or the process was interrupted",
     "dmesg | tail; bpsfast devices"),
    ("UCX", r"endpoint (?:timeout|is not connected)|connection reset by remote peer|endpoint is closed",
     "the peer's process has ended, or no longer answers", "see the first error in the peer's log"),
    ("Mooncake, NCCL",
     r"GID\b.{0,20} is NULL|(?:failed to|couldn'?t) query GID|can'?t read sgid of index|query_gid.{0,20}fail|"
     r"no (?:valid|usable) GID",
     "the requested row of the GID table is empty",
     "bpsfast gids lists the used rows (MC_GID_INDEX, NCCL_IB_GID_INDEX, perftest -x); bpsfast explain RD05"),
    # -- the kernel ----------------------------------------------------------------------------------------------------
    ("kernel", r"dump error cqe|got completion with error:|error cqe on cqn",
     "mlx5 dumps the whole failed completion: bytes 54 and 55 hold the vendor's code and the status",
     "paste the lines below it as well to have the status explained"),
    ("kernel", r"mlx5_cmd_(?:out_err|check)\b|op_mod\(0x[0-9a-f]+\) failed|failed, status .{0,40}syndrome \(0x",
     "the card's firmware refused a command of the driver; the name before op_mod is the command, `status` the reason "
     "(bad resource state, bad parameter, no resources, limits exceeded)", _FIRMWARE),
    ("kernel", r"mlx[45]_core.*(?:wait_func|cmd_work_handler|enter_error_state|timeout\. will cause a leak)|"
     r"command .{0,30}timeout",
     "the card's firmware does not answer the driver: the firmware or PCIe hangs",
     "a cold start of the machine; then " + _FIRMWARE),
    ("kernel",
     r"health compromised|firmware internal error|assert_var\[|print_health_info|poll_health|health_care|FW fatal",
     "the card's firmware has failed, and the driver will reset the card: all its connections are lost", _FIRMWARE),
    ("kernel", r"port module event(?:\[error\])?: module \d+, (?:cable )?unplugged|high temperature|bus stuck|"
     r"power budget exceeded|unknown identifier|unsupported cable|bad or shorted cable|cable is shorted",
     "there is no cable or module in the card's port, or one that the card does not accept", _CABLE),
    ("kernel", r"port module event: module \d+, cable plugged|\blink up\b",
     "this is no error: a cable was plugged in, or the link is up", "nothing to do"),
    ("kernel", r"mlx[45]_core.{0,60}\blink down\b|\bIB_EVENT_PORT_ERR|\bport error\b|PORT_ERR\b",
     "the link of a port went down", _CABLE),
    ("kernel",
     r"insufficient power on the PCIe slot|PCIe slot (?:advertised|power)|available PCIe bandwidth, limited by",
     "the slot has fewer lanes, or less speed or power, than the card can use",
     "use another slot; bpsfast explain RD11"),
    ("kernel", r"pcieport.{0,60}(?:AER|error)|AER: |PCIe Bus Error",
     "PCIe has errors between the card and the machine: a bad seat, riser or slot, or a card that was reset",
     "lspci -vv -s ADDRESS | grep -E 'LnkSta|UESta'; reseat the card"),
    ("kernel", r"DMAR: |IO_PAGE_FAULT|handling fault status reg|arm-smmu.{0,60}(?:fault|event)",
     "the IOMMU prevented a card from accessing memory",
     "iommu=pt on the kernel's command line; for GPU memory ACS off: bpsfast explain RD11 and RD12"),
    ("kernel", r"GID (?:table )?change|IBV?_EVENT_GID_CHANGE|IBV?_EVENT_LID_CHANGE|IBV?_EVENT_PORT_ACTIVE",
     "an address of the port has changed (an interface got or lost an IP address or VLAN), or the port came up: queue "
     "pairs that were connected by the old address fail",
     "nothing to do while a machine starts; else find out what changes addresses: ip monitor address"),
    ("kernel", r"NETDEV WATCHDOG|TX timeout (?:detected|on)|transmit queue \d+ timed out",
     "the card has sent nothing for seconds: endless pause frames, a firmware fault, or a virtual machine that was "
     "paused", "ethtool -S IFACE | grep pause; bpsfast explain RD09; then " + _FIRMWARE),
    ("kernel", r"\b(?:IB_EVENT_)?CQ_ERR\b|CQ error on CQN|\bCQ error\b(?! status)|CQ overrun",
     "a completion queue has overflowed: more was posted than it holds",
     "use longer completion queues, or fewer requests at a time (perftest -t, --cq-mod)"),
    ("kernel", r"(?:IB_EVENT_|IBV_EVENT_)?(?:QP_FATAL|QP_REQ_ERR|QP_ACCESS_ERR|DEVICE_FATAL)|"
     r"local (?:work queue )?catastrophic error|invalid request local work queue error|"
     r"local access violation work queue error",
     "a queue pair or the whole device failed: the device could not read a request, or a peer accessed memory without "
     "permission", "the first failed completion on either end names the cause; dmesg | grep -iE 'mlx|rdma'"),
    ("kernel", r"rdma_rxe:.*(?:moved to error state|retry exceeded)|rxe\d*:.*(?:error state|retry exceeded)",
     "a queue pair of Soft-RoCE failed: usually the peer is gone, or UDP port 4791 is filtered",
     "the status that the program prints says more; bpsfast explain RD14 and RD09"),
    ("kernel", r"bad ICRC|ICRC (?:error|mismatch)",
     "packets of Soft-RoCE arrive damaged, or their sender computes the checksum differently: an old rxe, or offloads "
     "of the interface", "use the same kernel on both ends; ethtool -K IFACE tx off gso off"),
    ("kernel", r"rdma_rxe|rxe_\w+:|\brxe\d+:",
     "a message of Soft-RoCE about one of its devices or packets",
     "rdma link; the interface below it must be up: bpsfast devices"),
    ("kernel", r"\bsiw(?:\d+)?[:\s].*(?:MPA|fail|error|reject|mismatch|abort|timeout)",
     "softiwarp's connection was refused or ended: it needs an ordinary TCP connection by rdma_cm",
     "iWARP connects by rdma_cm only: perftest -R on both ends; rdma link"),
    ("kernel",
     r"multicast join failed|ib\d+: .*join.*status -?\d+|MAD timed? ?out|sa_query|no SM found|SM (?:LID|is not)",
     "InfiniBand's subnet manager does not answer, or does not admit this port to a group",
     "sudo sminfo; sudo systemctl start opensm on one machine; bpsfast explain RD13"),
    ("kernel", r"neighbou?r table overflow|arp_cache: neighbor table",
     "there are more peers than the kernel's table of hardware addresses holds: connections to them time out",
     "sudo sysctl -w net.ipv4.neigh.default.gc_thresh3=16384; bpsfast explain RD06"),
    ("kernel", r"failed reclaiming pages|page allocation failure.*(?:mlx|rdma|ib_)|give_pages|out of pages",
     "the driver found no memory for the card",
     "free -h; use fewer queue pairs and regions; dmesg shows what else failed"),
    # -- general errors, last because they say least ------------------------------------------------------------------
    ("perftest, rdma-core",
     r"couldn'?t (?:get (?:port info|local LID|device)|set the link layer|connect to remote QP)|"
     r"failed to query (?:port|device)|error when trying to query|ibv_query_\w+\b.{0,40}(?:fail|error)",
     "the device or its port could not be queried, or has no address yet: it was reset, the port number is wrong, or "
     "on InfiniBand no subnet manager has assigned a LID",
     "bpsfast devices shows ports, their state and LID; bpsfast explain RD13"),
    ("perftest, rdma-core",
     r"(?:couldn'?t|failed to|unable to) (?:destroy|deregister|deallocate|dealloc|release|close|free)\b",
     "a consequence: objects could not be destroyed after an earlier error", "the first error above it is the cause"),
    ("perftest", r"couldn'?t allocate work buf|failed to allocate hugepages?|cannot allocate\b",
     "there was no memory for the test's buffers",
     "free -h; smaller -s or -q; for --use_hugepages: sysctl vm.nr_hugepages"),
    ("kernel",
     r"mlx[45]_(?:core|ib)\b.*(?:probe|load_one|init_one).{0,60}(?:fail|error)|probe of \S+ failed with error|"
     r"pre-initializing|fw_tracer.{0,40}fail|firmware.{0,40}(?:timeout|aborting|not supported)",
     "the driver could not start the card: its firmware is not ready or does not match the driver, or there is no "
     "memory", "a cold start of the machine (power off); then " + _FIRMWARE),
    ("rdma-core, librdmacm",
     r"\b(?:ibv|rdma)_[a-z]\w+\b.{0,60}(?:fail|error|null)|(?:fail\w*|error).{0,30}\b(?:ibv|rdma)_[a-z]\w+|"
     r"\b(?:libibverbs|librdmacm|(?:lib)?mlx[45]): (?:fatal|warning)",
     "a call of libibverbs or librdmacm failed; the errno in the same line, or after it, gives the reason",
     "bpsfast explain with that errno (ENOMEM, EINVAL ...); bpsfast doctor for the machine as a whole"),
    ("kernel", r"(?:\bmlx[45]_(?:core|ib)\b|\binfiniband \w+:|\bib_(?:core|cm|uverbs|ipoib|mad)\b|\b(?:rdma|iw)_cm\b|"
     r"\b(?:bnxt_re|irdma|qedr|hns_roce|efa|iw_cxgb4)\b).*(?:fail|error|unable|timed? ?out|timeout|abort|fatal|invalid|"
     r"couldn'?t|cannot)",
     "the driver of an RDMA card reports a problem",
     "the lines before it in dmesg often name the cause; bpsfast devices, bpsfast doctor; " + _FIRMWARE),
)
_KNOWN = tuple(LogMessage(source, re.compile(pattern, re.I), means, advice)
               for source, pattern, means, advice in _MESSAGES)
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")

#: syndrome of a failed mlx5 completion (struct mlx5_err_cqe) -> ibv_wc_status, as in the driver
_MLX5_SYNDROMES = {0x01: 1, 0x02: 2, 0x04: 4, 0x05: 5, 0x06: 6, 0x10: 7, 0x11: 8, 0x12: 9, 0x13: 10, 0x14: 11, 0x15: 12,
                   0x16: 13, 0x22: 16}
#: line of a dump with bytes 48 to 63, as words (rdma-core, older kernels) or bytes (newer kernels)
_AS_WORDS = re.compile(r"\b[0-9a-f]{8} [0-9a-f]{4}([0-9a-f]{2})([0-9a-f]{2}) [0-9a-f]{8} [0-9a-f]{8}\b", re.I)
_AS_BYTES = re.compile(r"\b0*30: (?:[0-9a-f]{2} ){6}([0-9a-f]{2}) ([0-9a-f]{2}) (?:[0-9a-f]{2} ?){8}", re.I)
_SPELLED = re.compile(r"\bsyndrome\s+(0x[0-9a-f]+),? vendor[ _]syndrome\s+(0x[0-9a-f]+)|"
                      r"\bsynd\s+(0x[0-9a-f]+)\s+vend\s+(0x[0-9a-f]+)", re.I)


def plain(text: str) -> str:
    """Return *text* without colors, carriage returns and typographic quotes."""
    text = _COLOURS.sub("", text).replace("\r", "\n").replace("\u2019", "'").replace("\u2018", "'")
    return text.replace("\u201c", '"').replace("\u201d", '"').replace("\xa0", " ")


def find(text: str) -> Iterator[tuple[str, LogMessage]]:
    """Yield each kind of message in *text* (from `plain`) with the matched words, once, also from wrapped lines."""
    seen: set[LogMessage] = set()
    lines = text.splitlines()
    for line in [*lines, " ".join(line.strip() for line in lines)] if len(lines) > 1 else lines:
        for message in _KNOWN:
            match = message.pattern.search(line)
            if match is not None:
                if message not in seen:
                    seen.add(message)
                    yield " ".join(match[0].split()), message
                break


def mlx5_completions(text: str) -> Iterator[tuple[int, int]]:
    """Yield (ibv_wc_status, vendor error) of each failed completion in mlx5 dumps and messages of *text*."""
    for pattern in (_AS_WORDS, _AS_BYTES):
        for vendor, syndrome in pattern.findall(text):
            if int(syndrome, 16) in _MLX5_SYNDROMES:
                yield _MLX5_SYNDROMES[int(syndrome, 16)], int(vendor, 16)
    for match in _SPELLED.finditer(text):
        syndrome, vendor = (int(each, 16) for each in match.groups() if each)
        if syndrome in _MLX5_SYNDROMES:
            yield _MLX5_SYNDROMES[syndrome], vendor
