"""Canon layers for a model that is trained already: does it gain from them?

    python train.py --task text --preset nano
    python examples/graft.py out/text_nano_rope_bare_s0

The run's model trains on for a quarter of its steps, as it is and with Canon layers, at the old
learning rate and at half of it. Canon's weights start at zero, so at first they change nothing. All
four together take about as long as the run did, on the CPU. To train with such layers from the
start, with train.py's other flags:

    python -c "import examples.graft, train; train.main()" --canon abcd --canon-type zero ..
"""

import copy
import dataclasses
import sys
from pathlib import Path

from torch import nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where train.py is
import sample
import train
from canon_gpt import CANONS, Canon, CanonGPT, Refused, require
from tasks import make_parser


class ZeroCanon(Canon):
    def __init__(self, width, config):
        super().__init__(width, config)
        nn.init.zeros_(self.weight)


CANONS["zero"] = ZeroCanon


def with_canon(model, points):
    """A copy of a model without Canon, with Canon layers that change nothing yet."""
    config = dataclasses.replace(model.config, canon=points, canon_type="zero")
    grafted = CanonGPT(config)
    grafted.load_state_dict(model.state_dict(), strict=False)  # Canon's weights are not in there
    return grafted


def train_on(task, model, training):
    """Train the model, and return its scores. It is train.py's loop without log and checkpoints."""
    run = train.Run()
    optimizer = train.make_optimizer(model, training)
    scaler = train.make_scaler(training, run)
    batches = train.load_batches(task, training, run, steps_done=0)
    autocast = train.mixed_precision(training, run)
    for step, batch in enumerate(tqdm(batches, total=training.steps), 1):
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(step, training.lr, training)
        train.train_step(model, optimizer, scaler, batch, autocast, training.clip)
    return train.evaluate(task, model, training, autocast)


def main(argv=None):
    parser = make_parser(__file__, __doc__)
    parser.add_argument("run", help="the folder of a run without Canon")
    folder = parser.parse_args(argv).run
    try:
        about = train.read_config(folder)
        task, model = sample.load_model(folder)
        require(model.config.canon == "", "canon", model.config.canon, "the run has it already")
    except Refused as error:
        parser.error(error)
    training = train.Training(preset=about["preset"], **about["training"])
    training.steps = max(1, training.steps // 4)
    training.warmup = training.steps // 10
    training.seed += 100  # for batches that the model has not seen
    print(f"{folder}, {training.steps} more steps:")
    for lr in (training.lr, training.lr / 2):
        training.lr = lr
        for points in ("", "abcd"):
            fresh = with_canon(model, points) if points else copy.deepcopy(model)
            scores = train_on(task, fresh.train(), training)
            name = f"canon {points}" if points else "no canon"
            print(f"  lr {lr}, {name}: {train.format_scores(task, scores)}", flush=True)


if __name__ == "__main__":
    main()
