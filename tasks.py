"""The tasks: what each one asks, how its data are drawn, and how a model is scored.

Each task but the last isolates one skill that language models need (Section 3 of
https://arxiv.org/abs/2512.17351); the last one, real text, needs them all at once. A task draws
documents, marks the targets in them, and packs them into windows. Here are two documents of Copy,
with their targets in [brackets]. The second one is cut off:

    <bos> 4 3 1 2 <query> [4 3 1 2] <bos> 2 4 1 3 <query> [2 4

Most tasks draw new documents at every step, so many that a model can't learn them by heart. There
are three exceptions: Capo repeats its people on purpose, long runs read a text many times, and the
smallest Mano has few expressions.

Read 1, what a task is, and 2, Copy, the smallest. Then read any of 3 Depo (reasoning depth),
4 Brevo (breadth), 5 Mano (arithmetic), 6 Lano (grammar), 7 Capo (facts), and 8, real text. 9 is the
table of tasks, which is also the place for your own; 10 prints an instance of one. The defaults of
a task's arguments are its sizes in train.py's preset nano.
"""

import argparse
import functools
import hashlib
import inspect
import math
import random
import re
import string
import sysconfig
import textwrap
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from canon_gpt import Refused, require

# ---- 1. A task -------------------------------------------------------------
#
# A task draws documents. Each is an instance of the task: tokens, of which some are targets. A
# training window is documents in a row, each opened by <bos> (the paper doesn't say how it packs
# them). Text's windows are cut from one long text instead. Unless a task scores otherwise, a
# document counts as right if the model predicts all of its targets.

# NumPy's generators are seeded with lists such as [seed, TRAIN, step]. The second number says what
# the random numbers are for, so that no two uses share them. PEOPLE and EXPOSURES are Capo's;
# SAMPLES is for what sample.py and plot.py show.
TRAIN, EVAL, PEOPLE, EXPOSURES, SAMPLES = range(5)
SCORE_BATCH = 32  # documents that a model reads at a time when it is scored
GENERATE_BATCH = 128  # answers that it writes at a time


class Document:
    """tokens, a list of int, and targets: spans (start, end) of tokens that count in the loss."""

    def __init__(self, tokens=(), targets=()):
        self.tokens = list(tokens)
        self.targets = list(targets)

    def give(self, tokens):
        """Append tokens that a model only reads."""
        self.tokens.extend(tokens)

    def ask(self, tokens):
        """Append tokens that a model must predict. Returns their span."""
        start = len(self.tokens)
        self.give(tokens)
        span = (start, len(self.tokens))
        self.targets.append(span)
        return span

    def target_tokens(self):
        """Each token that is a target, and -1 in place of the others: a list."""
        targets = [-1] * len(self.tokens)
        for start, end in self.targets:
            targets[start:end] = self.tokens[start:end]
        return targets


class Task:
    """The base class of all tasks. To add your own, subclass it and enter it in TASKS.

    A task defines `documents`, which training and evaluation draw (those of Capo and Text are only
    shown, because the two override `batch` and `evaluate`); `vocabulary`, what each token stands
    for (token 0 is padding); and, if it scores otherwise, `evaluate` and `units`.

    Each argument of its constructor becomes an option of train.py. It has the type of its default,
    and None takes a whole number. This default is its size in the preset nano, and its text in
    --help is a line of the class's docstring, such as

        block_size  context, in tokens; None: as long as the longest instance

    The constructor calls `check_fits` with the length of its longest document, because training
    cuts off a longer one, and scoring it fails. make_task then adds `name`, `parameters` and
    `run_seed`.
    """

    # {score: unit} of what evaluate returns. A unit says how scores are printed: "share", "bits",
    # "bits per ..", "nats", or another word.
    units = {"sequences": "share", "tokens": "share"}
    chance = None  # the share that guessing gets right, if it is worth a line in a figure
    stop = None  # the token that ends an answer, if answers differ in length
    space = " "  # between tokens in print
    measured = ()  # attributes that a run also records, such as the size of a text
    run_seed = 0  # the seed of the run that the task is for; Capo's people depend on it

    def __init__(self, block_size):
        self.block_size = block_size  # what a model reads; a window has one more, the last target

    def check_fits(self, longest):
        """Refused if a window does not hold `longest` tokens. If block_size is None, it becomes the
        smallest that does."""
        if self.block_size is None:
            self.block_size = longest - 1
        needed = f"at least {longest - 1} to hold an instance"
        require(longest <= self.block_size + 1, "block_size", self.block_size, needed)

    @property
    def vocab_size(self):
        return len(self.vocabulary)

    @property
    def settings(self):
        """What a run records of its task. make_task(**settings) makes the task again."""
        measured = {field: getattr(self, field) for field in self.measured}
        return {"name": self.name, **self.parameters, **measured}

    # ---- Training

    def documents(self, rng, count):
        """`count` Documents, in a list or yielded one by one. All chance must come from rng."""
        raise NotImplementedError

    def training_documents(self, rng, count):
        """The documents to train on. If your task has few examples, override this to leave out
        those that `documents` draws, which are scored and shown."""
        return self.documents(rng, count)

    def batch(self, seed, step, batch_size):
        """The training windows of one step.

        step     how many steps come before it
        returns  inputs and targets, both int64 (batch_size, block_size). A target is the token that
                 follows its input, or -1 where nothing is asked

        Each window starts with a new document and cuts off its last one. The windows depend on the
        arguments alone, so every model, resumed run and loader worker sees the same ones.
        """
        rng = np.random.default_rng([seed, TRAIN, step])
        width = self.block_size + 1
        tokens, targets = [], []  # of the windows, one after the other
        drawn_documents, drawn_tokens = 0, 0
        count = 2 * batch_size  # a first try; then the mean length of a document is known
        while len(tokens) < batch_size * width:
            before = len(tokens)
            for document in self.training_documents(rng, count):
                drawn_documents += 1
                drawn_tokens += len(document.tokens)
                room = width - len(tokens) % width  # in the window that is being filled
                tokens += document.tokens[:room]
                targets += document.target_tokens()[:room]
                if len(tokens) == batch_size * width:
                    break
            added = len(tokens) - before
            require(added > 0, f"tokens in {count} documents", added, "must be at least 1")
            # A window takes one document more than it holds, because it cuts off the last one. A
            # tenth and eight more make a further draw rare.
            windows_missing = batch_size - len(tokens) // width
            per_window = width / (drawn_tokens / drawn_documents) + 1
            count = int(1.1 * (windows_missing * per_window)) + 8
        windows = np.array([tokens, targets], dtype=np.int64).reshape(2, batch_size, width)
        return windows[0, :, :-1], windows[1, :, 1:]  # nothing predicts a window's first token

    # ---- Scores

    def answer_spans(self, document):
        """What a model is asked in this document: spans of its tokens. No span holds the first
        token, because nothing predicts it."""
        return [(max(start, 1), end) for start, end in document.targets if end > 1]

    def is_right(self, document, span, answer):
        """Whether `answer`, a list of tokens, is right in place of the span. None: there is no
        right or wrong."""
        start, end = span
        return answer == document.tokens[start:end]

    def evaluate(self, model, seed, n):
        """{score: float} on n documents, the same at each evaluation of a run: the share of
        documents with all answers right, and the share of the answers' tokens that are right."""
        documents = list(self.documents(np.random.default_rng([seed, EVAL]), n))
        right = self.right_tokens(model, [document.tokens for document in documents])
        right_documents, right_tokens = [], []
        for row, document in zip(right, documents):
            answers = [row[start:end] for start, end in self.answer_spans(document)]
            outcomes = np.concatenate(answers)  # a bool per token
            right_documents.append(outcomes.all())
            right_tokens.append(outcomes)
        return {"sequences": share(right_documents), "tokens": share(np.concatenate(right_tokens))}

    def right_answers(self, model, instances, letter):
        """{"k=1": share of right answers, ..} for each of `units`, if the letter is "k".

        instances  each is a document and its answers, [(k, start, end), ..]: the tokens from start
                   to end - 1 answer a question of this k. All of them must be right
        """
        instances = list(instances)
        rows = self.right_tokens(model, [document.tokens for document, _ in instances])
        right = defaultdict(list)
        for row, (_, answers) in zip(rows, instances):
            for number, start, end in answers:
                right[f"{letter}={number}"].append(row[start:end].all())
        return {score: share(right[score]) for score in self.units}

    @torch.no_grad()
    def right_tokens(self, model, sequences):
        """Whether each token is the model's top prediction, given the tokens before it. If all
        tokens of an answer are, greedy decoding writes that answer.

        sequences  lists of tokens
        returns    bool, (sequences, longest)
        """
        tokens = padded(sequences).to(device_of(model))
        right = []
        for rows in tokens.split(SCORE_BATCH):
            logits, _ = model(rows[:, :-1])
            right.append(logits.argmax(-1) == rows[:, 1:])
        # False in front, because nothing predicts the first token.
        return F.pad(torch.cat(right), (1, 0)).cpu().numpy()

    # ---- Answers and words

    def show(self, model, seed, temperature=0.0):
        """One instance, the longest of a hundred, in words and with the model's answers, as
        sample.py explains them. None of the hundred is drawn in training or scoring.

        temperature   0 takes the likeliest tokens, 1 samples
        """
        rng = np.random.default_rng([seed, SAMPLES])
        document = max(self.documents(rng, 100), key=lambda document: len(document.tokens))
        generator = torch.Generator(device_of(model)).manual_seed(seed)
        text = ""
        shown = 0  # how many of the document's tokens are in the text
        for start, end in self.answer_spans(document):
            prompt = document.tokens[:start]  # with right answers to earlier questions
            length = end - start
            if self.stop is not None:  # the answer ends at `stop`, or where the window is full
                length = self.block_size + 1 - start
            answer = self.generate_answer(model, prompt, length, temperature, generator)
            text += self.decode(document.tokens[shown:start]) + self.space
            verdict = self.is_right(document, (start, end), answer)
            if verdict is None:  # there is no right or wrong
                text += f"[{self.decode(answer)}]"
            elif verdict:
                text += f"[{self.decode(answer)} ✓]"
            else:
                text += f"[{self.decode(answer)} ✗ {self.decode(document.tokens[start:end])}]"
            text += self.space
            shown = end
        return text + self.decode(document.tokens[shown:])

    def generate_answer(self, model, prompt, length, temperature, generator):
        """What the model writes after these tokens: a list of tokens, up to and including `stop`.

        length  how many tokens at most; with the prompt, at most block_size + 1
        """
        prompts = torch.tensor([prompt], device=device_of(model))
        whole = model.generate(prompts, length, temperature, self.stop, generator)
        return whole[0, len(prompt) :].tolist()

    def encode(self, text):
        """The tokens of a text in the task's words. Raises Refused for a word that the task does
        not have."""
        tokens = []
        for word in text.split():
            if word not in self.vocabulary:
                raise Refused(f"{word!r} is not a word of {self.name}")
            tokens.append(self.vocabulary.index(word))
        return tokens

    def decode(self, tokens):
        """Tokens in words. Token 0, the padding, is an empty word, shown as <pad>."""
        return self.space.join(self.vocabulary[token] or "<pad>" for token in tokens)


