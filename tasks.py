"""The synthetic tasks: how instances are drawn, packed into windows, and scored (paper Section 3, App. A).

Each task isolates one skill that language models need, in data that hardly ever repeats: what a model gets right it has learnt
to *do*. (Capo, which is about knowing, tells of the same people again in new words; Brevo1's smallest graphs and Mano's short
expressions are so few that they come again, and at the nano preset Mano's models have met nearly all that they are asked.) Instances
are generated as they are needed, by array operations for thousands of them at once. Two ideas carry those of graphs, Depo and Brevo:

  pieces  A document is a list of pieces: special tokens and words. A table holds each piece's tokens as one short row,
          padded with zeros (token 0 is never used); a document is then a list of row numbers. Looking all rows of all
          documents up at once and dropping the zeros gives the text, with no loop over documents.
  owner   The nodes of all graphs lie behind one another in flat arrays, and `owner[i]` says whose node i is. Two graphs of
          3 and 4 nodes: owner = 0 0 0 1 1 1 1, and each node's index within its own graph is 0 1 2 0 1 2 3. Sorting by
          owner + a random fraction then shuffles every graph's nodes at once.

Reading order: 1 the shared machinery; 2 Copy; 3 Depo; 4 Brevo; 5 Mano; 6 Lano; 7 Capo; 8 the presets and `make_task`;
9 an example of each. Marks such as `# exercise N` are for those who make an assignment of it (README.md).
"""

import functools
import itertools
import math
import sys
import textwrap

import numpy as np
import torch
import torch.nn.functional as F

# ------------------------------------------------------------------------------------------------------------
# 1. The shared machinery
# ------------------------------------------------------------------------------------------------------------

TRAIN, EVAL, PEOPLE, MEETINGS = range(4)  # streams of random numbers: a part of their seeds


def ragged(lengths):
    """Things of several owners behind one another: (owner of each thing, its index within the owner)."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return owner, np.arange(len(owner)) - starts[owner]


def shuffle(rng, owner):
    """An order of the things (int array), sorted by owner, each owner's own in a uniformly random order."""
    return np.argsort(owner + rng.random(len(owner)))


def draw_sizes(rng, count, N):
    """count sizes in 3..N with probability proportional to 1 / (n + sqrt N): small ones, from which a model learns first, are likelier."""
    weights = 1 / (np.arange(3, N + 1) + N**0.5)
    return 3 + np.searchsorted(np.cumsum(weights / weights.sum())[:-1], rng.random(count), side="right")


def check_words(N, V, word_len):
    """word_len as a tuple, if instances of N distinct words can be drawn; ValueError if not."""
    word_len = tuple(word_len)
    require(V >= 1, "V", V, "at least one token")
    ok = len(word_len) == 2 and 1 <= word_len[0] <= word_len[1]
    require(ok, "word_len", word_len, "a shortest and a longest word, 1 <= shortest <= longest")
    fits = (2 * V + 1) ** word_len[1] < 2**40  # draw_words numbers the words of a batch by 64-bit integers
    require(fits, "word_len", word_len, f"words this long over V = {V} are too many to number")
    words = sum(V**length for length in range(word_len[0], word_len[1] + 1))
    require(N <= words, "N", N, f"V = {V} and word_len = {word_len} make only {words} words")
    return word_len


def draw_words(rng, owner, V, word_len):
    """One word for each thing, distinct within an owner: (things, longest) tokens, zeros behind the word.

    A word of length l, uniform in word_len = (shortest, longest), has l - 1 tokens in 1..V and a last one in V+1..2V,
    so that its end is visible. Words come as if drawn one at a time and drawn again when taken already. Where all words are
    single tokens, their ends are plain to see: they are tokens in 1..V.
    """
    shortest, longest = word_len
    if longest == 1:
        _, at = ragged(np.bincount(owner))
        return rng.permuted(np.tile(np.arange(1, V + 1), (owner[-1] + 1, 1)), axis=1)[owner, at][:, None]
    words = np.zeros((len(owner), longest), dtype=np.int64)
    radix = (2 * V + 1) ** np.arange(longest)  # a word's tokens, read as digits, number it
    taken = np.empty(0, dtype=np.int64)
    todo = np.arange(len(owner))
    while len(todo) > 0:
        length = rng.integers(shortest, longest + 1, (len(todo), 1))
        column = np.arange(longest)
        word = rng.integers(1, V + 1, (len(todo), longest)) + V * (column == length - 1)
        word *= column < length
        number, first = np.unique(owner[todo] * radix[-1] * (2 * V + 1) + word @ radix, return_index=True)
        new = ~np.isin(number, taken, assume_unique=True)
        words[todo[first[new]]] = word[first[new]]
        taken = np.concatenate([taken, number[new]])
        todo = np.delete(todo, first[new])
    # Later draws are rarer words; shuffling makes "which word" independent of "which thing".
    return words[shuffle(rng, owner)]


def padded(flat, lengths):
    """Texts behind one another, (sum of lengths,), as rows with zeros behind: (texts, longest)."""
    rows = np.zeros((len(lengths), lengths.max()), dtype=np.int64)
    rows[ragged(lengths)] = flat
    return rows


def spell(pieces, order, owner, documents):
    """The text of documents given as lists of pieces.

    pieces     (P, longest) tokens, zeros behind a piece
    order      (S,) the rows of pieces to write, document by document
    owner      (S,) the document of each
    returns    tokens (all documents behind one another), the index in `order` of each token, each document's length
    """
    rows = pieces[order]
    used = rows > 0
    of = np.repeat(np.arange(len(order)), used.sum(1))
    return rows[used], of, np.bincount(owner[of], minlength=documents)


def word_tokens(V, word_len):
    """What the tokens of such words stand for, from token 1 on: "7." goes on, "7" ends a word."""
    numbers = [str(i) for i in range(1, V + 1)]
    return numbers if word_len[1] == 1 else [f"{i}." for i in numbers] + numbers


def specials(longest, first, count):
    """`count` pieces of one token each: first, first + 1, .."""
    table = np.zeros((count, longest), dtype=np.int64)
    table[:, 0] = first + np.arange(count)
    return table


class Task:
    """What all tasks share. A subclass gives `meaning`, a legend to an instance; `vocabulary`, what each token stands for;
    `evaluate(model, seed, n)`; and `documents(rng, count)`: tokens of `count` documents behind one another, whether each is
    a target, and each document's length. `make_task` adds `name` and `settings`, which are name and parameters."""

    def __init__(self, block_size, model, training):
        self.block_size = block_size  # tokens a model sees; a window has one more, the last target
        self.model = model  # the preset's n_layer, n_head, d_model ..
        self.training = training  # the preset's steps, batch_size, lr ..

    @property
    def vocab_size(self):
        return len(self.vocabulary)

    def check_block(self, instance):
        """Refuse a block_size that an instance of so many tokens does not fit into."""
        require(instance <= self.block_size + 1, "block_size", self.block_size, f"the longest instance needs at least {instance - 1}")

    def batch(self, seed, step, batch_size):
        """The training windows of one step: tokens int64, loss_mask bool, both (batch_size, block_size + 1).

        loss_mask[:, i] says whether token i is a target. A pure function of its arguments: any number of loader
        workers, a resumed run and every architecture see the same stream.
        """
        return self.pack(np.random.default_rng([seed, TRAIN, step]), batch_size)

    def pack(self, rng, rows):
        """Documents behind one another, cut into windows. Left-aligned: each window starts with a new document, and the
        last one is cut off at the window's end."""
        width = self.block_size + 1
        tokens, mask, lengths = self.documents(rng, 2 * rows)
        while True:
            starts = np.append(0, np.cumsum(lengths))
            cuts, position = [], 0
            while len(cuts) < rows and position + width <= len(tokens):
                cuts.append(position)
                position = starts[np.searchsorted(starts, position + width)]
            if len(cuts) == rows:
                index = np.array(cuts)[:, None] + np.arange(width)
                return tokens[index], mask[index]
            missing = (rows - len(cuts)) * (width / lengths.mean() + 1)
            more = self.documents(rng, int(1.1 * missing) + 8)
            tokens, mask, lengths = (np.concatenate(pair) for pair in zip((tokens, mask, lengths), more))


