"""Rounding a weight to a trellis code or to a scalar grid, with rotations and with feedback of errors."""

import math

import torch

BLOCK = 16  # columns that are rounded together before their errors are fed to the columns after them
HADAMARD = 128


def hadamard(n=HADAMARD):
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / math.sqrt(n)


def rotate(x, signs, back=False):
    """Signs, then the Hadamard transform of each 128 columns of x, which is its own inverse; `back` undoes it."""
    h = hadamard().to(x)
    turn = lambda x: (x.unflatten(-1, (-1, HADAMARD)) @ h).flatten(-2)
    return turn(x) * signs if back else turn(x * signs)


def signs(n, seed):
    return torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1.0


def inverse_factor(h, damping=0.01):
    """Upper U with U^T U the inverse of h, damped: row i holds how an error of column i is fed to later columns."""
    h = h.double()
    h = h + damping * h.diagonal().mean() * torch.eye(len(h), device=h.device, dtype=h.dtype)
    return torch.linalg.cholesky(torch.linalg.inv(h), upper=True)


class Trellis:
    """Rounds blocks of columns of scaled weights to a code; sequences run along the rows of a block."""

    def __init__(self, search, values, step_bits, length, gain, cyclic=True):
        # As a GPU keeps them.
        self.search, self.values = search, (torch.as_tensor(values) * gain).half().float()
        self.step_bits, self.length, self.cyclic = step_bits, length, cyclic

    def __call__(self, block):
        x = block.reshape(-1, self.length)
        if x.is_cuda:
            self.values = self.values.to(x.device)
            states = self.search(self.values, self.step_bits, x, self.cyclic)
        else:
            states = torch.from_numpy(self.search(self.values.numpy(), self.step_bits, x.numpy(), self.cyclic).astype("int64"))
        return self.values[states.long()].reshape(block.shape)


def by_trellis(w, h, code, rotations="both", feedback=True, damping=0.01, scales="row", seed=0, block=BLOCK):
    """w [rows, columns] in full precision to its rounded values. rotations: none, inputs or both. scales: one for each
    row, or for each 128 columns of a row."""
    rows, columns = w.shape
    left, right = signs(rows, 1000 + seed).to(w), signs(columns, seed).to(w)
    if rotations != "none":
        w = rotate(w, right)
        h = rotate(rotate(h, right).T.contiguous(), right)
    if rotations == "both":
        w = rotate(w.T.contiguous(), left).T.contiguous()
    if scales == "row":
        scale = w.square().mean(1, keepdim=True).sqrt().expand(-1, columns)
    else:
        scale = w.unflatten(1, (-1, 128)).square().mean(2, keepdim=True).sqrt().expand(-1, -1, 128).flatten(1)
    scale = scale.half().float()
    q = torch.empty_like(w)
    left_over = w.clone()
    u = inverse_factor(h, damping)
    for at in range(0, columns, block):
        here = slice(at, at + block)
        q[:, here] = code(left_over[:, here] / scale[:, here]) * scale[:, here]
        if feedback:
            error = (left_over[:, here] - q[:, here]).double()
            fed = torch.linalg.solve_triangular(u[here, here], u[here, at + block:], upper=True)
            left_over[:, at + block:] -= (error @ fed).float()
    if rotations == "both":
        q = rotate(q.T.contiguous(), left, back=True).T.contiguous()
    if rotations != "none":
        q = rotate(q, right, back=True)
    return q


def clipped(w, weight, bits, symmetric):
    """Scale and zero of each row of w, their range searched so that the weighted error is least."""
    most = 2**bits - 1
    best = torch.full_like(w[:, :1], torch.inf)
    scale, zero = torch.ones_like(best), torch.zeros_like(best)
    for shrink in torch.linspace(1.0, 0.5, 26).tolist():
        if symmetric:
            extreme = w.gather(1, w.abs().argmax(1, keepdim=True))
            s = -extreme * shrink / (2 ** (bits - 1))
            z = torch.full_like(s, 2 ** (bits - 1))
        else:
            low, high = w.amin(1, keepdim=True).clamp(max=0) * shrink, w.amax(1, keepdim=True).clamp(min=0) * shrink
            s = (high - low) / most
            z = (-low / s).nan_to_num().round()
        s = torch.where(s == 0, 1e-8, s).half().float()
        s = torch.where(s == 0, 1e-6, s)
        error = (((w / s + z).round().clamp(0, most) - z) * s - w).square().mul(weight).sum(1, keepdim=True)
        better = error < best
        best, scale, zero = torch.where(better, error, best), torch.where(better, s, scale), torch.where(better, z, zero)
    return scale, zero


def by_scalar(w, h, bits, group=128, symmetric=True, rotations="none", feedback=True, damping=0.01, seed=0):
    """GPTQ: groups of columns with a scale each, columns in descending order of their second moment."""
    rows, columns = w.shape
    left, right = signs(rows, 1000 + seed).to(w), signs(columns, seed).to(w)
    if rotations != "none":
        w = rotate(w, right)
        h = rotate(rotate(h, right).T.contiguous(), right)
    if rotations == "both":
        w = rotate(w.T.contiguous(), left).T.contiguous()
    groups = w.reshape(-1, group)
    weight = h.diagonal().reshape(1, -1, group).expand(rows, -1, -1).reshape(-1, group)
    scale, zero = (p.view(rows, -1).repeat_interleave(group, 1) for p in clipped(groups, weight, bits, symmetric))
    order = h.diagonal().argsort(descending=True) if feedback else torch.arange(columns, device=w.device)
    u = inverse_factor(h[order][:, order], damping).float()
    left_over, scale, zero = w[:, order].clone(), scale[:, order], zero[:, order]
    q = torch.empty_like(w)
    for c in range(columns):
        s, z = scale[:, c], zero[:, c]
        q[:, c] = ((left_over[:, c] / s + z).round().clamp(0, 2**bits - 1) - z) * s
        if feedback:
            left_over[:, c + 1:] -= torch.outer((left_over[:, c] - q[:, c]) / u[c, c], u[c, c + 1:])
    q = q[:, order.argsort()]
    if rotations == "both":
        q = rotate(q.T.contiguous(), left, back=True).T.contiguous()
    if rotations != "none":
        q = rotate(q, right, back=True)
    return q