@torch.no_grad()
def token_costs(model, tokens, first=1):
    """What each token from number `first` on costs the model, in nats.

    tokens   (rows, T); number 0 has no cost, because nothing predicts it
    returns  (rows, T - first), on the CPU
    """
    nats = []
    for rows in tokens.to(device_of(model)).split(SCORE_BATCH):
        logits, _ = model(rows[:, :-1])  # logits[:, t] predicts token t + 1
        logits = logits[:, first - 1 :].float()
        # cross_entropy wants (rows, vocab_size, tokens), hence .mT.
        nats.append(F.cross_entropy(logits.mT, rows[:, first:], reduction="none").cpu())
    return torch.cat(nats)


def padded(sequences):
    """Lists of tokens as rows, with zeros after them: int64, (sequences, longest)."""
    return pad_sequence([torch.tensor(tokens) for tokens in sequences], batch_first=True)


def device_of(model):
    return next(model.parameters()).device


def share(outcomes):
    return float(np.mean(outcomes))


def score_text(value, unit):
    """A score in print: a share as "97%", bits as "1,234", bits or nats per something as "0.123".

    unit  None if the task names none
    """
    if unit == "share":
        return f"{value:.0%}"
    if unit == "bits":
        return f"{value:,.0f}"
    if unit is not None and unit.startswith(("bits", "nats")):
        return f"{value:.3f}"
    return f"{value:.4g}"


# ---- 2. Copy (paper Fig. 5): can one layer repeat a permutation? -----------
#
#     <bos> 4 3 1 2 <query> [4 3 1 2]
#
# To copy, find where the last token occurred before and take its right neighbour. Attention alone
# needs two layers for this, or one that is far wider. With two layers, the first tells every token
# its left neighbour, and the second finds the token whose left neighbour was just written. A Canon
# layer can take the place of the first.


class Copy(Task):
    """
    N  how many numbers are copied
    """

    def __init__(self, N=64, block_size=129):
        super().__init__(block_size)
        require(N >= 2, "N", N, "at least 2")
        self.check_fits(2 * N + 2)  # <bos>, <query> and twice the numbers
        self.N = N
        self.bos, self.query = N + 1, N + 2  # the number x is token x
        numbers = [str(number) for number in range(1, N + 1)]
        self.vocabulary = ["", *numbers, "<bos>", "<query>"]

    def documents(self, rng, count):
        for numbers in (1 + permutations(rng, count, self.N)).tolist():
            document = Document([self.bos, *numbers, self.query])
            document.ask(numbers)
            yield document


def permutations(rng, count, n):
    """`count` times the numbers 0..n-1 in random order: int64, (count, n)."""
    rows = np.tile(np.arange(n), (count, 1))  # each row is 0..n-1
    return rng.permuted(rows, axis=1)  # shuffles each row by itself


# ---- 3. Depo: reasoning depth (paper Section 3) ----------------------------
#
#     <bos> c a  b d  d c  a b  <query_2> b [<ans> c]  <query_1> c [<ans> a]
#
# The edges of a cycle, here a -> b -> d -> c -> a, in random order; then questions: who comes k
# after q? The answer follows at once, so all k hops must happen inside the network. That measures
# its depth. Names are words of 1-2 tokens in Depo1 and of 5-7 in Depo2, so a hop first has to put
# neighbours together. Each name appears twice among the edges, and only by counting from <bos> can
# one tell a source from a target. Depo0, our addition, removes both difficulties: names are single
# tokens, and a comma ends each edge.
#
# Keep N > 2K: on a cycle of n names, k hops forward are n - k hops backward, which may be fewer.
# Training draws smaller cycles, too, but the scores are for N names only.


class NamesTask(Task):
    """A task whose names are `self.words`, of one token or more: "7.2.5" is "7.", "2." and "5". A
    dot means that the word goes on, so in print no space follows it."""

    def encode(self, text):
        return super().encode(text.replace(".", ". "))

    def decode(self, tokens):
        return super().decode(tokens).replace(". ", ".")


