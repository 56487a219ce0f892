"""Handwritten digits with DistributedDataParallel: plain PyTorch with "bpsfast" instead of "gloo".

    BPSFAST_TORCH_AUTOLOAD=1 torchrun --nproc-per-node 2 examples/mnist_ddp.py
"""
import hashlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def digits():
    """Return images of 8 x 8 pixels with labels, for training and for testing."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target)
    return TensorDataset(images[:-297], labels[:-297]), TensorDataset(images[-297:], labels[-297:])


def network():
    """Return the model; its weights are random."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(512, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def accuracy(model, dataset):
    """Return the accuracy on *dataset*, of which each rank reads a part."""
    model.eval()
    images, labels = dataset[dist.get_rank()::dist.get_world_size()]
    with torch.no_grad():
        found = torch.tensor([(model(images).argmax(1) == labels).sum(), len(labels)])
    dist.all_reduce(found)
    model.train()
    return (found[0] / found[1]).item()


def train(n_epochs=3):
    """Train in the default process group; return a short checksum of the weights."""
    torch.manual_seed(0)
    training, testing = digits()
    sampler = DistributedSampler(training)
    batches = DataLoader(training, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(n_epochs):
        sampler.set_epoch(epoch)
        for images, labels in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        read_right = accuracy(model, testing)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, {read_right:.1%} of the test images read right", flush=True)
    weights = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
    return hashlib.sha256(weights).hexdigest()[:16]


def main():
    dist.init_process_group("bpsfast")
    digest = train()
    print(f"rank {dist.get_rank()}: weights {digest}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
