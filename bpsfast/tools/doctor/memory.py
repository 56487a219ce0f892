"""Checks RD01, RD02, RD10, RD12, RD20 of ``bpsfast doctor``: limits on memory, and forks and GPU memory with RDMA."""
from __future__ import annotations

from ...base.output import size
from .facts import Facts
from .finding import Check, Outcome, Severity, advice, failed, info, passed, skipped, warned

_MIB = 1 << 20
#: The least that any job needs; a smaller limit is a distribution's default.
_LEAST_LOCKED_NBYTES = 64 * _MIB
_LEAST_MAPS = 65_530
_LEAST_REGIONS = 1024
_LEAST_SHM_NBYTES = 1 << 30
#: First kernel that copies pinned pages for the child of a fork, so that the parent keeps its own.
_COPY_ON_FORK = (5, 12)
#: First kernel whose mlx5 driver registers GPU memory by dma-buf.
_DMA_BUF = (5, 12)

_MEMLOCK_HOST = (r"printf '* soft memlock unlimited\n* hard memlock unlimited\n' | sudo tee "
                 "/etc/security/limits.d/90-rdma.conf   # then log in again; a systemd service: LimitMEMLOCK=infinity")
_MEMLOCK_DOCKER = "docker run --ulimit memlock=-1 --cap-add IPC_LOCK ..."
_MEMLOCK_K8S = ("set LimitMEMLOCK=infinity for the container runtime (systemctl edit containerd); "
                "IPC_LOCK in securityContext.capabilities.add helps only a container that runs as root")
_MEMLOCK_SLURM = "slurmd.service: LimitMEMLOCK=infinity; slurm.conf: PropagateResourceLimitsExcept=MEMLOCK"


def locked_memory(facts: Facts) -> Outcome:
    """RD01: check that this process may lock the memory that it registers."""
    soft, hard = facts.memlock_nbytes
    actions = facts.variants(_MEMLOCK_HOST, _MEMLOCK_DOCKER, _MEMLOCK_K8S, _MEMLOCK_SLURM)
    actions["check"] = "ulimit -l   # must print unlimited"
    if soft is None or facts.can_lock_memory:
        own = "unlimited" if soft is None else f"{size(soft)}, lifted by CAP_IPC_LOCK"
        others = _of_others(facts)
        found = "; ".join([f"{own} for root, but {others}" if others else own, *_registered(facts)])
        return info(found, **actions) if others else passed(found)
    if not facts.capable:
        less = ", less than RDMA needs (bpsfast explain RD01)" if soft < _LEAST_LOCKED_NBYTES else ""
        return skipped(f"no RDMA device; the limit would be {size(soft)}{less}")
    found = size(soft)
    if hard != soft:
        found += f" (hard limit {'unlimited' if hard is None else size(hard)})"
    login = facts.login_memlock
    if login is not None and (login[0] is None or login[0] > soft):
        found += f", though {login[1]} gives {size(login[0]) if login[0] else 'no limit'} to new logins"
    refused = _registered(facts, refused=True)
    if hard is None or hard > soft:
        actions = {"now": f"ulimit -l {'unlimited' if hard is None else hard // 1024}   # this shell only"} | actions
    if refused or soft < _LEAST_LOCKED_NBYTES:
        need = f"{found}, need at least {size(_LEAST_LOCKED_NBYTES)}, better no limit{_why(facts)}"
        return failed("\n".join([need, *refused]), **actions)
    return warned(f"{found}: a job registers every gradient buffer, several times the model's gradients{_why(facts)}",
                  **actions)


