"""Train, evaluate and export the built-in model: `python -m parley.demo.train --out FOLDER --minutes 90`.

The budget is wall-clock time or, with `--steps`, a number of steps. The learning rate is constant after a short warm-up
and falls linearly over the last part of the budget, which brings most of the accuracy. A checkpoint is written every
few minutes, and the same command continues from it. At the end the model is exported in Hugging Face format and its
held-out accuracy is printed; `--eval-only` does only that, from the checkpoint. `--start FOLDER` trains an exported
model further, whose tokenizer stays as it is; a small `--rate` then keeps its knowledge.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from parley.demo import corpus
from parley.demo.evaluate import accuracy_table, evaluate_model
from parley.demo.export import export_model, load_demo_network
from parley.demo.network import DemoConfig, DemoNetwork
from parley.demo.optimiser import MuonAdam
from parley.demo.template import END_OF_TEXT
from parley.demo.tokenizer import encode_sample, require_token_id, train_tokenizer

TRAINING_SEED = 1
BATCH_TOKENS = 3072  # a multiple of each of BATCH_LENGTHS
BATCH_LENGTHS = (48, 64, 96, 128, 192, 256, 384, 512, 768)
WARMUP_STEPS = 60
DECAY_SHARE = 0.55
FINAL_SCALE = 0.02
# In the first part of the budget, most long batches are postponed: short ones teach more answers per second.
POSTPONE_SHARE = 0.3
POSTPONE_ABOVE = 192
CHECKPOINT_SECONDS = 300.0
LOG_STEPS = 50
IGNORED_TARGET = -100  # target of tokens that are not learnt; cross_entropy skips it

TrainingBatch = tuple[torch.Tensor, torch.Tensor]


def draw_batches(tokenizer: Tokenizer, seed: int, batch_tokens: int) -> Iterator[TrainingBatch]:
    """Yield batches (ids, targets) of `batch_tokens` without end; each has samples of about one length."""
    waiting: dict[int, list[tuple[list[int], list[bool]]]] = defaultdict(list)
    padding = require_token_id(tokenizer, END_OF_TEXT)
    for sample in corpus.draw_training(seed):
        ids, learnt = encode_sample(tokenizer, sample)
        if len(ids) > BATCH_LENGTHS[-1]:
            continue
        length = next(length for length in BATCH_LENGTHS if length >= len(ids))
        rows = waiting[length]
        rows.append((ids, learnt))
        if len(rows) * length == batch_tokens:
            inputs = torch.full((len(rows), length), padding)
            targets = torch.full((len(rows), length), IGNORED_TARGET)
            for row, (row_ids, row_learnt) in enumerate(rows):
                inputs[row, : len(row_ids)] = torch.tensor(row_ids)
                row_targets = [
                    token if write else IGNORED_TARGET for token, write in zip(row_ids, row_learnt, strict=True)
                ]
                targets[row, : len(row_ids) - 1] = torch.tensor(row_targets[1:])
            rows.clear()
            yield inputs, targets


class BatchFeed:
    """Yields the batches in training order; early in the training, most long ones are postponed."""

    def __init__(self, tokenizer: Tokenizer, seed: int, batch_tokens: int) -> None:
        self.stream = draw_batches(tokenizer, seed, batch_tokens)
        self.rng = random.Random(seed)
        self.postponed: list[TrainingBatch] = []

    def next_batch(self, progress: float) -> TrainingBatch:
        """Return the next batch. `progress`: the used share of the budget."""
        if progress >= POSTPONE_SHARE and self.postponed and self.rng.random() < 0.3:
            return self.postponed.pop()
        while True:
            batch = next(self.stream)
            if progress < POSTPONE_SHARE and batch[0].shape[1] > POSTPONE_ABOVE and self.rng.random() < 0.75:
                self.postponed.append(batch)
                continue
            return batch


def rate_scale(step: int, progress: float) -> float:
    """Return the factor of the learning rates at this step and share of the budget."""
    decay = min(1.0, (1 - progress) / DECAY_SHARE)
    return min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_SCALE + (1 - FINAL_SCALE) * max(0.0, decay))


@dataclass
class TrainingCounts:
    """Steps, seconds and tokens of the training so far, over all runs from the same checkpoint."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    learnt: int = 0


@dataclass(frozen=True)
class TrainingPlan:
    """The start, the budget and the rates of a training."""

    start: Path | None = None  # an exported model; None: new weights and a new tokenizer
    minutes: float = 90
    steps: int | None = None  # ends the training instead of the minutes
    rate: float = 1.0  # factor of all learning rates
    seed: int = TRAINING_SEED
    batch_tokens: int = BATCH_TOKENS

    def progress(self, counts: TrainingCounts) -> float:
        """Return the used share of the budget."""
        return counts.step / self.steps if self.steps else counts.seconds / (60 * self.minutes)


def _save_checkpoint(path: Path, network: DemoNetwork, optimiser: MuonAdam, counts: TrainingCounts) -> None:
    state = {"network": network.state_dict(), "optimiser": optimiser.state_dict(), "counts": asdict(counts)}
    new_path = path.with_suffix(".new")
    torch.save(state, new_path)
    new_path.replace(path)


