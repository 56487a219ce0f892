"""Handwritten digits with Lightning, whose strategy gets the name of the backend.

    BPSFAST_TORCH_AUTOLOAD=1 torchrun --nproc-per-node 2 examples/mnist_lightning.py
"""
import lightning
import mnist_ddp
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader


class Digits(lightning.LightningModule):
    """The network of mnist_ddp.py."""

    def __init__(self):
        super().__init__()
        self.network = mnist_ddp.network()

    def training_step(self, batch, _):
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch, _):
        images, labels = batch
        right = (self.network(images).argmax(1) == labels).float().mean()
        self.log("right", right, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main():
    lightning.seed_everything(0)
    training, testing = mnist_ddp.digits()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        strategy=DDPStrategy(process_group_backend="bpsfast"))
    trainer.fit(Digits(), DataLoader(training, batch_size=32, shuffle=True), DataLoader(testing, batch_size=297))
    if trainer.is_global_zero:
        print(f"{torch.distributed.get_backend()}: {trainer.callback_metrics['right']:.1%} of the test images read "
              "right", flush=True)


if __name__ == "__main__":
    main()