def registrations(facts: Facts) -> Outcome:
    """RD02: check that there are enough mappings and memory regions."""
    limit = facts.host.tree.number("proc/sys/vm/max_map_count")
    maps = len((facts.host.tree.text("proc/self/maps") or "").splitlines())
    refused = _registered(facts, refused=True)
    if refused and (facts.memlock_nbytes[0] is None or facts.can_lock_memory):
        return failed("\n".join(["registration fails although locked memory is not limited", *refused]),
                      host="sudo sysctl -w vm.max_map_count=1048576",
                      check="dmesg | tail   # a card out of memory regions says so there")
    regions = {name: opened.attributes["max_mr"] for name, opened in facts.opened.items()
               if "max_mr" in opened.attributes}
    low = ", ".join(f"{name} {number}" for name, number in regions.items() if number < _LEAST_REGIONS)
    if low:
        return warned(f"few memory regions: max_mr {low} (bpsfast registers whole slabs, so this may suffice)",
                      host="lower the number of processes that share the card, or use another one")
    if limit is None:
        return skipped("/proc/sys/vm/max_map_count cannot be read")
    if limit < _LEAST_MAPS or maps > limit // 2:
        return warned(f"vm.max_map_count {limit}, {maps} mappings in use here",
                      **facts.variants("sudo sysctl -w vm.max_map_count=1048576   # lasting: in /etc/sysctl.d",
                                       "on the host, not in the container: sudo sysctl -w vm.max_map_count=1048576",
                                       "on the node: sysctl -w vm.max_map_count=1048576"))
    return passed(f"vm.max_map_count {limit}" + (f", max_mr {min(regions.values())}" if regions else ""))


def shared_memory(facts: Facts) -> Outcome:
    """RD20: check the size of /dev/shm."""
    nbytes = facts.host.kernel.shm_nbytes()
    if nbytes is None:
        return info("there is no /dev/shm; bpsfast shares memory without it, torch's data loaders do not",
                    **facts.variants("sudo mount -t tmpfs shm /dev/shm", "docker run --ipc=host ...",
                                     "mount an emptyDir with medium: Memory at /dev/shm"))
    if nbytes < _LEAST_SHM_NBYTES:
        return info(f"/dev/shm has {size(nbytes)}: enough for bpsfast, which shares memory by memfd; "
                    "torch's data loaders and NCCL want more",
                    **facts.variants("sudo mount -o remount,size=50% /dev/shm",
                                     "docker run --shm-size=8g ...   # or --ipc=host",
                                     "mount an emptyDir with medium: Memory at /dev/shm"))
    return passed(f"/dev/shm has {size(nbytes)}")


def _registered(facts: Facts, refused: bool = False) -> list[str]:
    """Return how much each device registered in the test; *refused*: only failed tests, with their errors."""
    groups: dict[tuple[int, str], list[str]] = {}
    for name, opened in facts.opened.items():
        if opened.registration_error if refused else not opened.error:
            error = f", then: {opened.registration_error}" if refused else ""
            groups.setdefault((opened.registered_nbytes, error), []).append(name)
    return [f"{', '.join(names)} registered {size(nbytes) if nbytes else 'nothing'}{error}"
            for (nbytes, error), names in groups.items()]


def _of_others(facts: Facts) -> str:
    """Return why ordinary users cannot register memory although root (this process) can; "" if they can."""
    if facts.uid != 0 or not facts.capable:
        return ""
    nbytes, source = facts.login_memlock or (facts.memlock_nbytes[0], "as the limit here")
    if nbytes is None or nbytes >= _LEAST_LOCKED_NBYTES:
        return ""
    return f"an ordinary user may lock {size(nbytes)} ({source}), too little to register memory"


def _why(facts: Facts) -> str:
    """Return why CAP_IPC_LOCK does not lift the limit where it might be expected to."""
    if facts.container and facts.uid > 0:
        return f" (CAP_IPC_LOCK is not effective: uid {facts.uid})"
    return " (root, but CAP_IPC_LOCK is missing or of a user namespace)" if facts.uid == 0 else ""


def fork(facts: Facts) -> Outcome:
    """RD10: check that registered memory survives a fork (data loaders, subprocess)."""
    report = facts.verbs
    if report is None or report.error:
        if facts.host.devices and facts.kernel_version >= _COPY_ON_FORK:
            return passed(f"kernel {facts.kernel_release} copies pinned pages for the child")
        return skipped("libibverbs was not queried" if facts.host.devices else "no RDMA device")
    if report.fork == "unneeded":
        return passed("the kernel copies pinned pages for the child (ibv_fork_init is not needed)")
    if report.fork == "enabled":
        return passed("ibv_fork_init is on: registered pages stay with the parent")
    return warned(f"fork safety is off ({report.fork}): a data loader that forks may corrupt or lose registered memory",
                  host="RDMAV_FORK_SAFE=1 python train.py   # set before the process starts",
                  job="DataLoader(..., multiprocessing_context='forkserver')")


