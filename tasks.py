"""The synthetic tasks: what each one asks, how its data are drawn, and how a model is scored.

Each task isolates one skill that language models need (arXiv 2512.17351, Section 3). It draws
documents, marks the targets in them, here in [brackets], and packs them into windows:

    <bos> 4 3 1 2 <query> [4 3 1 2] <bos> 2 4 1 3 <query> [2 4

Every step draws new documents, so many that a model can't learn them by heart (only Capo asks for
that; the smallest Mano lets it).

Read 1, what a task is, and 2, Copy, the smallest; then any of 3 Depo (reasoning depth), 4 Brevo
(breadth), 5 Mano (arithmetic), 6 Lano (grammar), 7 Capo (facts). 8 holds the presets, where a task
of your own goes too; 9 prints examples.
"""

import functools
import itertools
import math
import random
import re
import sys
import textwrap
from collections import Counter, defaultdict

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

# ---- 1. A task -------------------------------------------------------------
#
# A task draws documents. A document is two lists: its tokens, and a mask that
# says which of them are targets. A training window is documents in a row, each
# opened by <bos> (our choice). A model scores where it gets all targets right.

TRAIN, EVAL, PEOPLE, MEETINGS = range(4)  # independent random streams, parts of the seeds


class Task:
    """A subclass defines `documents`; `meaning`, one line about them; and `vocabulary`, what each
    token stands for (token 0 is padding). make_task adds `name` and `settings`, the parameters."""


    def __init__(self, block_size, model, training):
        require_range("block_size", block_size, 1)
        self.block_size = block_size  # the model's context; a window has one more token
        self.model, self.training = model, training

    @property
    def vocab_size(self):
        return len(self.vocabulary)

    def documents(self, rng, count):
        """`count` documents: a list of (tokens, mask)."""
        raise NotImplementedError

    def batch(self, seed, step, batch_size):
        """A step's training windows: tokens (int64) and mask (bool), (batch_size, block_size + 1).

        Each starts with a new document and cuts its last one off. They depend on the arguments
        alone: every model, resumed run and loader worker sees the same.
        """
        rng = np.random.default_rng([seed, TRAIN, step])
        width, count = self.block_size + 1, 2 * batch_size
        windows, lengths = [], []
        window_tokens, window_mask = [], []
        while len(windows) < batch_size:
            for tokens, mask in self.documents(rng, count):
                lengths.append(len(tokens))
                window_tokens += tokens
                window_mask += mask
                if len(window_tokens) >= width:
                    windows.append((window_tokens[:width], window_mask[:width]))
                    window_tokens, window_mask = [], []
            missing = (batch_size - len(windows)) * (width / np.mean(lengths) + 1)
            count = int(1.1 * missing) + 8  # a guess
        tokens, mask = zip(*windows[:batch_size])
        return np.array(tokens, dtype=np.int64), np.array(mask)

    def evaluate(self, model, seed, n):
        """{score: float} on n fresh documents: the shares of documents and targets got right."""
        texts, masks = zip(*self.documents(np.random.default_rng([seed, EVAL]), n))
        right = self.right_tokens(model, texts)
        targets = [row[: len(mask)][mask] for row, mask in zip(right, masks)]
        whole = [each.all() for each in targets]
        return {"sequences": float(np.mean(whole)), "tokens": float(np.concatenate(targets).mean())}

    def check_fits(self, longest):
        """ValueError if a window does not hold `longest` tokens."""
        needed = f"at least {longest - 1} to hold an instance"
        require(longest <= self.block_size + 1, "block_size", self.block_size, needed)

    @torch.no_grad()
    def right_tokens(self, model, texts):
        """Whether the model finds each token likeliest, given those before: bool, (texts, longest).
        An answer of such tokens is one that it would generate greedily."""
        tokens, right = padded(texts).to(next(model.parameters()).device), []
        for rows in tokens.split(self.training["batch_size"]):
            right.append(model(rows[:, :-1])[0].argmax(-1) == rows[:, 1:])
        return F.pad(torch.cat(right), (1, 0)).cpu().numpy()  # nothing predicts the first token


def padded(texts):
    """Lists of tokens as rows, zeros behind: int64, (texts, longest)."""
    return pad_sequence([torch.tensor(text) for text in texts], batch_first=True)


# ---- 2. Copy (paper Fig. 5): can one layer repeat a permutation? -----------
#
#     <bos> 4 3 1 2 <query> [4 3 1 2]
#
# To copy, find where the last token stood before and take its right neighbour.
# Attention alone needs two layers, or a far wider one: one tells every token its
# left neighbour, the next looks one up. A Canon layer can do the first.


class Copy(Task):
    meaning = "after <query>, the numbers once more in the same order"

    def __init__(self, N, **settings):
        super().__init__(**settings)
        require_range("N", N, 2)
        self.check_fits(2 * N + 2)
        self.N = N
        self.bos, self.query = N + 1, N + 2
        self.vocabulary = ["", *map(str, range(1, N + 1)), "<bos>", "<query>"]

    def documents(self, rng, count):
        mask = [False] * (self.N + 2) + [True] * self.N
        permutations = [(1 + rng.permutation(self.N)).tolist() for _ in range(count)]
        return [([self.bos, *numbers, self.query, *numbers], mask) for numbers in permutations]


# ---- 3. Depo: reasoning depth ----------------------------------------------
#
#     <bos> c a  b d  d c  a b  <query_2> b [<ans> c]  <query_1> c [<ans> a]
#
# The edges of a cycle, here a -> b -> d -> c -> a, in random order; then
# questions: who comes k after q? The answer follows at once, so all k hops
# happen inside the network: this measures its depth. Names are words of several
# tokens (1-2 in Depo1, 5-7 in Depo2), so a hop first puts neighbours together.
# Each name comes twice, and only counting words from <bos> tells a source from a
# target. Depo0, our addition, spares a model both: names are single tokens, and a
# comma ends each edge. Keep N > 2K: k hops forward are n - k backward, fewer in
# small cycles (only those of N are scored).