class Depo(NamesTask):
    """
    N          the most names on a cycle
    K          the most hops that are asked for
    V          how many letters words are made of
    word_len   the fewest and the most letters of a word
    separator  whether a comma ends each edge
    """

    most_questions = 10  # in an instance; n if it has fewer nodes

    def __init__(self, N, K, V, word_len, separator, block_size):
        super().__init__(block_size)
        require(N >= 3, "N", N, "at least 3")
        require(1 <= K < N, "K", K, f"allowed: 1 to {N - 1}")  # N hops lead back to q itself
        self.N, self.K = N, K
        self.words = Words(N, V, word_len)
        edge_length = 2 * self.words.longest + (1 if separator else 0)  # at most, in tokens
        question_length = 2 * self.words.longest + 2  # <query_k>, q, <ans> and the answer
        edges = N * edge_length
        questions = min(N, self.most_questions) * question_length
        self.check_fits(1 + edges + questions)  # 1 for <bos>

        queries = [f"<query_{k}>" for k in range(1, K + 1)]
        self.vocabulary = [""] + self.words.vocabulary + ["<bos>", "<ans>"] + queries
        self.bos = 1 + len(self.words.vocabulary)
        self.ans = self.bos + 1  # <query_k> is token ans + k
        self.separator = ()  # the tokens that end an edge: none, or a comma
        if separator:
            self.vocabulary.append(",")
            self.separator = (self.vocabulary.index(","),)

        self.scored = powers_of_two(K)  # the k that evaluate asks for
        if K > 3:
            self.scored.insert(2, 3)  # [1, 2, 3, 4, ..]: figures count hops without a gap
        self.units = {f"k={k}": "share" for k in self.scored}
        self.chance = 1 / (N - 1)  # one of the nodes other than q

    def documents(self, rng, count):
        sizes = draw_sizes(rng, count, self.N)
        n_questions = sum(min(n, self.most_questions) for n in sizes)
        hops = rng.integers(1, self.K + 1, n_questions).tolist()
        for document, _ in self.instances(rng, sizes, hops):
            yield document

    def instances(self, rng, sizes, hops):
        """Yields an `instance` for each size n. `hops` has the k of each question, for all
        instances in a row."""
        next_hops = iter(hops)
        drawn = zip(self.words.draw(rng, sizes), shuffles(rng, sizes), shuffles(rng, sizes))
        for names, sources, nodes in drawn:
            asked = nodes[: self.most_questions]
            yield self.instance(names, sources, asked, [next(next_hops) for _ in asked])

    def instance(self, names, sources, asked, hops):
        """A cycle 0 -> 1 -> .. -> n-1 -> 0 as a document, and its answers [(k, start, end), ..]:
        the tokens start .. end - 1 answer a question of k hops.

        names    the words of nodes 0..n-1, each a tuple of tokens
        sources  0..n-1 in random order, the order in which edges x -> x + 1 are written
        asked    the nodes that are asked about, in another random order
        hops     the k of each of these questions
        """
        n = len(names)
        document, answers = Document([self.bos]), []
        for x in sources:
            document.give(names[x] + names[(x + 1) % n] + self.separator)
        for q, k in zip(asked, hops):
            document.give((self.ans + k, *names[q]))
            start, end = document.ask((self.ans, *names[(q + k) % n]))
            answers.append((k, start + 1, end))  # <ans> is not part of the answer
        return document, answers

    def evaluate(self, model, seed, n):
        """n instances of size N: for each scored k, the share of answers with all tokens right."""
        rng = np.random.default_rng([seed, EVAL])
        n_questions = n * min(self.N, self.most_questions)
        # np.resize repeats the scored k in turn, so that each is asked equally often.
        hops = rng.permutation(np.resize(self.scored, n_questions)).tolist()
        sizes = [self.N for _ in range(n)]
        return self.right_answers(model, self.instances(rng, sizes, hops), letter="k")


class Depo0(Depo):
    def __init__(self, N=10, K=4, V=20, word_len=(1, 1), separator=True, block_size=71):
        super().__init__(N, K, V, word_len, separator, block_size)
        if self.words.longest == 1 and V <= 26:  # print names as letters, as README does
            self.vocabulary = [""] + list(string.ascii_lowercase[:V]) + self.vocabulary[V + 1 :]


class Depo1(Depo):
    def __init__(self, N=5, K=2, V=50, word_len=(1, 2), block_size=52):
        super().__init__(N, K, V, word_len, separator=False, block_size=block_size)


class Depo2(Depo):
    def __init__(self, N=5, K=2, V=3, word_len=(5, 7), block_size=152):
        super().__init__(N, K, V, word_len, separator=False, block_size=block_size)


def draw_sizes(rng, count, N):
    """`count` sizes n in 3..N, P(n) proportional to 1 / (n + sqrt N), as in the paper."""
    sizes = np.arange(3, N + 1)
    weights = 1 / (sizes + N**0.5)
    return rng.choice(sizes, count, p=weights / weights.sum()).tolist()


def shuffles(rng, sizes):
    """For each size n, the numbers 0..n-1 in random order, which is the order of n random keys. To
    draw all keys at once takes half the time of one permutation per size."""
    keys = rng.random(sum(sizes))
    orders, start = [], 0
    for n in sizes:
        orders.append(keys[start : start + n].argsort().tolist())
        start += n
    return orders


def powers_of_two(most):
    """1, 2, 4 .. and most."""
    powers = [2**i for i in range(most.bit_length())]  # all up to `most`
    return powers if most in powers else [*powers, most]


class Words:
    """Words of word_len = (shortest, longest) tokens, at least N different ones.

    The last token of a word is in V+1..2V, which marks its end, and the others are in 1..V. If all
    words have one token, it is in 1..V.
    """

    def __init__(self, N, V, word_len):
        require(V >= 1, "V", V, "at least 1")
        self.V = V
        self.shortest, self.longest = word_len
        in_order = 1 <= self.shortest <= self.longest
        require(in_order, "word_len", word_len, "allowed: 1 <= shortest <= longest")
        many = sum(V**length for length in range(self.shortest, self.longest + 1))
        require(N <= many, "N", N, f"V = {V} and word_len = {word_len} make only {many} words")
        last_letters = [str(letter) for letter in range(1, V + 1)]
        self.vocabulary = last_letters
        if self.longest > 1:
            earlier_letters = [f"{letter}." for letter in last_letters]
            self.vocabulary = earlier_letters + last_letters

    def draw(self, rng, sizes):
        """For each size n, n different words, tuples of tokens. They are distributed as after

            while len(words) < n:
                word = draw_word()
                if word not in words:
                    words.append(word)
            rng.shuffle(words)

        but all documents draw at once, and a word that came twice is drawn again.
        """
        words = []  # of each document
        if self.longest == 1:  # n different letters: none is drawn twice
            letters = 1 + permutations(rng, len(sizes), self.V)  # (documents, V)
            for row, n in zip(letters.tolist(), sizes):
                words.append([(letter,) for letter in row[:n]])
            return words
        words = [[None] * n for n in sizes]
        taken = [set() for _ in sizes]  # each document's words so far
        missing = [range(n) for n in sizes]  # each document's places without a word
        while any(missing):  # a list without places counts as False
            count = sum(len(places) for places in missing)
            drawn = iter(self.draw_any(rng, count))
            for i, places in enumerate(missing):  # document i needs words at these places
                missing[i] = []
                for place in places:
                    word = next(drawn)
                    if word in taken[i]:
                        missing[i].append(place)  # to be drawn again
                    else:
                        taken[i].add(word)
                        words[i][place] = word
        # Of two equal words the later one was drawn again, and short words are equal more often, so
        # later places have longer words. Shuffle them, or a word's place would hint at its length.
        shuffled = []
        for words_of_document, order in zip(words, shuffles(rng, sizes)):
            shuffled.append([words_of_document[place] for place in order])
        return shuffled

    def draw_any(self, rng, count):
        """`count` words, tuples of tokens. Some may be equal."""
        lengths = rng.integers(self.shortest, self.longest + 1, count)
        letters = rng.integers(1, self.V + 1, (count, self.longest))
        # In each row, move the letter at place length - 1 to V+1..2V, because it ends the word.
        letters[np.arange(count), lengths - 1] += self.V
        # Slices of one flat tuple: faster than a tuple per row.
        flat = tuple(letters.ravel().tolist())
        starts = range(0, count * self.longest, self.longest)
        return [flat[start : start + length] for start, length in zip(starts, lengths.tolist())]

    def split(self, tokens):
        """The words that tokens spell, as tuples. A special token is a word of its own."""
        words, word = [], ()
        for token in tokens:
            word += (token,)
            ends_word = token > self.V or self.longest == 1  # special tokens exceed V, too
            if ends_word:
                words.append(word)
                word = ()
        if word:
            words.append(word)  # it lacks its end
        return words


