"""The tests:   python -m pytest

By file, from the inside out. Fast code is compared with slow code that is obviously right, written
here from the definitions; properties are tried on random shapes.
"""

# ruff: noqa: E402, E731

import contextlib
import json
import math
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import nullcontext
from functools import partial
from itertools import chain, combinations, permutations, product, takewhile
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for work this small a second thread mostly waits

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.random import default_rng
from torch.testing import assert_close

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: kernels run on the CPU

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "results"), str(HERE / "assignment")]

parametrize = pytest.mark.parametrize


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def drawn_as(outcomes, chances):
    """Whether outcomes look drawn with these chances, {outcome: chance}, or uniformly from these:
    Pearson's test, five standard deviations wide."""
    found, free = Counter(outcomes), len(chances) - 1
    if not isinstance(chances, dict):
        chances = dict.fromkeys(chances, 1 / len(chances))
    expected = {each: chance * sum(found.values()) for each, chance in chances.items()}
    assert min(expected.values()) >= 5 and sum(chances.values()) == pytest.approx(1)
    statistic = sum((found[each] - mean) ** 2 / mean for each, mean in expected.items())
    return set(found) <= set(chances) and statistic <= free + 5 * (2 * free) ** 0.5


# ---- 3. tasks.py -----------------------------------------------------------

import tasks
import train
from canon_gpt import CanonGPT, Config
from tasks import Document, make_task


class Fake(torch.nn.Module):
    """A model with these methods; evaluations ask its parameters for the device."""

    def __init__(self, **methods):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))
        for name, method in methods.items():
            setattr(self, name, method)


def spans_of(marks):
    """The runs of True in a list of bool, [(start, end), ..]."""
    spans = []
    for place, marked in enumerate(marks):
        if marked and (place == 0 or not marks[place - 1]):
            spans.append((place, place))
        if marked:
            start, _ = spans[-1]
            spans[-1] = (start, place + 1)
    return spans


def instances(task, rows=200):
    """The whole documents of a batch in words, such as "<bos> 2 1 <query> [2 1]"."""
    tokens, mask = task.batch(3, 5, rows)
    assert tokens.shape == mask.shape == (rows, task.block_size + 1)
    assert tokens.dtype == np.int64 and mask.dtype == bool
    for row, marks in zip(tokens.tolist(), mask.tolist()):
        starts = [place for place, token in enumerate(row) if token == task.bos]
        assert starts[0] == 0
        ends = starts[1:] or [len(row)]  # the last one may be cut off, unless it is alone
        for start, end in zip(starts, ends):
            document = Document(row[start:end], spans_of(marks[start:end]))
            yield tasks.printed(task, document)


# -- All tasks


@parametrize("name", tasks.TASKS)
def test_batches_are_pure(name):
    task, again = make_task(name), make_task(name)
    tokens, mask = task.batch(1, 7, 16)
    for other in (again, task):
        same_tokens, same_mask = other.batch(1, 7, 16)
        assert np.array_equal(tokens, same_tokens) and np.array_equal(mask, same_mask)
    for arguments in ((1, 8, 16), (2, 7, 16), (7, 1, 16)):
        other_tokens, _ = task.batch(*arguments)
        assert not np.array_equal(tokens, other_tokens)
    windows = set()
    for step in range(20):
        tokens, _ = task.batch(0, step, 16)
        windows.update(row.tobytes() for row in tokens)
    assert len(windows) == 320


@parametrize("name", tasks.TASKS)
@parametrize("preset", train.PRESETS)
def test_documents_of_every_preset_fit(name, preset):
    task = make_task(**train.preset_parts(preset, name)["task"])
    assert task.batch(0, 0, 2)[1].any(axis=1).all()
    if name.startswith("depo"):
        assert task.N > 2 * task.K
    for document in task.documents(default_rng(0), 100):
        assert len(document.tokens) <= task.block_size + 1
        assert 1 <= min(document.tokens) and max(document.tokens) < task.vocab_size
        shown = 0
        for start, end in document.targets:
            assert shown <= start < end <= len(document.tokens)
            shown = end


@parametrize("name", [name for name in tasks.TASKS if name not in ("capo", "text")])
def test_a_window_is_documents_in_a_row(name):
    task, drawn = make_task(name), []
    draw = task.documents

    def recorded(rng, count):
        documents = list(draw(rng, count))
        drawn.extend(documents)
        return documents

    task.documents = recorded
    tokens, mask = task.batch(3, 5, 8)
    documents = iter(drawn)
    for row, marks in zip(tokens.tolist(), mask.tolist()):
        expected_row, expected_marks = [], []
        while len(expected_row) < len(row):
            document = next(documents)
            marked = [False] * len(document.tokens)
            for start, end in document.targets:
                for place in range(start, end):
                    marked[place] = True
            expected_row += document.tokens
            expected_marks += marked
        assert row == expected_row[: len(row)]
        assert marks == expected_marks[: len(row)]


@parametrize("name", ("copy", "depo1", "brevo1", "mano"))
def test_evaluation_is_on_fresh_data(name, monkeypatch):
    task, seeds = make_task(name), []
    draw = np.random.default_rng

    def recorded(seed):
        seeds.append(seed)
        return draw(seed)

    def forward(tokens):
        return torch.zeros(*tokens.shape, task.vocab_size), None

    def generate(tokens, *settings):
        return tokens

    monkeypatch.setattr(np.random, "default_rng", recorded)
    task.evaluate(Fake(forward=forward, generate=generate), 3, 30)
    task.batch(3, 7, 2)
    assert seeds == [[3, tasks.EVAL], [3, tasks.TRAIN, 7]] and tasks.EVAL != tasks.TRAIN