class Depo(Task):
    meaning = "the edges of a cycle, x y for x -> y; then questions: who comes k after q?"
    questions = 10  # in an instance, or n if it has fewer nodes

    def __init__(self, N, K, V, word_len, separator=False, **settings):
        super().__init__(**settings)
        require_range("N", N, 3)
        require_range("K", K, 1, min(N - 1, 512))  # an instance can ask all scored k
        self.N, self.K, self.words = N, K, Words(N, V, word_len)
        word = self.words.longest
        self.check_fits(1 + N * (2 * word + separator) + min(N, self.questions) * (2 * word + 2))
        self.bos = 1 + len(self.words.vocabulary)
        self.ans = self.bos + 1  # <query_k> is token ans + k
        self.separator = [self.ans + K + 1] * separator
        queries = [f"<query_{k}>" for k in range(1, K + 1)] + [","] * separator
        self.vocabulary = ["", *self.words.vocabulary, "<bos>", "<ans>", *queries]
        self.hops = powers_of_two(K)  # the scored k

    def documents(self, rng, count):
        sizes = draw_sizes(rng, count, self.N)
        hops = rng.integers(1, self.K + 1, np.minimum(sizes, self.questions).sum())
        return [(tokens, mask) for tokens, mask, _ in self.instances(rng, sizes, hops)]

    def instances(self, rng, sizes, hops):
        """For each size n the text of a cycle 0 -> 1 -> .. -> n-1 -> 0; hops: k of all questions.

        Yields tokens; mask, true for each <ans> and its answer; and answers, [(k, start, end)]:
        tokens[start:end] answers a question of k hops.
        """
        all_names, hops = self.words.draw(rng, sizes), iter(hops.tolist())
        for names, edges, asked in zip(all_names, shuffles(rng, sizes), shuffles(rng, sizes)):
            # names[x] is the word of node x, a list of tokens. Both edges and asked are 0..n-1 in
            # random order: x in edges stands for x -> x + 1; the first of asked are asked about,
            # and next(hops) is the next question's k.
            n, tokens, mask, answers = len(names), [self.bos], [], []
            # exercise 7: extend tokens, mask and answers
            for x in edges:
                tokens += names[x] + names[(x + 1) % n] + self.separator
            for q, k in zip(asked[: self.questions], hops):
                tokens += [self.ans + k] + names[q]
                mask += [False] * (len(tokens) - len(mask))
                tokens += [self.ans] + names[(q + k) % n]
                answers.append((k, len(mask) + 1, len(tokens)))  # len(mask): where <ans> is
                mask += [True] * (len(tokens) - len(mask))
            # end of exercise
            yield tokens, mask, answers

    def evaluate(self, model, seed, n):
        """n instances of size N: for each scored k, the share of answers with all tokens right."""
        rng = np.random.default_rng([seed, EVAL])
        hops = rng.permutation(np.resize(self.hops, n * min(self.N, self.questions)))
        texts, _, answers = zip(*self.instances(rng, [self.N] * n, hops))
        right = defaultdict(list)
        for row, spans in zip(self.right_tokens(model, texts), answers):
            for k, start, end in spans:
                right[k].append(row[start:end].all())
        return {f"k={k}": float(np.mean(right[k])) for k in self.hops}


def draw_sizes(rng, count, N):
    """`count` sizes n in 3..N, P(n) proportional to 1 / (n + sqrt N)."""
    weights = 1 / (np.arange(3, N + 1) + N**0.5)
    return (3 + rng.choice(N - 2, count, p=weights / weights.sum())).tolist()


def shuffles(rng, sizes):
    """The numbers 0..n-1 in random order, for each size n, with one draw for all."""
    ends = np.cumsum(sizes)
    return [keys.argsort().tolist() for keys in np.split(rng.random(ends[-1]), ends[:-1])]


class Words:
    """Words of word_len = (shortest, longest) tokens, N different ones at least. The last token is
    in V+1..2V, which shows the end, the others in 1..V. (If all have one token, it is in 1..V.)"""

    def __init__(self, N, V, word_len):
        require_range("V", V, 1)
        self.V, (self.shortest, self.longest) = V, word_len
        allowed = "1 <= shortest <= longest <= 100"
        require(1 <= self.shortest <= self.longest <= 100, "word_len", word_len, allowed)
        many = sum(V**length for length in range(self.shortest, self.longest + 1))
        require(N <= many, "N", N, f"V = {V} and word_len = {word_len} make only {many} words")
        numbers = [str(number) for number in range(1, V + 1)]  # "7." goes on, "7" ends a word
        self.vocabulary = [f"{number}." for number in numbers] * (self.longest > 1) + numbers

    def draw(self, rng, sizes):
        """n different words, lists of tokens, for each size n, of uniform lengths. Equals

            while len(words) < n:
                word = draw_word()
                if word not in words:
                    words.append(word)
            rng.shuffle(words)

        but all documents draw at once, and what misses a word draws again.
        """
        if self.longest == 1:
            return [[[1 + i] for i in rng.permutation(self.V)[:n].tolist()] for n in sizes]
        words, taken = [[None] * n for n in sizes], set()
        missing = [(document, place) for document, n in enumerate(sizes) for place in range(n)]
        while missing:
            lengths = rng.integers(self.shortest, self.longest + 1, len(missing)).tolist()
            tokens = rng.integers(1, self.V + 1, (len(missing), self.longest)).tolist()
            drawn, missing = zip(missing, lengths, tokens), []
            for (document, place), length, word in drawn:
                word[length - 1 :] = [word[length - 1] + self.V]
                if (document, *word) in taken:
                    missing.append((document, place))
                else:
                    words[document][place] = word
                    taken.add((document, *word))
        return [[found[i] for i in order] for found, order in zip(words, shuffles(rng, sizes))]

    def split(self, tokens):
        """The words that tokens spell, tuples; a special token is one, too."""
        words, word = [], ()
        for token in tokens:
            word += (token,)
            if token > self.V or self.longest == 1:
                words.append(word)
                word = ()
        return words + [word] if word else words  # the last one may lack its end