# ---- 4. Brevo: reasoning breadth (paper Section 3) -------------------------
#
#     <bos> a c  d f  b c  c e  a d <query> e [<ans> b a c e <eos>]
#
# The edges "parent child" of a random graph without cycles, in random order; then all that q
# depends on, parents before their children, with q last. Any such order is right. Here e needs c,
# which needs a and b. The answer starts with a node without parents, so the model has to search the
# whole sub-graph before it writes a word. That measures breadth. Names are one token 1..N in
# Brevo1, and words of 2-4 tokens in Brevo2.

MOST_EDGES = 4  # the most parents of a node, and the most children


class Brevo(NamesTask):
    """
    N         the most names in a graph
    V         how many letters words are made of
    word_len  the fewest and the most letters of a word
    """

    units = {"all": "share"}

    def __init__(self, N, V, word_len, block_size):
        super().__init__(block_size)
        require(N >= 3, "N", N, "at least 3")
        self.N, self.words = N, Words(N, V, word_len)
        # A window must hold the most edges and the longest answer, in words of average length. The
        # words of Brevo2 can make an instance longer than that, at N = 50, say. It is drawn again.
        most_edges = sum(min(MOST_EDGES, node) for node in range(N))  # a parent is an earlier node
        most_words = 2 * most_edges + 1 + N  # the edges, q and the answer
        average = (self.words.shortest + self.words.longest) / 2
        self.check_fits(4 + math.ceil(most_words * average))  # <bos>, <query>, <ans> and <eos>
        self.vocabulary = ["", *self.words.vocabulary, "<bos>", "<query>", "<ans>", "<eos>"]
        self.bos, self.query, self.ans, self.eos = range(self.vocab_size - 4, self.vocab_size)
        self.stop = self.eos

    def documents(self, rng, count):
        return self.instances(rng, draw_sizes(rng, count, self.N))

    def instances(self, rng, sizes):
        """Yields a document for each size n."""
        all_names = self.words.draw(rng, sizes)
        dice = random.Random(int(rng.integers(2**63)))  # faster than numpy for single numbers
        for names in all_names:
            document = self.instance(dice, names)
            while len(document.tokens) > self.block_size + 1:  # rare: see __init__
                (names,) = self.words.draw(rng, [len(names)])
                document = self.instance(dice, names)
            yield document

    def instance(self, dice, names):
        """A document. names[x] is the word of node x, a tuple of tokens."""
        n = len(names)
        parents = draw_graph(dice, n)
        q = dice.randrange(n - math.ceil(n / 4), n)  # in the last quarter: it has parents
        edges = []
        for node in range(n):
            for parent in parents[node]:
                edges.append(names[parent] + names[node])  # the tokens of both words
        dice.shuffle(edges)
        document = Document([self.bos])
        for edge in edges:
            document.give(edge)
        document.give((self.query, *names[q]))
        answer = [self.ans]
        for node in draw_order(dice, parents, q):
            answer += names[node]
        answer.append(self.eos)
        document.ask(answer)
        return document

    def verify(self, prompt, answer):
        """Whether the answer is right for the prompt, which ends in <ans>. Both are lists."""
        _, *edges, _, q, _ = self.words.split(prompt)  # <bos> edges <query> q <ans>
        parents = defaultdict(set)
        for parent, child in zip(edges[::2], edges[1::2]):
            parents[child].add(parent)
        if self.eos not in answer:
            return False
        named = self.words.split(answer[: answer.index(self.eos)])
        placed = set()
        for word in named:
            if parents[word] - placed:  # a parent that is not placed yet
                return False
            placed.add(word)
        return sorted(named) == sorted(dependencies(parents, q))  # each of them once

    def answer_spans(self, document):
        """All that follows <ans>, which is the first token of the only target."""
        ((start, end),) = document.targets
        return [(start + 1, end)]

    def is_right(self, document, span, answer):
        return self.verify(document.tokens[: span[0]], answer)

    def evaluate(self, model, seed, n):
        """n greedy answers at size N: the share that is right."""
        rng = np.random.default_rng([seed, EVAL])
        prompts = defaultdict(list)  # by length, because `generate` takes prompts of one length
        longest = defaultdict(int)  # their longest answer; any right answer is as long as ours
        for document in self.instances(rng, [self.N for _ in range(n)]):
            ((start, end),) = self.answer_spans(document)
            prompts[start].append(document.tokens[:start])
            longest[start] = max(longest[start], end - start)
        verdicts = []
        for length in prompts:
            for rows in torch.tensor(prompts[length]).split(GENERATE_BATCH):
                rows = rows.to(device_of(model))
                whole = model.generate(rows, longest[length], temperature=0.0, stop=self.eos)
                for tokens in whole.tolist():
                    verdicts.append(self.verify(tokens[:length], tokens[length:]))
        return {"all": share(verdicts)}


class Brevo1(Brevo):
    def __init__(self, N=10, block_size=96):
        super().__init__(N, V=N, word_len=(1, 1), block_size=block_size)


class Brevo2(Brevo):
    def __init__(self, N=5, V=4, word_len=(2, 4), block_size=107):
        super().__init__(N, V, word_len, block_size)


def draw_graph(dice, n):
    """Each node's parents in a random graph. The first nodes, at most a quarter (rounded up), are
    leaves, which have none. A later node has 1 to 4 parents among the earlier nodes that are still
    free, which are those with fewer than 4 children."""
    leaves = dice.randint(1, math.ceil(n / 4))
    parents = [[] for _ in range(n)]
    children = [0] * n
    free = list(range(leaves))  # the earlier nodes with fewer than 4 children, in order
    for node in range(leaves, n):
        parents[node] = dice.sample(free, dice.randint(1, min(MOST_EDGES, len(free))))
        for parent in parents[node]:
            children[parent] += 1
            if children[parent] == MOST_EDGES:
                free.remove(parent)
        free.append(node)
    return parents


def dependencies(parents, q):
    """q and all that it depends on, a set."""
    found, unexplored = {q}, [q]
    while unexplored:
        new = set(parents[unexplored.pop()]) - found
        found |= new
        unexplored += new
    return found


def draw_order(dice, parents, q):
    """q and all that it depends on, parents first. The order is drawn from its end, which is q. A
    node is ready to be drawn once all its children that q depends on are placed."""
    unplaced_children = [0] * len(parents)  # of each node, among those that q depends on
    for node in dependencies(parents, q):
        for parent in parents[node]:
            unplaced_children[parent] += 1
    order, ready = [], [q]
    while ready:
        node = ready.pop(dice.randrange(len(ready)))
        order.append(node)
        for parent in parents[node]:
            unplaced_children[parent] -= 1
            if unplaced_children[parent] == 0:
                ready.append(parent)
    return order[::-1]


# ---- 5. Mano: knowledge manipulation (paper Section 3) ---------------------
#
#     [<bos> <len_3> * - 7 20 + 3 9 <ans> 5]      (7 - 20) * (3 + 9) = 5 mod 23
#
# Arithmetic modulo 23 in prefix notation, without intermediate steps. The tables of + - * are
# knowledge, which has to be learnt and then applied several times over. All tokens are targets.
# Short expressions are few, so they come up again.