@torch.no_grad()
def right_tokens(model, tokens, batch_size):
    """Whether the model's likeliest next token is the true one, bool as tokens[:, 1:], in numpy.

    A model that is right about every token of an answer, given the true ones before it, is one that would have
    generated that answer greedily: exact match needs no generation.
    """
    device = next(model.parameters()).device
    right = []
    for piece in torch.from_numpy(tokens).split(batch_size):
        piece = piece.to(device)
        right.append((model(piece[:, :-1])[0].argmax(-1) == piece[:, 1:]).cpu())
    return torch.cat(right).numpy()


NO_SHARES = ("KL", "bits", "bits/param")  # the scores that are numbers; all others are shares


def written(name, score):
    """A score in print."""
    if name not in NO_SHARES:
        return f"{score:.1%}"
    return f"{score:,.0f}" if name == "bits" else f"{score:.3f}"


def require(ok, field, value, allowed):
    if not ok:
        raise ValueError(f"{field} = {value!r}: {allowed}")


def powers_of_two(most):
    """The scored hops or lengths: 1, 2, 4 .. and most."""
    return sorted({2**i for i in range(most.bit_length())} | {most})


# ------------------------------------------------------------------------------------------------------------
# 2. Copy (paper Fig. 5): can one layer repeat a permutation?
#
#     <bos> 4 3 1 2 <query> 4 3 1 2
#
# To copy, find the last token's first occurrence and take its right neighbour. Attention alone needs two layers (or a
# much wider one): the first tells each token who stands left of it, the next looks that up. A Canon layer does the first.
# Loss on the copy only.
# ------------------------------------------------------------------------------------------------------------


class Copy(Task):
    meaning = "after <query>, the numbers once more in the same order"

    def __init__(self, N, **settings):
        super().__init__(**settings)
        require(N >= 2, "N", N, "the number of tokens to copy must be at least 2")
        self.check_block(2 * N + 2)
        self.N = N
        self.bos, self.query = N + 1, N + 2
        self.vocabulary = ["", *map(str, range(1, N + 1)), "<bos>", "<query>"]

    def documents(self, rng, count):
        tokens = np.empty((count, 2 * self.N + 2), dtype=np.int64)
        tokens[:, 0] = self.bos
        tokens[:, 1 : self.N + 1] = rng.permuted(np.tile(np.arange(1, self.N + 1), (count, 1)), axis=1)
        tokens[:, self.N + 1] = self.query
        tokens[:, self.N + 2 :] = tokens[:, 1 : self.N + 1]
        mask = np.zeros(tokens.shape, dtype=bool)
        mask[:, self.N + 2 :] = True
        return tokens.ravel(), mask.ravel(), np.full(count, tokens.shape[1])

    def evaluate(self, model, seed, n):
        """n sequences: the share that is copied whole, and the share of tokens."""
        tokens = self.documents(np.random.default_rng([seed, EVAL]), n)[0].reshape(n, -1)
        right = right_tokens(model, tokens, self.training["batch_size"])[:, self.N + 1 :]
        return {"sequences": float(right.all(1).mean()), "tokens": float(right.mean())}


# ------------------------------------------------------------------------------------------------------------
# 3. Depo (paper Section 3): reasoning depth
#
#     <bos> c a  b d  d c  a b  <query_2> b <ans> c  <query_1> c <ans> a           the cycle a -> b -> d -> c -> a
#
# The edges of a cycle in random order, then questions "who comes k after q?", each about another q. The answer must begin right behind
# <ans>, so all k hops happen inside the network: its depth is what is measured. Words of several tokens (Depo1: 1-2,
# Depo2: 5-7) make "who follows" a matter of putting neighbouring tokens together. And every node stands in the list
# twice, once before its successor and once before whichever edge comes next; words being of different lengths, only
# counting them from <bos> on tells which is which. Loss on <ans> and the answer only. Our choice: a <bos> opens each
# instance. Keep N > 2K, or the scores measure less than k hops: on a cycle of n nodes, k hops forward are n - k hops
# backward, and attention follows edges backward as easily.
# ------------------------------------------------------------------------------------------------------------


class Depo(Task):
    meaning = "the edges of a cycle, x y for x -> y; then questions: who comes k after q?"
    queries = 10  # questions an instance, or n if that is less

    def __init__(self, N, K, V, word_len, **settings):
        super().__init__(**settings)
        require(N >= 3, "N", N, "a cycle needs at least 3 nodes")
        require(K >= 1, "K", K, "at least one hop")
        word_len = check_words(N, V, word_len)
        self.check_block(1 + 2 * N * word_len[1] + min(self.queries, N) * (2 + 2 * word_len[1]))
        self.N, self.K, self.V, self.word_len = N, K, V, word_len
        self.vocabulary = ["", *word_tokens(V, word_len), "<bos>", "<ans>", *(f"<query_{k}>" for k in range(1, K + 1))]
        self.bos, self.ans = self.vocab_size - K - 2, self.vocab_size - K - 1
        self.hops = powers_of_two(K)  # the scored k

    def documents(self, rng, count):
        sizes = draw_sizes(rng, count, self.N)
        k = rng.integers(1, self.K + 1, np.minimum(sizes, self.queries).sum())
        tokens, of, lengths, hop = self.instances(rng, sizes, k)
        return tokens, hop[of] >= 0, lengths

    def instances(self, rng, sizes, k):
        """Instances of the given sizes; k: the hops of all their queries, instance by instance.

        Returns the three results of `spell`, and for each piece written its `hop`: k for an answer that is k hops from
        its question, 0 for <ans>, -1 for what is no target.
        """
        V, count = self.V, len(sizes)
        owner, at = ragged(sizes)  # the nodes of all cycles, in cycle order
        first = (np.cumsum(sizes) - sizes)[owner]
        pieces = np.concatenate([draw_words(rng, owner, V, self.word_len), specials(self.word_len[1], self.bos, 2 + self.K)])
        bos, ans = len(owner), len(owner) + 1  # numbers of rows in pieces, not tokens; <query_k> stands k rows behind <ans>

        # exercise 7: order, the rows of `pieces` that the instances are made of; lengths, how many of each instance; and hop
        source = shuffle(rng, owner)  # the edges in random order
        target = first + (at + 1) % sizes[owner]
        asked = shuffle(rng, owner)[at < self.queries]  # distinct nodes to ask about
        asker, which = owner[asked], at[at < self.queries]
        answer = first[asked] + (at[asked] + k) % sizes[asker]

        # Where each piece goes: <bos>, two pieces an edge, four a query.
        queries = np.minimum(sizes, self.queries)
        lengths = 1 + 2 * sizes + 4 * queries
        start = np.cumsum(lengths) - lengths
        order = np.empty(lengths.sum(), dtype=np.int64)
        order[start] = bos
        edge = start[owner] + 1 + 2 * at
        order[edge], order[edge + 1] = source, target[source]
        ask = start[asker] + 1 + 2 * sizes[asker] + 4 * which
        order[ask], order[ask + 1], order[ask + 2], order[ask + 3] = ans + k, asked, ans, answer
        hop = np.full(len(order), -1)
        hop[ask + 2], hop[ask + 3] = 0, k
        # end of exercise
        return *spell(pieces, order, np.repeat(np.arange(count), lengths), count), hop

    def evaluate(self, model, seed, n):
        """n instances of size N: for each scored k, the share of answers with all tokens right."""
        rng = np.random.default_rng([seed, EVAL])
        k = rng.permutation(np.resize(self.hops, n * min(self.N, self.queries)))  # each as often as the others
        flat, of, lengths, hop = self.instances(rng, np.full(n, self.N), k)
        owner, at = ragged(lengths)
        right = right_tokens(model, padded(flat, lengths), self.training["batch_size"])
        wrong = ~right[owner, at - 1]  # the token at i is predicted at i - 1; <bos> is never an answer
        mistakes = np.bincount(of, weights=wrong, minlength=len(hop))
        return {f"k={k}": float((mistakes[hop == k] == 0).mean()) for k in self.hops}


