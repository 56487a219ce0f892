"""A trainer without a framework: a two-layer network in NumPy with its own backward pass, on several ranks.

    bpsfast run -n 4 --nodes 2 -- python examples/custom_trainer.py

Each rank has its own samples. A gradient is announced as soon as backward has computed it, and the rank waits for the
sum only when the next forward pass needs the layer, so sums overlap with computing.
"""
import numpy as np

import bpsfast

N_STEPS, N_SAMPLES, RATE = 200, 64, 0.2
LAYERS = {"w1": ((16, 32), "float32"), "b1": ((32,), "float32"), "w2": ((32, 1), "float32"), "b2": ((1,), "float32")}


def samples(generator):
    """Return inputs and the values of the function to learn."""
    x = generator.standard_normal((N_SAMPLES, 16), dtype=np.float32)
    return x, np.sin(x[:, :1]) * x[:, 1:2]


def update(parameters, gradients, names):
    """Apply the mean gradients of *names*, waiting for them."""
    for name in names:
        parameters[name] -= RATE * gradients.wait(name)


def forward(parameters, gradients, x, first_step):
    """Return hidden activations and outputs; each layer is updated just before it is used."""
    if not first_step:
        update(parameters, gradients, ["w1", "b1"])
    hidden = np.tanh(x @ parameters["w1"] + parameters["b1"])
    if not first_step:
        update(parameters, gradients, ["w2", "b2"])
        gradients.step()
    return hidden, hidden @ parameters["w2"] + parameters["b2"]


def backward(parameters, gradients, x, hidden, error):
    """Write each gradient into shared memory and announce it."""
    slope = 2 * error / len(x)
    np.matmul(hidden.T, slope, out=gradients["w2"])
    gradients.ready("w2")
    slope.sum(axis=0, out=gradients["b2"])
    gradients.ready("b2")
    slope = slope @ parameters["w2"].T * (1 - hidden**2)
    np.matmul(x.T, slope, out=gradients["w1"])
    gradients.ready("w1")
    slope.sum(axis=0, out=gradients["b1"])
    gradients.ready("b1")


def main():
    bpsfast.init()
    start = np.random.default_rng(0)
    parameters = {name: start.normal(0, 0.3, shape).astype(dtype) for name, (shape, dtype) in LAYERS.items()}
    for name, array in parameters.items():
        bpsfast.broadcast(array, root_rank=0, name=name)
    gradients = bpsfast.Gradients(LAYERS)
    generator = np.random.default_rng(1 + bpsfast.rank())
    for step in range(N_STEPS):
        x, target = samples(generator)
        hidden, output = forward(parameters, gradients, x, first_step=step == 0)
        backward(parameters, gradients, x, hidden, output - target)
        if step % 50 == 0 and bpsfast.rank() == 0:
            print(f"step {step}: loss {np.mean((output - target) ** 2):.4f}", flush=True)
    gradients.step()
    of_rank_0 = [bpsfast.broadcast(p.copy(), root_rank=0) for p in parameters.values()]  # all ranks, in order
    same = all((p == other).all() for p, other in zip(parameters.values(), of_rank_0))
    n_same = bpsfast.push_pull(np.array([same], np.int32), average=False, name="check")[0]
    if bpsfast.rank() == 0:
        print(f"same parameters on {n_same} of {bpsfast.size()} ranks")
    bpsfast.shutdown()


if __name__ == "__main__":
    main()
