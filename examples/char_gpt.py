"""A small GPT learns, character by character, to write like the documentation of Python's library.

    BPSFAST_TORCH_AUTOLOAD=1 torchrun --nproc-per-node 2 examples/char_gpt.py --steps 300

A typical trainer for a model of one's own. It accumulates gradients over micro-batches, of which only the last one
exchanges (`no_sync`), and clips them. The learning rate warms up and decays with a cosine. The loss on unseen text is
the mean over all ranks, and at the end rank 0 writes some text. The text comes with Python, so nothing is downloaded.
"""
import argparse
import ast
import contextlib
import math
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def documentation(n_modules=60):
    """Return the docstrings of modules of Python's library, one after another."""
    found = []
    for path in sorted(Path(ast.__file__).parent.glob("[a-z]*.py"))[:n_modules]:
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                found.append(ast.get_docstring(node) or "")
    return "\n\n".join(filter(None, found))


class Characters:
    """The alphabet of a text, which maps characters to numbers."""

    def __init__(self, text):
        self.letters = sorted(set(text))
        self._number = {letter: i for i, letter in enumerate(self.letters)}

    def numbers(self, text):
        """Return *text* as a tensor of int64."""
        return torch.tensor([self._number[letter] for letter in text])

    def text(self, numbers):
        """Return the text of *numbers*."""
        return "".join(self.letters[i] for i in numbers)


class Block(torch.nn.Module):
    """Attention to earlier positions, and a perceptron; both are added to the input."""

    def __init__(self, width, n_heads):
        super().__init__()
        self._n_heads = n_heads
        self.before_attention, self.before_mlp = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.query_key_value = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(),
                                       torch.nn.Linear(4 * width, width))

    def forward(self, x):
        n, length, width = x.shape
        heads = [part.view(n, length, self._n_heads, -1).transpose(1, 2)
                 for part in self.query_key_value(self.before_attention(x)).split(width, 2)]
        seen = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(torch.nn.Module):
    """Predicts the next character at each position of texts of up to *context* characters."""

    def __init__(self, n_letters, context, width, n_blocks, n_heads):
        super().__init__()
        self.context = context
        self.letters = torch.nn.Embedding(n_letters, width)
        self.places = torch.nn.Embedding(context, width)
        self.blocks = torch.nn.Sequential(*(Block(width, n_heads) for _ in range(n_blocks)))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, n_letters, bias=False)
        self.head.weight = self.letters.weight
        torch.nn.init.normal_(self.letters.weight, std=0.02)

    def forward(self, x):
        x = self.letters(x) + self.places(torch.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def write(self, start, n, generator):
        """Return *start* (int64, one dimension) with *n* more characters."""
        text = start[None]
        for _ in range(n):
            chances = self(text[:, -self.context:])[0, -1].softmax(0)
            text = torch.cat([text, torch.multinomial(chances, 1, generator=generator)[None]], 1)
        return text[0]


def batch(text, options, generator):
    """Return pieces of *text*, and the same pieces one character later."""
    starts = torch.randint(len(text) - options.context - 1, (options.batch,), generator=generator)
    pieces = torch.stack([text[start:start + options.context + 1] for start in starts])
    return pieces[:, :-1], pieces[:, 1:]


def loss_of(model, inputs, targets):
    return torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model, text, options):
    """Return the mean loss of all ranks, each on different pieces of *text*."""
    model.eval()
    generator = torch.Generator().manual_seed(dist.get_rank())
    loss = sum(loss_of(model.module, *batch(text, options, generator)) for _ in range(4)) / 4
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    model.train()
    return loss.item()


def rate(step, options):
    """Return the learning rate of *step*: a warm-up, then a cosine decay."""
    n_warmup = max(1, options.steps // 20)
    if step < n_warmup:
        return options.rate * (step + 1) / n_warmup
    return options.rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - n_warmup) / (options.steps - n_warmup))))


def step_of(model, optimizer, text, options, generator):
    """Train one step; return its loss on this rank."""
    optimizer.zero_grad()
    total = 0.0
    for micro in range(options.accumulate):
        is_last = micro == options.accumulate - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = loss_of(model, *batch(text, options, generator)) / options.accumulate
            loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total


def train(options):
    """Train in the default process group; return the model and its alphabet."""
    text = documentation()
    alphabet = Characters(text)
    numbers = alphabet.numbers(text)
    training, unseen = numbers[:-len(numbers) // 10], numbers[-len(numbers) // 10:]
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(len(alphabet.letters), options.context, options.width, 2, 4))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    began = time.perf_counter()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, options)
        loss = step_of(model, optimizer, training, options, generator)
        if (step + 1) % options.evaluate_every == 0 or step + 1 == options.steps:
            unseen_loss = evaluate(model, unseen, options)
            if dist.get_rank() == 0:
                print(f"step {step + 1}: loss {loss:.3f}, on unseen text {unseen_loss:.3f}, "
                      f"{(step + 1) / (time.perf_counter() - began):.1f} steps/s", flush=True)
    return model.module, alphabet


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="pieces of text of a micro-batch, on each rank")
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--evaluate-every", type=int, default=50)
    options = parser.parse_args()
    dist.init_process_group("bpsfast")
    model, alphabet = train(options)
    if dist.get_rank() == 0:
        written = model.write(alphabet.numbers("Return "), 200, torch.Generator().manual_seed(0))
        print(f"it writes: {alphabet.text(written.tolist())!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
