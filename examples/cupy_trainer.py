"""A trainer without a framework whose arrays may be on a GPU: a perceptron in NumPy or CuPy learns handwritten digits.

    bpsfast run -n 2 -- python examples/cupy_trainer.py --device cuda    # CuPy arrays, on each rank's current GPU
    bpsfast run -n 2 -- python examples/cupy_trainer.py --device host    # the host device: the same code, without a GPU
    bpsfast run -n 2 -- python examples/cupy_trainer.py --device none    # NumPy arrays in shared memory

A gradient is announced when the work that computes it is enqueued. When the next forward pass needs its layer, the
stream (not the host) waits for the sum. host and none end with the same weights, bit for bit.
"""
import argparse
import functools
import hashlib

import numpy as np

import bpsfast

N_EPOCHS, N_SAMPLES, N_TESTED, RATE = 20, 32, 297, 0.1
LAYERS = [("w1", (64, 128)), ("b1", (128,)), ("w2", (128, 64)), ("b2", (64,)), ("w3", (64, 10)), ("b3", (10,))]


def digits(xp):
    """Return images and one-hot labels, for training and for testing."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = xp.asarray((found.data / 16).astype(np.float32))
    labels = xp.asarray(np.eye(10, dtype=np.float32)[found.target])
    return images[:-N_TESTED], labels[:-N_TESTED], images[-N_TESTED:], labels[-N_TESTED:]


def weights(xp):
    """Return rank 0's random weights on all ranks; they are broadcast as NumPy arrays."""
    draw = np.random.default_rng(bpsfast.rank())
    found = {}
    for name, shape in LAYERS:
        start = draw.normal(0, (2 / shape[0]) ** 0.5 if len(shape) == 2 else 0, shape).astype(np.float32)
        found[name] = xp.asarray(bpsfast.broadcast(start, root_rank=0, name=name))
    return found


def update(parameters, gradients, layer):
    """Apply the mean gradients of one layer."""
    for name in (f"w{layer}", f"b{layer}"):
        parameters[name] -= RATE * gradients.wait(name)


def forward(xp, parameters, x, before=lambda layer: None):
    """Return the inputs of each layer, and the outputs; *before* is called with each layer before it is used."""
    inputs = []
    for layer in (1, 2, 3):
        before(layer)
        inputs.append(x)
        x = x @ parameters[f"w{layer}"] + parameters[f"b{layer}"]
        if layer < 3:
            x = xp.maximum(x, 0)
    return inputs, x


def backward(xp, parameters, gradients, inputs, slope):
    """Announce each gradient as soon as the work that computes it is enqueued."""
    for layer in (3, 2, 1):
        w, b = f"w{layer}", f"b{layer}"
        gradients[w][...] = inputs[layer - 1].T @ slope
        gradients.ready(w)
        gradients[b][...] = slope.sum(axis=0)
        gradients.ready(b)
        if layer > 1:
            slope = (slope @ parameters[w].T) * (inputs[layer - 1] > 0)


def train(xp, device):
    """Return the weights and their accuracy on the test images."""
    images, labels, test_images, test_labels = digits(xp)
    parameters = weights(xp)
    gradients = bpsfast.Gradients({name: (shape, np.float32) for name, shape in LAYERS}, device=device)
    order = np.random.default_rng(1)  # the same on all ranks; each uses its part
    size, under_way = bpsfast.size(), False
    for epoch in range(N_EPOCHS):
        steps = order.permutation(len(images))[: len(images) // (size * N_SAMPLES) * size * N_SAMPLES]
        for step in steps.reshape(-1, size, N_SAMPLES):
            own = xp.asarray(step[bpsfast.rank()])
            before = [functools.partial(update, parameters, gradients)] if under_way else []
            inputs, outputs = forward(xp, parameters, images[own], *before)
            if under_way:
                gradients.step()
            exp = xp.exp(outputs - outputs.max(axis=1, keepdims=True))
            slope = (exp / exp.sum(axis=1, keepdims=True) - labels[own]) / N_SAMPLES
            backward(xp, parameters, gradients, inputs, slope)
            under_way = True
        if bpsfast.rank() == 0:
            loss = -xp.log((exp * labels[own]).sum(axis=1) / exp.sum(axis=1)).mean()
            print(f"epoch {epoch}: loss {float(loss):.4f}", flush=True)
    for layer in (1, 2, 3):
        update(parameters, gradients, layer)
    gradients.step()
    _, outputs = forward(xp, parameters, test_images)
    return parameters, float((outputs.argmax(axis=1) == test_labels.argmax(axis=1)).mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "host", "none"], default="none")
    device = parser.parse_args().device
    bpsfast.init()
    if device == "cuda":
        import cupy as xp

        xp.cuda.Device(bpsfast.local_rank() % xp.cuda.runtime.getDeviceCount()).use()
    else:
        xp = np
    parameters, read_right = train(xp, None if device == "none" else device)
    own = b"".join((xp.asnumpy(p) if device == "cuda" else p).tobytes() for p in parameters.values())
    print(f"rank {bpsfast.rank()}: {read_right:.1%} of the test images read right, "
          f"weights {hashlib.sha256(own).hexdigest()[:16]}", flush=True)
    bpsfast.shutdown()


if __name__ == "__main__":
    main()
