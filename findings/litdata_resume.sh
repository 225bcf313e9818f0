#!/usr/bin/env bash
# LitData 0.2.76: resumed with several workers, a CombinedStreamingDataset reads samples twice and
# leaves out others.
#
# All workers of the StreamingDataLoader draw the datasets in the same order, so they are about
# equally far in each dataset, but rarely at a whole number of batches. The state keeps only the sum
# over the workers for each dataset. When it is loaded, the sum is dealt out in whole batches, and
# the remainder goes to one worker. So some workers read a few samples again, and others skip a few.
# The number of samples is right, and there is no error.
#
# One would expect the rest of the epoch, because the README says that such a loader can resume with
# the same numbers of processes and workers and the same batch size. A StreamingDataset alone does
# so with several workers, and a mixture with none or one.
#
# Here are two datasets of 2,000 samples, shuffled and mixed, in batches of eight. After some of 500
# batches the state is saved, and loaded into a new loader. Below is how many of the 4,000 samples
# of the epoch come twice. As many never come.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU):
#
#   after batch                  50  100  150  200  240
#   one dataset, 0 workers        0    0    0    0    0
#   one dataset, 4 workers        0    0    0    0    0
#   mixture, 0 workers            0    0    0    0    0
#   mixture, 1 workers            0    0    0    0    0
#   mixture, 2 workers            2    6    0    2    4
#   mixture, 4 workers           10    6    8   12   12
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

SIZE = 2000
BREAKS = 50, 100, 150, 200, 240

for name, first in (("a", 0), ("b", SIZE)):
    settings = dict(output_dir=name, chunk_size=50, num_workers=1, start_method="fork")
    with open("log", "a") as log, redirect_stdout(log):
        litdata.optimize(fn=int, inputs=list(range(first, first + SIZE)), **settings)


def new_loader(mixture, workers):
    datasets = [StreamingDataset(name, shuffle=True) for name in ("a", "b")]
    dataset = CombinedStreamingDataset(datasets) if mixture else datasets[0]
    return StreamingDataLoader(dataset, batch_size=8, num_workers=workers)


def samples(batches):
    return [sample for batch in batches for sample in batch.tolist()]


def read_twice(mixture, workers, breaks):
    whole = samples(new_loader(mixture, workers))
    assert sorted(whole) == list(range(SIZE * (1 + mixture)))
    loader = new_loader(mixture, workers)
    begun = samples(islice(loader, breaks))
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    loader = new_loader(mixture, workers)
    loader.load_state_dict(state)
    len(loader)  # undoes another fault, see litdata_len.sh
    rest = samples(loader)
    assert begun == whole[: len(begun)] and len(begun + rest) == len(whole)
    twice = set(begun) & set(rest)
    assert len(twice) == len(set(whole) - set(begun + rest))
    assert not twice or rest != whole[len(begun) :]
    return len(twice)


print("after batch".ljust(26), *(f"{breaks:4}" for breaks in BREAKS))
for mixture, workers in ((False, 0), (False, 4), (True, 0), (True, 1), (True, 2), (True, 4)):
    counts = [read_twice(mixture, workers, breaks) for breaks in BREAKS]
    title = f"{'mixture' if mixture else 'one dataset'}, {workers} workers"
    print(title.ljust(26), *(f"{count:4}" for count in counts))
    assert any(counts) == (mixture and workers > 1)
PYTHON
