"""Handwritten digits with the Trainer of Hugging Face Transformers.

    BPSFAST_TORCH_AUTOLOAD=1 torchrun --nproc-per-node 2 examples/mnist_hf_trainer.py

`--ddp_backend` accepts only certain names; but the Trainer uses a process group that exists already.
"""
import tempfile

import mnist_ddp
import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments


class Reader(torch.nn.Module):
    """A model for the Trainer: batches are keyword arguments, and the results have the loss."""

    def __init__(self):
        super().__init__()
        self.network = mnist_ddp.network()

    def forward(self, images, labels):
        logits = self.network(images)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def samples(dataset):
    return [{"images": image, "labels": label} for image, label in dataset]


def read_right(found):
    return {"right": (found.predictions.argmax(1) == found.label_ids).mean()}


def main():
    dist.init_process_group("bpsfast")
    torch.manual_seed(0)
    training, testing = mnist_ddp.digits()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=32, num_train_epochs=2, learning_rate=0.05,
            optim="sgd", lr_scheduler_type="cosine", report_to=[], disable_tqdm=True, save_strategy="no")
        trainer = Trainer(Reader(), arguments, train_dataset=samples(training), eval_dataset=samples(testing),
                          compute_metrics=read_right)
        trainer.train()
        metrics = trainer.evaluate()
    if dist.get_rank() == 0:
        print(f"{dist.get_backend()}: {metrics['eval_right']:.1%} of the test images read right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