def gpu_memory(facts: Facts) -> Outcome:
    """RD12: check whether the network card can access GPU memory directly."""
    if "nvidia" not in facts.modules and "amdgpu" not in facts.modules:
        return skipped("no GPU driver is loaded")
    ours = "bpsfast sums in host memory and registers no GPU memory"
    if "nvidia" in facts.modules and not facts.modules & {"nvidia_peermem", "nv_peer_mem"}:
        dma_buf = (", dma-buf may do (kernel " + facts.kernel_release + ")" if facts.kernel_version >= _DMA_BUF
                   else f", nor has kernel {facts.kernel_release} dma-buf for it")
        return info(f"nvidia_peermem is not loaded{dma_buf}; {ours}, but NCCL and perftest --use_cuda want it",
                    **facts.variants("sudo modprobe nvidia-peermem", "on the host: modprobe nvidia-peermem",
                                     "on the node: modprobe nvidia-peermem, or the GPU operator with rdma.enabled"))
    return passed(f"the modules for it are loaded; {ours}")


CHECKS = (
    Check("RD01", "locked memory", Severity.BLOCKS,
          ("ibv_reg_mr: Cannot allocate memory", "ibv_create_cq(cqe=4096) failed: Cannot allocate memory",
           "NCCL silently falls back to sockets"),
          "RLIMIT_MEMLOCK is the distribution's default (64 KiB or 8 MiB). Registered memory is locked memory.",
          "Without registered memory there is no RDMA: jobs end, or go on over TCP.",
          "openucx/ucx#8229, bytedance/byteps#282 and #372, NVIDIA/nvidia-container-toolkit#2037", locked_memory,
          advice(host=_MEMLOCK_HOST, docker=_MEMLOCK_DOCKER, k8s=_MEMLOCK_K8S, slurm=_MEMLOCK_SLURM,
                 check="ulimit -l   # must print unlimited")),
    Check("RD02", "registrations", Severity.BLOCKS,
          ("ibv_reg_mr: Cannot allocate memory, although ulimit -l is unlimited",),
          "Too many mappings for vm.max_map_count, or too many memory regions for the card (max_mr).",
          "Registration fails after a while, mostly when a job grows.",
          "openucx/ucx#6264, bytedance/byteps#295", registrations,
          advice(host="sudo sysctl -w vm.max_map_count=1048576",
                 check="cat /proc/sys/vm/max_map_count; ibv_devinfo -v | grep max_mr")),
    Check("RD20", "/dev/shm", Severity.INFORMS,
          ("Bus error in a container", "unable to open shared memory object"),
          "A container's /dev/shm has 64 MiB by default.",
          "bpsfast does not use it, but data loaders and other libraries in the same process do.",
          "the documentation of docker run --shm-size", shared_memory,
          advice(docker="docker run --shm-size=8g ...   # or --ipc=host",
                 k8s="mount an emptyDir with medium: Memory at /dev/shm", check="df -h /dev/shm")),
    Check("RD10", "fork", Severity.SLOW,
          ("a DataLoader worker ends with a segmentation fault", "Work Request Flushed Error after a fork",
           "local protection error some time after os.fork()"),
          "A fork marks all pages copy-on-write. On kernels before 5.12 the parent may then get the copy, while the "
          "card still writes into the old page.",
          "Data arrives in pages that no process reads, or the child crashes.",
          "facebookincubator/gloo#340, aws/aws-ofi-nccl#69, linux-rdma/rdma-core PR#1431", fork,
          advice(host="RDMAV_FORK_SAFE=1 python train.py",
                 job="DataLoader(..., multiprocessing_context='forkserver')")),
    Check("RD12", "GPU memory", Severity.SLOW,
          ("Couldn't allocate MR, only with --use_cuda", "status 4 vendor error 0x51 with GPU buffers"),
          "The module that lets the card reach GPU memory (nvidia_peermem) is not loaded, and dma-buf is not "
          "supported.",
          "Other libraries copy through host memory; bpsfast does so by design.",
          "linux-rdma/perftest#126, #269 and #280", gpu_memory,
          advice(host="sudo modprobe nvidia-peermem", check="lsmod | grep peermem")),
)
