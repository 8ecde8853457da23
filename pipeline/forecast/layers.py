"""Layers beyond those of Llama, as stories of memory like those of `net.py`.

Each gives a new value with one reference, and leaves the caller the references to what it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.forecast.net import WIDE, Net, Parts
from pipeline.forecast.tape import GRADIENTS, Value

if TYPE_CHECKING:
    from pipeline.forecast.shapes import Weight


def copied(net: Net, x: Value) -> Value:
    """Another tensor with the same numbers, or with a constant added."""

    def back(upstream: Value) -> Parts:
        yield x, net.tape.hold(upstream)

    return net.tape.node(net.like(x), [], back)


def shifted(net: Net, x: Value, y: Value) -> Value:
    """A sum with what is the same for all samples."""
    out = net.like(x)
    out.graded = x.graded or y.graded

    def back(upstream: Value) -> Parts:
        for one in (x, y):
            alike = one.bytes == upstream.bytes
            yield one, net.tape.hold(upstream) if alike else net.gradient(one.bytes)

    return net.tape.node(out, [], back)


def tanh(net: Net, x: Value) -> Value:
    """Keeps what it gives."""
    out = net.like(x)

    def back(upstream: Value) -> Parts:
        yield x, net.gradient(x.bytes)

    return net.tape.node(out, [out], back)


def capped(net: Net, x: Value) -> Value:
    """Numbers kept below a bound: divided by it, through a hyperbolic tangent, times it. Takes the
    reference to `x`."""
    x = net.replaced(x, net.by_number(x))
    x = net.replaced(x, tanh(net, x))
    return net.replaced(x, net.by_number(x))


def composed_gelu(net: Net, x: Value) -> Value:
    """GELU by a hyperbolic tangent, written as one operation after another (`gelu_new`)."""
    half = net.by_number(x)
    cube = _cubed(net, x)
    cube = net.replaced(cube, net.by_number(cube))
    inner = net.replaced(cube, net.add(x, cube))
    inner = net.replaced(inner, net.by_number(inner))
    bent = net.replaced(inner, tanh(net, inner))
    above = net.replaced(bent, copied(net, bent))
    out = net.multiply(half, above)
    net.tape.drop(half, above)
    return out


def _cubed(net: Net, x: Value) -> Value:
    def back(upstream: Value) -> Parts:
        square, slope = net.gradient(x.bytes), net.gradient(x.bytes)
        mine = net.gradient(x.bytes)
        net.tape.drop(square, slope)
        yield x, mine

    return net.tape.node(net.like(x), [x], back)


def sliced(net: Net, x: Value, sizes: Sequence[int]) -> list[Value]:
    """Parts of `x`, so many bytes each, as views; backward makes a whole gradient of each that is
    not all of it."""

    def one(size: int) -> Value:
        def back(upstream: Value) -> Parts:
            yield x, net.tape.hold(upstream) if size == x.bytes else net.gradient(x.bytes)

        return net.tape.node(net.tape.part(x, size), [], back)

    return [one(size) for size in sizes]


def split(net: Net, x: Value, sizes: Sequence[int]) -> list[Value]:
    """Parts of `x`, so many bytes each, as views; backward joins their gradients once."""
    parts = [net.tape.part(x, size) for size in sizes]
    waiting: list[Value] = []

    def join(upstream: Value) -> Parts:
        whole = net.gradient(x.bytes)
        net.tape.drop(*waiting)
        waiting.clear()
        yield x, whole

    def wait(upstream: Value) -> Parts:
        waiting.append(net.tape.hold(upstream))
        return iter(())

    for number, part in enumerate(parts):
        net.tape.node(part, [], wait if number else join)
    return parts


def repeated(net: Net, x: Value, times: int, heads: int) -> Value:
    """Keys or values, once for each of so many heads that share those of one of `heads`: a copy,
    or a view where there is only one."""
    if heads > 1 or times == 1:
        return net.repeated(x, times)

    def back(upstream: Value) -> Parts:
        yield x, net.gradient(x.bytes)

    return net.tape.node(net.tape.part(x, x.bytes * times), [], back)


def by_head(net: Net, x: Value) -> Value:
    """What a layer gives, which lies token by token, for products of matrices by head: a copy, or
    itself where there is one sample."""
    return copied(net, x) if net.batch.samples > 1 else net.tape.hold(x)


def turned(net: Net, x: Value, share: float) -> Value:
    """Rotary position embedding of the first share of each head, joined with the rest."""
    first = round(x.bytes * share)
    part, rest = sliced(net, x, (first, x.bytes - first))
    embedded = net.rotary(part)
    out = net.like(x)

    def back(upstream: Value) -> Parts:
        upstream.shared = True
        yield embedded, net.tape.hold(upstream)
        yield rest, net.tape.hold(upstream)

    net.tape.node(out, [], back)
    net.tape.drop(part, rest, embedded)
    return out


def wide_rotary(net: Net, x: Value) -> Value:
    """Rotary position embedding with sines and cosines in fp32: a result in fp32."""
    by_cosine = net.like(x, WIDE)
    halves = net.like(x)
    by_sine = net.like(x, WIDE)
    net.tape.drop(halves)
    out = net.like(x, WIDE)
    net.tape.drop(by_cosine, by_sine)

    def back(upstream: Value) -> Parts:
        net.tape.pulse(upstream.bytes, GRADIENTS)
        by_sine = net.gradient(x.bytes)
        half, padded = net.gradient(x.bytes // 2), net.gradient(x.bytes)
        net.tape.pulse(x.bytes, GRADIENTS)
        net.tape.drop(by_sine, half, padded)
        net.tape.pulse(upstream.bytes, GRADIENTS)
        yield x, net.gradient(x.bytes)

    return net.tape.node(out, [], back)


def wide_norm(net: Net, x: Value, weight: Weight) -> Value:
    """RMS norm that is scaled in fp32 too, and narrowed at the end."""
    tape, w = net.tape, net.weight(weight)
    normed = net.normalised(x, weight.shape[-1])
    scaled = net.like(normed)
    scaled.graded = x.graded or w.graded

    def back(upstream: Value) -> Parts:
        mine = net.gradient(normed.bytes) if normed.graded else None
        if w.graded:
            tape.pulse(normed.bytes, GRADIENTS)  # before it is summed over tokens
            yield w, net.gradient(weight.elements * net.c)
        yield normed, mine

    tape.node(scaled, [normed] if w.graded else [], back)
    tape.drop(normed)
    return net.replaced(scaled, net.cast(scaled, net.c))


def layer_norm(net: Net, x: Value, weight: Weight, bias: Weight) -> Value:
    """One operation; keeps what it is given, and a mean and a deviation of each token."""
    tape, w, b = net.tape, net.weight(weight), net.weight(bias)
    out = net.like(x)
    out.graded = x.graded or w.graded
    rows = net.tensor(2 * net.batch.tokens, graded=False)

    def back(upstream: Value) -> Parts:
        yield x, net.gradient(x.bytes) if x.graded else None
        yield w, net.gradient(weight.elements * net.c) if w.graded else None
        yield b, net.gradient(bias.elements * net.c) if b.graded else None

    tape.node(out, [x, rows, w], back)
    tape.drop(rows)
    return out


def eager_attention(
    net: Net,
    q: Value,
    k: Value,
    v: Value,
    heads: int,
    *,
    cap: bool = False,
    dropout: bool = False,
    wide: bool = True,
) -> Value:
    """Attention that holds its matrix, of every head and pair of tokens: products, caps, a mask
    that is added, weights (in fp32 first if `wide`). Keys and values are the heads' own."""
    pairs = net.batch.tokens * net.batch.length * heads
    x = _matmul(net, q, k, pairs, net.c)
    x = net.replaced(x, net.by_number(x))
    if cap:
        x = capped(net, x)
    x = net.replaced(x, copied(net, x))  # with the mask
    x = net.replaced(x, _softmax(net, x, WIDE if wide else net.c))
    if dropout:
        x = net.replaced(x, net.dropped(x))
    out = _matmul(net, x, v, q.bytes // q.element, net.c)
    out = net.replaced(out, copied(net, out))
    net.tape.drop(x)
    return out


def dropping_attention(net: Net, q: Value, k: Value, v: Value, heads: int) -> Value:
    """Attention in one operation that drops weights, as kernels of CPUs compute it: by matrices in
    fp32."""
    pairs, times = net.batch.tokens * net.batch.length * heads, q.bytes // k.bytes
    q, k, v = (net.cast(x, WIDE) for x in (q, k, v))
    k, v = (net.replaced(x, net.repeated(x, times)) for x in (k, v))
    q, k = (net.replaced(x, net.by_number(x)) for x in (q, k))
    x = _matmul(net, q, k, pairs, WIDE)
    x = net.replaced(x, copied(net, x))  # with the mask
    unseen = net.tensor(pairs, 1, graded=False)
    shares = _softmax(net, x, WIDE)
    shares = net.replaced(shares, copied(net, shares))  # without rows that see nothing
    net.tape.drop(x, unseen)
    x = net.replaced(shares, net.dropped(shares))
    v = v if times > 1 else net.replaced(v, by_head(net, v))
    wide = _matmul(net, x, v, q.bytes // WIDE, WIDE)
    net.tape.drop(x, q, k, v)
    return net.replaced(wide, net.cast(wide, net.c))


def _matmul(net: Net, x: Value, y: Value, elements: int, size: int) -> Value:
    """Products of matrices that are no weights."""
    out = net.tensor(elements, size, graded=x.graded or y.graded)

    def back(upstream: Value) -> Parts:
        for factor in (x, y):
            yield factor, net.gradient(factor.bytes) if factor.graded else None

    return net.tape.node(out, [x, y], back)


def _softmax(net: Net, x: Value, size: int) -> Value:
    """In numbers of so many bytes; keeps what it gives."""
    wide = net.cast(x, size)
    out = net.like(wide)

    def back(upstream: Value) -> Parts:
        yield wide, net.gradient(wide.bytes)

    net.tape.node(out, [out], back)
    net.tape.drop(wide)
    return net.replaced(out, net.cast(out, x.element))