class Mano(Task):
    """
    L  the most operators in an expression
    """

    modulus = 23
    chance = 0.06  # zero is the likeliest value: 6% of short expressions have it

    def __init__(self, L=2, block_size=128):
        super().__init__(block_size)
        # Python limits how deep append_expression may recurse.
        require(1 <= L <= 400, "L", L, "allowed: 1 to 400")
        self.check_fits(2 * L + 5)  # L operators and L + 1 operands, between four other tokens
        self.L = L
        numbers = [str(number) for number in range(self.modulus)]
        lengths = [f"<len_{l}>" for l in range(1, L + 1)]
        self.vocabulary = ["", *numbers, "+", "-", "*", "<bos>", "<ans>"] + lengths
        self.plus = self.modulus + 1  # the number x is token x + 1; then come + - *
        self.bos, self.ans = self.plus + 3, self.plus + 4  # <len_l> is token ans + l
        self.scored = powers_of_two(L)  # the l that evaluate asks for
        self.units = {f"l={l}": "share" for l in self.scored}

    def documents(self, rng, count):
        lengths = rng.integers(1, self.L + 1, count).tolist()
        for document, _ in self.instances(rng, lengths):
            yield document

    def instances(self, rng, lengths):
        """For each length l, which is the number of operators, yields a document and its answer, as
        [(l, start, end)]."""
        dice = random.Random(int(rng.integers(2**63)))  # faster than numpy for single numbers
        for l in lengths:
            tokens = [self.bos, self.ans + l]
            value = self.append_expression(tokens, dice, l)
            tokens += [self.ans, 1 + value]
            end = len(tokens)
            yield Document(tokens, [(0, end)]), [(l, end - 1, end)]

    def append_expression(self, tokens, dice, l):
        """Append a random expression with l operators to the tokens. Returns its value."""
        if l == 0:
            number = dice.randrange(self.modulus)
            tokens.append(1 + number)
            return number
        operator = dice.randrange(3)  # 0, 1, 2 are + - *, as in the vocabulary
        tokens.append(self.plus + operator)
        in_left = dice.randrange(l)  # operators in the left operand
        a = self.append_expression(tokens, dice, in_left)
        b = self.append_expression(tokens, dice, l - 1 - in_left)
        if operator == 0:
            return (a + b) % self.modulus
        if operator == 1:
            return (a - b) % self.modulus
        return (a * b) % self.modulus

    def answer_spans(self, document):
        """The value."""
        end = len(document.tokens)
        return [(end - 1, end)]

    def evaluate(self, model, seed, n):
        """n expressions of each scored l: the share of right values."""
        lengths = np.repeat(self.scored, n).tolist()
        instances = self.instances(np.random.default_rng([seed, EVAL]), lengths)
        return self.right_answers(model, instances, letter="l")


# ---- 6. Lano: the structure of language (paper Section 3) ------------------
#
#     [<bos> 3 3 2 2 1 .. 1 2 1 <bos> 3 1 2 1 ..]        sentences of a grammar
#
# A sentence grows from the root: level by level, each symbol becomes one of its rules, all equally
# likely, down to the tokens 1, 2, 3. Nothing marks where the tokens of a symbol begin or end, so
# the model must infer the whole tree. (The grammars are from https://arxiv.org/abs/2305.13673.) All
# tokens are targets. Both scores come from one chart, `Grammar.chart`.

GRAMMARS = {  # {symbol: its rules, with | between them}
    "cfg3f": {
        22: "20 21 | 20 19 21 | 21 19 19 | 20 20",
        19: "18 16 18 | 17 18 | 18 18",
        20: "16 16 | 16 17 | 17 16 18",
        21: "18 17 | 17 16 | 16 17 18 | 16 18",
        16: "15 15 | 13 15 13 | 14 13 | 14 14",
        17: "15 14 13 | 14 15 | 15 14",
        18: "14 15 13 | 15 13 13 | 13 15",
        13: "11 12 | 12 11 12 | 10 12 11",
        14: "10 12 | 12 10 12 | 12 11 | 10 12 12",
        15: "10 11 11 | 11 11 10 | 10 10 | 12 12 11",
        10: "8 9 9 | 9 7 9 | 7 9 9",
        11: "8 8 | 9 7 | 9 7 7",
        12: "7 9 7 | 9 8 | 8 8 9",
        7: "2 2 1 | 3 2 2 | 3 1 2 | 3 2",
        8: "3 1 1 | 1 2 | 3 3 1",
        9: "1 2 1 | 3 3 | 1 1",
    },
    "cfg3k": {
        25: "22 23 | 24 24 | 24 23",
        22: "21 19 | 21 20 20 | 21 21 | 19 21",
        23: "20 21 20 | 20 21 21 | 20 20 | 19 20",
        24: "21 20 | 20 21 | 19 19 21",
        19: "17 18 16 | 18 16 | 18 16 18 | 18 18 17",
        20: "17 17 17 | 16 18 | 17 17 16 | 18 17 16",
        21: "18 17 | 16 18 16 | 17 16 16 | 17 18 18",
        16: "15 14 | 14 15 | 15 14 15 | 14 13 13",
        17: "14 15 14 | 15 13 13 | 15 15",
        18: "14 14 | 15 13 | 13 14 14",
        13: "10 12 12 | 11 11 12 | 12 12",
        14: "10 11 | 10 11 11 | 11 10 10 | 11 11",
        15: "12 11 | 10 10 | 11 12",
        10: "7 7 | 8 8 | 9 9 7 | 7 9 7",
        11: "8 7 9 | 7 7 7 | 7 8 7",
        12: "7 8 | 8 8 7 | 9 7 9 | 8 9",
        7: "3 3 | 1 3 1 | 2 1",
        8: "2 3 | 1 1 2 | 3 1 | 1 2 2",
        9: "1 3 3 | 2 2 | 1 1 1 | 3 2 3",
    },
}
MOST_RULES, MOST_PARTS = 4, 3  # of a symbol, and of a rule


class Grammar:
    """A context-free grammar in levels, from {symbol: its rules as in GRAMMARS}.

    rules  {symbol: list of tuples of symbols}, lower levels first, without the symbols whose number
           is above the root's
    root   the symbol that sentences grow from; the default is the highest
    mean   {symbol: how many tokens it grows into}
    """

    def __init__(self, rules, root=None):
        self.root = max(rules) if root is None else root
        require(self.root in rules, "root", root, f"allowed: {min(rules)} to {max(rules)}")
        self.rules = {}
        for symbol in sorted(rules):
            if symbol <= self.root:
                choices = rules[symbol].split("|")
                self.rules[symbol] = [tuple(map(int, rule.split())) for rule in choices]

        self.mean = {1: 1, 2: 1, 3: 1}  # a token grows into itself
        for symbol, rules_of_symbol in self.rules.items():
            means = []
            for rule in rules_of_symbol:
                means.append(sum(self.mean[part] for part in rule))
            self.mean[symbol] = np.mean(means)  # its rules are equally likely

        # The rules as tables, for `sample`: n_rules[symbol] counts a symbol's rules, and
        # parts[symbol, number] has the parts of one, then zeros.
        self.n_rules = np.zeros(self.root + 1, dtype=np.int64)
        self.parts = np.zeros((self.root + 1, MOST_RULES, MOST_PARTS), dtype=np.int64)
        for symbol, rules_of_symbol in self.rules.items():
            self.n_rules[symbol] = len(rules_of_symbol)
            for number, rule in enumerate(rules_of_symbol):
                self.parts[symbol, number, : len(rule)] = rule

    def sample(self, rng, count):
        """`count` sentences, lists of tokens."""
        symbols = np.full(count, self.root)  # of all sentences in a row; each begins as a root
        sentence_of = np.arange(count)  # symbols[i] belongs to sentence number sentence_of[i]
        while symbols[0] in self.rules:  # all symbols are on one level, so one stands for all
            uniform = rng.random(len(symbols))  # in [0, 1)
            numbers = (uniform * self.n_rules[symbols]).astype(np.int64)  # each symbol's rule
            parts = self.parts[symbols, numbers]  # (symbols, most parts of a rule)
            is_part = parts > 0  # zeros only fill up short rules
            sentence_of = np.repeat(sentence_of, is_part.sum(1))  # parts stay in their sentence
            symbols = parts[is_part]  # row after row, which keeps their order
        ends = np.bincount(sentence_of).cumsum()  # of each sentence, counted in symbols
        return [tokens.tolist() for tokens in np.split(symbols, ends[:-1])]

    def chart(self, tokens, scale=2.1):
        """For every prefix of a sentence, how likely it is together with each next token, or with
        the end.

        tokens    (B, T) int64, a sentence a row, zeros after it
        returns   (B, T + 1, 4) float64 (float32 on MPS): [b, t, v] is scale^t times the probability
                  that a sentence starts with row b's first t tokens and then has v (0: ends). The
                  scale, about 1 / P(a token), prevents underflow

        Up, level by level: I_X[i, j] = P(X grows into exactly the tokens i .. j-1). It is the mean
        over X's rules, such as X -> B C D, of the matrix products I_B I_C I_D: "B up to somewhere,
        C from there, D from there".

        Down: starts[X][t] = P(a sentence has the row's first t tokens, and an X begins after them).
        The root begins at 0, a rule's first part where its symbol does, the next part where that
        ends; `end` is where the root's last part ends.
        """
        B, T = tokens.shape
        dtype = torch.float32 if tokens.device.type == "mps" else torch.float64
        inside = {}
        for token in (1, 2, 3):
            scaled = scale * (tokens == token).to(dtype)
            inside[token] = torch.diag_embed(scaled, 1)  # `scale` at [i, i + 1] if it is token i
        for symbol in list(self.rules)[:-1]:  # lowest level first; the root's is not needed
            total = 0  # over the rules: (B, T + 1, T + 1)
            for rule in self.rules[symbol]:
                product = inside[rule[0]]
                for part in rule[1:]:
                    product = product @ inside[part]
                total = total + product
            inside[symbol] = total / len(self.rules[symbol])
        zeros = tokens.new_zeros(B, 1, T + 1, dtype=dtype)  # shared, so never written in place
        starts, end = defaultdict(lambda: zeros), zeros
        starts[self.root] = zeros.clone()
        starts[self.root][:, :, 0] = 1
        for symbol in reversed(self.rules):  # from the root down: starts[symbol] is complete
            for rule in self.rules[symbol]:
                here = starts[symbol] / len(self.rules[symbol])  # where the first part begins
                for part in rule:
                    starts[part] = starts[part] + here
                    here = here @ inside[part]  # where this part ends, and the next one begins
                if symbol == self.root:
                    end = end + here
        return torch.cat([end, starts[1], starts[2], starts[3]], 1).mT  # from (B, 4, T + 1)