# ------------------------------------------------------------------------------------------------------------
# 4. Brevo (paper Section 3): reasoning breadth
#
#     <bos> a c  d f  b c  c e  a d <query> e <ans> b a c e <eos>          e needs c, which needs a and b; d and f do not matter
#
# The edges "parent child" of a random graph without cycles, in random order, then one question: all that q depends
# on, parents before their children, q last; any such order is right. The very first name must be a node without
# parents (a leaf, as the paper says) that q depends on, so the whole sub-graph has to be searched before a word is
# written: its breadth is what is measured. Loss from <ans> to <eos>. Brevo1: names of one token, 1..N; Brevo2: of
# 2-4. A <bos> opens each instance (our choice, as in Depo).
# ------------------------------------------------------------------------------------------------------------


def draw_graphs(rng, sizes):
    """A random directed graph without cycles for each size n; its nodes 0..n-1 are in an order with parents before children.

    The first L, uniform in 1..(n-1)//4 + 1, are leaves: they have no parents. Each later one gets 1..4 parents (uniform, or as many as
    there are) among the earlier nodes that have fewer than 4 children.
    returns  graph, parent, child, (edges,) each: all edges, sorted by graph, in random order within a graph
             edge (graphs, largest, largest) bool: the same as a table, edge[g, a, b] says that a is a parent of b
             leaves (graphs,): L
    """
    largest = sizes.max()
    edges = []
    children = np.zeros((len(sizes), largest), dtype=np.int64)
    leaves = rng.integers(1, (sizes - 1) // 4 + 2)
    for node in range(1, largest):
        graphs = np.flatnonzero((leaves <= node) & (node < sizes))  # those in which it is there, and no leaf
        few = min(4, node)
        key = rng.random((len(graphs), node), dtype=np.float32)
        key[children[graphs, :node] == 4] = 2
        picks = np.argpartition(key, range(few), axis=1)[:, :few]  # four at random; those that have 4 children come last
        chosen = np.arange(few) < rng.integers(1, 5, (len(graphs), 1))
        chosen &= np.take_along_axis(key, picks, 1) < 2
        row, column = np.nonzero(chosen)
        parent = picks[row, column]
        children[graphs[row], parent] += 1
        edges.append((graphs[row], parent, np.full(len(row), node)))
    of, parent, child = map(np.concatenate, zip(*edges))
    edge = np.zeros((len(sizes), largest, largest), dtype=bool)
    edge[of, parent, child] = True
    mix = shuffle(rng, of)
    return of[mix], parent[mix], child[mix], edge, leaves


def dependencies(edge, q):
    """need (graphs, largest) bool: q (graphs,) and all that it depends on."""
    need = np.zeros(edge.shape[:2], dtype=bool)
    need[np.arange(len(q)), q] = True
    for node in reversed(range(need.shape[1])):  # children first
        graphs = np.flatnonzero(need[:, node])
        need[graphs] |= edge[graphs, :, node]
    return need


def random_order(rng, edge, need):
    """The needed nodes in a random topological order, -1 behind: (graphs, longest).

    In each place stands one of the nodes whose parents are all written, each as likely as the others. (Our choice: so
    not all whole orders are equally likely.)"""
    counts = need.sum(1)
    waits = edge.sum(1, dtype=np.int64)  # how many parents are not yet written
    waits[~need] = -1
    order = np.full((len(need), counts.max()), -1)
    for place in range(counts.max()):
        graphs = np.flatnonzero(place < counts)
        key = rng.random((len(graphs), need.shape[1]), dtype=np.float32)
        key[waits[graphs] != 0] = -1
        node = key.argmax(1)
        order[graphs, place] = node
        waits[graphs] -= edge[graphs, node]
        waits[graphs, node] = -1
    return order


def distance_to_leaf(edge):
    """(graphs, largest): how many edges up from each node to the nearest one without parents."""
    distance = np.zeros(edge.shape[:2], dtype=np.int64)
    for node in range(1, edge.shape[2]):
        graphs = np.flatnonzero(edge[:, :node, node].any(1))
        distance[graphs, node] = 1 + np.where(edge[graphs, :node, node], distance[graphs, :node], node).min(1)
    return distance


class Brevo(Task):
    meaning = "edges, parent child; then all that q depends on, parents before their children"

    def __init__(self, N, V=None, word_len=(1, 1), **settings):
        super().__init__(**settings)
        require(N >= 3, "N", N, "a graph needs at least 3 nodes")
        V = N if V is None else V
        word_len = check_words(N, V, word_len)
        edges = 4 * N - 10 if N > 3 else 3  # at most: the first node is the only leaf, and all others have min(4, node) parents
        self.check_block(4 + int((2 * edges + 1 + N) * sum(word_len) / 2))  # with words of the mean length
        self.N, self.V, self.word_len = N, V, word_len
        self.vocabulary = ["", *word_tokens(V, word_len), "<bos>", "<query>", "<ans>", "<eos>"]
        self.bos, self.query, self.ans, self.eos = range(self.vocab_size - 4, self.vocab_size)

    def documents(self, rng, count):
        tokens, of, lengths, target, *_ = self.instances(rng, draw_sizes(rng, count, self.N))
        return tokens, target[of], lengths

    def instances(self, rng, sizes):
        """Instances of the given sizes: the three results of `spell`, for each piece written whether it is a target, and the graphs' edges
        and asked nodes."""
        of, parent, child, edge, leaves = draw_graphs(rng, sizes)
        q = sizes - 1 - rng.integers(0, (sizes - leaves + 3) // 4)  # one of the last quarter of those with parents
        need = dependencies(edge, q)
        answer = random_order(rng, edge, need)

        owner, _ = ragged(sizes)
        node = np.cumsum(sizes) - sizes  # the row in `pieces` of each graph's first node
        pieces = np.concatenate([draw_words(rng, owner, self.V, self.word_len), specials(self.word_len[1], self.bos, 4)])
        bos, query, ans, eos = len(owner) + np.arange(4)

        edges, answers = np.bincount(of, minlength=len(sizes)), need.sum(1)
        lengths = 1 + 2 * edges + 3 + answers + 1  # <bos>, edges, <query> q <ans>, answer, <eos>
        start = np.cumsum(lengths) - lengths
        order = np.empty(lengths.sum(), dtype=np.int64)
        order[start] = bos
        place = start[of] + 1 + 2 * ragged(edges)[1]
        order[place], order[place + 1] = node[of] + parent, node[of] + child
        ask = start + 1 + 2 * edges
        order[ask], order[ask + 1], order[ask + 2], order[start + lengths - 1] = query, node + q, ans, eos
        of, at = ragged(answers)
        order[ask[of] + 3 + at] = node[of] + answer[of, at]
        document, at = ragged(lengths)
        target = at >= (ask - start + 2)[document]  # from <ans> on
        return *spell(pieces, order, document, len(sizes)), target, edge, q

    def words(self, tokens):
        """The words that a list of tokens spells, as tuples; a special token is a word, too."""
        words, word = [], ()
        for token in tokens:
            word += (token,)
            if token > self.V or self.word_len[1] == 1:
                words.append(word)
                word = ()
        return words + [word] * (word != ())  # the last may be unfinished

    def verify(self, prompt, answer):
        """Whether `answer` is right for `prompt`, lists of tokens; the graph is read from the prompt itself."""
        _, *edges, query, q, ans = self.words(prompt)
        parents = {}
        for parent, child in zip(edges[::2], edges[1::2]):
            parents.setdefault(child, set()).add(parent)
        need, todo = {q}, [q]
        while todo:
            more = parents.get(todo.pop(), set()) - need
            need |= more
            todo += more
        if self.eos not in answer:
            return False
        named = self.words(answer[: answer.index(self.eos)])
        in_order = all(parents.get(word, set()) <= set(named[:i]) for i, word in enumerate(named))
        return in_order and set(named) == need and len(named) == len(need)

    def evaluate(self, model, seed, n):
        """n instances of size N, answered greedily: the share of right answers, of all and by `depth`, the distance (1 to 5) of the asked
        node from the nearest leaf (as in the paper's Fig. 9)."""
        rng = np.random.default_rng([seed, EVAL])
        flat, of, lengths, target, edge, q = self.instances(rng, np.full(n, self.N))
        distance = distance_to_leaf(edge)[np.arange(n), q]
        tokens = padded(flat, lengths)
        prompt = lengths - np.bincount(ragged(lengths)[0], weights=target[of]).astype(int) + 1  # up to <ans>
        device, size = next(model.parameters()).device, 4 * self.training["batch_size"]
        right = np.zeros(n, dtype=bool)
        fits = np.flatnonzero(lengths <= self.block_size + 1)  # words that are all long can make an instance too long: left out
        for rows in (fits[i : i + size] for i in range(0, len(fits), size)):
            given = torch.from_numpy(tokens[rows, : prompt[rows].max()]).to(device)
            # all right answers name the same nodes, so they are as long as the one we have
            new = lengths[rows].max() - prompt[rows].max()
            texts = model.generate(given, new, 0.0, self.eos, lengths=torch.from_numpy(prompt[rows]).to(device))
            right[rows] = [self.verify(row[:end], row[end:]) for row, end in zip(texts.tolist(), prompt[rows])]
        right, distance = right[fits], distance[fits]
        return {"all": float(right.mean()), **{f"depth={d}": float(right[distance == d].mean()) for d in np.unique(distance[distance <= 5])}}


# ------------------------------------------------------------------------------------------------------------
# 5. Mano (paper Section 3): knowledge manipulation
#
#     <bos> <len_3> * - 7 20 + 3 9 <ans> 5                                  (7 - 20) * (3 + 9) = 5 mod 23
#
# Arithmetic modulo 23 in prefix notation, worked out in the head: the tables of + - * are knowledge that must be
# learnt, and then applied l times over, with nothing written in between. Loss on all tokens.
# ------------------------------------------------------------------------------------------------------------


class Mano(Task):
    meaning = "an expression in prefix notation, and its value modulo 23"
    modulus = 23

    def __init__(self, L, **settings):
        super().__init__(**settings)
        require(L >= 1, "L", L, "at least one operator")
        self.check_block(2 * L + 5)
        self.L = L
        self.operator = self.modulus + 1  # the number x is token 1 + x; then come + - *, <bos>, <ans>, <len_1> .. <len_L>
        self.bos, self.ans, self.len = self.operator + 3, self.operator + 4, self.operator + 4
        numbers, lengths = map(str, range(self.modulus)), (f"<len_{l}>" for l in range(1, L + 1))
        self.vocabulary = ["", *numbers, "+", "-", "*", "<bos>", "<ans>", *lengths]
        self.scored = powers_of_two(L)  # l

    def documents(self, rng, count):
        tokens, lengths = self.instances(rng, rng.integers(1, self.L + 1, count))
        tokens = tokens[tokens > 0]
        return tokens, np.ones(len(tokens), dtype=bool), lengths

    def instances(self, rng, l):
        """One instance for each l, with l operators: tokens (instances, longest), zeros behind them, and their lengths."""
        each, size, longest = np.arange(len(l)), 2 * l + 1, 2 * l.max() + 1
        tokens = np.zeros((len(l), longest + 4), dtype=np.int64)
        text = tokens[:, 2:]
        # Written from left to right. A stack holds the operands still to come, as their numbers of operators: 0 is a number; more than
        # that is an operator, which splits the others uniformly between its two operands. The left one goes on top.
        stack, top = np.zeros((len(l), longest), dtype=np.int64), np.zeros(len(l), dtype=np.int64)
        stack[:, 0] = l
        for at in range(longest):
            row = each[at < size]
            todo = stack[row, top[row]]
            split = todo > 0
            text[row, at] = np.where(split, self.operator + rng.integers(0, 3, len(row)), 1 + rng.integers(0, self.modulus, len(row)))
            left = rng.integers(0, np.maximum(todo, 1))
            stack[row, top[row]] = todo - 1 - left
            top[row] += np.where(split, 1, -1)
            stack[row[split], top[row[split]]] = left[split]
        # Every stack is empty again (top = -1). Worked out from right to left: so an operator finds its operands on the stack, the left
        # one on top.
        for at in reversed(range(longest)):
            row = each[at < size]
            token = text[row, at] - self.operator
            a, b = stack[row, top[row]], stack[row, top[row] - 1]  # for a number these two are not used
            value = np.select([token < 0, token == 0, token == 1], [token + self.operator - 1, a + b, a - b], a * b)
            top[row] += np.where(token < 0, 1, -1)
            stack[row, top[row]] = value % self.modulus
        tokens[:, 0], tokens[:, 1] = self.bos, self.len + l
        tokens[each, size + 2], tokens[each, size + 3] = self.ans, 1 + stack[:, 0]
        return tokens, size + 4

    def evaluate(self, model, seed, n):
        """n expressions of each scored l: the share of right values."""
        l = np.repeat(self.scored, n)
        tokens, lengths = self.instances(np.random.default_rng([seed, EVAL]), l)
        right = right_tokens(model, tokens, self.training["batch_size"])[np.arange(len(l)), lengths - 2]
        return {f"l={length}": float(right[l == length].mean()) for length in self.scored}


# ------------------------------------------------------------------------------------------------------------
# 6. Lano (paper Section 3): the structure of language
#
#     <bos> 3 3 2 2 1 .. 1 2 1 <bos> 3 1 2 1 ..                             sentences of a grammar, one after another
#
# A sentence grows from the root: a symbol is replaced by one of its rules, each as likely as the others, level by
# level down to the tokens 1, 2, 3. What a symbol grows into is its yield. Nothing marks where a yield begins and
# ends, and neighbouring tokens hardly tell: the whole tree has to be inferred. Loss on all tokens. Two scores: how
# many of the model's own texts are sentences, and how far its predictions are from the exact ones. Both come from one
# chart. Let I_X[i, j] = P(X yields exactly the tokens i .. j-1). A rule X -> B C D adds I_B I_C I_D / (number of X's
# rules) to I_X, a matrix product: "B up to somewhere, C from there up to somewhere else, then D". The grammar has
# levels, so all matrices follow from those of the tokens, one level after another.
# ------------------------------------------------------------------------------------------------------------

GRAMMARS = {
    "cfg3f": """22: 20 21 | 20 19 21 | 21 19 19 | 20 20
        19: 18 16 18 | 17 18 | 18 18             20: 16 16 | 16 17 | 17 16 18             21: 18 17 | 17 16 | 16 17 18 | 16 18
        16: 15 15 | 13 15 13 | 14 13 | 14 14     17: 15 14 13 | 14 15 | 15 14             18: 14 15 13 | 15 13 13 | 13 15
        13: 11 12 | 12 11 12 | 10 12 11          14: 10 12 | 12 10 12 | 12 11 | 10 12 12  15: 10 11 11 | 11 11 10 | 10 10 | 12 12 11
        10: 8 9 9 | 9 7 9 | 7 9 9                11: 8 8 | 9 7 | 9 7 7                    12: 7 9 7 | 9 8 | 8 8 9
        7: 2 2 1 | 3 2 2 | 3 1 2 | 3 2           8: 3 1 1 | 1 2 | 3 3 1                   9: 1 2 1 | 3 3 | 1 1""",
    "cfg3j": """25: 22 22 | 23 22 | 24 23 24
        22: 19 20 | 19 19 21 | 20 19 19          23: 21 19 20 | 21 20 | 19 20 20          24: 19 19 | 20 21 19 | 19 21 21
        19: 17 17 16 | 16 18 18 | 16 17          20: 17 17 17 | 18 18 | 18 17 18          21: 18 16 | 16 17 17 | 16 18 16
        16: 14 15 | 13 15 | 15 15                17: 14 14 | 15 15 15 | 15 14             18: 14 13 15 | 13 13 14 | 13 14
        13: 10 12 | 12 10 | 11 11                14: 10 11 | 12 11 10 | 10 11 11          15: 11 12 12 | 10 10 | 11 12
        10: 7 7 9 | 8 7 | 9 8                    11: 7 8 8 | 9 9 | 8 8                    12: 7 7 8 | 8 7 7 | 9 8 8
        7: 1 2 | 2 2 | 3 3 2                     8: 3 1 | 2 3 | 1 1 2                     9: 3 2 1 | 1 3 | 3 2""",
    "cfg3k": """25: 22 23 | 24 24 | 24 23
        22: 21 19 | 21 20 20 | 21 21 | 19 21     23: 20 21 20 | 20 21 21 | 20 20 | 19 20  24: 21 20 | 20 21 | 19 19 21
        19: 17 18 16 | 18 16 | 18 16 18 | 18 18 17   20: 17 17 17 | 16 18 | 17 17 16 | 18 17 16   21: 18 17 | 16 18 16 | 17 16 16 | 17 18 18
        16: 15 14 | 14 15 | 15 14 15 | 14 13 13  17: 14 15 14 | 15 13 13 | 15 15          18: 14 14 | 15 13 | 13 14 14
        13: 10 12 12 | 11 11 12 | 12 12          14: 10 11 | 10 11 11 | 11 10 10 | 11 11  15: 12 11 | 10 10 | 11 12
        10: 7 7 | 8 8 | 9 9 7 | 7 9 7            11: 8 7 9 | 7 7 7 | 7 8 7                12: 7 8 | 8 8 7 | 9 7 9 | 8 9
        7: 3 3 | 1 3 1 | 2 1                     8: 2 3 | 1 1 2 | 3 1 | 1 2 2             9: 1 3 3 | 2 2 | 1 1 1 | 3 2 3""",
}


class Grammar:
    """A levelled grammar whose sentences grow from `root` (default: its highest symbol).

    rules  {symbol: [its rules, tuples of symbols one level down]}, lower levels first; 1, 2, 3 are tokens
    """

    def __init__(self, text, root=None):
        rules = {}
        for word in text.replace("|", " | ").split():
            if word.endswith(":"):
                rules[int(word[:-1])] = parts = [()]
            elif word == "|":
                parts.append(())
            else:
                parts[-1] += (int(word),)
        self.root = max(rules) if root is None else root
        require(self.root in rules, "root", root, f"allowed: {min(rules)} to {max(rules)}")
        used = {self.root}
        for symbol in sorted(rules, reverse=True):
            used |= {part for rule in rules[symbol] if symbol in used for part in rule}
        self.rules = {symbol: rules[symbol] for symbol in sorted(rules) if symbol in used}
        self.table = np.zeros((self.root + 1, max(map(len, self.rules.values())), 3), dtype=np.int64)  # [symbol, rule]: parts, zeros behind
        for symbol, parts in self.rules.items():
            for i, rule in enumerate(parts):
                self.table[symbol, i, : len(rule)] = rule
        self.choices = (self.table[:, :, 0] > 0).sum(1)

        self.mean, self.longest = {1: 1, 2: 1, 3: 1}, {1: 1, 2: 1, 3: 1}  # of each symbol's yield, in tokens
        for symbol, parts in self.rules.items():
            self.mean[symbol] = sum(self.mean[part] for rule in parts for part in rule) / len(parts)
            self.longest[symbol] = max(sum(self.longest[part] for part in rule) for rule in parts)

    def sample(self, rng, count):
        """`count` sentences: their tokens, all behind one another, and each one's length."""
        symbols, owner = np.full(count, self.root), np.arange(count)
        while symbols[0] in self.rules:
            parts = self.table[symbols, (rng.random(len(symbols)) * self.choices[symbols]).astype(int)]  # (symbols, 3)
            used = parts > 0
            symbols, owner = parts[used], np.repeat(owner, used.sum(1))
        return symbols, np.bincount(owner, minlength=count)

    def chart(self, tokens, c=2.1):
        """For each prefix of each row: how likely is it, and then each next token, or the end?

        tokens   (B, T) int64, a sentence a row; zeros behind it if it is shorter than T
        returns  (B, T + 1, 4) float64 (float32 on MPS): [b, t, v] is the probability that a sentence starts with row b's first t tokens
                 and then has v, with v = 0 for its end; times c^t. The factor, of the order of 1 / P(a token), keeps long
                 sentences from underflowing.
        """
        B, T = tokens.shape
        dtype = torch.float32 if tokens.device.type == "mps" else torch.float64
        # Up: the matrices I_X of the tokens, then level by level those of the symbols below the root, by `band_product`, as a yield
        # of X has at most self.longest[X] tokens. Down: the root must begin at 0, so from here one row of each matrix will do:
        # starts[X][t] = P(the first t tokens are right, and an X begins there). The first part of a rule begins where its symbol does,
        # the next where that ends.
        # exercise 11
        yields = {v: torch.diag_embed(c * (tokens == v).to(dtype), 1) for v in (1, 2, 3)}  # I_X, each (B, T + 1, T + 1)
        for symbol in list(self.rules)[:-1]:
            total = 0
            for first, *others in self.rules[symbol]:
                product, length = yields[first], self.longest[first]
                for part in others:
                    product = band_product(product, yields[part], length, self.longest[part])
                    length += self.longest[part]
                total = total + product
            yields[symbol] = total / len(self.rules[symbol])
        starts = {symbol: tokens.new_zeros(B, 1, T + 1, dtype=dtype) for symbol in [*yields, self.root]}
        starts[self.root][..., 0] = 1
        end = 0
        for symbol in reversed(self.rules):
            for rule in self.rules[symbol]:
                row = starts[symbol] / len(self.rules[symbol])
                for part in rule:
                    starts[part] = starts[part] + row
                    row = row @ yields[part]
                if symbol == self.root:
                    end = end + row
        return torch.cat([end, starts[1], starts[2], starts[3]], 1).mT


def band_product(left, right, first, second, rows=64):
    """left @ right, (B, T, T) each, where left[i, j] is zero but for i <= j <= i + first, and right likewise for `second`."""
    T = left.shape[1]
    product = torch.zeros_like(left)
    for i in range(0, T, rows):
        k = min(i + rows + first, T)
        j = min(k + second, T)
        product[:, i : i + rows, i:j] = left[:, i : i + rows, i:k] @ right[:, i:k, i:j]
    return product


class Lano(Task):
    meaning = "a sentence of the grammar"

    def __init__(self, cfg, root=None, **settings):
        super().__init__(**settings)
        require(cfg in GRAMMARS, "cfg", cfg, f"allowed: {', '.join(GRAMMARS)}")
        self.grammar = Grammar(GRAMMARS[cfg], root)
        mean = self.grammar.mean[self.grammar.root]
        require(2 * mean <= self.block_size, "block_size", self.block_size, f"must be at least {math.ceil(2 * mean)}, twice a sentence's mean length")
        self.bos, self.vocabulary = 4, ["", "1", "2", "3", "<bos>"]

    def documents(self, rng, count):
        sentences, lengths = self.grammar.sample(rng, count)
        tokens = np.insert(sentences, np.cumsum(lengths) - lengths, self.bos)
        return tokens, np.ones(len(tokens), dtype=bool), lengths + 1

    def charts(self, tokens):
        """The grammar's chart of many rows, a few at a time for memory's sake."""
        few = max(1, 2**21 // tokens.shape[1] ** 2)
        return torch.cat([self.grammar.chart(rows) for rows in tokens.split(few)])

    @torch.no_grad()
    def evaluate(self, model, seed, n):
        """sentences: of n texts that the model writes after <bos>, at temperature 1 and up to the next <bos>, the share that are sentences
        of the grammar. KL: the divergence of its next-token distribution from the exact one, in nats, on average over all places of
        n sentences.
        """
        device, size = next(model.parameters()).device, 4 * self.training["batch_size"]
        generator, known = torch.Generator(device).manual_seed(seed), 0
        for begin in torch.full((n, 1), self.bos, device=device).split(size):
            text = model.generate(begin, self.block_size, 1.0, self.bos, generator)[:, 1:]
            text = text[text[:, -1] == self.bos]  # those that came to an end
            inside = text != self.bos
            end = self.charts(text * inside)[torch.arange(len(text)), inside.sum(1), 0]
            known += int((end > 0).sum())

        tokens = padded(*self.grammar.sample(np.random.default_rng([seed, EVAL]), n))
        nats, places = 0.0, 0
        for rows in torch.from_numpy(tokens[:, : self.block_size - 1]).split(size // 4):
            rows = rows.to(device)
            chart = self.charts(rows)  # (rows, T + 1, 4), zero behind the end
            place = chart.sum(-1) > 0
            exact = chart[place] / chart[place].sum(-1, keepdim=True)
            logits = model(F.pad(rows, (1, 0), value=self.bos))[0][place]
            log_model = logits.to(exact.dtype).log_softmax(-1)[:, [self.bos, 1, 2, 3]]
            nats += float((torch.xlogy(exact, exact) - exact * log_model).sum())
            places += len(exact)
        return {"sentences": known / n, "KL": nats / places}


# ------------------------------------------------------------------------------------------------------------
# 7. Capo (paper Section 3): knowledge capacity
#
#     <bos> Ada Mae King first saw light July 3 1961 she grew up in Rome she was reading at Oxford ..
#
# Biographies of N invented people, each met 100 times, worded anew each time. How many bits of this does a model
# hold, for each of its parameters? A person has three names, a token each (Ada is one of 400 first names), and facts:
# a birth date of three tokens, and others of one. Before each fact stand three word tokens, which tell what it is, in
# one of 10 wordings, drawn afresh at every exposure. Names and facts are drawn once, uniformly: log2 of the
# possibilities is what there is to know. Loss on all tokens. (The paper's biographies are in English; it finds that
# the format does not matter.)
# ------------------------------------------------------------------------------------------------------------

PERSON = {"first name": 400, "middle name": 400, "last name": 1000, "pronoun": 2, "month": 12, "day": 28, "year": 200,
          "birth city": 200, "university": 300, "major": 100, "employer": 263}  # and how many there are of each  # fmt: skip
COLUMNS = [*PERSON, "work city"]  # a person's tokens; the work city follows from the employer
SENTENCES = [["month", "day", "year"], ["birth city"], ["university"], ["major"], ["employer"], ["work city"]]
WORDINGS, WORDS = 10, 50  # ways to say a sentence, each with three words out of so many
FIRST_WORD = 1 + sum(PERSON.values())
POSSIBLE_NAMES, POSSIBLE_FACTS = math.prod([*PERSON.values()][:3]), math.prod([*PERSON.values()][3:])


@functools.lru_cache(maxsize=2)
def draw_people(seed, N):
    """N people with different names, as tokens: (N, 12), in the order of COLUMNS."""
    rng = np.random.default_rng([seed, PEOPLE])
    sizes = np.array([*PERSON.values()])
    people = rng.integers(0, sizes, (N, len(sizes)))
    people[:, :3] = np.stack(np.unravel_index(rng.choice(POSSIBLE_NAMES, N, replace=False), sizes[:3]), 1)
    first = 1 + np.cumsum(sizes) - sizes  # token of each kind
    cities = np.random.default_rng(0).integers(0, PERSON["birth city"], PERSON["employer"])  # of the employers, the same in all worlds
    work = first[COLUMNS.index("birth city")] + cities[people[:, COLUMNS.index("employer")]]
    return np.column_stack([first + people, work])


@functools.lru_cache(maxsize=2)
def meeting_order(seed, epoch, N):
    """The order in which an epoch meets the people."""
    return np.random.default_rng([seed, MEETINGS, epoch]).permutation(N)


class Capo(Task):
    meaning = "a life: names and values, by kind and number, and the words between them"

    def __init__(self, N, exposures, **settings):
        super().__init__(**settings)
        require(1 <= N <= POSSIBLE_NAMES // 50, "N", N, f"allowed: 1 to {POSSIBLE_NAMES // 50:,} people, at most 1/50 of the possible names")
        require(exposures >= 1, "exposures", exposures, "at least one")
        self.N, self.exposures = N, exposures
        values = (f"{kind.replace(' ', '-')}-{i}" for kind, size in PERSON.items() for i in range(size))
        self.vocabulary = ["", *values, *(f"word-{i}" for i in range(WORDS)), "<bos>"]
        self.bos = FIRST_WORD + WORDS
        # A person's 12 tokens, 18 words and <bos> stand side by side; layout[i] is the column that goes to place i of a biography.
        words = itertools.count(len(COLUMNS))
        self.layout = [len(COLUMNS) + 3 * len(SENTENCES), 0, 1, 2]
        for number, facts in enumerate(SENTENCES):
            pronoun = [COLUMNS.index("pronoun")] * (number > 0)
            self.layout += [*pronoun, next(words), next(words), next(words), *map(COLUMNS.index, facts)]
        self.told = np.array([self.layout.index(i) for i in range(len(COLUMNS))])  # where a person's tokens stand first
        different = np.random.default_rng(0).choice(WORDS**3, len(SENTENCES) * WORDINGS, replace=False)
        self.wordings = FIRST_WORD + np.stack(np.unravel_index(different, (WORDS,) * 3), 1).reshape(len(SENTENCES), WORDINGS, 3)
        self.check_block(len(self.layout))
        self.a_window = (self.block_size + 1) // len(self.layout)  # biographies

    def steps(self, batch_size):
        """The training steps that make up the exposures."""
        return -(-self.exposures * self.N // (batch_size * self.a_window))

    def biographies(self, rng, seed, who):
        """(len(who), columns) tokens: these people's lives in new words."""
        wording = self.wordings[np.arange(len(SENTENCES)), rng.integers(0, WORDINGS, (len(who), len(SENTENCES)))]
        parts = draw_people(seed, self.N)[who], wording.reshape(len(who), -1), np.full((len(who), 1), self.bos)
        return np.concatenate(parts, axis=1)[:, self.layout]

    def documents(self, rng, count):  # for `example`; training goes through `batch`
        tokens = self.biographies(rng, 0, rng.integers(0, self.N, count))
        return tokens.ravel(), np.ones(tokens.size, dtype=bool), np.full(count, tokens.shape[1])

    def batch(self, seed, step, batch_size):
        """As in all tasks; but a window has whole biographies only, with zeros behind, and nobody comes again before everybody
        has come: the step tells who comes."""
        turn = step * batch_size * self.a_window + np.arange(batch_size * self.a_window)
        epoch, at = np.divmod(turn, self.N)
        who = np.empty_like(turn)
        for e in np.unique(epoch):
            who[epoch == e] = meeting_order(seed, int(e), self.N)[at[epoch == e]]
        text = self.biographies(np.random.default_rng([seed, TRAIN, step]), seed, who).reshape(batch_size, -1)
        tokens = np.zeros((batch_size, self.block_size + 1), dtype=np.int64)
        tokens[:, : text.shape[1]] = text
        return tokens, tokens > 0

    @torch.no_grad()
    def evaluate(self, model, seed, n):
        """What the model knows, from n of the people: the shares of what there is to know of names and of facts; `bits`; and bits/param.

        With p1 the mean nats that the model needs for a name, and p2 for all facts of a person (the work city, too), each given what stands
        before it, bits = N log2(N0 / e^p1) + N log2(S0 / e^p2), neither term below zero (paper Section 3); N0 and S0 are the numbers of possible
        names and facts. Rows of the embedding for tokens that no person has are not counted as parameters.
        """
        rng = np.random.default_rng([seed, EVAL])
        tokens = torch.from_numpy(self.biographies(rng, seed, rng.permutation(self.N)[:n]))
        device, costs = next(model.parameters()).device, []
        for rows in tokens.to(device).split(self.training["batch_size"]):
            logits = model(rows[:, :-1])[0].float()
            costs.append(F.cross_entropy(logits.mT, rows[:, 1:], reduction="none"))
        nats = torch.cat(costs).mean(0).cpu().numpy()[self.told - 1]  # of each of a person's tokens
        names = max(0.0, 1 - float(nats[:3].sum()) / math.log(POSSIBLE_NAMES))
        facts = max(0.0, 1 - float(nats[3:].sum()) / math.log(POSSIBLE_FACTS))
        bits = self.N * (names * math.log2(POSSIBLE_NAMES) + facts * math.log2(POSSIBLE_FACTS))
        used = np.bincount(draw_people(seed, self.N).ravel(), minlength=FIRST_WORD) > 0
        counts = model.parameter_counts()
        parameters = counts["total"] - counts["embeddings"] // self.vocab_size * int((~used).sum())
        return {"names": names, "facts": facts, "bits": bits, "bits/param": bits / parameters}


# ------------------------------------------------------------------------------------------------------------
# 8. Presets
#
# One word scales task, model and budget together: nano for two CPU cores and minutes, small for one GPU (only Copy's is
# measured yet), paper for the paper's own numbers. Where the paper gives several values (N, lr), the first or the middle
# one stands here, and the flags of train.py reach the others.
# ------------------------------------------------------------------------------------------------------------

ADAMW = dict(betas=(0.9, 0.98), eps=1e-6, weight_decay=0.03, warmup=1000, schedule="cosine")
NANO = dict(n_layer=3, n_head=2, d_model=64)
SMALL = dict(n_layer=6, n_head=6, d_model=384)
LARGE = dict(n_layer=12, n_head=12, d_model=768)

PRESETS = {
    "copy": {
        "nano": dict(N=64, block_size=129, model=dict(n_layer=1, n_head=2, d_model=16),
                     training=dict(ADAMW, steps=2000, batch_size=32, lr=1e-2, warmup=200)),
        "small": dict(N=200, block_size=401, model=dict(n_layer=1, n_head=2, d_model=16),
                      training=dict(ADAMW, steps=3000, batch_size=32, lr=1e-2)),
        "paper": dict(N=500, block_size=1024, model=dict(n_layer=1, n_head=2, d_model=16),
                      training=dict(ADAMW, steps=50_000, batch_size=32, lr=5e-3)),
    },
    "depo1": {
        "nano": dict(N=5, K=2, V=50, word_len=(1, 2), block_size=52, model=NANO,
                     training=dict(ADAMW, steps=10_000, batch_size=32, lr=7e-3, warmup=300)),
        "small": dict(N=40, K=4, V=50, word_len=(1, 2), block_size=320, model=SMALL,
                      training=dict(ADAMW, steps=20_000, batch_size=128, lr=1e-3)),
        "paper": dict(N=225, K=8, V=50, word_len=(1, 2), block_size=2048, model=LARGE,
                      training=dict(ADAMW, steps=87_500, batch_size=128, lr=1e-3)),
    },
    "depo2": {
        "nano": dict(N=5, K=2, V=3, word_len=(5, 7), block_size=152, model=NANO,
                     training=dict(ADAMW, steps=5000, batch_size=16, lr=5e-3, warmup=100)),
        "small": dict(N=25, K=4, V=3, word_len=(5, 7), block_size=512, model=SMALL,
                      training=dict(ADAMW, steps=20_000, batch_size=128, lr=1e-3)),
        "paper": dict(N=75, K=16, V=3, word_len=(5, 7), block_size=2048, model=LARGE,
                      training=dict(ADAMW, steps=100_000, batch_size=128, lr=1e-3)),
    },
    "brevo1": {
        "nano": dict(N=10, block_size=96, model=NANO,
                     training=dict(ADAMW, steps=2000, batch_size=32, lr=5e-3, warmup=300)),
        "small": dict(N=40, block_size=384, model=SMALL,
                      training=dict(ADAMW, steps=20_000, batch_size=128, lr=1e-3)),
        "paper": dict(N=70, block_size=1024, model=LARGE,
                      training=dict(ADAMW, steps=100_000, batch_size=256, lr=1e-3)),
    },
    "brevo2": {
        "nano": dict(N=5, V=4, word_len=(2, 4), block_size=88, model=NANO,
                     training=dict(ADAMW, steps=5000, batch_size=32, lr=5e-3, warmup=300)),
        "small": dict(N=20, V=4, word_len=(2, 4), block_size=576, model=SMALL,
                      training=dict(ADAMW, steps=20_000, batch_size=128, lr=1e-3)),
        "paper": dict(N=30, V=4, word_len=(2, 4), block_size=1536, model=LARGE,
                      training=dict(ADAMW, steps=200_000, batch_size=192, lr=1e-3)),
    },
    "mano": {
        "nano": dict(L=2, block_size=128, model=NANO,
                     training=dict(ADAMW, steps=5000, batch_size=32, lr=3e-3, warmup=300, weight_decay=0.1)),
        "small": dict(L=8, block_size=256, model=SMALL,
                      training=dict(ADAMW, steps=20_000, batch_size=128, lr=5e-4, weight_decay=0.1)),
        "paper": dict(L=10, block_size=1024, model=LARGE,
                      training=dict(ADAMW, steps=80_000, batch_size=64, lr=3e-4, weight_decay=0.1)),
    },
    "lano": {
        "nano": dict(cfg="cfg3f", root=17, block_size=128, model=NANO,
                     training=dict(ADAMW, steps=2000, batch_size=32, lr=5e-3, warmup=300, weight_decay=0.1)),
        "small": dict(cfg="cfg3f", root=None, block_size=512, model=SMALL,
                      training=dict(ADAMW, steps=20_000, batch_size=96, lr=1e-3, weight_decay=0.1)),
        "paper": dict(cfg="cfg3f", root=None, block_size=512, model=LARGE,
                      training=dict(ADAMW, steps=100_000, batch_size=96, lr=5e-4, warmup=0, schedule="linear", weight_decay=0.1)),
    },
    "capo": {
        "nano": dict(N=2000, exposures=100, block_size=139, model=dict(n_layer=2, n_head=2, d_model=32, tie_embeddings=True),
                     training=dict(ADAMW, steps=None, batch_size=16, lr=5e-3, warmup=300, weight_decay=0.01)),
        "small": dict(N=50_000, exposures=100, block_size=512, model=dict(n_layer=4, n_head=4, d_model=256, tie_embeddings=True),
                      training=dict(ADAMW, steps=None, batch_size=48, lr=2e-3, weight_decay=0.01)),
        "paper": dict(N=50_000, exposures=100, block_size=512, model=dict(n_layer=4, n_head=4, d_model=256, tie_embeddings=True),
                      training=dict(ADAMW, steps=None, batch_size=12, lr=1e-3, weight_decay=0.01)),
    },
}  # fmt: skip

TASKS = {"copy": Copy, "depo1": Depo, "depo2": Depo, "brevo1": Brevo, "brevo2": Brevo, "mano": Mano, "lano": Lano, "capo": Capo}
ALIASES = {"depo": "depo1", "brevo": "brevo1"}


def make_task(name, preset="nano", **overrides):
    """The task of this name at a preset's scale ("nano", "small", "paper").

    overrides: the task's own parameters, such as N, in place of the preset's.
    Raises ValueError for an unknown name, preset or parameter, and for values that do not fit together.
    """
    name = ALIASES.get(name, name)
    require(name in PRESETS, "task", name, f"allowed: {', '.join([*PRESETS, *ALIASES])}")
    require(preset in PRESETS[name], "preset", preset, f"allowed: {', '.join(PRESETS[name])}")
    settings = dict(PRESETS[name][preset])
    for field, value in overrides.items():
        own = sorted(set(settings) - {"model", "training"})
        require(field in own, field, value, f"{name} has no such parameter; it has {', '.join(own)}")
        settings[field] = value
    settings["training"] = dict(settings["training"])  # the caller's own, to change
    task = TASKS[name](**settings)
    task.name, task.settings = name, {"name": name, **{f: v for f, v in settings.items() if f not in ("model", "training")}}
    return task


# ------------------------------------------------------------------------------------------------------------
# 9. An example of each:   python tasks.py depo
# ------------------------------------------------------------------------------------------------------------


def example(task, seed=0):
    """One instance in print: what the loss counts stands in [brackets]."""
    tokens, mask, _ = task.documents(np.random.default_rng(seed), 1)
    before, after = np.append(False, mask[:-1]), np.append(mask[1:], False)
    text = ""
    for token, opens, closes in zip(tokens, (mask & ~before).tolist(), (mask & ~after).tolist()):
        text += "[" * opens + task.vocabulary[token] + "]" * closes
        text += "" if text.endswith(".") else " "  # a word goes on
    return text


def main(arguments):
    if len(arguments) not in (1, 2) or arguments[0].startswith("-"):
        raise ValueError(f"usage: python tasks.py TASK [PRESET], TASK one of {', '.join([*PRESETS, *ALIASES])}")
    task = make_task(*arguments)
    settings = ", ".join(f"{field} = {value}" for field, value in task.settings.items() if field != "name")
    print(f"{task.name}: {settings}; {task.vocab_size} tokens\n")
    print(textwrap.fill(example(task), 110, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False))
    joined = "\na word's tokens are joined by dots" if getattr(task, "word_len", (1, 1))[1] > 1 else ""
    print(f"\n{task.meaning}{joined}\nthe loss counts what stands in [brackets]")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        print(f"tasks.py: {error}", file=sys.stderr)
        raise SystemExit(2)
