"""Trellis codes: the values that a state stands for, and the search for the best states of a sequence.

A code has states of L bits; each step of a sequence reads B new bits into the state and gives V values, so a value
costs B / V bits. Sequences are cyclic unless said otherwise: the bits before the first step are the last ones.
"""

import ctypes
from pathlib import Path

import numpy as np

# Of the codes computed from a product: of hundreds, those with the least errors at 3 to 5 bits (ladder.py --tries).
MULTIPLIER, OCTAGON = 0xD17F17D3, 0xAD1B72DB


def product(state_bits, multiplier=MULTIPLIER, addend=0):
    """The four bytes of state * multiplier + addend modulo 2^32, lowest first: [states, 4]."""
    states = np.arange(1 << state_bits, dtype=np.uint64)
    return ((states * np.uint64(multiplier) + np.uint64(addend)) & np.uint64(0xFFFFFFFF)).astype("<u4").view(np.uint8).reshape(-1, 4)


def unit(values):
    """Each of the V values without mean, all of variance 1."""
    values = np.asarray(values, np.float64).reshape(len(values), -1)
    values = values - values.mean(0)
    return (values / values.std()).astype(np.float32)


def gauss(state_bits, width=1, seed=1):
    """Independent Gaussians: what computed codes imitate. A decoder would need a table of all states."""
    return unit(np.random.default_rng(seed).standard_normal((1 << state_bits, width)))


def bytes4(state_bits, width=1, multiplier=MULTIPLIER, addend=0):
    """One value a step: the sum of the product's four bytes."""
    return unit(product(state_bits, multiplier, addend).sum(1, dtype=np.int64))


def bytes2(state_bits, width=2, multiplier=0x9F452C07, addend=0):
    """Two values a step: the sums of the product's low and high two bytes."""
    return unit(product(state_bits, multiplier, addend).reshape(-1, 2, 2).sum(2, dtype=np.int64))


def octagon(state_bits, width=2, multiplier=OCTAGON, addend=0):
    """Two values a step: two sums of the product's four bytes, whose weights are a projection of the cube to an octagon."""
    weights = np.array([[10, 0], [7, 7], [0, 10], [-7, 7]])
    return unit(product(state_bits, multiplier, addend).astype(np.int64) @ weights)


def bytes1(state_bits, width=4, multiplier=MULTIPLIER, addend=0):
    """Four values a step: the product's bytes."""
    return unit(product(state_bits, multiplier, addend))


def halves(state_bits, width=1, multiplier=0x8A2B19D5, addend=0x3C6EF35F):
    """One value a step: the sum of two f16 whose signs, low exponent bits and mantissas are the product's bits."""
    words = product(state_bits, multiplier, addend).reshape(-1, 4).copy().view("<u4")[:, 0]
    words = (words & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)
    return unit(words.view("<f2").reshape(-1, 2).astype(np.float32).sum(1))


def wide(state_bits, width=2, multiplier=(0x959DE095, 0x23EDCB05), addend=0xF2650B71):
    """Two values a step: sums of four bytes of two products."""
    return unit(np.stack([product(state_bits, m, addend).sum(1, dtype=np.int64) for m in multiplier], 1))


def alternating(state_bits, first, second, **computed):
    """bytes4 with steps of `first` and `second` bits in turns, as one code of two values a step."""
    values = bytes4(state_bits, **computed)[:, 0]
    states = np.arange(1 << (state_bits + second))
    return np.stack([values[states >> second], values[states & ((1 << state_bits) - 1)]], 1)


CODES = {"gauss": gauss, "bytes4": bytes4, "bytes2": bytes2, "octagon": octagon, "bytes1": bytes1, "halves": halves,
         "wide": wide}


class Search:
    """The search for the best states, compiled from viterbi.c."""

    def __init__(self, library):
        self.run = ctypes.CDLL(str(Path(library).resolve())).search

    def __call__(self, values, step_bits, x, cyclic=True):
        """States [count, steps] of sequences x [count, steps * V] for values [2^L, V]."""
        width = values.shape[1]
        state_bits = len(values).bit_length() - 1
        tails = 1 << (state_bits - step_bits)
        assert tails >= 16, "fewer tails than a vector has lanes"
        # [branches, tails / 16, 16, V] to [tails / 16, branches, V, 16]
        table = np.ascontiguousarray(values.reshape(1 << step_bits, tails // 16, 16, width).transpose(1, 0, 3, 2), np.float32)
        x = np.asarray(x, np.float32).reshape(len(x), -1, width)
        count, steps = x.shape[:2]
        x = np.ascontiguousarray(np.concatenate([x, np.zeros((-count % 4, steps, width), np.float32)]))
        states = np.empty(x.shape[:2], np.uint32)
        pointer = lambda a: a.ctypes.data_as(ctypes.c_void_p)
        self.run(state_bits, step_bits, width, pointer(table), steps, len(x), int(cyclic), pointer(x), pointer(states))
        return states[:count]


class GpuSearch:
    """The same search on a GPU, compiled from viterbi.cu. Takes and returns tensors there."""

    BLOCKS = 264  # blocks in flight at most

    def __init__(self, library):
        import torch

        self.torch, self.run = torch, ctypes.CDLL(str(Path(library).resolve())).search_cuda

    def __call__(self, values, step_bits, x, cyclic=True, side=None):
        torch, width = self.torch, values.shape[1]
        state_bits = len(values).bit_length() - 1
        tails = 1 << (state_bits - step_bits)
        x = x.float().reshape(len(x), -1, width).contiguous()
        count, steps = x.shape[:2]
        if side is None:  # as many as shared memory holds, but no fewer blocks than multiprocessors
            sides = {1: (1, 2, 4, 8), 2: (1, 2, 4, 8), 4: (4,)}[width]
            held = [s for s in sides if 2 * tails * s * 4 + (8192 * s if tails < 1024 else 0) <= 220_000]
            side = max([s for s in held if count >= 132 * s] or held[:1])
        grid = min(-(-count // side), self.BLOCKS)
        table = values.half().contiguous()
        states = torch.empty((count, steps), dtype=torch.int32, device=x.device)
        back = torch.empty(grid * steps * tails * side, dtype=torch.int16, device=x.device)
        pointer = lambda t: ctypes.c_void_p(t.data_ptr())
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = self.run(state_bits, step_bits, width, side, pointer(table), steps, count, int(cyclic), pointer(x),
                         pointer(states), pointer(back), grid, stream)
        assert error == 0, f"CUDA error {error}"
        return states


def check_chain(states, state_bits, step_bits, cyclic=True):
    """Asserts that each state is the one before with step_bits new bits."""
    tail = state_bits - step_bits
    before, after = states[:, :-1] & ((1 << tail) - 1), states[:, 1:] >> step_bits
    assert (before == after).all()
    if cyclic:
        assert ((states[:, -1] & ((1 << tail) - 1)) == states[:, 0] >> step_bits).all()
