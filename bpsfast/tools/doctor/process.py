"""RD10, RD12: what the process itself does to its registered memory: it forks, or it lies in a GPU."""
from __future__ import annotations

from .facts import Facts
from .finding import Check, Outcome, Severity, advice, passed, skipped, told, warned

#: The first kernel that copies pinned pages for the child, so that the parent keeps its own (copy on fork).
_COPY_ON_FORK = (5, 12)
#: The first kernel whose mlx5 registers GPU memory by dma-buf.
_DMA_BUF = (5, 12)


def fork(facts: Facts) -> Outcome:
    """RD10: does registered memory survive a fork (data loaders, subprocess)?"""
    report = facts.verbs
    if report is None or report.error:
        if not facts.host.devices:
            return skipped("no RDMA device")
        if facts.kernel_version >= _COPY_ON_FORK:
            return passed(f"kernel {facts.kernel_release} copies pinned pages for the child")
        return skipped("libibverbs was not asked")
    if report.fork == "unneeded":
        return passed("the kernel copies pinned pages for the child (ibv_fork_init is not needed)")
    if report.fork == "enabled":
        return passed("ibv_fork_init is on: registered pages stay with the parent")
    return warned(f"fork safety is off ({report.fork}): a data loader that forks may corrupt or lose registered memory",
                  host="RDMAV_FORK_SAFE=1 python train.py   # set before the process starts",
                  job="DataLoader(..., multiprocessing_context='forkserver')")


def gpu_memory(facts: Facts) -> Outcome:
    """RD12: could the card reach GPU memory by itself?"""
    if "nvidia" not in facts.modules and "amdgpu" not in facts.modules:
        return skipped("no GPU driver is loaded")
    ours = "bpsfast sums in host memory and registers no GPU memory"
    if "nvidia" in facts.modules and not facts.modules & {"nvidia_peermem", "nv_peer_mem"}:
        dma_buf = (", dma-buf may do (kernel " + facts.kernel_release + ")" if facts.kernel_version >= _DMA_BUF
                   else f", nor has kernel {facts.kernel_release} dma-buf for it")
        return told(f"nvidia_peermem is not loaded{dma_buf}; {ours}, but NCCL and perftest --use_cuda want it",
                    **facts.variants("sudo modprobe nvidia-peermem", "on the host: modprobe nvidia-peermem",
                                     "on the node: modprobe nvidia-peermem, or the GPU operator with rdma.enabled"))
    return passed(f"the modules for it are loaded; {ours}")


MORE_CHECKS = (
    Check("RD10", "fork", Severity.SLOW,
          ("a DataLoader worker ends with a segmentation fault", "Work Request Flushed Error after a fork",
           "local protection error some time after os.fork()"),
          "A fork marks all pages copy-on-write. On kernels before 5.12 the parent may then get the copy, while the "
          "card still writes into the old page.",
          "Data arrives in pages that nobody reads, or the child dies.",
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
