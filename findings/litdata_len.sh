#!/usr/bin/env bash
# LitData 0.2.76: len() of a CombinedStreamingDataset sets its batch size to 1, so per-stream
# batches come out mixed.
#
# With batching_method="per_stream", a batch of a mixture comes from one of its datasets only. For
# this, the StreamingDataLoader tells the dataset its batch size. But len(dataset) calls
# get_len(1, 1), which stores the two numbers as numbers of workers and batch size. From then on the
# dataset changes after each sample, and all batches are mixed. There is no error. If you load a
# saved state into a loader, it asks for len(dataset), too, so a resumed run has mixed batches even
# if the first had none.
#
# One would expect that len() changes nothing. len(loader) doesn't, because it gives the loader's
# own numbers, and neither does len() of a StreamingDataset. As a workaround, call
# len(loader) after len(dataset) or load_state_dict().
#
# Here are two datasets of 96 samples, in batches of four. Below is how many batches have samples of
# both. (Resumed after 12 of 48.)
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU):
#
#   0 workers
#     new                               0 of 48
#     after len(loader)                 0 of 48
#     after len(dataset)               48 of 48
#     after len(dataset), len(loader)   0 of 48
#     resumed                          36 of 36
#     resumed, after len(loader)        0 of 36
#   2 workers
#     new                               0 of 48
#     after len(loader)                 0 of 48
#     after len(dataset)               48 of 48
#     after len(dataset), len(loader)   0 of 48
#     resumed                          36 of 36
#     resumed, after len(loader)        0 of 36
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 litdata==0.2.76
cd "$folder"
venv/bin/python -W ignore - 2>log <<'PYTHON' || (cat log && false)
import pickle
from contextlib import redirect_stdout
from itertools import islice

import litdata
from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset

SIZE = 96

for name, first in (("a", 0), ("b", SIZE)):
    settings = dict(output_dir=name, chunk_size=8, num_workers=1, start_method="fork")
    with open("log", "a") as log, redirect_stdout(log):
        litdata.optimize(fn=int, inputs=list(range(first, first + SIZE)), **settings)


def new_loader(workers):
    datasets = [StreamingDataset(name, shuffle=True) for name in ("a", "b")]
    mixture = CombinedStreamingDataset(datasets, batching_method="per_stream")
    return StreamingDataLoader(mixture, batch_size=4, num_workers=workers)


def is_mixed(batch):
    return len({sample < SIZE for sample in batch.tolist()}) == 2


def resumed(workers):
    loader = new_loader(workers)
    assert not any(is_mixed(batch) for batch in islice(loader, 12))
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    loader = new_loader(workers)
    loader.load_state_dict(state)
    return loader


def show(title, loader, expected):
    mixed = [is_mixed(batch) for batch in loader]
    print(f"  {title:33}{sum(mixed):2} of {len(mixed)}")
    assert sum(mixed) == (len(mixed) if expected else 0)


for workers in (0, 2):
    print(f"{workers} workers")
    show("new", new_loader(workers), False)
    loader = new_loader(workers)
    len(loader)
    show("after len(loader)", loader, False)
    loader = new_loader(workers)
    len(loader.dataset)
    show("after len(dataset)", loader, True)
    loader = new_loader(workers)
    len(loader.dataset), len(loader)
    show("after len(dataset), len(loader)", loader, False)
    show("resumed", resumed(workers), True)
    loader = resumed(workers)
    len(loader)
    show("resumed, after len(loader)", loader, False)
PYTHON
