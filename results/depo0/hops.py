"""Which layer makes which hop:   python results/depo0/hops.py out/RUN

Asks a trained Depo0 model for K hops on 60 cycles of N nodes. The end of a hop is the second name
of its edge, with the two tokens behind it, into which Canon mixes the name. Measures which share of
its attention each head gives to it, on average. Then switches off the attention of one layer at a
time, and scores the model on 200 other cycles; at last, that of all layers together that can be
spared one by one. Does the same with Canon in place of attention. Prints tables, and draws them as
hops.png in the run's folder.
"""

import copy
import sys
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))  # where claims.py is
sys.path.insert(0, str(HERE.parents[2]))  # where plot.py is

import plot
import sample
from claims import MASTERED

CYCLES = 60
SCORED_CYCLES = 200
EDGE = 3  # tokens: "x y ,"


def attention_to_hops(task, model):
    """{asker: {"layer.head": (K,)}}: the mean shares of attention that the ends of the K hops get.

    The askers are the two tokens before an answer: the question's node, and <ans>.
    """
    sizes = [task.N for _ in range(CYCLES)]
    hops = [task.K for _ in range(CYCLES * task.N)]
    askers = {"the question's node": 2, "<ans>": 1}  # how far before the answer
    shares = {asker: [] for asker in askers}  # of each question: (heads, K)
    for document, answers in task.instances(np.random.default_rng(0), sizes, hops):
        tokens = document.tokens
        maps = plot.attention_maps(model, tokens[:-1])
        attention = torch.stack(list(maps.values()))  # (heads, T, T)
        for _, answer, _ in answers:
            ends = hop_ends(task, tokens, node=tokens[answer - 2])
            for asker, before in askers.items():
                row = attention[:, answer - before]  # (heads, T)
                to_ends = [row[:, end : end + EDGE].sum(-1) for end in ends]
                shares[asker].append(torch.stack(to_ends, dim=1))
    heads = [f"{layer}.{head}" for layer, head in maps]
    means = {}
    for asker, found in shares.items():
        means[asker] = dict(zip(heads, torch.stack(found).mean(0)))
    return means


def hop_ends(task, tokens, node):
    """Where the names of the next K nodes stand as the second of their edge."""
    second = {}  # {x: where y stands} for each edge x -> y
    for start in range(1, 1 + EDGE * task.N, EDGE):  # behind <bos>
        second[tokens[start]] = start + 1
    ends = []
    for _ in range(task.K):
        ends.append(second[node])
        node = tokens[second[node]]
    return ends


def attention_off(block):
    """It adds nothing then."""
    block.mixer.out.weight.zero_()


def canon_off(block):
    """Each vector passes unchanged then."""
    for name, weight in block.named_parameters():
        if "canon_" in name:
            weight.zero_()


@torch.no_grad()
def right_answers(task, model, switch_off, layers):
    """(scored k,): the shares of right answers, with something switched off in these layers."""
    model = copy.deepcopy(model)
    for layer in layers:
        switch_off(model.blocks[layer - 1])
    scores = task.evaluate(model, seed=0, n=SCORED_CYCLES)
    return torch.tensor(list(scores.values()))


def right_without_layers(task, model, switch_off):
    """{where it is off: (K,)}: the shares right of 1 .. K hops with it switched off nowhere, in one
    layer at a time, and in all layers together in which it can be spared one by one."""
    task.scored = list(range(1, task.K + 1))
    found = {"nothing": right_answers(task, model, switch_off, [])}
    spared = []
    for layer in range(1, len(model.blocks) + 1):
        right = right_answers(task, model, switch_off, [layer])
        found[f"layer {layer}"] = right
        if right[-1] >= MASTERED:
            spared.append(layer)
    if len(spared) > 1:
        together = f"layers {', '.join(map(str, spared))}"
        found[together] = right_answers(task, model, switch_off, spared)
    return found


def show(panels, K, path):
    """Print {title: {column: (K,)}} as tables, and draw them: white is 0, dark is 1."""
    hops = ["1 hop"] + [f"{hop} hops" for hop in range(2, K + 1)]
    title = "Which layer makes which hop?"
    figure, axes = plot.make_grid(len(panels), title, per_row=1, height=0.6 + 0.3 * K)
    for axis, (name, columns) in zip(axes, panels.items()):
        values = torch.stack(list(columns.values()), dim=1)  # (K, columns)
        axis.imshow(values.numpy(), cmap="Oranges", vmin=0, vmax=1, aspect="auto")
        axis.set_title(name)
        axis.set_yticks(range(K), hops)
        axis.set_xticks(range(len(columns)), columns, fontsize=8)
        rows = [["", *columns]]
        for hop, row in zip(hops, values):
            rows.append([hop, *(f"{share:.2f}" for share in row)])
        print(f"{name}:\n\n{plot.markdown(rows)}\n")
    plot.save(figure, path)


def main():
    folder = Path(sys.argv[1])
    task, model = sample.load_model(folder)
    panels = {}
    for asker, by_head in attention_to_hops(task, model).items():
        panels[f"Attention from {asker}"] = by_head
    for part, switch_off in {"attention": attention_off, "Canon": canon_off}.items():
        title = f"Right answers, with {part} switched off in"
        panels[title] = right_without_layers(task, model, switch_off)
    show(panels, task.K, folder / "hops.png")


if __name__ == "__main__":
    main()
