"""SyncBatchNorm: batch normalisation by the mean and variance of all ranks' batches."""
from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from . import runtime
from .collective_ops import allgather, allreduce
from .reduce_op import Sum


class SyncBatchNorm(_BatchNorm):
    """As ``torch.nn.BatchNorm*d``, with the same parameters, of all ranks' batches together, which may differ in size.

    All ranks run its forward and backward passes equally often. (Horovod's takes GPU tensors only.)
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return *input*, of shape (batch, channels, ...), normalised."""
        self._check_input_dim(input)
        uses_batch = self.training or not self.track_running_stats
        if not uses_batch or runtime.current().size == 1:
            return super().forward(input)
        momentum = self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1 / int(self.num_batches_tracked) if momentum is None else momentum
        output, mean, variance, count = _Normalise.apply(input, self.weight, self.bias, self.eps)
        if self.training and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                unbiased = variance * (count / (count - 1).clamp(min=1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum or 0.0)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum or 0.0)
        return output


class _Normalise(torch.autograd.Function):
    """Combines the ranks' means and sums of squares by Chan's formula, which is numerically stable."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
                eps: float) -> tuple[torch.Tensor, ...]:
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        n_channels, n = x.shape[1], x.numel() // max(x.shape[1], 1)
        over = [dim for dim in range(x.dim()) if dim != 1]
        own_mean = x.mean(over) if n else x.new_zeros(n_channels)
        own_square = (x - _spread(own_mean, x)).square().sum(over)
        counts, means, squares = allgather(
            torch.stack([own_mean.new_full((n_channels,), n), own_mean, own_square]).unsqueeze(0),
            name="sync_batch_norm.stats").unbind(1)
        count = counts.sum(0)
        mean = (counts * means).sum(0) / count
        variance = (squares + counts * (means - mean).square()).sum(0) / count
        inverse = (variance + eps).rsqrt()
        normal = (x - _spread(mean, x)) * _spread(inverse, x)
        ctx.save_for_backward(normal, inverse, count, weight)
        ctx.has_bias = bias is not None
        output = normal if weight is None else normal * _spread(weight, x)
        output = output if bias is None else output + _spread(bias, x)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normal, inverse, count, weight = ctx.saved_tensors
        gradient = gradients[0].to(normal.dtype)
        over = [dim for dim in range(gradient.dim()) if dim != 1]
        own = torch.stack([gradient.sum(over), (gradient * normal).sum(over)])
        total, total_normal = allreduce(own, op=Sum, name="sync_batch_norm.gradient") / count
        of_input = (gradient - _spread(total, normal) - normal * _spread(total_normal, normal)) * _spread(
            inverse if weight is None else inverse * weight, normal)
        of_weight = own[1].to(weight.dtype) if weight is not None else None
        of_bias = own[0].to(weight.dtype) if weight is not None and ctx.has_bias else None
        return of_input.to(gradients[0].dtype), of_weight, of_bias, None


def _spread(channels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a value for each channel in a shape that broadcasts to *like*."""
    return channels.view(1, -1, *[1] * (like.dim() - 2))
