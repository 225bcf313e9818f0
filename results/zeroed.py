"""What trained models need: their scores if some of their weights are zero.

    python results/zeroed.py out/RUN ..

A table for each run: without one layer's attention, without its Canon layers, and without one of
Canon-B's distances in the queries, keys or values.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where plot.py is

import plot
from canon_gpt import Refused
from sample import load_model
from tasks import score_text


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
def scores_without(task, model, weights):
    """The scores of 200 instances, and the weights are as before."""
    saved = [weight.clone() for weight in weights]
    for weight in weights:
        weight.zero_()
    scores = task.evaluate(model, seed=0, n=200)
    for weight, value in zip(weights, saved):
        weight.copy_(value)
    return scores


def main():
    parser = argparse.ArgumentParser(prog="zeroed.py", usage=argparse.SUPPRESS)
    parser.add_argument("runs", nargs="+", help="folders of trained models")
    for folder in parser.parse_args().runs:
        try:
            task, model = load_model(folder)
        except Refused as error:
            parser.error(error)
        rows = []
        for part, weights in parts_of(model).items():
            scores = scores_without(task, model, weights)
            rows.append([part, *(score_text(scores[name], task.units[name]) for name in scores)])
        print(f"{folder}\n\n{plot.markdown([['without', *scores], *rows])}\n")


if __name__ == "__main__":
    main()