class Lano(Task):
    """
    cfg   the grammar: cfg3f or cfg3k
    root  the symbol that sentences grow from; None: the grammar's own
    """

    units = {"sentences": "share", "KL": "nats"}

    def __init__(self, cfg="cfg3f", root=17, block_size=128):
        super().__init__(block_size)
        require(cfg in GRAMMARS, "cfg", cfg, f"allowed: {', '.join(GRAMMARS)}")
        self.grammar = Grammar(GRAMMARS[cfg], root)
        mean_length = self.grammar.mean[self.grammar.root]
        # <bos> and a sentence of twice the mean length: nearly all are shorter.
        self.check_fits(1 + math.ceil(2 * mean_length))
        self.vocabulary = ["", "1", "2", "3", "<bos>"]
        self.bos = self.stop = self.vocabulary.index("<bos>")

    def documents(self, rng, count):
        for sentence in self.grammar.sample(rng, count):
            tokens = [self.bos, *sentence]
            yield Document(tokens, [(0, len(tokens))])

    @torch.no_grad()
    def evaluate(self, model, seed, n):
        """sentences: the share of n texts, drawn at temperature 1 from <bos> to <bos>, that are
        sentences of the grammar.

        KL: the divergence of the next-token distribution from the exact one, in nats, as the mean
        over all places of n sentences.
        """
        generator = torch.Generator(device_of(model)).manual_seed(seed)
        parsed = 0
        prompts = torch.full((n, 1), self.bos, device=device_of(model))  # <bos> alone
        for rows in prompts.split(GENERATE_BATCH):
            drawn = model.generate(rows, self.block_size, stop=self.bos, generator=generator)
            parsed += int(self.parses(drawn[:, 1:]).sum())

        sentences = padded(self.grammar.sample(np.random.default_rng([seed, EVAL]), n))
        nats, n_places = 0.0, 0
        # <bos> comes before a sentence; what no longer fits in the context is cut off.
        for rows in sentences[:, : self.block_size - 1].split(SCORE_BATCH):
            rows = rows.to(device_of(model))
            chart = self.charts(rows)  # (rows, T + 1, 4), zero at places after a sentence's end
            is_place = chart.sum(-1) > 0
            exact = chart[is_place] / chart[is_place].sum(-1, keepdim=True)
            logits, _ = model(F.pad(rows, (1, 0), value=self.bos))
            log_model = logits[is_place].to(exact.dtype).log_softmax(-1)
            log_model = log_model[:, [self.bos, 1, 2, 3]]  # as in the chart; <bos> is the end
            exact_log_exact = torch.xlogy(exact, exact)  # 0 where exact is 0
            nats += float((exact_log_exact - exact * log_model).sum())
            n_places += len(exact)
        return {"sentences": parsed / n, "KL": nats / n_places}

    def parses(self, tokens):
        """Which rows (B, T) are a sentence and then <bos> up to the end, as `generate` writes them:
        bool, (B,)."""
        in_sentence = tokens != self.bos
        lengths = in_sentence.sum(1)
        chart = self.charts(tokens * in_sentence)
        each_row = torch.arange(len(tokens), device=tokens.device)
        after_sentence = chart[each_row, lengths]  # (B, 4)
        ended = tokens[:, -1] == self.bos  # otherwise it was cut off
        return ended & (after_sentence[:, 0] > 0)  # entry 0: the sentence may end here

    def charts(self, tokens):
        """The chart of many rows, a few at a time to save memory."""
        most_numbers = 2**21  # in one of the chart's matrices, for all these rows: 16 MB in float64
        few = max(1, most_numbers // tokens.shape[1] ** 2)
        return torch.cat([self.grammar.chart(rows) for rows in tokens.split(few)])

    def answer_spans(self, document):
        """The sentence after <bos>."""
        return [(1, len(document.tokens))]

    def is_right(self, document, span, answer):
        """Whether it is any sentence of the grammar."""
        return bool(self.parses(torch.tensor([answer])).item())


# ---- 7. Capo: knowledge capacity (paper Section 3) -------------------------
#
#     [<bos> Ada Mae King first saw light July 3 1961 she grew up in Rome ..]
#
# Biographies of N invented people, each of whom is met 100 times, each time in newly drawn
# wordings. How many bits of these facts does a model hold per parameter? (The question is that of
# https://arxiv.org/abs/2404.05405.) A person has three names and some facts. Each is one token, but
# the birth date is three. Three words before a fact tell which it is, worded in one of 10 ways.
# Names and facts are uniform, so log2 of the number of possibilities is what there is to know. All
# tokens are targets. Tokens in place of English are our choice.

# How many different ones there are of each, as in the paper.
NAMES = {"first name": 400, "middle name": 400, "last name": 1000}
FACTS = {
    "pronoun": 2,
    "month": 12,
    "day": 28,
    "year": 200,
    "birth city": 200,
    "university": 300,
    "major": 100,
    "employer": 263,
}
PERSON = NAMES | FACTS
COLUMNS = [*PERSON, "work city"]  # a person's tokens; the work city follows from the employer
POSSIBLE_NAMES, POSSIBLE_FACTS = math.prod(NAMES.values()), math.prod(FACTS.values())

THREE_WORDS = ["word", "word", "word"]
BIOGRAPHY = ["<bos>", "first name", "middle name", "last name", *THREE_WORDS]
BIOGRAPHY += ["month", "day", "year"]
BIOGRAPHY += ["pronoun", *THREE_WORDS, "birth city"]
BIOGRAPHY += ["pronoun", *THREE_WORDS, "university"]
BIOGRAPHY += ["pronoun", *THREE_WORDS, "major"]
BIOGRAPHY += ["pronoun", *THREE_WORDS, "employer"]
BIOGRAPHY += ["pronoun", *THREE_WORDS, "work city"]
# The places of a biography that hold words, those that hold values, and each value's column.
WORD_PLACES = [place for place, kind in enumerate(BIOGRAPHY) if kind == "word"]
VALUE_PLACES = [place for place, kind in enumerate(BIOGRAPHY) if kind in COLUMNS]
VALUE_COLUMNS = [COLUMNS.index(BIOGRAPHY[place]) for place in VALUE_PLACES]

SENTENCES = 6  # in a biography
WORDINGS = 10  # of each sentence
FILLERS = 50  # the different words that wordings are made of


class Capo(Task):
    """
    N          how many people there are
    exposures  how often each person is met, if --steps is not given
    """

    units = {"names": "share", "facts": "share", "bits": "bits", "bits/param": "bits per parameter"}

    def __init__(self, N=2000, exposures=100, block_size=139):
        super().__init__(block_size)
        # With more people, `choice` in draw_people lists all 160 million names: 1.3 GB.
        most = POSSIBLE_NAMES // 50
        require(1 <= N <= most, "N", N, f"allowed: 1 to {most:,}")
        require(exposures >= 1, "exposures", exposures, "at least 1")
        self.check_fits(len(BIOGRAPHY))
        self.N, self.exposures = N, exposures
        values = []
        for kind, many in PERSON.items():
            values += [f"{kind}-{i}".replace(" ", "-") for i in range(many)]
        words = [f"word-{i}" for i in range(FILLERS)]
        self.vocabulary = [""] + values + words + ["<bos>"]
        self.first_word = 1 + len(values)
        self.bos = self.first_word + len(words)
        # A wording is three words, which are the digits in base 50 of a number. All numbers differ,
        # so no two wordings are alike. They are the same for all seeds.
        rng = np.random.default_rng(0)
        numbers = rng.choice(FILLERS**3, (SENTENCES, WORDINGS), replace=False)
        digits = np.unravel_index(numbers, (FILLERS, FILLERS, FILLERS))
        self.wordings = self.first_word + np.stack(digits, axis=-1)  # (SENTENCES, WORDINGS, 3)
        self.biographies_per_window = (self.block_size + 1) // len(BIOGRAPHY)

    def steps(self, batch_size):
        """How many training steps it takes to meet everybody `exposures` times."""
        return math.ceil(self.exposures * self.N / (batch_size * self.biographies_per_window))

    def biographies(self, rng, who):
        """The lives of the people with numbers `who`, in new words: (len(who), 35) int64. Who they
        are depends on the run's seed alone."""
        chosen = rng.integers(0, WORDINGS, (len(who), SENTENCES))
        # words[i, s] = self.wordings[s, chosen[i, s]]: (people, SENTENCES, 3)
        words = self.wordings[np.arange(SENTENCES), chosen]
        people = draw_people(self.run_seed, self.N)[who]  # (people, 12)
        text = np.full((len(who), len(BIOGRAPHY)), self.bos, dtype=np.int64)
        # Written over, all but the first token.
        text[:, WORD_PLACES] = words.reshape(len(who), -1)
        text[:, VALUE_PLACES] = people[:, VALUE_COLUMNS]
        return text

    def documents(self, rng, count):
        """To look at; `batch` draws for training."""
        lives = self.biographies(rng, rng.integers(0, self.N, count)).tolist()
        return [Document(tokens, [(0, len(tokens))]) for tokens in lives]

    def batch(self, seed, step, batch_size):
        """As in all tasks, but windows hold whole biographies, zeros after, and every person
        appears once per epoch."""
        count = batch_size * self.biographies_per_window
        # The i-th biography of the run is of epoch i // N, at place i % N of its order.
        epochs, places = np.divmod(np.arange(step * count, (step + 1) * count), self.N)
        who = np.empty(count, dtype=np.int64)
        for epoch in range(epochs[0], epochs[-1] + 1):
            in_epoch = epochs == epoch
            who[in_epoch] = epoch_order(seed, epoch, self.N)[places[in_epoch]]
        lives = self.biographies(np.random.default_rng([seed, TRAIN, step]), who)
        tokens = lives.reshape(batch_size, -1)
        n_zeros = self.block_size + 1 - tokens.shape[1]
        tokens = np.pad(tokens, [(0, 0), (0, n_zeros)])  # at the end of each row
        following = tokens[:, 1:]
        return tokens[:, :-1], np.where(following > 0, following, -1)

    def answer_spans(self, document):
        """The first mention of each fact."""
        places = [BIOGRAPHY.index(fact) for fact in COLUMNS if fact not in NAMES]
        return [(place, place + 1) for place in sorted(places)]

    def evaluate(self, model, seed, n):
        """What the model knows, judged by n people: the shares of all there is to know of names and
        of facts; bits; and bits/param.

            bits = N log2(N0 / e^p1) + N log2(S0 / e^p2),  no term below zero    (paper Section 3)

        There are N0 possible names and S0 possible sets of facts. A person's name costs the model
        p1 nats on average, the facts p2. The work city follows from the employer, so it adds
        nothing to S0, but it costs a model that does not know it. Embeddings of tokens that nobody
        has do not count as parameters.
        """
        rng = np.random.default_rng([seed, EVAL])
        who = rng.permutation(self.N)[:n]  # n different people
        lives = torch.from_numpy(self.biographies(rng, who))
        nats = token_costs(model, lives).mean(0).numpy()  # nats[i] is what token i + 1 costs

        def cost_of(kinds):
            """What these cost in nats, each at its first mention."""
            return float(nats[[BIOGRAPHY.index(kind) - 1 for kind in kinds]].sum())

        # log2(N0 / e^p1) = log2 N0 * (1 - p1 / ln N0): all there is to know, times the share known.
        names = max(0.0, 1 - cost_of(NAMES) / math.log(POSSIBLE_NAMES))
        facts = max(0.0, 1 - cost_of([*FACTS, "work city"]) / math.log(POSSIBLE_FACTS))
        bits = self.N * (names * math.log2(POSSIBLE_NAMES) + facts * math.log2(POSSIBLE_FACTS))
        # Tokens below first_word are padding and values. Those that no person has are unused.
        unused = self.first_word - len(np.unique(draw_people(self.run_seed, self.N)))
        counts = model.parameter_counts()
        per_token = counts["embeddings"] // self.vocab_size  # its row, and its head's if untied
        parameters = counts["total"] - per_token * unused
        return {"names": names, "facts": facts, "bits": bits, "bits/param": bits / parameters}


@functools.lru_cache(maxsize=2)
def draw_people(seed, N):
    """N people with different names: tokens, (N, 12) int64, in the order of COLUMNS."""
    rng = np.random.default_rng([seed, PEOPLE])
    counts = np.array(list(PERSON.values()))
    people = rng.integers(0, counts, (N, len(counts)))
    # Replace the names, so that no two people share one. A number stands for a first, middle and
    # last name, as 365 does for the digits 3, 6, 5.
    names = rng.choice(POSSIBLE_NAMES, N, replace=False)
    people[:, : len(NAMES)] = np.stack(np.unravel_index(names, counts[: len(NAMES)]), axis=1)
    # Each employer is in one of the birth cities, the same for every seed.
    cities = np.random.default_rng(0).integers(0, PERSON["birth city"], PERSON["employer"])
    work_cities = cities[people[:, COLUMNS.index("employer")]]
    first_tokens = np.cumsum([1, *counts[:-1]])  # the token of each column's value 0
    first_city = first_tokens[COLUMNS.index("birth city")]
    return np.column_stack([people + first_tokens, work_cities + first_city])


@functools.lru_cache(maxsize=2)
def epoch_order(seed, epoch, N):
    """The people 0..N-1, each once, in the order of this epoch."""
    return np.random.default_rng([seed, EXPOSURES, epoch]).permutation(N)


# ---- 8. Text: real text, byte by byte --------------------------------------
#
#     [def forward(self, x): ..]
#
# Does Canon help on real text? The paper trains on web text. A laptop can take a text that comes
# with Python, which is its standard library, or any file of yours. A token is a byte, so nothing
# comes between text and model. All tokens are targets. Every 20th block of 4 KiB is held out, and
# the score is how many bits the model needs for each of its bytes.


class Text(Task):
    """
    text  python, which is Python's standard library, or the path of a file
    """

    units = {"bits per byte": "bits per byte"}
    measured = ("size", "sha256")
    bytes_per_block = 4096  # of the text; block_size, a model's context, is another size
    held_out_every = 20  # blocks
    context = 64  # bytes that come before every byte that is scored
    space = ""

    def __init__(self, text="python", block_size=256):
        super().__init__(block_size)
        self.check_fits(2 * self.context + 1)  # at least half of a window is scored
        most = self.bytes_per_block - 1  # so that a window fits in a block
        require(self.block_size <= most, "block_size", self.block_size, f"at most {most}")
        self.text = text
        # A byte's word is what Python prints between b' and ', such as a, \n or \xff.
        self.vocabulary = [""] + [repr(bytes([byte]))[2:-1] for byte in range(256)]

    @functools.cached_property
    def data(self):
        """The text's bytes. They are read when first needed, so a trained model can continue a
        prompt even on a machine without its text. A subclass may return an array of integers,
        where 0 is the token 1, and so on."""
        return read_text(self.text)

    @functools.cached_property
    def size(self):
        size = len(self.data)
        least = 2 * self.held_out_every * self.bytes_per_block  # so that two blocks are held out
        require(size >= least, "text", self.text, f"at least {least:,} bytes; it has {size:,}")
        return size

    @functools.cached_property
    def sha256(self):
        return hashlib.sha256(self.data).hexdigest()

    def windows(self, starts):
        """The windows that begin at these bytes: tokens, (windows, block_size + 1) int64."""
        data = self.data
        if isinstance(data, bytes):
            data = np.frombuffer(data, dtype=np.uint8)
        rows = [data[start : start + self.block_size + 1] for start in starts]
        return 1 + np.stack(rows).astype(np.int64, casting="safe")  # 0 is padding

    def batch(self, seed, step, batch_size):
        """Windows from anywhere in the text, except the blocks that are held out."""
        rng = np.random.default_rng([seed, TRAIN, step])
        starts = []
        while len(starts) < batch_size:
            start = int(rng.integers(0, self.size - self.block_size))
            end = start + self.block_size  # its last byte
            # A window is shorter than a block, so only the blocks of its two ends matter.
            if not (self.is_held_out(start) or self.is_held_out(end)):
                starts.append(start)
        tokens = self.windows(starts)
        return tokens[:, :-1], tokens[:, 1:]

    def is_held_out(self, place):
        """Whether the byte at this place is in a block that is held out."""
        block = place // self.bytes_per_block
        return block % self.held_out_every == self.held_out_every - 1

    def held_out_starts(self):
        """Where the windows that are scored begin. Within a block that is held out, a window's
        scored bytes begin where those of the window before it end."""
        width = self.block_size + 1
        scored = width - self.context  # bytes per window
        starts = []
        for block_end in range(self.bytes_per_block, self.size + 1, self.bytes_per_block):
            if self.is_held_out(block_end - 1):
                block_start = block_end - self.bytes_per_block
                starts += range(block_start, block_end - width + 1, scored)
        return starts

    def evaluate(self, model, seed, n):
        """Bits per byte on n windows that are held out, the same for all seeds. They are evenly
        spread over the text; there may be fewer than n."""
        starts = self.held_out_starts()
        chosen = np.linspace(0, len(starts) - 1, min(n, len(starts))).astype(int)
        windows = self.windows([starts[i] for i in chosen])
        nats = token_costs(model, torch.from_numpy(windows), first=self.context)
        bits = nats.double() / math.log(2)
        return dict.fromkeys(self.units, bits.mean().item())

    def documents(self, rng, count):
        """Windows that are held out, to look at."""
        starts = self.held_out_starts()
        for tokens in self.windows(rng.choice(starts, count)).tolist():
            yield Document(tokens, [(0, len(tokens))])

    def answer_spans(self, document):
        """The second half: how would the model go on?"""
        return [(len(document.tokens) // 2, len(document.tokens))]

    def is_right(self, document, span, answer):
        return None  # there are many ways to go on

    def encode(self, text):
        # A command line hands over bytes that are not UTF-8 as surrogates. This restores them.
        return [1 + byte for byte in text.encode(errors="surrogateescape")]

    def decode(self, tokens):
        """Control characters become escapes, because a terminal would obey them."""
        text = bytes(token - 1 for token in tokens if token > 0).decode(errors="replace")
        return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", escaped, text)


def escaped(match):
    return match[0].encode("unicode_escape").decode()


def read_text(text):
    """The bytes of a file, or of the standard library."""
    if text == "python":
        return read_library()
    try:
        return Path(text).expanduser().read_bytes()
    except OSError as error:
        raise Refused(f"text = {text!r}: {error.strerror}") from None


@functools.cache
def read_library():
    """The library's .py files in alphabetical order."""
    library = Path(sysconfig.get_path("stdlib"))
    # Tests, which some installations lack, and packages that are not the library's.
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    files = []
    for path in sorted(library.rglob("*.py")):
        if left_out.isdisjoint(path.relative_to(library).parts):
            files.append(path.read_bytes())
    return b"".join(files)


# ---- 9. The table of tasks -------------------------------------------------

TASKS = {  # your own task is one more entry
    "copy": Copy,
    "depo0": Depo0,
    "depo1": Depo1,
    "depo2": Depo2,
    "brevo1": Brevo1,
    "brevo2": Brevo2,
    "mano": Mano,
    "lano": Lano,
    "capo": Capo,
    "text": Text,
}
ALIASES = {"depo": "depo1", "brevo": "brevo1"}


def make_task(name, run_seed=0, **parameters):
    """A task; parameters, such as N, replace the defaults of its constructor.

    run_seed    the seed of the run that the task is for
    parameters  may also hold what the task has measured, as `task.settings` do; it is measured
                again
    """
    name = ALIASES.get(name, name)
    require(name in TASKS, "task", name, f"allowed: {', '.join(TASKS | ALIASES)}")
    known = inspect.signature(TASKS[name]).parameters
    for field, value in parameters.items():
        is_known = field in known or field in TASKS[name].measured
        require(is_known, field, value, f"{name} has only {', '.join(known)}")
    arguments = {field: parameters.get(field, known[field].default) for field in known}
    task = TASKS[name](**arguments)
    if "block_size" in known:
        arguments["block_size"] = task.block_size  # it may have been None
    task.name, task.parameters = name, arguments
    task.run_seed = run_seed
    return task


# ---- 10. An instance of a task:   python tasks.py depo ---------------------


def printed(task, document):
    """A document in words, its targets in [brackets]."""
    parts, shown = [], 0  # shown: how many tokens are in parts
    for start, end in document.targets:
        parts.append(task.decode(document.tokens[shown:start]))
        parts.append(f"[{task.decode(document.tokens[start:end])}]")
        shown = end
    parts.append(task.decode(document.tokens[shown:]))
    return " ".join(filter(None, parts))  # leaves out empty parts


def wrapped(text):
    """The text in lines of 96 characters, unless it already has line breaks."""
    if "\n" in text:
        return text
    return textwrap.fill(text, 96, break_on_hyphens=False, break_long_words=False)


def make_parser(file, doc, add_help=True):
    """A parser of the arguments of one of our programs. --help shows its docstring, and an error is
    one line."""
    return argparse.ArgumentParser(
        prog=Path(file).name,
        description=doc,
        formatter_class=functools.partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=43, width=100
        ),
        usage=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=add_help,
    )


def main(argv=None):
    parser = make_parser(__file__, "Print an instance, its targets in [brackets].")
    parser.add_argument("task", choices=list(TASKS | ALIASES))
    task = make_task(parser.parse_args(argv).task)
    (document,) = task.documents(np.random.default_rng(0), 1)
    print(wrapped(printed(task, document)))
    print("\nA model is trained and scored on what is in [brackets]; the rest is given to it.")


if __name__ == "__main__":
    main()
