"""A Gluon network that reads handwritten digits, on several ranks. It needs MXNet 1.9.1, numpy<1.24 and scikit-learn.

    bpsfast run -n 4 --nodes 2 --helpers 1 -- python examples/mxnet_digits.py
"""
import hashlib

import mxnet as mx
import numpy as np
from mxnet.gluon import loss, nn
from sklearn.datasets import load_digits

import bpsfast.mxnet as bps

N_STEPS, N_SAMPLES = 200, 32


def main():
    bps.init()
    digits = load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target.astype(np.float32)
    test, rest = slice(0, 300), slice(300, None)
    mx.random.seed(bps.rank())  # ranks begin with different weights; the trainer broadcasts rank 0's
    net = nn.Sequential()
    net.add(nn.Dense(48, activation="relu"), nn.Dense(10))
    net.initialize(mx.init.Xavier())
    trainer = bps.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": 5e-3})
    cross_entropy, order = loss.SoftmaxCrossEntropyLoss(), np.random.default_rng(0)
    for _ in range(N_STEPS):
        parts = order.permutation(len(x[rest]))[:N_SAMPLES * bps.size()].reshape(bps.size(), N_SAMPLES)
        mine = parts[bps.rank()]
        with mx.autograd.record():
            value = cross_entropy(net(mx.nd.array(x[rest][mine])), mx.nd.array(y[rest][mine]))
        value.backward()
        trainer.step(N_SAMPLES)
    accuracy = float((net(mx.nd.array(x[test])).asnumpy().argmax(1) == y[test]).mean())
    digest = hashlib.sha256(b"".join(p.data().asnumpy().tobytes() for p in net.collect_params().values()))
    print(f"rank {bps.rank()}: accuracy {accuracy:.3f}, parameters {digest.hexdigest()[:16]}", flush=True)
    bps.shutdown()


if __name__ == "__main__":
    main()