@parametrize("name", tasks.TASKS)
def test_scores_are_those_announced(name):
    task = make_task(name)
    config = Config(task.vocab_size, task.block_size, n_layer=1, n_head=1, d_model=8)
    scores = task.evaluate(CanonGPT(config), 0, 40)
    announced = [score for score in task.scores if score in scores or not name.startswith("brevo")]
    assert list(scores) == announced  # a depth that Brevo did not draw has no score
    for value in scores.values():
        assert type(value) is float and math.isfinite(value)
    units = {"share", "nats", "bits", "bits per byte", "bits per parameter"}
    assert set(task.scores.values()) <= units


class Count(tasks.Task):
    """After the number n, n times n."""

    vocabulary = ["", "1", "2", "3", "<bos>"]
    bos = 4

    def documents(self, rng, count):
        documents = []
        for n in rng.integers(1, 4, count).tolist():
            document = Document([self.bos, n])
            document.ask([n] * n)
            documents.append(document)
        return documents


def test_documents_are_enough_to_train_and_to_score():
    task = Count(block_size=11)
    assert set(instances(task)) == {"<bos> 1 [1]", "<bos> 2 [2 2]", "<bos> 3 [3 3 3]"}
    numbers = [document.tokens[1] for document in task.documents(default_rng([5, tasks.EVAL]), 60)]

    def forward(tokens):
        guess = tokens.clone()
        guess[:, 1] %= 3  # so the first 3 of three is wrong
        return F.one_hot(guess, 5), None

    wrong = numbers.count(3)
    scores = {"sequences": 1 - wrong / 60, "tokens": 1 - wrong / sum(numbers)}
    assert task.evaluate(Fake(forward=forward), 5, 60) == pytest.approx(scores)


@parametrize("name", tasks.TASKS)
def test_settings_make_the_same_task(name):
    task = make_task(name)
    again = make_task(**json.loads(json.dumps(task.settings)))  # as a run's config.json has them
    assert again.name == task.name == task.settings["name"] == name
    assert json.dumps(again.settings) == json.dumps(task.settings)
    assert again.vocabulary == task.vocabulary
    for mine, other in zip(task.batch(0, 3, 4), again.batch(0, 3, 4)):
        assert np.array_equal(mine, other)


def test_parameters_and_aliases_replace_the_usual_ones():
    task = make_task("depo", N=9, block_size=90)
    usual = make_task("depo1").settings
    assert task.name == "depo1" and make_task("brevo").name == "brevo1"
    assert task.settings == {**usual, "N": 9, "block_size": 90} and task.N == 9
    depo0 = {"N": 10, "K": 4, "V": 20, "word_len": (1, 1), "separator": True, "block_size": 71}
    assert make_task("depo0").settings == {"name": "depo0", **depo0}


def test_chances():
    assert make_task("depo1", N=9, block_size=90).chance == 1 / 8
    for name in ("copy", "brevo1", "brevo2", "lano", "capo", "text"):
        assert make_task(name).chance is None
    task = make_task("mano")
    values = Counter()
    for document in task.documents(default_rng(0), 20_000):
        values[task.decode(document.tokens[-1:])] += 1
    ((value, times),) = values.most_common(1)
    assert value == "0" and times / 20_000 == pytest.approx(task.chance, abs=0.01)


# -- Words and answers


@parametrize("name", tasks.TASKS)
def test_texts_are_the_tokens_in_words(name):
    task = make_task(name)
    for document in task.documents(default_rng(1), 30):
        if name == "text" and max(document.tokens) > 128:
            continue  # a character of several bytes may be cut off
        text = task.decode(document.tokens)
        assert task.encode(text) == document.tokens
        assert text == tasks.printed(task, Document(document.tokens))


def test_words_of_several_tokens_are_joined_by_dots():
    task = make_task("depo2")
    text = "<bos> 2.1.3.1.1 3.3.3.3.3 <query_2> 2.1.3.1.1 <ans> 3."
    tokens = task.encode(text)
    assert [task.vocabulary[token] for token in tokens[:7]] == "<bos> 2. 1. 3. 1. 1 3.".split()
    assert task.decode(tokens) == text
    for text, unknown in (("<bos> 2.4.1", "4."), ("1 <eos>", "<eos>"), ("1.1 1.7", "7")):
        with pytest.raises(ValueError, match=f"^'{unknown}' is no word of depo2$"):
            task.encode(text)


def test_printed_targets_are_in_brackets():
    task = Count(block_size=11)
    tokens = [4, 2, 2, 2, 4, 1, 1]
    for targets, text in (
        ([], "<bos> 2 2 2 <bos> 1 1"),
        ([(0, 7)], "[<bos> 2 2 2 <bos> 1 1]"),
        ([(2, 4)], "<bos> 2 [2 2] <bos> 1 1"),
        ([(2, 4), (4, 5), (6, 7)], "<bos> 2 [2 2] [<bos>] 1 [1]"),
    ):
        assert tasks.printed(task, Document(tokens, targets)) == text


@parametrize("name", tasks.TASKS)
def test_right_answers_are_right_and_changed_ones_wrong(name):
    task = make_task(name)
    for document in task.documents(default_rng(1), 30):
        spans = task.answer_spans(document)
        assert spans
        for start, end in spans:
            answer = document.tokens[start:end]
            if task.stop is not None and answer[-1] != task.stop:
                answer.append(task.stop)  # a model says where its answer ends
            verdict = task.is_right(document, (start, end), answer)
            if name == "text":
                assert verdict is None  # there are many ways to go on
                continue
            assert verdict is True
            for place, token in enumerate(answer):
                changed = list(answer)
                changed[place] = 1 if token != 1 else 2
                if name != "lano":  # whose change may be another sentence
                    assert task.is_right(document, (start, end), changed) is False
            if len(answer) > 1:
                assert task.is_right(document, (start, end), answer[:-1]) is False