def _start_network(tokenizer_path: Path, plan: TrainingPlan) -> tuple[DemoNetwork, Tokenizer]:
    """Return the network and the tokenizer before the first step; the tokenizer is kept in the checkpoint."""
    if plan.start is not None:
        network, tokenizer = load_demo_network(plan.start)
        tokenizer.save(str(tokenizer_path))
        return network, tokenizer
    if not tokenizer_path.exists():
        train_tokenizer(plan.seed).save(str(tokenizer_path))
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    return DemoNetwork(DemoConfig(vocab_size=tokenizer.get_vocab_size())), tokenizer


def _train_step(network: DemoNetwork, optimiser: MuonAdam, batch: TrainingBatch, scale: float) -> float:
    """Run one step; return the mean loss over the tokens that the model writes itself."""
    ids, targets = (part.to(network.device) for part in batch)
    learnt = targets.flatten().ne(IGNORED_TARGET)
    hidden = network(ids).flatten(0, 1)[learnt]
    loss = F.cross_entropy(network.logits(hidden), targets.flatten()[learnt])
    loss.backward()
    optimiser.step(scale)
    return loss.item()


def train_model(checkpoint: Path, plan: TrainingPlan, compiled: bool) -> tuple[DemoNetwork, Tokenizer]:
    """Train until the budget is used up, including steps and time of earlier runs that the checkpoint records."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    state_path = checkpoint / "state.pt"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(plan.seed)
    network, tokenizer = _start_network(checkpoint / "tokenizer.json", plan)
    network.to(device)
    padding = require_token_id(tokenizer, END_OF_TEXT)
    optimiser, counts = MuonAdam(network), TrainingCounts()
    if state_path.exists():
        state = torch.load(state_path, map_location=device, weights_only=True)
        network.load_state_dict(state["network"])
        optimiser.load_state_dict(state["optimiser"])
        counts = TrainingCounts(**state["counts"])
    if compiled:
        network.compile_parts()
    feed = BatchFeed(tokenizer, plan.seed + counts.step, plan.batch_tokens)
    print(f"{sum(p.numel() for p in network.parameters()):,} parameters, starting at {counts}", flush=True)
    started = saved = time.monotonic()
    before, losses = counts.seconds, 0.0
    while (progress := plan.progress(counts)) < 1:
        batch = feed.next_batch(progress)
        losses += _train_step(network, optimiser, batch, plan.rate * rate_scale(counts.step, progress))
        counts.step += 1
        counts.tokens += int(batch[0].ne(padding).sum())
        counts.learnt += int(batch[1].ne(IGNORED_TARGET).sum())
        counts.seconds = before + time.monotonic() - started
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            _save_checkpoint(state_path, network, optimiser, counts)
            saved = time.monotonic()
        if counts.step % LOG_STEPS == 0:
            print(f"{100 * progress:.1f} % loss {losses / LOG_STEPS:.4f} {counts}", flush=True)
            losses = 0.0
    _save_checkpoint(state_path, network, optimiser, counts)
    return network, tokenizer


def load_checkpoint(checkpoint: Path) -> tuple[DemoNetwork, Tokenizer]:
    """Load the network and the tokenizer of a checkpoint folder."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    network = DemoNetwork(DemoConfig(vocab_size=tokenizer.get_vocab_size()))
    network.load_state_dict(torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)["network"])
    return network, tokenizer


def main() -> None:
    """Train or load a checkpoint, then export and evaluate the model, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-model"), help="folder of the exported model")
    parser.add_argument("--checkpoint", type=Path, help="folder of the checkpoint (default: OUT-checkpoint)")
    parser.add_argument("--start", type=Path, help="exported model that the training starts from (default: none)")
    parser.add_argument("--minutes", type=float, default=90, help="time budget of the training")
    parser.add_argument("--steps", type=int, help="steps of the training, instead of the time budget")
    parser.add_argument("--rate", type=float, default=1.0, help="factor of the learning rates")
    parser.add_argument("--seed", type=int, default=TRAINING_SEED, help="seed of weights, tokenizer and samples")
    parser.add_argument(
        "--batch-tokens", type=int, default=BATCH_TOKENS, help="tokens of a step: a multiple of 1536, for all lengths"
    )
    parser.add_argument("--threads", type=int, help="number of CPU threads")
    parser.add_argument("--no-compile", action="store_true", help="train without torch.compile")
    parser.add_argument("--eval-only", action="store_true", help="evaluate and export the checkpoint as it is")
    parser.add_argument("--eval-count", type=int, default=100, help="held-out questions per task")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    checkpoint = options.checkpoint or options.out.with_name(options.out.name + "-checkpoint")
    if options.eval_only:
        network, tokenizer = load_checkpoint(checkpoint)
    else:
        if options.batch_tokens <= 0 or any(options.batch_tokens % length for length in BATCH_LENGTHS):
            parser.error(f"--batch-tokens must be a multiple of each of {BATCH_LENGTHS}, but is {options.batch_tokens}")
        plan = TrainingPlan(
            options.start, options.minutes, options.steps, options.rate, options.seed, options.batch_tokens
        )
        network, tokenizer = train_model(checkpoint, plan, not options.no_compile)
    export_model(network, tokenizer, options.out)
    print(accuracy_table(evaluate_model(options.out, options.eval_count)))


if __name__ == "__main__":
    main()
