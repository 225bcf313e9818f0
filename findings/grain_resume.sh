#!/usr/bin/env bash
# Grain 0.2.18: resumed from a checkpoint, ConcatThenSplitIterDataset loses a document.
#
# It packs documents into rows of a fixed length: it joins them and cuts the text into rows. Grain
# promises that a resumed iterator goes on as if it had not stopped. If a row ends where a document
# ends, no part of a document is left over, and the state says so by (-1, -1). A checkpoint is a
# JSON file, in which a tuple becomes a list. When it is read again, [-1, -1] != (-1, -1), so Grain
# takes the next document for one that is used already in part, and takes the rest of it to be
# document[-1:-1], which is empty. This document is lost, and all later rows are shifted. There is
# no error, and set_state(get_state()), without a file, is right.
#
# If all documents have one length that divides the row's, as in many puzzles, it happens at every
# checkpoint. With lengths at random it happens at the start, and then rarely. It is frequent, too,
# with split_full_length_features=False and some documents of a row's length. Until it is mended,
# make tuples of the lists in state["remainder_slices"] before set_state(), as below.
#
# Here a checkpoint is written after 0, 1, 2, .. rows by the handler that Grain has for Orbax, and
# read into a new iterator. Each token is a number of its own. How many tokens come neither before
# the checkpoint nor after it? ("First fit" is another way of packing.)
#
# Seen on 2026-11-28 (NumPy 2.4.6):
#
#   documents of 32 tokens in rows of 128
#     set_state(get_state()): 0 of 30 lose tokens
#     a checkpoint:           30 of 30 lose tokens (32)
#     a checkpoint, tuples:   0 of 30 lose tokens
#     first fit:              0 of 30 lose tokens
#   documents of 20 to 100 tokens
#     set_state(get_state()): 0 of 30 lose tokens
#     a checkpoint:           2 of 30 lose tokens (69), after 0, 1 rows
#     a checkpoint, tuples:   0 of 30 lose tokens
#     first fit:              0 of 30 lose tokens
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet grain==0.2.18 numpy==2.4.6
cd "$folder"
venv/bin/python - 2>warnings.txt <<'PYTHON' || { cat warnings.txt; exit 1; }
import json
import random
from pathlib import Path

import grain
import numpy as np

ROW, CHECKPOINTS = 128, 30
HERE = Path(".")
handler = grain.checkpoint.CheckpointHandler()


def new_iterator(lengths, first_fit):
    ends = np.cumsum(lengths)
    documents = [{"x": np.arange(end - n, end) + 1} for n, end in zip(lengths, ends)]  # 0 pads
    documents = grain.MapDataset.source(documents).to_iter_dataset()
    settings = dict(length_struct={"x": ROW})
    if first_fit:
        settings["num_packing_bins"] = 4
        return iter(grain.experimental.FirstFitPackIterDataset(documents, **settings))
    return iter(grain.experimental.ConcatThenSplitIterDataset(documents, **settings))


def by_set_state(old, new):
    new.set_state(old.get_state())


def by_checkpoint(old, new):
    handler.save(HERE, old)
    handler.restore(HERE, new)


def by_tuples(old, new):
    handler.save(HERE, old)
    (path,) = HERE.glob("process_*.json")
    state = json.loads(path.read_text())
    state["remainder_slices"] = {k: tuple(v) for k, v in state["remainder_slices"].items()}
    new.set_state(state)


def tokens_of(rows):
    return {token for row in rows for token in row["x"].tolist() if token}


def losses(lengths, resume, first_fit):
    """How many tokens are lost after a checkpoint, for those after 0, 1, .. rows"""
    every = tokens_of(new_iterator(lengths, first_fit))
    assert every == set(range(1, sum(lengths) + 1))
    counts = []
    for rows in range(CHECKPOINTS):
        old, new = new_iterator(lengths, first_fit), new_iterator(lengths, first_fit)
        seen = tokens_of(next(old) for _ in range(rows))
        resume(old, new)
        counts.append(len(every - seen - tokens_of(new)))
    return counts


WAYS = {
    "set_state(get_state())": (by_set_state, False),
    "a checkpoint": (by_checkpoint, False),
    "a checkpoint, tuples": (by_tuples, False),
    "first fit": (by_checkpoint, True),
}
generator = random.Random(0)
for title, lengths in (
    ("documents of 32 tokens in rows of 128", [32] * 200),
    ("documents of 20 to 100 tokens", [generator.randint(20, 100) for _ in range(100)]),
):
    print(title)
    for name, (resume, first_fit) in WAYS.items():
        counts = losses(lengths, resume, first_fit)
        after = [rows for rows, lost in enumerate(counts) if lost]
        words = ""
        if after:
            lost = sorted({counts[rows] for rows in after})
            words = f" ({', '.join(map(str, lost))})"
            if len(after) < CHECKPOINTS:
                words += f", after {', '.join(map(str, after))} rows"
        print(f"  {name}:".ljust(25), f"{len(after)} of {CHECKPOINTS} lose tokens{words}")
        if name != "a checkpoint":
            assert not after
        elif lengths[0] == lengths[1]:
            assert counts == [32] * CHECKPOINTS
        else:
            assert {0, 1} <= set(after) and len(after) < CHECKPOINTS / 2
PYTHON