def test_what_a_model_is_asked():
    def asked(name):
        task = make_task(name)
        (document,) = task.documents(default_rng(0), 1)
        words = task.decode(document.tokens).split()
        answers = []
        for start, end in task.answer_spans(document):
            answers.append(task.decode(document.tokens[start:end]))
        return words, answers

    words, answers = asked("depo0")
    assert len(answers) == words.count("<ans>") > 1
    assert all(answer.startswith("<ans> ") for answer in answers)
    words, answers = asked("brevo2")
    assert answers == [" ".join(words[words.index("<ans>") + 1 :])]
    words, answers = asked("mano")
    assert answers == [words[-1]]
    words, answers = asked("lano")
    assert answers == [" ".join(words[1:])]
    words, answers = asked("capo")
    kinds = ["month", "day", "year", "pronoun", "birth-city", "university", "major", "employer"]
    for kind, answer in zip([*kinds, "birth-city"], answers, strict=True):  # work in such a city
        assert answer.startswith(f"{kind}-") and answer in words


def test_scores_in_print():
    for value, unit, text in (
        (0.974, "share", "97%"),
        (1, "share", "100%"),
        (0.12345, "nats", "0.123"),
        (1.5, "bits per byte", "1.500"),
        (2, "bits per parameter", "2.000"),
        (12345.6, "bits", "12,346"),
        (12345.6, "steps", "1.235e+04"),
        (0.5, None, "0.5"),
    ):
        assert tasks.score_text(value, unit) == text


# -- Copy


def test_copy():
    task = make_task("copy", N=7, block_size=40)
    first_numbers = []
    for text in instances(task, rows=300):
        numbers, copy = text.removeprefix("<bos> ").split(" <query> ")
        assert copy == f"[{numbers}]" and sorted(numbers.split()) == list("1234567")
        first_numbers.append(numbers[0])
    assert len(first_numbers) == 600 and drawn_as(first_numbers, "1234567")
    assert (task.batch(0, 0, 50)[0][:, 32] == task.bos).all()  # the third is cut off


# -- Depo

DEPOS = (
    ("depo0", {}),
    ("depo1", {}),
    ("depo2", {}),
    ("depo1", dict(N=24, K=5, block_size=300)),
    ("depo1", dict(V=2, word_len=(2, 3), N=12, block_size=260)),
    ("depo1", dict(word_len=(1, 1))),
    ("depo2", dict(N=12, K=4, block_size=400)),
    ("depo0", dict(V=3, word_len=(2, 2), N=9, block_size=200)),
)


def require_names(task, names):
    """Names are numbers 1..V joined by dots, as many as word_len allows."""
    for name in names:
        letters = [int(letter) for letter in name.split(".")]
        assert task.words.shortest <= len(letters) <= task.words.longest
        assert 1 <= min(letters) and max(letters) <= task.words.V