# ---- 4. Brevo: reasoning breadth -------------------------------------------
#
#     <bos> a c  d f  b c  c e  a d <query> e [<ans> b a c e <eos>]
#
# The edges "parent child" of a random graph without cycles, in random order;
# then all that q depends on, parents before their children, q last; any such
# order is right. Here e needs c, which needs a and b. The answer starts with a
# node without parents, so the model searches the whole sub-graph before it
# writes a word: this measures breadth. Names are one token 1..N in Brevo1, words
# of 2-4 tokens in Brevo2.


class Brevo(Task):
    meaning = "edges, parent child; then all that q depends on, parents before their children"

    def __init__(self, N, V=None, word_len=(1, 1), **settings):
        super().__init__(**settings)
        require_range("N", N, 3)
        self.N, self.words = N, Words(N, N if V is None else V, word_len)
        most_edges = sum(min(4, node) for node in range(N))
        self.check_fits(4 + (2 * most_edges + 1 + N) * self.words.longest)
        self.vocabulary = ["", *self.words.vocabulary, "<bos>", "<query>", "<ans>", "<eos>"]
        self.bos, self.query, self.ans, self.eos = range(self.vocab_size - 4, self.vocab_size)

    def documents(self, rng, count):
        return [
            (prompt + answer, [False] * (len(prompt) - 1) + [True] * (len(answer) + 1))
            for prompt, answer, _ in self.instances(rng, draw_sizes(rng, count, self.N))
        ]  # <ans>, which ends the prompt, is a target, too

    def instances(self, rng, sizes):
        """For each size a prompt, an answer, and the depth of q."""
        all_names = self.words.draw(rng, sizes)
        dice = random.Random(int(rng.integers(2**63)))  # faster than numpy for one number
        for n, names in zip(sizes, all_names):
            parents = draw_graph(dice, n)
            q = dice.randrange(n - math.ceil(n / 4), n)  # the last quarter has parents
            edges = [(parent, node) for node in range(n) for parent in parents[node]]
            dice.shuffle(edges)
            prompt = [self.bos, *spell(names, itertools.chain(*edges))]
            prompt += [self.query, *names[q], self.ans]
            answer = [*spell(names, draw_order(dice, parents, q)), self.eos]
            yield prompt, answer, depth_of(parents, q)

    def verify(self, prompt, answer):
        """Whether the answer is right for the prompt, two lists of tokens."""
        _, *edges, _, q, _ = self.words.split(prompt)
        parents = defaultdict(set)
        for parent, child in zip(edges[::2], edges[1::2]):
            parents[child].add(parent)
        if self.eos not in answer:
            return False
        named = self.words.split(answer[: answer.index(self.eos)])
        in_order = all(parents[word] <= set(named[:i]) for i, word in enumerate(named))
        return in_order and sorted(named) == sorted(dependencies(parents, q))

    def evaluate(self, model, seed, n):
        """n greedy answers at size N: the share right, of all and by depth of q (paper Fig. 9)."""
        groups = defaultdict(list)  # by length, as `generate` takes prompts of one length
        for instance in self.instances(np.random.default_rng([seed, EVAL]), [self.N] * n):
            groups[len(instance[0])].append(instance)
        device, right = next(model.parameters()).device, defaultdict(list)
        for length, group in groups.items():
            prompts, answers, depths = zip(*group)
            longest, texts = max(map(len, answers)), []  # right answers are as long as ours
            for rows in torch.tensor(prompts, device=device).split(4 * self.training["batch_size"]):
                texts += model.generate(rows, longest, 0.0, self.eos)[:, length:].tolist()
            for prompt, text, depth in zip(prompts, texts, depths):
                right["all"].append(self.verify(prompt, text))
                right[f"depth={depth}"].append(right["all"][-1])
        scores = ["all", *(f"depth={depth}" for depth in range(1, 6))]  # deeper: too rare
        return {score: float(np.mean(right[score])) for score in scores if score in right}


def spell(names, nodes):
    """The tokens of these nodes' names."""
    return [token for node in nodes for token in names[node]]


