"""Handwritten digits with Hugging Face Accelerate.

    BPSFAST_TORCH_AUTOLOAD=1 torchrun --nproc-per-node 2 examples/mnist_accelerate.py

Accelerate supports only gloo and MPI on CPUs, and rejects other names in InitProcessGroupKwargs; but it uses a process
group that exists already.
"""
import mnist_ddp
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader


def main():
    dist.init_process_group("bpsfast")
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    training, testing = mnist_ddp.digits()
    model = mnist_ddp.network()
    model, optimizer, batches, test_batches = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        DataLoader(training, batch_size=32, shuffle=True), DataLoader(testing, batch_size=64))
    for _ in range(2):
        for images, labels in batches:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
    model.eval()
    found = []
    with torch.no_grad():
        for images, labels in test_batches:
            found.append(accelerator.gather_for_metrics(model(images).argmax(1) == labels))
    read_right = torch.cat(found)
    accelerator.print(f"{dist.get_backend()}: {read_right.float().mean():.1%} of {len(read_right)} test images read "
                      f"right by {accelerator.num_processes} processes")
    accelerator.end_training()  # ends the group, too


if __name__ == "__main__":
    main()
