#!/usr/bin/env bash
# transformers 5.24.0: with an IterableDataset, Trainer adds up two steps' gradients after an epoch.
#
# With gradient_accumulation_steps=3, a step uses the mean gradient of three batches. If an epoch
# has eight batches, two are left over at its end. Trainer takes a step with them if the dataset has
# a length. An IterableDataset has none, as when streaming, so Trainer doesn't see that the epoch
# ends here. It takes no step, but doesn't clear the gradient either. The next epoch counts from 0,
# and adds the gradient of its first three batches, so that this step has the sum of two means. The
# logged loss of this step is the sum of two losses. There is no warning.
#
# One would expect a step with the two batches, as with a length, and as in Accelerate's own loop,
# or a step with these two and one of the next epoch. (In 2023 pull request 22098 mended a similar
# fault, where an epoch's length is known.) If the dataset repeats itself without an end, as
# datasets.IterableDataset.repeat(None) does, steps are right.
#
# Here all examples are the same, and the learning rate is 0, so all steps must have the same loss
# and the same norm of the gradient. Both are from Trainer's own log. (The norm is logged before it
# is clipped. Clipping, on by default, limits the step's size if the norm is above 1.)
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU; transformers 4.57.6 does the same), with eight batches
# in an epoch:
#
#   a list, steps of three batches
#     loss      3.79  3.79  3.79  3.79  3.79  3.79  3.79  3.79  3.79
#     gradient  3.83  3.83  3.83  3.83  3.83  3.83  3.83  3.83  3.83
#   an IterableDataset with a length, steps of three batches
#     the same
#   an endless IterableDataset, steps of three batches
#     the same
#   an IterableDataset, steps of four batches
#     the same
#   an IterableDataset, steps of three batches
#     loss      3.79  3.79  7.57  3.79  7.57  3.79  7.57  3.79  7.57
#     gradient  3.83  3.83  7.66  3.83  7.66  3.83  7.66  3.83  7.66
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 \
    numpy==2.4.6
cd "$folder"
venv/bin/python - 2>warnings.txt <<'PYTHON' || { cat warnings.txt; exit 1; }
from itertools import count

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
EXAMPLE = {"input_ids": torch.arange(1, 9), "labels": torch.arange(1, 9)}
SIZE = 16


class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (EXAMPLE for _ in range(SIZE))


class WithLength(Streamed):
    def __len__(self):
        return SIZE


class Endless(Streamed):
    def __iter__(self):
        return (EXAMPLE for _ in count())


def log_of(dataset, accumulate):
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=9,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulate,
        learning_rate=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [[float(entry[key]) for entry in log] for key in ("loss", "grad_norm")]


expected = None
for title, dataset, accumulate in (
    ("a list, steps of three batches", [EXAMPLE] * SIZE, 3),
    ("an IterableDataset with a length, steps of three batches", WithLength(), 3),
    ("an endless IterableDataset, steps of three batches", Endless(), 3),
    ("an IterableDataset, steps of four batches", Streamed(), 4),
    ("an IterableDataset, steps of three batches", Streamed(), 3),
):
    print(title)
    log = log_of(dataset, accumulate)
    if expected is None:
        expected = log
        assert all(abs(number / row[0] - 1) < 1e-3 for row in log for number in row)
    factors = [[n / e for n, e in zip(*rows)] for rows in zip(log, expected)]
    if all(abs(factor - 1) < 1e-3 for row in factors for factor in row) and log is not expected:
        print("  the same")
    else:
        for name, row in zip(("loss", "gradient"), log):
            print(f"  {name:8}", " ".join(f"{number:5.2f}" for number in row))
    faulty = title == "an IterableDataset, steps of three batches"
    seen = [1, 1, 2, 1, 2, 1, 2, 1, 2] if faulty else [1] * 9
    assert all(abs(f - s) < 0.01 for row in factors for f, s in zip(row, seen))
PYTHON
