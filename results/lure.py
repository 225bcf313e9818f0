"""Why models wait on Depo1: do they take the lure?   python results/lure.py out/RUN ..

Depo1 has no commas, and each name q is twice among the edges: as a source, before the answer to
<query_1> q, and as a target, before the source of the next edge, the lure:

    .. q answer .. p q lure ..

Only counting words tells the two apart. This asks trained models about one hop among 5, 7, 10 and
20 names. For each number of names it prints which answers are right and which are the lure, and
draws out/lure.png: packed runs while they train, and right answers by q's place.
"""

import re
from collections import Counter
from itertools import chain
from pathlib import Path
from statistics import mean

import numpy as np
import torch

import reproduce  # before plot, because it makes the folder above importable
import plot
from canon_gpt import Refused, require
from sample import load_model
from tasks import Depo1, make_parser, shuffles

TITLE = "Depo1: models wait until they count words; with commas none waits"
HEADER = ["run", "names", "right", "lure", "expected", "other", "words known"]
SIZES = (20, 10, 7, 5)  # names
CYCLES = 200  # of each size
KNOWN = 4  # words whose parity such a model knows, in the figure's thin lines


def expected_lures(known, names):
    """The share of lures in the answers of a model that can tell sources from targets only for
    `known` of the words of `names` edges, and else guesses: if it knows neither place of q, it
    takes the lure half of the time, if there is one."""
    unknown = max(0, 1 - known / (2 * names))
    return have_lure(names) * unknown**2 / 2


def have_lure(names):
    """The share of questions that have a lure. There is none if the edge to q is the last one, or
    if the next one begins with q, or with the answer; for each of these the chance is 1 / names."""
    return 1 - 3 / names


def known_words(lures, names):
    """The reverse of `expected_lures`."""
    unknown = (2 * lures / have_lure(names)) ** 0.5
    return max(0, 2 * names * (1 - unknown))


@torch.no_grad()
def ask(task, model, names):
    """One (found, place) for each question about one hop, in CYCLES cycles of that many names.

    found  "right", "lure", or "other": what the answer is
    place  where q is first among the words of the edges, from 0; None if there is no lure, or if
           it is the answer
    """
    rng = np.random.default_rng(7)
    sizes = [names for _ in range(CYCLES)]
    hops = [1 for _ in range(min(names, task.most_questions))]
    found = []
    for words, sources, nodes in zip(
        task.words.draw(rng, sizes), shuffles(rng, sizes), shuffles(rng, sizes)
    ):
        document, answers = task.instance(words, sources, nodes[: len(hops)], hops)
        logits, _ = model(torch.tensor([document.tokens[:-1]]))
        guesses = [None, *logits[0].argmax(-1).tolist()]  # of each token, given all before it
        for q, (_, start, end) in zip(nodes, answers):
            as_source = sources.index(q)
            as_target = sources.index((q - 1) % names)
            after = sources[as_target + 1] if as_target + 1 < names else q  # q: there is no edge
            has_lure = after not in (q, (q + 1) % names)
            place = min(2 * as_source, 2 * as_target + 1) if has_lure else None
            if guesses[start:end] == document.tokens[start:end]:
                found.append(("right", place))
            elif has_lure and guesses[start] == words[after][0]:
                found.append(("lure", place))
            else:
                found.append(("other", place))
    return found


def shares(found):
    """{"right": .., "lure": .., "other": ..}, of all answers."""
    counts = Counter(kind for kind, _ in found)
    return {kind: counts[kind] / len(found) for kind in ("right", "lure", "other")}


def right_by_place(found):
    """{place: the share of right answers}, where there is a lure."""
    by_place = {}
    for kind, place in found:
        if place is not None:
            by_place.setdefault(place, []).append(kind == "right")
    return {place: mean(values) for place, values in sorted(by_place.items())}