def read_depo(task, text):
    """The edges, [(source, target), ..], and the questions, [(k, q, answer), ..]."""
    edges_text, *question_texts = text.split("<query_")
    bos, *words = edges_text.split()
    assert bos == "<bos>"
    if task.name == "depo0":
        commas = words[2::3]
        assert commas == [","] * (len(words) // 3)
        words = [word for word in words if word != ","]
    edges = list(zip(words[0::2], words[1::2], strict=True))
    questions = []
    for question in question_texts:
        hops, q, ans, answer = question.split()
        assert hops[-1] == ">" and ans == "[<ans>" and answer[-1] == "]"
        questions.append((int(hops[:-1]), q, answer[:-1]))
        words += [q, answer[:-1]]
    require_names(task, words)
    return edges, questions


@parametrize("name, options", DEPOS, ids=str)
def test_depo_by_an_independent_checker(name, options):
    task = make_task(name, **options)
    for text in instances(task):
        edges, questions = read_depo(task, text)
        successor, n = dict(edges), len(edges)
        cycle = [edges[0][0]]
        while successor[cycle[-1]] not in cycle:
            cycle.append(successor[cycle[-1]])
        assert 3 <= n <= task.N and len(successor) == len(cycle) == n
        asked = {q for _, q, _ in questions}
        assert len(asked) == len(questions) == min(10, n)
        for k, q, answer in questions:
            assert 1 <= k <= task.K and answer == cycle[(cycle.index(q) + k) % n]


def test_depo_order_and_sizes_are_random():
    N = 9
    task = make_task("depo1", N=N, K=3, block_size=2000)  # so long that hardly any are cut off
    weights = {n: 1 / (n + N**0.5) for n in range(3, N + 1)}
    chances = {n: weight / sum(weights.values()) for n, weight in weights.items()}
    sizes, hops = [], []
    turns, places = [], []
    for text in instances(task, rows=150):
        edges, questions = read_depo(task, text)
        sizes.append(len(edges))
        hops += [k for k, _, _ in questions]
        if len(edges) == 3:
            starts = [start for start, _ in edges]
            asked = [q for _, q, _ in questions]
            turns.append(starts.index(edges[0][1]))  # which edge goes on where the first ends
            places.append(asked.index(starts[0]))
    assert drawn_as(sizes, chances) and drawn_as(hops, (1, 2, 3))
    assert drawn_as(turns, (1, 2)) and drawn_as(places, (0, 1, 2))


def chances_of_words(V, low, high):
    """{word: chance}: uniform lengths, uniform letters, V more at the end if lengths differ."""
    chances = {}
    for length in range(low, high + 1):
        for letters in product(range(1, V + 1), repeat=length):
            if high > 1:
                letters = (*letters[:-1], letters[-1] + V)
            chances[letters] = 1 / (high + 1 - low) / V**length
    return chances


@parametrize("V, low, high", [(1, 1, 3), (2, 1, 2), (3, 1, 1)])
def test_words_come_as_if_drawn_one_by_one(V, low, high):
    """As the plain loop in the docstring draws two: the second is another, and their order even."""
    chances = chances_of_words(V, low, high)
    pairs = defaultdict(float)
    for first, second in permutations(chances, 2):
        chance = chances[first] * chances[second] / (1 - chances[first])
        pairs[first, second] += chance / 2
        pairs[second, first] += chance / 2
    found = []
    for first, second in tasks.Words(2, V, (low, high)).draw(default_rng(0), [2] * 9000):
        found.append((tuple(first), tuple(second)))
    assert drawn_as(found, pairs)


def test_words_are_as_long_in_every_place():
    documents = tasks.Words(5, 2, (1, 2)).draw(default_rng(0), [5] * 9000)
    short = []
    for words in documents:
        short.append([len(word) == 1 for word in words])
    shares = np.mean(short, axis=0)
    assert np.ptp(shares) < 0.03 < 0.3 < shares.mean()


def scores_if(task, is_right):
    """The scores of a model that finds answers, behind <ans>, and no other tokens. It finds an
    answer's last token only if is_right(the words before <ans>)."""

    def right_tokens(model, texts):
        longest = max(len(text) for text in texts)
        right = np.zeros((len(texts), longest), dtype=bool)
        for row, text in zip(right, texts):
            words = [task.vocabulary[token] for token in text]
            for ans, word in enumerate(words):
                if word == "<ans>":
                    end = ans + 1
                    while end < len(words) and not words[end].startswith("<"):
                        end += 1
                    row[ans + 1 : end] = True
                    row[end - 1] = is_right(words[:ans])
        return right

    task.right_tokens = right_tokens
    return task.evaluate(None, 0, 50)


@parametrize("name, hops", [("depo1", [1, 2]), ("depo0", [1, 2, 4, 6])])
def test_depo_scores(name, hops):
    def is_right(words):
        queries = [word for word in words if word.startswith("<query_")]
        return queries[-1] != "<query_2>"

    scores = scores_if(make_task(name, K=max(hops)), is_right)
    assert scores == {f"k={k}": float(k != 2) for k in hops}


def test_one_instance_asks_all_scored_hops():
    task = make_task("depo1", N=5, K=4, block_size=60)
    task.right_tokens = lambda model, texts: np.ones((1, 60), dtype=bool)
    assert task.evaluate(None, 0, 1) == {"k=1": 1.0, "k=2": 1.0, "k=4": 1.0}
    assert len(make_task("depo1", N=513, K=512, block_size=4000).hops) <= task.questions


# -- Brevo

BREVOS = (
    ("brevo1", {}),
    ("brevo1", dict(N=30, block_size=300)),
    ("brevo2", {}),
    ("brevo2", dict(N=14, V=3, word_len=(1, 3), block_size=400)),
)


def read_brevo(text):
    """The edges, [(parent, child), ..], the node that is asked about, the answer's nodes."""
    edges_text, question = text.split(" <query> ")
    bos, *names = edges_text.split()
    q, ans, *answer, eos = question.split()
    assert (bos, ans, eos) == ("<bos>", "[<ans>", "<eos>]")
    edges = list(zip(names[0::2], names[1::2], strict=True))
    return edges, q, answer


def neighbours(edges):
    """{node: the nodes that have an edge to it}."""
    found = defaultdict(set)
    for a, b in edges:
        found[b].add(a)
    return found


@parametrize("name, options", BREVOS, ids=str)
def test_brevo_by_an_independent_checker(name, options):
    task = make_task(name, **options)
    for text in instances(task):
        edges, q, answer = read_brevo(text)
        nodes = set(chain(*edges))
        require_names(task, nodes)
        assert len(nodes) <= task.N and len(answer) == len(set(answer))
        parents = neighbours(edges)
        children = neighbours((child, parent) for parent, child in edges)
        assert answer[-1] == q and parents[q]
        for i, node in enumerate(answer):
            assert parents[node] <= set(answer[:i])
            assert node == q or children[node] & set(answer[i + 1 :])  # something needs it


def test_brevo_graphs_follow_their_distribution():
    """Of the earlier nodes that are free, each number 1..min(4, free) and each set is as likely."""
    dice = tasks.random.Random(0)
    leaves, chosen = [], defaultdict(list)
    for _ in range(6000):
        graph = tasks.draw_graph(dice, 13)
        first = 0
        while not graph[first]:
            first += 1
        leaves.append(first)
        children = Counter()
        for node in range(first, 13):
            free = [other for other in range(node) if children[other] < 4]
            places = [free.index(parent) for parent in graph[node]]
            chosen[len(free)].append(tuple(sorted(places)))
            children.update(graph[node])
    assert drawn_as(leaves, (1, 2, 3, 4))
    for free in range(1, 9):
        chances = {}
        for size in range(1, min(4, free) + 1):
            for places in combinations(range(free), size):
                chances[places] = 1 / min(4, free) / math.comb(free, size)
        assert drawn_as(chosen[free], chances)


def test_brevo_orders_are_drawn_backward_step_by_step():
    """2 needs 0; 3 needs 0 and 1; 4 needs 2 and 3; 5 is not asked about."""
    parents, chances = [[], [], [0], [0, 1], [2, 3], [4, 1]], {}

    def extend(order, chance):
        left = set(range(5)) - set(order)
        needed = set()
        for child in left:
            needed.update(parents[child])
        ready = left - needed
        for node in ready:
            extend((node, *order), chance / len(ready))
        if not ready:
            chances[order] = chance

    extend((), 1.0)
    assert len(chances) == 5 and len(set(chances.values())) > 1
    dice = tasks.random.Random(0)
    assert drawn_as((tuple(tasks.draw_order(dice, parents, 4)) for _ in range(5000)), chances)


@parametrize("n", (3, 5, 10, 12))
def test_brevo_asks_for_the_last_quarter(n, monkeypatch):
    asked = []

    def recorded(dice, parents, q):
        assert parents[q]
        asked.append(q)
        return [0]

    monkeypatch.setattr(tasks, "draw_order", recorded)
    list(make_task("brevo1", N=12, block_size=200).instances(default_rng(0), [n] * 2000))
    assert drawn_as(asked, range(n - math.ceil(n / 4), n))


def test_brevo_names_and_order_tell_nothing():
    nodes, orders = [], []
    possible = list(permutations((1, 2, 3)))
    for text in instances(make_task("brevo1", N=4), rows=2000):
        edges, q, answer = read_brevo(text)
        nodes.append(q)
        if len(edges) == 3 and set(chain(*edges)) == set(answer):
            order = tuple(answer.index(a) + answer.index(b) for a, b in edges)
            if order in possible:  # the graph of three nodes with all edges
                orders.append(order)
    assert drawn_as(nodes, "1234") and drawn_as(orders, possible)


@parametrize("name", ("brevo1", "brevo2"))
def test_brevo_accepts_exactly_the_valid_orders(name):
    task, checked = make_task(name), Counter()
    for document, depth in task.instances(default_rng(0), [4, 5] * 20):
        edges, q, words = read_brevo(tasks.printed(task, document))
        (span,) = task.answer_spans(document)
        parents = neighbours(edges)

        def depth_of(node):
            return 1 + min((depth_of(parent) for parent in parents[node]), default=-1)

        def right(words, *end):
            answer = task.encode(" ".join(words)) + [*end]
            return task.is_right(document, span, answer)

        assert depth_of(q) == depth
        for order in permutations(words):
            valid = True
            for parent, child in edges:
                if parent in order and child in order:
                    valid = valid and order.index(parent) < order.index(child)
            assert right(order, task.eos) == valid
            checked[valid] += 1
        assert right(words, task.eos) and right(words, task.eos, 1)  # what follows <eos> is no text
        for wrong in ([], words[1:], words[:-1], words[:1] + words):
            assert not right(wrong, task.eos)
        for other in set(chain(*edges)) - set(words):
            assert not right([other, *words], task.eos)
        assert not right(words) and not right(words, task.query, task.eos)
        assert not right(words, 1, task.eos)  # in Brevo2 half a word
    assert min(checked.values()) > 20


@parametrize("name", ("brevo1", "brevo2"))
def test_brevo_scores(name):
    """Of a model that gives the right answers, but without their first token if q's last is odd."""
    task = make_task(name)
    given, right = {}, defaultdict(list)
    for document, depth in task.instances(default_rng([0, tasks.EVAL]), [task.N] * 99):
        ((start, end),) = task.answer_spans(document)
        ends_of_q = document.tokens[start - 2]
        answer = document.tokens[start:end]
        given[tuple(document.tokens[:start])] = answer[1:] if ends_of_q % 2 else answer
        for score in ("all", f"depth={depth}"):
            right[score].append(ends_of_q % 2 == 0)

    def generate(tokens, max_new_tokens, temperature, stop):
        assert temperature == 0 and stop == task.eos
        texts = [given[tuple(prompt)] for prompt in tokens.tolist()]
        assert max(len(text) for text in texts) <= max_new_tokens
        return torch.cat([tokens, tasks.padded(texts)], 1)

    scores = task.evaluate(Fake(generate=generate), 0, 99)
    assert scores == {score: np.mean(outcomes) for score, outcomes in right.items()}
    assert list(scores) == sorted(scores) and {"depth=1", "depth=2"} <= set(scores)


# -- Mano


def mano_value(words):
    """The value, and the number of operators, of the expression that an iterator starts with."""
    head = next(words)
    if head.isdigit():
        return int(head), 0
    a, in_left = mano_value(words)
    b, in_right = mano_value(words)
    results = {"+": a + b, "-": a - b, "*": a * b}
    return results[head] % 23, in_left + in_right + 1


def test_mano_by_an_independent_checker():
    task = make_task("mano", L=6, block_size=400)
    operators, numbers = [], []
    splits = []
    for text in instances(task, rows=100):
        assert text[0] == "[" and text.endswith("]")  # all tokens are targets
        bos, head, *expression, ans, result = text.strip("[]").split()
        rest = iter(expression)
        value, count = mano_value(rest)
        assert not list(rest)
        assert [bos, head, ans, result] == ["<bos>", f"<len_{count}>", "<ans>", str(value)]
        for word in expression:
            (numbers if word.isdigit() else operators).append(word)
        if count == 4:
            _, in_left = mano_value(iter(expression[1:]))
            splits.append(in_left)
    assert task.batch(0, 0, 9)[1].all() and drawn_as(splits, range(4))
    assert drawn_as(operators, "+-*") and drawn_as(numbers, [str(number) for number in range(23)])
    lengths = [len(document.tokens) for document in task.documents(default_rng(0), 6000)]
    assert drawn_as(lengths, range(7, 18, 2))


def test_mano_scores():
    scores = scores_if(make_task("mano", L=6), lambda words: "<len_2>" in words)
    assert scores == {"l=1": 0.0, "l=2": 1.0, "l=4": 0.0, "l=6": 0.0}


# -- Lano


def all_yields(grammar, symbol):
    """{yield: probability}, by enumeration."""
    if symbol <= 3:
        return {(symbol,): 1.0}
    rules, found = grammar.rules[symbol], defaultdict(float)
    for rule in rules:
        yields = [all_yields(grammar, part).items() for part in rule]
        for parts in product(*yields):
            text, chance = (), 1 / len(rules)
            for part, p in parts:
                text += part
                chance *= p
            found[text] += chance
    return found


def exact_table(language, text):
    """For each prefix of the text, the probabilities that it is all, or goes on with 1, 2, 3."""
    rows = np.zeros((len(text) + 1, 4))
    for other, p in language.items():
        for t in range(len(text) + 1):
            if other[:t] == text[:t] and len(other) >= t:
                rows[t, other[t] if len(other) > t else 0] += p
    return rows


@parametrize("cfg, root", [("cfg3f", 10), ("cfg3f", 11), ("cfg3j", 12), ("cfg3k", 12)])
def test_lano_chart_equals_enumeration(cfg, root):
    task = make_task("lano", cfg=cfg, root=root)
    grammar, language = task.grammar, all_yields(task.grammar, root)
    assert grammar.longest[root] == max(len(text) for text in language)
    mean = sum(len(text) * p for text, p in language.items())
    assert grammar.mean[root] == pytest.approx(mean)

    texts = sorted(language)[::5][:12]
    for text in texts[:4]:  # and all their corruptions by one token
        texts += [text[:-1], (*text, 1), ()]
        for i in range(len(text)):
            for other in (1, 2, 3):
                texts.append(text[:i] + (other,) + text[i + 1 :])
    assert 12 < sum(text in language for text in texts) < len(texts)
    rows = F.pad(tasks.padded(texts), (0, 200))  # so wide that they are taken a few at a time
    for text, found in zip(texts, task.charts(rows).numpy(), strict=True):
        t = np.arange(len(text) + 1)
        exact = exact_table(language, text) * 2.1 ** t[:, None]
        np.testing.assert_allclose(found[t], exact, rtol=1e-12)
        assert not found[len(t) :].any()


@parametrize("cfg, most", [("cfg3f", 350), ("cfg3j", 1000), ("cfg3k", 800)])
def test_lano_long_sentences_keep_their_probability(cfg, most):
    grammar = tasks.Grammar(tasks.GRAMMARS[cfg])
    for rules in grammar.rules.values():
        assert 3 <= len(set(rules)) == len(rules) <= 4
    sentences = grammar.sample(default_rng(1), 1000)
    assert set(chain(*sentences)) == {1, 2, 3}  # so each rule's parts are of the next level
    text = max((sentence for sentence in sentences if len(sentence) <= most), key=len)
    chart = grammar.chart(torch.tensor([text]))[0]
    assert len(text) > 0.8 * most and 1e-100 < chart.max() < 1e100 and chart[-1, 0] > 0
    here = chart[torch.arange(len(text)), text]
    assert_close(chart[1:].sum(1), 2.1 * here, rtol=1e-10, atol=0)
    assert chart[0].sum() == pytest.approx(1)


def test_lano_windows_and_samples():
    task = make_task("lano", root=12, block_size=40)
    language = all_yields(task.grammar, 12)
    for text in instances(task):
        bos, *words = text.strip("[]").split()
        assert bos == "<bos>" and tuple(int(word) for word in words) in language
    assert task.batch(0, 0, 9)[1].all()
    sentences = task.grammar.sample(default_rng(0), 5000)
    assert drawn_as((tuple(sentence) for sentence in sentences), language)


def test_lano_parses_whole_sentences():
    task = make_task("lano", root=10, block_size=20)
    language = all_yields(task.grammar, 10)
    texts = list(product((1, 2, 3), repeat=8))
    verdicts = [text in language for text in texts]
    tokens = torch.tensor(texts)
    assert task.parses(F.pad(tokens, (0, 2), value=4)).tolist() == verdicts and any(verdicts)
    assert not task.parses(tokens).any()  # they have no end
    document = Document([4, *max(language, key=len)])
    for text in list(language)[:20]:
        assert task.is_right(document, (1, len(document.tokens)), [*text, 4])
    assert not task.is_right(document, (1, len(document.tokens)), [1, 1, 4])


def test_lano_scores():
    """Of texts that are sentences, or none, or do not end; by half knowledge, half guessing."""
    task = make_task("lano", root=10, block_size=20)
    task.block_size = 9  # so sentences of nine tokens have no end
    language = all_yields(task.grammar, 10)
    short = [text for text in language if len(text) <= 8]
    long = [text for text in language if len(text) > 8]
    long = (long * 20)[:20]
    none = [(1, 1, 1, 1, 1, 1, 1, 1)] * 20
    texts = []
    for text in short[:40] + long + none:
        missing = 9 - len(text)
        texts.append([4, *text] + [4] * missing)

    def generate(tokens, max_new_tokens, temperature, stop, generator):
        assert (tokens.tolist(), max_new_tokens, temperature, stop) == ([[4]] * 80, 9, 1, 4)
        return torch.tensor(texts)

    def forward(tokens):
        chart = task.grammar.chart(tokens[:, 1:])
        exact = (chart / chart.sum(-1, keepdim=True)).nan_to_num()
        logits = torch.full((*tokens.shape, 5), -1e30)
        logits[..., [4, 1, 2, 3]] = (exact / 2 + 1 / 8).log().float()
        return logits, None

    sentences = task.grammar.sample(default_rng([0, tasks.EVAL]), 80)
    places = np.concatenate([exact_table(language, tuple(text))[:9] for text in sentences])
    p = places / places.sum(1, keepdims=True)
    guess = p / 2 + 1 / 8
    nats = (p * np.log(np.maximum(p, 1e-300) / guess)).sum(1).mean()
    scores = task.evaluate(Fake(generate=generate, forward=forward), 0, 80)
    assert scores == {"sentences": 0.5, "KL": pytest.approx(nats, rel=1e-5)} and nats > 0.1


# -- Capo


def test_capo_meets_everybody_once_an_epoch_in_new_words():
    task, people = make_task("capo", N=30, exposures=4, block_size=120), tasks.draw_people(0, 30)
    assert not np.array_equal(people, tasks.draw_people(1, 30))
    who = {tuple(person[:3]): person for person in people.tolist()}
    met, told = [], set()
    assert task.steps(batch_size=5) == 8  # 8 x 5 windows of 3 lives; 4 x 30 wanted
    for step in range(8):
        tokens, mask = task.batch(0, step, 5)
        assert tokens.shape == (5, 121) and np.array_equal(mask, tokens > 0)
        assert not mask[:, 105:].any()
        for life in tokens[:, :105].reshape(-1, 35).tolist():
            met.append(tuple(life[1:4]))
            told.add(tuple(life))
            pronoun, *facts = who[met[-1]][3:]
            assert life[0] == task.bos and life[7:10] + life[14::5] == facts
            assert life[10::5] == [pronoun] * 5
            for wordings, start in zip(task.wordings.tolist(), (4, 11, 16, 21, 26, 31)):
                assert life[start : start + 3] in wordings
    for start in range(0, 120, 30):
        assert len(set(met[start : start + 30])) == len(who) == 30
    assert met[:30] != met[30:60] and len(told) == 120


def test_capo_people_and_wordings():
    people, first = tasks.draw_people(5, 40_000), 1
    for column, size in enumerate(tasks.PERSON.values()):
        assert drawn_as(people[:, column].tolist(), range(first, first + size))
        first += size
    assert len(np.unique(people[:, :3], axis=0)) == 40_000  # chance would bring some five twice
    assert len(np.unique(people[:, -2:], axis=0)) == 263
    assert set(people[:, -1]) <= set(people[:, 7])
    wordings = make_task("capo").wordings
    assert wordings.shape == (6, 10, 3) and len(np.unique(wordings.reshape(-1, 3), axis=0)) == 60


COSTS = {1: 0.5, 2: 0.2, 3: 9, 7: 1, 8: 0.3, 9: 0.4, 10: 3, 14: 2, 19: 0.6, 24: 0.1, 29: 4, 34: 5}
COSTS |= {4: 5, 15: 5, 33: 5}  # words and a later pronoun


@parametrize("nats", ({}, COSTS, dict.fromkeys(range(35), 9)))
def test_capo_bits(nats):
    """Tokens cost {place: nats}; names and facts count where they come first."""
    task = make_task("capo", N=50)
    rng = default_rng([0, tasks.EVAL])
    lives = task.biographies(rng, 0, rng.permutation(50)[:20])[:, 1:]
    lives = {tuple(life[:3]): life for life in lives.tolist()}
    prices = [math.expm1(nats.get(place, 1e-9)) for place in range(1, 35)]
    heights = torch.tensor([[math.log((task.vocab_size - 1) / price)] for price in prices])

    def forward(tokens):
        truth = torch.tensor([lives[tuple(row[1:4])] for row in tokens.tolist()])
        return F.one_hot(truth, task.vocab_size) * heights, None

    def known(places, possible):
        return max(0, 1 - sum(nats.get(place, 0) for place in places) / math.log(possible))

    N0, S0 = 400 * 400 * 1000, 2 * (12 * 28 * 200) * 200 * 300 * 100 * 263
    names, facts = known((1, 2, 3), N0), known((7, 8, 9, 10, 14, 19, 24, 29, 34), S0)
    bits = 50 * (names * math.log2(N0) + facts * math.log2(S0))
    used = len(np.unique(tasks.draw_people(0, 50))) + 50 + 1  # and the words, and <bos>
    rate = bits / (10**6 - 16 * (task.vocab_size - used))
    counts = {"total": 10**6, "embeddings": 16 * task.vocab_size}
    scores = task.evaluate(Fake(forward=forward, parameter_counts=lambda: counts), 0, 20)
    wanted = {"names": names, "facts": facts, "bits": bits, "bits/param": rate}
    assert scores == pytest.approx(wanted, rel=1e-5)


# -- Text

BLOCK = 4096  # of these, 19, 39, .. are held out


@pytest.fixture
def text_file(tmp_path):
    """Random bytes below 255 in 45 blocks and a half, but 255 all over what is held out."""
    data = default_rng(0).integers(0, 255, 45 * BLOCK + BLOCK // 2, dtype=np.uint8)
    for block in (19, 39):
        data[block * BLOCK : (block + 1) * BLOCK] = 255
    file = tmp_path / "text.bin"
    file.write_bytes(data.tobytes())
    return file


def test_text_is_trained_on_what_is_not_held_out(text_file):
    task, data = make_task("text", text=str(text_file)), text_file.read_bytes()
    assert (task.size, task.vocab_size) == (len(data), 257)
    blocks = set()
    for step in range(20):
        tokens, mask = task.batch(0, step, 32)
        assert tokens.shape == (32, 257) and tokens.dtype == np.int64 and mask.all()
        for row in tokens:
            start = data.find(bytes(row - 1 for row in row.tolist()))
            assert start >= 0 and 256 not in row  # 255 is the token 256
            blocks.update((start // BLOCK, (start + 256) // BLOCK))
    assert blocks == set(range(46)) - {19, 39}
    for start, end, meets in (
        (0, 19 * BLOCK, False),
        (0, 19 * BLOCK + 1, True),
        (20 * BLOCK - 1, 21 * BLOCK, True),
        (20 * BLOCK, 39 * BLOCK, False),
    ):
        assert task.meets_held_out(start, end) == meets


def test_text_scores_all_of_a_held_out_block_behind_64_bytes(tmp_path):
    data = default_rng(0).bytes(45 * BLOCK)
    file = tmp_path / "text.bin"
    file.write_bytes(data)
    task = make_task("text", text=str(file))
    scored = []
    for row in task.held_out_windows(10**6):
        start = data.find(bytes(token - 1 for token in row.tolist()))
        assert start >= 0 and len(row) == 257
        scored += range(start + 64, start + 257)
    for first in (19 * BLOCK, 39 * BLOCK):
        inside = [place for place in scored if first <= place < first + BLOCK]
        assert inside == list(range(first + 64, inside[-1] + 1))  # each once, without a gap
        assert first + BLOCK - 257 < inside[-1] < first + BLOCK  # no further window would fit
        scored = [place for place in scored if place not in inside]
    assert not scored
    assert len(task.held_out_windows(5)) == 5


def test_bits_per_byte(text_file):
    """Held-out bytes are all alike here. The model spends one bit on each, or 20 where it stands
    behind `place` others. The 193 bytes of a window that stand behind 64 or more count."""
    task = make_task("text", text=str(text_file))

    def bits(place):
        def forward(tokens):
            B, T = tokens.shape
            cost = torch.ones(T)
            cost[place - 1] = 20
            logits = torch.zeros(B, T, 257)
            logits[..., 0] = -torch.inf
            logits[..., 256] = torch.log(255 / torch.expm1(cost * math.log(2)))
            return logits, None

        return task.evaluate(Fake(forward=forward), 0, 40)["bits per byte"]

    for place in (1, 63):
        assert bits(place) == pytest.approx(1, rel=1e-5)
    for place in (64, 65, 256):
        assert bits(place) == pytest.approx(1 + 19 / 193, rel=1e-5)


def test_guessing_one_of_256_bytes_costs_8_bits(text_file):
    task = make_task("text", text=str(text_file))

    def forward(tokens):
        logits = torch.zeros(*tokens.shape, 257)
        logits[..., 0] = -torch.inf
        return logits, None

    scores = task.evaluate(Fake(forward=forward), 0, 40)
    assert scores == {"bits per byte": pytest.approx(8)}


def test_text_of_another_run_is_refused(text_file, tmp_path):
    settings = make_task("text", text=str(text_file)).settings
    assert settings["size"] == text_file.stat().st_size
    copy, other = tmp_path / "copy.bin", tmp_path / "other.bin"
    data = text_file.read_bytes()
    copy.write_bytes(data)
    other.write_bytes(data[:-1] + b"?")
    assert make_task(**{**settings, "text": str(copy)}).sha256 == settings["sha256"]
    with pytest.raises(ValueError, match=f"^sha256 = '{settings['sha256']}': .*was another"):
        make_task(**{**settings, "text": str(other)})


def test_the_usual_text_is_pythons_library():
    task = make_task("text")
    data = bytes((task.tokens - 1).astype(np.uint8))
    assert task.size == len(data) > 5_000_000
    assert Path(os.__file__).read_bytes() in data and Path(json.__file__).read_bytes() in data
    library = Path(os.__file__).parent
    for pattern in ("site-packages/*/main*.py", "test/test_o*.py"):
        for file in library.glob(pattern):
            assert file.read_bytes() not in data
    assert task.encode("né") == [1 + byte for byte in "né".encode()]
    assert task.decode(task.encode("né\n")) == "né\n"


# -- Refusals and examples

BAD_TASKS = (
    ("sort", {}, "task = 'sort'"),
    ("copy", dict(K=3), "K = 3"),
    ("copy", dict(N=1), "N = 1"),
    ("copy", dict(N=10**8), "N = 100000000"),
    ("copy", dict(block_size=128), "block_size = 128"),
    ("depo", dict(N=2), "N = 2"),
    ("depo", dict(K=0), "K = 0"),
    ("depo", dict(K=5), "K = 5"),
    ("depo", dict(V=0), "V = 0"),
    ("depo", dict(V=2, word_len=(1, 1)), "N = 5"),
    ("depo", dict(word_len=(3, 2)), "word_len = (3, 2)"),
    ("depo", dict(word_len=(0, 2)), "word_len = (0, 2)"),
    ("depo", dict(word_len=(1, 10**9)), "word_len = (1, 1000000000)"),
    ("depo", dict(separator=True), "separator = True"),
    ("depo0", dict(block_size=69), "block_size = 69"),
    ("brevo", dict(N=2), "N = 2"),
    ("brevo2", dict(block_size=106), "block_size = 106"),
    ("mano", dict(L=0), "L = 0"),
    ("mano", dict(L=10**7), "L = 10000000"),
    ("mano", dict(block_size=7), "block_size = 7"),
    ("lano", dict(cfg="cfg4"), "cfg = 'cfg4'"),
    ("lano", dict(root=3), "root = 3"),
    ("lano", dict(root=23), "root = 23"),
    ("lano", dict(root=22), "block_size = 128"),
    ("lano", dict(block_size=1e10), "block_size = 10000000000.0"),
    ("capo", dict(N=0), "N = 0"),
    ("capo", dict(N=10**7), "N = 10000000"),
    ("capo", dict(exposures=0), "exposures = 0"),
    ("capo", dict(block_size=33), "block_size = 33"),
    ("text", dict(text="no such file"), "text = 'no such file'"),
    ("text", dict(text="/"), "text = '/'"),
    ("text", dict(text=pytest.__file__), f"text = {pytest.__file__!r}"),  # it is too short
    ("text", dict(block_size=127), "block_size = 127"),
    ("text", dict(block_size=4096), "block_size = 4096"),
    ("text", dict(sha256="0" * 64), f"sha256 = '{'0' * 64}'"),
)


@parametrize("name, parameters, message", BAD_TASKS)
def test_bad_and_absurd_tasks_are_refused(name, parameters, message):
    with pytest.raises(ValueError) as error:
        make_task(name, **parameters)
    refused, allowed = str(error.value).split(": ", maxsplit=1)
    assert refused == message and allowed


@parametrize("name", [*tasks.TASKS, *tasks.ALIASES])
def test_examples_are_printed(name, capsys):
    tasks.main([name])
    title, text, legend = capsys.readouterr().out.split("\n\n")
    task = make_task(name)
    assert title.startswith(f"{task.name}: ") and f"{task.vocab_size} tokens" in title
    assert task.meaning in legend
    (document,) = task.documents(default_rng(0), 1)
    assert text.split() == tasks.printed(task, document).split()


@parametrize("words", ([], ["sort"], ["copy", "depo"]))
def test_examples_of_unknown_tasks_end_with_a_line(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        tasks.main(words)
    output = capsys.readouterr()
    assert stopped.value.code == 2 and not output.out
    (line,) = output.err.splitlines()
    assert line.startswith("tasks.py: ") and "depo0" in line