def draw_graph(dice, n):
    """Each node's parents in a random graph. The first 1..(n-1)//4+1 nodes are leaves: they have
    none. A later one has 1..min(4, free) of the `free` earlier ones with fewer than 4 children."""
    leaves = dice.randint(1, (n - 1) // 4 + 1)
    parents, children = [[] for _ in range(n)], [0] * n
    for node in range(leaves, n):
        free = [other for other in range(node) if children[other] < 4]
        parents[node] = dice.sample(free, dice.randint(1, min(4, len(free))))
        for parent in parents[node]:
            children[parent] += 1
    return parents


def draw_order(dice, parents, q):
    """All that q depends on and q, parents first. Drawn backward from q: each time one of the nodes
    whose needed children are all placed."""
    needed = dependencies(parents, q)
    missing = Counter(parent for node in needed for parent in parents[node])  # children
    order, ready = [], [q]
    while ready:
        node = ready.pop(dice.randrange(len(ready)))
        order.append(node)
        for parent in parents[node]:
            missing[parent] -= 1
            if missing[parent] == 0:
                ready.append(parent)
    return order[::-1]


def dependencies(parents, q):
    """q and all that it depends on, a set."""
    found, unexplored = {q}, [q]
    while unexplored:
        new = set(parents[unexplored.pop()]) - found
        found |= new
        unexplored += new
    return found


def depth_of(parents, q):
    """How many edges up from q the nearest leaf is."""
    level, steps = {q}, 0
    while all(parents[node] for node in level):
        level, steps = {parent for node in level for parent in parents[node]}, steps + 1
    return steps


# ---- 5. Mano: knowledge manipulation ---------------------------------------
#
#     [<bos> <len_3> * - 7 20 + 3 9 <ans> 5]      (7 - 20) * (3 + 9) = 5 mod 23
#
# Arithmetic modulo 23 in prefix notation, in the head: the tables of + - * are
# knowledge, to be learnt and then applied several times over. All tokens are
# targets. Short expressions are few and come again.


class Mano(Task):
    meaning = "an expression in prefix notation, and its value modulo 23"
    modulus = 23

    def __init__(self, L, **settings):
        super().__init__(**settings)
        require_range("L", L, 1, 400)  # Python's recursion goes so deep
        self.check_fits(2 * L + 5)
        self.L = L
        numbers, lengths = map(str, range(self.modulus)), [f"<len_{l}>" for l in range(1, L + 1)]
        self.vocabulary = ["", *numbers, "+", "-", "*", "<bos>", "<ans>", *lengths]
        self.plus = self.modulus + 1  # the number x is token x + 1; then come + - *
        self.bos, self.ans = self.plus + 3, self.plus + 4  # <len_l> is token ans + l
        self.scored = powers_of_two(L)  # the scored l

    def documents(self, rng, count):
        texts = self.instances(rng, rng.integers(1, self.L + 1, count).tolist())
        return [(tokens, [True] * len(tokens)) for tokens in texts]

    def instances(self, rng, lengths):
        """The tokens of an instance for each length l, its number of operators."""
        dice = random.Random(int(rng.integers(2**63)))  # faster than numpy for single numbers

        def expression(l):
            if l == 0:
                return [1 + dice.randrange(self.modulus)]
            operator = self.plus + dice.randrange(3)
            left = dice.randrange(l)  # operators in the left operand
            return [operator, *expression(left), *expression(l - 1 - left)]

        texts = [[self.bos, self.ans + l, *expression(l), self.ans] for l in lengths]
        return [[*text, 1 + self.value(iter(text[2:]))] for text in texts]

    def value(self, tokens):
        """The value of the expression that an iterator of tokens starts with."""
        token = next(tokens)
        if token < self.plus:
            return token - 1
        a, b = self.value(tokens), self.value(tokens)
        return (a + b, a - b, a * b)[token - self.plus] % self.modulus

    def evaluate(self, model, seed, n):
        """n expressions of each scored l: the share of right values."""
        lengths = [l for l in self.scored for _ in range(n)]
        texts = self.instances(np.random.default_rng([seed, EVAL]), lengths)
        right = self.right_tokens(model, texts)
        values = np.reshape([row[len(text) - 1] for row, text in zip(right, texts)], (-1, n))
        return {f"l={l}": float(share) for l, share in zip(self.scored, values.mean(1))}


# ---- 6. Lano: the structure of language ------------------------------------
#
#     [<bos> 3 3 2 2 1 .. 1 2 1 <bos> 3 1 2 1 ..]        sentences of a grammar
#
# A sentence grows from the root: level by level, each symbol becomes one of its
# rules, all equally likely, down to the tokens 1, 2, 3. Nothing marks where the
# tokens of a symbol begin or end, so the model infers the whole tree. All tokens
# are targets. Both scores come from one chart. Let
#
#     I_X[i, j] = P(X grows into exactly the tokens i .. j-1)
#
# Then I_X is the mean over X's rules, such as X -> B C D, of the matrix products
# I_B I_C I_D: "B up to somewhere, C from there, D from there". So the tokens'
# matrices give those of the next level, and on up.

GRAMMARS = {
    "cfg3f": """22: 20 21 | 20 19 21 | 21 19 19 | 20 20
    19: 18 16 18 | 17 18 | 18 18   20: 16 16 | 16 17 | 17 16 18
    21: 18 17 | 17 16 | 16 17 18 | 16 18
    16: 15 15 | 13 15 13 | 14 13 | 14 14   17: 15 14 13 | 14 15 | 15 14
    18: 14 15 13 | 15 13 13 | 13 15
    13: 11 12 | 12 11 12 | 10 12 11   14: 10 12 | 12 10 12 | 12 11 | 10 12 12
    15: 10 11 11 | 11 11 10 | 10 10 | 12 12 11
    10: 8 9 9 | 9 7 9 | 7 9 9   11: 8 8 | 9 7 | 9 7 7   12: 7 9 7 | 9 8 | 8 8 9
    7: 2 2 1 | 3 2 2 | 3 1 2 | 3 2   8: 3 1 1 | 1 2 | 3 3 1   9: 1 2 1 | 3 3 | 1 1""",
    "cfg3j": """25: 22 22 | 23 22 | 24 23 24
    22: 19 20 | 19 19 21 | 20 19 19   23: 21 19 20 | 21 20 | 19 20 20
    24: 19 19 | 20 21 19 | 19 21 21
    19: 17 17 16 | 16 18 18 | 16 17   20: 17 17 17 | 18 18 | 18 17 18
    21: 18 16 | 16 17 17 | 16 18 16
    16: 14 15 | 13 15 | 15 15   17: 14 14 | 15 15 15 | 15 14   18: 14 13 15 | 13 13 14 | 13 14
    13: 10 12 | 12 10 | 11 11   14: 10 11 | 12 11 10 | 10 11 11   15: 11 12 12 | 10 10 | 11 12
    10: 7 7 9 | 8 7 | 9 8   11: 7 8 8 | 9 9 | 8 8   12: 7 7 8 | 8 7 7 | 9 8 8
    7: 1 2 | 2 2 | 3 3 2   8: 3 1 | 2 3 | 1 1 2   9: 3 2 1 | 1 3 | 3 2""",
    "cfg3k": """25: 22 23 | 24 24 | 24 23
    22: 21 19 | 21 20 20 | 21 21 | 19 21   23: 20 21 20 | 20 21 21 | 20 20 | 19 20
    24: 21 20 | 20 21 | 19 19 21
    19: 17 18 16 | 18 16 | 18 16 18 | 18 18 17   20: 17 17 17 | 16 18 | 17 17 16 | 18 17 16
    21: 18 17 | 16 18 16 | 17 16 16 | 17 18 18
    16: 15 14 | 14 15 | 15 14 15 | 14 13 13   17: 14 15 14 | 15 13 13 | 15 15
    18: 14 14 | 15 13 | 13 14 14
    13: 10 12 12 | 11 11 12 | 12 12   14: 10 11 | 10 11 11 | 11 10 10 | 11 11
    15: 12 11 | 10 10 | 11 12
    10: 7 7 | 8 8 | 9 9 7 | 7 9 7   11: 8 7 9 | 7 7 7 | 7 8 7   12: 7 8 | 8 8 7 | 9 7 9 | 8 9
    7: 3 3 | 1 3 1 | 2 1   8: 2 3 | 1 1 2 | 3 1 | 1 2 2   9: 1 3 3 | 2 2 | 1 1 1 | 3 2 3""",
}


class Grammar:
    """rules {symbol: list of tuples of symbols}, lower levels first; root, by default the highest
    symbol; mean and longest {symbol: the number of tokens it grows into}."""

    def __init__(self, text, root=None):
        fields = re.split(r"(\d+):", text)[1:]  # symbol, its rules, symbol, its rules ..
        rules = {
            int(symbol): [tuple(map(int, rule.split())) for rule in choices.split("|")]
            for symbol, choices in zip(fields[::2], fields[1::2])
        }
        self.root = max(rules) if root is None else root
        require(self.root in rules, "root", root, f"allowed: {min(rules)} to {max(rules)}")
        self.rules = {symbol: rules[symbol] for symbol in sorted(rules) if symbol <= self.root}

        self.mean, self.longest = {1: 1, 2: 1, 3: 1}, {1: 1, 2: 1, 3: 1}
        for symbol, choices in self.rules.items():
            self.mean[symbol] = np.mean([sum(self.mean[part] for part in rule) for rule in choices])
            self.longest[symbol] = max(sum(self.longest[part] for part in rule) for rule in choices)

    def sample(self, rng, count):
        """`count` sentences, lists of tokens."""
        sentences = [[self.root] for _ in range(count)]
        while sentences[0][0] in self.rules:
            chances = iter(rng.random(sum(map(len, sentences))).tolist())
            sentences = [
                [part for symbol in sentence for part in choose(self.rules[symbol], next(chances))]
                for sentence in sentences
            ]
        return sentences

    def chart(self, tokens, scale=2.1):
        """How likely each prefix is with each next token, or the end, behind it.

        tokens    (B, T) int64, a sentence a row, zeros behind it
        returns   (B, T + 1, 4) float64 (float32 on MPS): [b, t, v] is scale^t times the probability
                  that a sentence starts with row b's first t tokens and then has v (0: ends). The
                  scale, about 1 / P(a token), prevents underflow
        """
        B, T = tokens.shape
        dtype = torch.float32 if tokens.device.type == "mps" else torch.float64
        # Up, level by level: inside[X] = I_X, (B, T + 1, T + 1), of all symbols below the root. It
        # is zero where j - i exceeds longest[X]; skipping that is several times faster.
        # Down: starts[X][t] = P(the first t tokens are right, and an X begins there). The root
        # begins at 0, a rule's first part where its symbol does, the next where that ends; `end`
        # is where the root's last part ends.
        # exercise 11: starts[X] and end, (B, 1, T + 1)
        inside = {v: torch.diag_embed(scale * (tokens == v).to(dtype), 1) for v in (1, 2, 3)}
        for symbol in list(self.rules)[:-1]:
            total = 0
            for first, *others in self.rules[symbol]:
                product, width = inside[first], self.longest[first]
                for part in others:
                    product = band_product(product, inside[part], width, self.longest[part])
                    width += self.longest[part]
                total = total + product
            inside[symbol] = total / len(self.rules[symbol])
        zeros = tokens.new_zeros(B, 1, T + 1, dtype=dtype)
        starts, end = defaultdict(lambda: zeros), zeros
        starts[self.root] = F.one_hot(tokens.new_zeros(B, 1), T + 1).to(dtype)
        for symbol in reversed(self.rules):
            for rule in self.rules[symbol]:
                row = starts[symbol] / len(self.rules[symbol])
                for part in rule:
                    starts[part] = starts[part] + row
                    row = row @ inside[part]
                if symbol == self.root:
                    end = end + row
        # end of exercise
        return torch.cat([end, starts[1], starts[2], starts[3]], 1).mT


def choose(options, chance):
    """One of the options, all equally likely if the chance is uniform in [0, 1)."""
    return options[int(chance * len(options))]


def band_product(left, right, left_width, right_width, rows=64):
    """left @ right, both (B, T, T), where left[i, j] = 0 unless i <= j <= i + left_width, and right
    likewise: some rows at a time, without the zeros."""
    T = left.shape[1]
    product = torch.zeros_like(left)
    for i in range(0, T, rows):
        k = min(i + rows + left_width, T)
        j = min(k + right_width, T)
        product[:, i : i + rows, i:j] = left[:, i : i + rows, i:k] @ right[:, i:k, i:j]
    return product


class Lano(Task):
    meaning = "a sentence of the grammar"

    def __init__(self, cfg, root=None, **settings):
        super().__init__(**settings)
        require(cfg in GRAMMARS, "cfg", cfg, f"allowed: {', '.join(GRAMMARS)}")
        self.grammar = Grammar(GRAMMARS[cfg], root)
        self.check_fits(1 + math.ceil(2 * self.grammar.mean[self.grammar.root]))  # nearly all do
        self.bos, self.vocabulary = 4, ["", "1", "2", "3", "<bos>"]

    def documents(self, rng, count):
        sentences = self.grammar.sample(rng, count)
        return [([self.bos, *text], [True] * (len(text) + 1)) for text in sentences]

    @torch.no_grad()
    def evaluate(self, model, seed, n):
        """sentences: the share that parses of n texts, drawn at temperature 1 from <bos> to <bos>.
        KL: of the next-token distribution from the exact one, in nats, the mean over all places of
        n sentences."""
        batch_size, device = self.training["batch_size"], next(model.parameters()).device
        generator, parsed = torch.Generator(device).manual_seed(seed), 0
        for bos in torch.full((n, 1), self.bos, device=device).split(4 * batch_size):
            texts = model.generate(bos, self.block_size, 1.0, self.bos, generator)[:, 1:]
            texts = texts[texts[:, -1] == self.bos]  # the others have no end
            words = texts != self.bos
            chart = self.charts(texts * words)
            parsed += int((chart[torch.arange(len(texts)), words.sum(1), 0] > 0).sum())

        sentences = padded(self.grammar.sample(np.random.default_rng([seed, EVAL]), n))
        nats, places = 0.0, 0
        for rows in sentences[:, : self.block_size - 1].split(batch_size):
            rows = rows.to(device)
            chart = self.charts(rows)  # (rows, T + 1, 4), zero behind the end
            place = chart.sum(-1) > 0
            exact = chart[place] / chart[place].sum(-1, keepdim=True)
            logits = model(F.pad(rows, (1, 0), value=self.bos))[0][place]
            log_model = logits.to(exact.dtype).log_softmax(-1)[:, [self.bos, 1, 2, 3]]
            nats += float((torch.xlogy(exact, exact) - exact * log_model).sum())
            places += len(exact)
        return {"sentences": parsed / n, "KL": nats / places}

    def charts(self, tokens):
        """The chart of many rows, a few at a time to save memory."""
        few = max(1, 2**21 // tokens.shape[1] ** 2)
        return torch.cat([self.grammar.chart(rows) for rows in tokens.split(few)])


# ---- 7. Capo: knowledge capacity -------------------------------------------
#
#     [<bos> Ada Mae King first saw light July 3 1961 she grew up in Rome ..]
#
# Biographies of N invented people, each met 100 times, in new words every time:
# how many bits of them does a model hold, for each parameter? A person has three
# names and some facts, of one token but for the birth date. Three words before a
# fact tell which it is, in one of 10 wordings. Names and facts are uniform, so
# log2 of the possibilities is what there is to know. All tokens are targets. Our
# choice: tokens in place of English.

NAMES = {"first name": 400, "middle name": 400, "last name": 1000}  # how many there are of each
FACTS = {"pronoun": 2, "month": 12, "day": 28, "year": 200, "birth city": 200, "university": 300,
         "major": 100, "employer": 263}  # fmt: skip
PERSON = NAMES | FACTS
COLUMNS = [*PERSON, "work city"]  # a person's tokens; the work city follows from the employer
POSSIBLE_NAMES, POSSIBLE_FACTS = math.prod(NAMES.values()), math.prod(FACTS.values())

BIOGRAPHY = ["<bos>", *NAMES, "word", "word", "word", "month", "day", "year"]
for fact in COLUMNS[7:]:
    BIOGRAPHY += ["pronoun", "word", "word", "word", fact]


class Capo(Task):
    meaning = "a life: names and values, by kind and number, and the words between them"

    def __init__(self, N, exposures, **settings):
        super().__init__(**settings)
        require_range("N", N, 1, POSSIBLE_NAMES // 50)
        require_range("exposures", exposures, 1)
        self.check_fits(len(BIOGRAPHY))
        self.N, self.exposures = N, exposures
        values = [f"{kind}-{i}".replace(" ", "-") for kind in PERSON for i in range(PERSON[kind])]
        self.vocabulary = ["", *values, *(f"word-{i}" for i in range(50)), "<bos>"]
        self.first_word, self.bos = 1 + len(values), 1 + len(values) + 50
        # six sentences, ten wordings of each, three of 50 words in each, no two the same
        numbers = np.random.default_rng(0).choice(50**3, (6, 10, 1), replace=False)
        self.wordings = self.first_word + numbers // [50**2, 50, 1] % 50
        self.lives = (self.block_size + 1) // len(BIOGRAPHY)  # biographies in a window

    def steps(self, batch_size):
        """The training steps in which everybody is met `exposures` times."""
        return math.ceil(self.exposures * self.N / (batch_size * self.lives))

    def biographies(self, rng, seed, who):
        """These people's lives in new words: tokens, (len(who), 35) int64."""
        words = self.wordings[np.arange(6), rng.integers(0, 10, (len(who), 6))]  # (people, 6, 3)
        text = np.full((len(who), len(BIOGRAPHY)), self.bos)
        for place, kind in enumerate(BIOGRAPHY):
            if kind in COLUMNS:
                text[:, place] = draw_people(seed, self.N)[who, COLUMNS.index(kind)]
        text[:, [kind == "word" for kind in BIOGRAPHY]] = words.reshape(len(who), -1)
        return text

    def documents(self, rng, count):
        """Seed 0's people, to look at; `batch` draws for training."""
        lives = self.biographies(rng, 0, rng.integers(0, self.N, count)).tolist()
        return [(tokens, [True] * len(tokens)) for tokens in lives]

    def batch(self, seed, step, batch_size):
        """As in all tasks, but windows hold whole biographies, zeros behind, and everybody comes
        once an epoch."""
        meetings = batch_size * self.lives
        turns = range(step * meetings, (step + 1) * meetings)
        who = [meeting_order(seed, turn // self.N, self.N)[turn % self.N] for turn in turns]
        lives = self.biographies(np.random.default_rng([seed, TRAIN, step]), seed, who)
        tokens = lives.reshape(batch_size, -1)
        tokens = np.pad(tokens, [(0, 0), (0, self.block_size + 1 - tokens.shape[1])])
        return tokens, tokens > 0

    @torch.no_grad()
    def evaluate(self, model, seed, n):
        """What the model knows, judged by n people: the shares of all there is to know of names and
        of facts; bits; and bits/param.

            bits = N log2(N0 / e^p1) + N log2(S0 / e^p2),  no term below zero    (paper Section 3)

        Of N0 possible names and S0 possible facts, a person's cost p1 and p2 nats on average.
        Embeddings of tokens that nobody has do not count as parameters.
        """
        rng = np.random.default_rng([seed, EVAL])
        lives = torch.from_numpy(self.biographies(rng, seed, rng.permutation(self.N)[:n]))
        device, costs = next(model.parameters()).device, []
        for rows in lives.to(device).split(self.training["batch_size"]):
            logits = model(rows[:, :-1])[0].float()
            costs.append(F.cross_entropy(logits.mT, rows[:, 1:], reduction="none"))
        nats = torch.cat(costs).mean(0).cpu().numpy()  # of tokens 1, 2 ..
        nats = nats[[BIOGRAPHY.index(kind) - 1 for kind in COLUMNS]]  # of each kind's first mention
        names = max(0.0, 1 - float(nats[:3].sum()) / math.log(POSSIBLE_NAMES))
        facts = max(0.0, 1 - float(nats[3:].sum()) / math.log(POSSIBLE_FACTS))
        bits = self.N * (names * math.log2(POSSIBLE_NAMES) + facts * math.log2(POSSIBLE_FACTS))
        unused = self.first_word - len(np.unique(draw_people(seed, self.N)))
        counts = model.parameter_counts()
        parameters = counts["total"] - counts["embeddings"] // self.vocab_size * unused
        return {"names": names, "facts": facts, "bits": bits, "bits/param": bits / parameters}


@functools.lru_cache(maxsize=2)
def draw_people(seed, N):
    """N people with different names: tokens, (N, 12) int64, in the order of COLUMNS."""
    rng = np.random.default_rng([seed, PEOPLE])
    counts = np.array([*PERSON.values()])
    people = rng.integers(0, counts, (N, len(counts)))
    names = rng.choice(POSSIBLE_NAMES, N, replace=False)
    people[:, :3] = np.stack(np.unravel_index(names, counts[:3]), 1)
    # each employer is in one of the birth cities, the same in all worlds
    cities = np.random.default_rng(0).integers(0, PERSON["birth city"], PERSON["employer"])
    people = np.column_stack([people, cities[people[:, COLUMNS.index("employer")]]])
    first = np.cumsum([1, *counts[:-1]])  # tokens
    return people + np.append(first, first[COLUMNS.index("birth city")])


@functools.lru_cache(maxsize=2)
def meeting_order(seed, epoch, N):
    return np.random.default_rng([seed, MEETINGS, epoch]).permutation(N)


# ---- 8. The presets --------------------------------------------------------
#
# A preset scales task, model and training together: nano for two CPU cores and
# minutes, small for one GPU and minutes (only Copy's is measured), paper for the
# paper's numbers. A task of your own is one more entry of TASKS.


def preset(model, steps, batch_size, lr, weight_decay=0.03, warmup=1000, schedule="cosine", **own):
    """The task's own parameters, the model's, and those of training by AdamW."""
    training = dict(betas=(0.9, 0.98), eps=1e-6, weight_decay=weight_decay, warmup=warmup,
                    schedule=schedule, steps=steps, batch_size=batch_size, lr=lr)  # fmt: skip
    return dict(**own, model=model, training=training)


TINY = dict(n_layer=1, n_head=2, d_model=16)
NANO = dict(n_layer=3, n_head=2, d_model=64)
DEEP = dict(n_layer=5, n_head=4, d_model=64)
SMALL = dict(n_layer=6, n_head=6, d_model=384)
LARGE = dict(n_layer=12, n_head=12, d_model=768)
TIED_NANO = dict(n_layer=2, n_head=2, d_model=32, tie_embeddings=True)
TIED = dict(n_layer=4, n_head=4, d_model=256, tie_embeddings=True)

DEPO1, DEPO2 = dict(V=50, word_len=(1, 2)), dict(V=3, word_len=(5, 7))
DEPO0, BREVO2 = dict(word_len=(1, 1), separator=True), dict(V=4, word_len=(2, 4))

TASKS = {
    "copy": (Copy, {
        "nano": preset(TINY, 2000, 32, 1e-2, warmup=200, N=64, block_size=129),
        "small": preset(TINY, 3000, 32, 1e-2, N=200, block_size=401),
        "paper": preset(TINY, 50_000, 32, 5e-3, N=500, block_size=1024),
    }),
    "depo0": (Depo, {
        "nano": preset(DEEP, 24_000, 16, 5e-3, warmup=300, N=10, K=4, V=20, **DEPO0, block_size=71),
        "small": preset(SMALL, 20_000, 128, 1e-3, N=40, K=4, V=80, **DEPO0, block_size=320),
        "paper": preset(LARGE, 87_500, 128, 1e-3, N=225, K=8, V=450, **DEPO0, block_size=2048),
    }),
    "depo1": (Depo, {
        "nano": preset(NANO, 10_000, 32, 7e-3, warmup=300, N=5, K=2, **DEPO1, block_size=52),
        "small": preset(SMALL, 20_000, 128, 1e-3, N=40, K=4, **DEPO1, block_size=320),
        "paper": preset(LARGE, 87_500, 128, 1e-3, N=225, K=8, **DEPO1, block_size=2048),
    }),
    "depo2": (Depo, {
        "nano": preset(NANO, 5000, 16, 5e-3, warmup=100, N=5, K=2, **DEPO2, block_size=152),
        "small": preset(SMALL, 20_000, 128, 1e-3, N=25, K=4, **DEPO2, block_size=512),
        "paper": preset(LARGE, 100_000, 128, 1e-3, N=75, K=16, **DEPO2, block_size=2048),
    }),
    "brevo1": (Brevo, {
        "nano": preset(NANO, 2000, 32, 5e-3, warmup=300, N=10, block_size=96),
        "small": preset(SMALL, 20_000, 128, 1e-3, N=40, block_size=384),
        "paper": preset(LARGE, 100_000, 256, 1e-3, N=70, block_size=1024),
    }),
    "brevo2": (Brevo, {
        "nano": preset(NANO, 5000, 32, 5e-3, warmup=300, N=5, **BREVO2, block_size=107),
        "small": preset(SMALL, 20_000, 128, 1e-3, N=20, **BREVO2, block_size=647),
        "paper": preset(LARGE, 200_000, 192, 1e-3, N=30, **BREVO2, block_size=1536),
    }),
    "mano": (Mano, {
        "nano": preset(NANO, 5000, 32, 3e-3, 0.1, warmup=300, L=2, block_size=128),
        "small": preset(SMALL, 20_000, 128, 5e-4, 0.1, L=8, block_size=256),
        "paper": preset(LARGE, 80_000, 64, 3e-4, 0.1, L=10, block_size=1024),
    }),
    "lano": (Lano, {
        "nano": preset(NANO, 2000, 32, 5e-3, 0.1, warmup=300, cfg="cfg3f", root=17, block_size=128),
        "small": preset(SMALL, 20_000, 96, 1e-3, 0.1, cfg="cfg3f", root=None, block_size=512),
        "paper": preset(LARGE, 100_000, 96, 5e-4, 0.1, warmup=0, schedule="linear",
                        cfg="cfg3f", root=None, block_size=512),
    }),
    "capo": (Capo, {  # the steps follow from the exposures
        "nano": preset(TIED_NANO, None, 16, 5e-3, 0.01, 300, N=2000, exposures=100, block_size=139),
        "small": preset(TIED, None, 48, 2e-3, 0.01, N=50_000, exposures=100, block_size=512),
        "paper": preset(TIED, None, 12, 1e-3, 0.01, N=50_000, exposures=100, block_size=512),
    }),
}  # fmt: skip
ALIASES = {"depo": "depo1", "brevo": "brevo1"}


def make_task(name, preset="nano", **overrides):
    """A Task at the scale of a preset; overrides are parameters, such as N, in place of the
    preset's. ValueError if something is unknown or does not fit."""
    name = ALIASES.get(name, name)
    require(name in TASKS, "task", name, f"allowed: {', '.join([*TASKS, *ALIASES])}")
    task_class, presets = TASKS[name]
    require(preset in presets, "preset", preset, f"allowed: {', '.join(presets)}")
    parameters = dict(presets[preset])
    model, training = parameters.pop("model"), dict(parameters.pop("training"))
    for field, value in overrides.items():
        own = f"{name} has no such parameter; it has {', '.join(sorted(parameters))}"
        require(field in parameters, field, value, own)
    parameters |= overrides
    task = task_class(model=model, training=training, **parameters)
    task.name, task.settings = name, {"name": name, **parameters}
    return task


def require(ok, field, value, allowed):
    if not ok:
        raise ValueError(f"{field} = {value!r}: {allowed}")


def require_range(field, value, least, most=10**6):
    require(least <= value <= most, field, value, f"allowed: {least:,} to {most:,}")


def powers_of_two(most):
    """1, 2, 4 .. and most."""
    return sorted({2**i for i in range(most.bit_length())} | {most})


NO_SHARES = {"KL": ".3f", "bits": ",.0f", "bits/param": ".3f",
             "hops mastered": ".0f", "steps to k=1": ",.0f"}  # all other scores are shares


def score_text(score, value):
    """In print: "97%", "0.123". "capo: bits" is Capo's bits."""
    usual = ".0%" if 0 <= value <= 1 else ".3g"
    return format(value, NO_SHARES.get(score.split(": ")[-1], usual))


def is_share(score, value):
    """Whether it prints as a percentage."""
    return score_text(score, value).endswith("%")


# ---- 9. An example of each:   python tasks.py depo -------------------------


def printed(task, tokens, mask):
    """A document, or a window, in words, its targets in [brackets]."""
    text = ""
    for target, run in itertools.groupby(zip(tokens, mask), key=lambda pair: pair[1]):
        words = " ".join(task.vocabulary[token] for token, _ in run).replace(". ", ".")
        text += f"[{words}] " if target else f"{words} "
    return text


def main(arguments):
    try:
        require(len(arguments) in (1, 2), "arguments", arguments, "wanted: TASK [PRESET]")
        task = make_task(*arguments)
    except ValueError as error:
        print(f"tasks.py: {error}", file=sys.stderr)
        raise SystemExit(2)
    _, *settings = (f"{field} = {value}" for field, value in task.settings.items())
    print(f"{task.name}: {', '.join(settings)}; {task.vocab_size} tokens\n")
    [document] = task.documents(np.random.default_rng(0), 1)
    print(textwrap.fill(printed(task, *document), 96, break_on_hyphens=False))
    print(f"\n{task.meaning}\nthe loss counts what stands in [brackets]; dots join a word's tokens")


if __name__ == "__main__":
    main(sys.argv[1:])