NAMES_9 = "N=9_K=4_block-size=104_n-layer=4_steps=6000_lr=0.005"
NAMES_20 = "N=20_K=4_block-size=160_n-layer=4_steps=6000_lr=0.005"
COMMAS = "N=9_K=4_V=50_word-len=1-2_n-layer=4_n-head=2_steps=3000_batch-size=32_lr=0.005"
# (label, its names, its runs without the seed, colour, line), all NoPE + Canon
TRAINED = [
    ("9 names, with commas", 9, f"depo0_nano_nope_abcd_{COMMAS}", plot.BLUE, "-"),
    ("5 names", 5, "depo1_nano_nope_abcd", plot.ORANGE, "-"),
    ("10 names, a GPU's model", 10, "depo1_small_nope_abcd", plot.ORANGE, "--"),
    ("9 names", 9, f"depo1_nano_nope_abcd_{NAMES_9}", plot.ORANGE, "-."),
    ("20 names", 20, f"depo1_nano_nope_abcd_{NAMES_20}", plot.ORANGE, ":"),
]


def draw_training(axis):
    """One hop against steps, and where a model that knows KNOWN words waits."""
    packed = reproduce.runs_here(own=Path("none"))
    for label, names, start, colour, line in TRAINED:
        runs = [packed[name] for name in packed if re.fullmatch(rf"{start}_s\d+", name)]
        curve = plot.mean_by_step(runs, "k=1")
        axis.plot(list(curve), list(curve.values()), line, color=colour, lw=2.2, label=label)
        if colour == plot.ORANGE:
            waits_at = 1 - expected_lures(KNOWN, names)
            axis.axhline(waits_at, color=plot.GREY, ls=line, lw=0.9)
    axis.set_xlim(0, 9000)
    axis.set_xlabel("training steps")
    axis.set_title(f"one hop, NoPE + Canon; grey: {KNOWN} words known", fontsize=11)
    axis.legend(fontsize=9, loc="lower right")


def draw_places(axis, found):
    """found: {a model's name: what `ask` found}. Thin lines are models, and a thick one is all."""
    everything = list(chain.from_iterable(found.values()))
    for answers, width in [*((each, 0.7) for each in found.values()), (everything, 2.4)]:
        right = right_by_place(answers)
        axis.plot(list(right), list(right.values()), color=plot.ORANGE, lw=width)
    axis.axhline(0.5, color=plot.GREY, ls=":", lw=1)
    axis.set_xlabel("the first place of q among the words")
    axis.locator_params(axis="x", integer=True)
    axis.set_title(f"one hop among 10 names, {len(found)} models that wait", fontsize=11)


def rows_of(folder):
    """(what `ask` found among 10 names, the table's rows) of a run. The known words follow from the
    lures among the most names, and the expected lures from them."""
    task, model = load_model(folder)
    require(isinstance(task, Depo1), "task", task.name, "allowed: depo1")
    require(task.N >= SIZES[0], "N", task.N, f"at least {SIZES[0]}")
    found = {names: ask(task, model, names) for names in SIZES}
    known = known_words(shares(found[SIZES[0]])["lure"], SIZES[0])
    rows = []
    for names in SIZES:
        each = shares(found[names])
        cells = each["right"], each["lure"], expected_lures(known, names), each["other"]
        percent = map("{:.0%}".format, cells)
        rows.append([Path(folder).name, str(names), *percent, f"{known:.1f}"])
    return found[10], rows


def main():
    parser = make_parser(__file__, __doc__)
    parser.add_argument("runs", nargs="+", help="folders of models trained on Depo1")
    among_ten, rows = {}, [HEADER]
    try:
        for folder in parser.parse_args().runs:
            among_ten[folder], its_rows = rows_of(folder)
            rows += its_rows
    except Refused as error:
        parser.error(error)
    print(plot.markdown(rows))
    figure, (left, right) = plot.make_grid(2, TITLE, per_row=2, height=3.6)
    draw_training(left)
    draw_places(right, among_ten)
    for axis in (left, right):
        axis.set_ylim(0, 1.02)
        axis.yaxis.set_major_formatter(plot.PercentFormatter(xmax=1))
    plot.save(figure, "lure")


if __name__ == "__main__":
    main()
