"""What depends on the version of torch, or on its C++: options, compiled code, built-in communication hooks."""
from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._dynamo import eval_frame

from ...orchestration.errors import UnsupportedError
from .operands import Reduction

NAME = "bpsfast"
#: They were the process group's until 2.5.
BackendOptions: Any = getattr(_distributed_c10d.Backend, "Options", None) or vars(
    _distributed_c10d.ProcessGroup)["Options"]

_OPS = {"SUM": "sum", "AVG": "avg", "PRODUCT": "product", "MIN": "min", "MAX": "max", "BAND": "band", "BOR": "bor",
        "BXOR": "bxor"}


#: In torch up to 2.6 a Work written in Python loses its Python half when only C++ refers to it; 2.13 keeps it.
LOSES_PYTHON_WORK = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8)


def reduction(options: Any) -> Reduction:
    """Return what the ``reduceOp`` of *options* says."""
    op = options.reduceOp
    kind = getattr(op, "op", op)
    name = getattr(kind, "name", str(kind).rpartition(".")[2])
    if name == "PREMUL_SUM":
        return Reduction("sum", op.__getstate__()[1])
    if name not in _OPS:
        raise UnsupportedError(f"ReduceOp.{name} is unknown; bpsfast combines by {', '.join(_OPS)} and PREMUL_SUM")
    return Reduction(_OPS[name])


def is_waited_for(options: Any) -> bool:
    """Whether the caller will wait at once; false where this version of torch does not say."""
    return not getattr(options, "asyncOp", True)


def timeout_of(options: Any, default_s: float) -> float:
    """Return the deadline that *options* give, else *default_s*; seconds."""
    timeout = getattr(options, "timeout", None)
    if isinstance(timeout, timedelta) and timeout.total_seconds() > 0:
        return timeout.total_seconds()
    return default_s


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return *function* as one that `torch.compile` calls and does not trace: the graph breaks before it.

    As `torch.compiler.disable`, which imports the compiler for it: seconds, in every process that compiles nothing.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        callback = eval_frame.set_eval_frame(None)
        try:
            return function(*arguments, **keywords)
        finally:
            eval_frame.set_eval_frame(callback)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = "it talks to other processes"  # type: ignore[attr-defined]
    call._torchdynamo_disable_recursive = True  # type: ignore[attr-defined]
    _skip(call.__code__)  # type: ignore[attr-defined]
    return call


def _skip(code: CodeType) -> None:
    """Let the compiler run frames of *code* as they are."""
    if hasattr(eval_frame, "skip_code"):  # up to torch 2.6
        eval_frame.skip_code(code)
    else:
        actions = eval_frame._FrameAction
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(actions.SKIP, actions.DEFAULT))


@functools.cache
def serve_builtin_hooks() -> None:
    """Let DistributedDataParallel over a group of ours take the hook in Python in place of the built-in FP16_COMPRESS.

    That one wants its future's value as a list of C++ tensors, which a future made in Python never has.
    """
    module: Any = torch.nn.parallel.DistributedDataParallel
    builtin = getattr(module, "_register_builtin_comm_hook", None)
    if builtin is None:
        return

    @functools.wraps(builtin)
    def register(self: Any, comm_hook_type: Any) -> None:
        is_fp16 = comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS
        if is_fp16 and dist.get_backend(self.process_group) == NAME:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            self.register_comm_hook(self.process_group, fp16_compress_hook)
        else:
            builtin(self, comm_hook_type)

    module._register_builtin_comm_hook = register
