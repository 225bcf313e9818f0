"""Why models wait on Depo1: do they take the lure?   python results/lure.py out/RUN ..

Depo1 has no commas, and each name q is twice among the edges: as a source, before the answer to
<query_1> q, and as a target, before the source of the next edge, the lure:

    .. q answer .. p q lure ..

Only counting words tells the two apart. This asks trained models about one hop among 5, 7, 10 and
20 names. For each number of names it prints which answers are right and which are the lure, and
draws out/lure.png: packed runs while they train, and right answers by q's place.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from statistics import mean

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # where plot.py is

import plot
from canon_gpt import Refused, require
from sample import load_model
from tasks import Depo1, shuffles

TITLE = "Depo1: models wait until they can count words; a comma saves them the wait"
SIZES = (20, 10, 7, 5)  # names
CYCLES = 200  # of each size
KNOWN = 5  # words whose parity such a model knows, in the figure's thin lines


def expected_share(known, names):
    """The right answers of a model that can tell sources from targets only for `known` of the words
    of `names` edges. It answers half of the questions about a q of which it knows neither place."""
    unknown = max(0, 1 - known / (2 * names))
    return 1 - unknown**2 / 2


def known_words(share, names):
    """The reverse of `expected_share`."""
    return 2 * names * (1 - (2 * min(1 - share, 0.5)) ** 0.5)


@torch.no_grad()
def ask(task, model, names):
    """One (found, place) for each question about one hop, in CYCLES cycles of that many names.

    found  "right", "lure", or "other": what the answer is
    place  where q is first among the words of the edges, from 0; None if there is no lure
    """
    rng = np.random.default_rng(7)
    sizes = [names] * CYCLES
    asked = min(names, task.most_questions)
    found = []
    for words, sources, nodes in zip(
        task.words.draw(rng, sizes), shuffles(rng, sizes), shuffles(rng, sizes)
    ):
        document, answers = task.instance(words, sources, nodes[:asked], [1] * asked)
        logits, _ = model(torch.tensor([document.tokens[:-1]]))
        guesses = [None, *logits[0].argmax(-1).tolist()]  # of each token, given all before it
        for q, (_, start, end) in zip(nodes, answers):
            as_source = sources.index(q)
            as_target = sources.index((q - 1) % names)
            has_lure = as_target + 1 not in (names, as_source)  # else q or a question is next
            place = min(2 * as_source, 2 * as_target + 1) if has_lure else None
            lure = words[sources[as_target + 1]] if has_lure else None
            if guesses[start:end] == document.tokens[start:end]:
                found.append(("right", place))
            elif has_lure and guesses[start] == lure[0]:
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


# {label: (its packed runs, its names)}, all NoPE + Canon
TRAINED = {
    "5 names": ("depo1/runs.json", "depo1_nano_nope_abcd_s"),
    "9 names": ("depo1/runs.json", "depo1_nano_nope_abcd_N=9_K=4_block-size=104_n-layer=4_steps"),
    "10 names, a GPU's model": ("gpu/runs.json", "depo1_small_nope_abcd_s"),
    "20 names": ("depo1/runs.json", "depo1_nano_nope_abcd_N=20_K=4_block-size=160_n-layer=4_steps"),
    "9 names, with a comma": ("lure/runs.json", "comma9_nope_canon"),
}
LINES = ["-", "-.", "--", ":", "-"]


def draw_training(axis):
    """One hop against steps, and where a model that knows KNOWN words waits."""
    for (label, (file, name)), line in zip(TRAINED.items(), LINES):
        runs = [run for run in plot.read_runs([HERE / file]) if run["run"].startswith(name)]
        curve = plot.mean_by_step(runs, "k=1")
        colour = plot.BLUE if "comma" in label else plot.ORANGE
        axis.plot(list(curve), list(curve.values()), line, color=colour, lw=2.2, label=label)
        if "comma" not in label:
            waits_at = expected_share(KNOWN, names=int(label.split()[0]))
            axis.axhline(waits_at, color=plot.GREY, ls=line, lw=0.8)
    axis.set_xlim(0, 9000)
    axis.set_xlabel("training steps")
    axis.set_title("one hop, NoPE + Canon; grey: five words known", fontsize=11)
    axis.legend(fontsize=9, loc="lower right")


def draw_places(axis, found):
    """found: {a model's name: what `ask` found}."""
    for answers in found.values():
        right = right_by_place(answers)
        axis.plot(list(right), list(right.values()), "o-", color=plot.ORANGE, lw=0.9, ms=3)
    axis.axhline(0.5, color=plot.GREY, ls=":", lw=1)
    axis.set_xlabel("where q is first among the words")
    axis.set_title(f"right answers among 10 names, {len(found)} models", fontsize=11)


def main():
    parser = argparse.ArgumentParser(prog="lure.py", usage=argparse.SUPPRESS)
    parser.add_argument("runs", nargs="+", help="folders of models trained on Depo1")
    among_ten = {}
    rows = [["", "names", "right", "lure", "other", "known words", "right, expected from 20 names"]]
    for folder in parser.parse_args().runs:
        try:
            task, model = load_model(folder)
            require(isinstance(task, Depo1), "task", task.name, "allowed: depo1")
            require(task.N >= max(SIZES), "N", task.N, f"at least {max(SIZES)}")
        except Refused as error:
            parser.error(error)
        for names in SIZES:  # the largest first
            found = ask(task, model, names)
            each = shares(found)
            if names == max(SIZES):
                known = known_words(each["right"], names)
            if names == 10:
                among_ten[folder] = found
            cells = [each["right"], each["lure"], each["other"]]
            expected = expected_share(known, names)
            rows.append([folder, str(names), *map("{:.0%}".format, cells), f"{known:.1f}", f"{expected:.0%}"])
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
