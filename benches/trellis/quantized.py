"""Quantizes the demo model's layers one after another, each on the inputs that the rounded layers before it give."""

import torch

from demo import INPUTS


def quantized(demo, windows, choose, embed=None):
    """Layers of the demo rounded by `choose(layer index, group, products, weight, second moments)`, which gets the rows
    of all products of a group as one weight and returns them rounded. `embed` replaces the embedding."""
    embedding = demo.embedding if embed is None else embed
    x = embedding[windows]
    result = []
    for index, weights in enumerate(demo.layers):
        rounded = dict(weights)

        def see(group, inputs):
            a = inputs.reshape(-1, inputs.shape[-1])
            h = sum(part.T @ part for part in a.double().split(16384)) / len(a)
            products = INPUTS[group]
            w = torch.cat([weights[p] for p in products])
            q = choose(index, group, products, w, h)
            rounded.update(zip(products, q.split([len(weights[p]) for p in products])))

        x = demo.layer(rounded, x, see)
        result.append(rounded)
    return result


def relative_error(demo, layers):
    """Squared error of all products' weights over their squares."""
    error = square = 0.0
    for before, after in zip(demo.layers, layers):
        for p in (p for products in INPUTS.values() for p in products):
            error += (after[p] - before[p]).square().sum().item()
            square += before[p].square().sum().item()
    return error / square
