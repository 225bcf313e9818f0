"""What do trained models need, and how far do they reach?

    python results/probe.py without out/RUN ..   scores without one layer's attention, without its
                                                 Canon layers, and without one of Canon-B's
                                                 distances in the queries, keys or values
    python results/probe.py names out/RUN ..     scores of a Depo model among as many names as in
                                                 training, and among up to twice as many

Each prints a table for each run.
"""

import dataclasses
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where plot.py is

import plot
from canon_gpt import CanonGPT, Refused, require
from sample import load_model
from tasks import Depo, make_parser, make_task
from train import format_scores


def parts_of(model):
    """{name: weights}. If they are zero, the part adds nothing to what it reads."""
    parts = {"nothing": []}
    for layer, block in enumerate(model.blocks, 1):
        weights = dict(block.named_parameters())
        parts[f"attention {layer}"] = [weights["mixer.out.weight"]]
        parts[f"Canon {layer}"] = [weights[name] for name in weights if "canon_" in name]
        if "mixer.canon_b.weight" in weights:
            for letter, part in zip("qkv", weights["mixer.canon_b.weight"].chunk(3, dim=1)):
                for back in range(1, len(part)):
                    parts[f"B {layer}: {letter}, w_{back}"] = [part[back]]
    return parts


@torch.no_grad()
def scores_without(task, model):
    """{what is missing: the scores of 200 instances}"""
    scores = {}
    for part, weights in parts_of(model).items():
        saved = [weight.clone() for weight in weights]
        for weight in weights:
            weight.zero_()
        scores[part] = task.evaluate(model, seed=0, n=200)
        for weight, value in zip(weights, saved):
            weight.copy_(value)
    return scores


def scores_among(task, model):
    """{how many names: the scores of 512 cycles}. More names need a longer window."""
    require(isinstance(task, Depo), "task", task.name, "allowed: depo0, depo1, depo2")
    scores = {}
    for factor in (1, 1.2, 1.5, 2):
        names = int(factor * task.N)
        asked = make_task(**task.settings | {"N": names, "block_size": None})
        config = dataclasses.replace(model.config, block_size=asked.block_size)
        wider = CanonGPT(config).eval()
        wider.load_state_dict(model.state_dict())  # no weight depends on the window
        scores[names] = asked.evaluate(wider, task.run_seed, n=512)
    return scores


PROBES = {"without": scores_without, "names": scores_among}


def main():
    parser = make_parser(__file__, __doc__)
    parser.add_argument("probe", choices=PROBES)
    parser.add_argument("runs", nargs="+", help="folders of trained models")
    args = parser.parse_args()
    for folder in args.runs:
        try:
            task, model = load_model(folder)
            rows = [[args.probe, *task.units]]
            for what, scores in PROBES[args.probe](task, model).items():
                rows.append([str(what), *format_scores(task, scores).values()])
            print(f"{folder}\n\n{plot.markdown(rows)}\n")
        except Refused as error:
            parser.error(error)


if __name__ == "__main__":
    main()
