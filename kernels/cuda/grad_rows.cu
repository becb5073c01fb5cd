// Row-wise operations of a training step in f32: norms, rotation, softmax, SiLU, the KL
// divergence, embedding; forward and backward. Sums run in a fixed order.
#include "grad.cuh"

// One value a thread.
DEVICE long long value_index() { return (long long)blockIdx.x * blockDim.x + threadIdx.x; }
// One row a warp.
DEVICE long long row_index() { return value_index() / 32; }

// to[i] = from[i], or 0 if there is no `from`. One value a thread.
struct GradCopyArgs {
    const float* from;
    float* to;
    long long n;
};

extern "C" __global__ void grad_copy(const __grid_constant__ GradCopyArgs p) {
    const long long i = value_index();
    if (i < p.n) p.to[i] = p.from ? p.from[i] : 0.f;
}

// x[r] = table[ids[r * stride + offset]]; not a number for an id past the table, as one is that was
// not drawn yet. A row a block.
struct GradEmbedArgs {
    const float* table;   // [tokens][width]
    const uint32_t* ids;
    float* x;             // [rows][width]
    int stride, offset, width, tokens;
};

extern "C" __global__ void grad_embed(const __grid_constant__ GradEmbedArgs p) {
    const long long r = blockIdx.x;
    const uint32_t id = p.ids[r * p.stride + p.offset];
    const float* from = id < uint32_t(p.tokens) ? p.table + (long long)id * p.width : nullptr;
    for (int i = threadIdx.x; i < p.width; i += blockDim.x) p.x[r * p.width + i] = from ? from[i] : __uint_as_float(0x7fffffffu);
}

// table[tokens[t]] += sum of dx[rows[starts[t] .. starts[t + 1]]]. A token a block.
struct GradEmbedGradArgs {
    const float* dx;          // [.][width]
    const uint32_t* rows;
    const uint32_t* tokens;
    const uint32_t* starts;
    float* table;
    int width, pad;
};

extern "C" __global__ void grad_embed_grad(const __grid_constant__ GradEmbedGradArgs p) {
    const int t = blockIdx.x;
    float* to = p.table + (long long)p.tokens[t] * p.width;
    for (int i = threadIdx.x; i < p.width; i += blockDim.x) {
        float sum = to[i];
        for (uint32_t r = p.starts[t]; r < p.starts[t + 1]; r++)
            sum += p.dx[(long long)p.rows[r] * p.width + i];
        to[i] = sum;
    }
}

// y = x inv gain, inv = 1 / sqrt(mean(x^2) + eps). A row a warp.
struct GradNormArgs {
    const float* x;      // [rows][width]
    const float* gain;   // [width]
    float* y;            // [rows][width]
    float* inv;          // [rows]
    long long rows;
    int width;
    float eps;
};

extern "C" __global__ void grad_rms_norm(const __grid_constant__ GradNormArgs p) {
    const long long r = row_index();
    const int lane = threadIdx.x % 32;
    if (r >= p.rows) return;
    const float* x = p.x + r * p.width;
    float sum = 0.f;
    for (int i = lane; i < p.width; i += 32) sum = fmaf(x[i], x[i], sum);
    const float inv = rsqrtf(warp_sum(sum) / p.width + p.eps);
    for (int i = lane; i < p.width; i += 32) p.y[r * p.width + i] = x[i] * inv * p.gain[i];
    if (lane == 0) p.inv[r] = inv;
}

// dx (+)= inv (dy gain - xhat mean(dy gain xhat)), xhat = x inv. A row a warp; dx may be dy.
struct GradNormGradArgs {
    const float* x;
    const float* gain;
    const float* inv;
    const float* dy;
    float* dx;
    long long rows;
    int width;
    int add;
};

extern "C" __global__ void grad_rms_norm_grad(const __grid_constant__ GradNormGradArgs p) {
    const long long r = row_index();
    const int lane = threadIdx.x % 32;
    if (r >= p.rows) return;
    const float* x = p.x + r * p.width;
    const float* dy = p.dy + r * p.width;
    float* dx = p.dx + r * p.width;
    const float inv = p.inv[r];
    float dot = 0.f;
    for (int i = lane; i < p.width; i += 32) dot = fmaf(dy[i] * p.gain[i], x[i] * inv, dot);
    const float mean = warp_sum(dot) / p.width;
    for (int i = lane; i < p.width; i += 32) {
        const float d = inv * (dy[i] * p.gain[i] - x[i] * inv * mean);
        dx[i] = p.add ? dx[i] + d : d;
    }
}

// part[y][i] = sum of dy x inv over the block's rows. Grid (width / 256, parts).
struct GradGainArgs {
    const float* x;
    const float* inv;
    const float* dy;
    float* part;       // [parts][width]
    long long rows;
    int width;
    int rows_of_part;
};

extern "C" __global__ void grad_gain(const __grid_constant__ GradGainArgs p) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.width) return;
    const long long first = (long long)blockIdx.y * p.rows_of_part;
    const long long end = min(p.rows, first + p.rows_of_part);
    float sum = 0.f;
    for (long long r = first; r < end; r++)
        sum = fmaf(p.dy[r * p.width + i], p.x[r * p.width + i] * p.inv[r], sum);
    p.part[(long long)blockIdx.y * p.width + i] = sum;
}

// Heads of a batch: rows [batch * seq][heads * dim] and head-major [batch][heads][capacity][dim].
struct Heads {
    int batch, seq, heads, dim, capacity, at, position, pad;
};

// Value of the head-major side where head `head` of row `row` starts.
DEVICE long long head_at(const Heads& s, long long row, int head) {
    return ((row / s.seq * s.heads + head) * s.capacity + s.at + row % s.seq) * s.dim;
}

// Norm of every head, if there is one, then rotation; rows to head-major. A head of a row a warp.
struct GradRopeArgs {
    const float* x;
    const float* gain;       // [dim]; null: no norm
    const float2* cos_sin;   // [positions][dim / 2]
    float* y;
    float* inv;              // [rows][heads]
    Heads s;
    float eps;
    int pad;
};

extern "C" __global__ void grad_rope(const __grid_constant__ GradRopeArgs p) {
    const long long i = row_index();
    const int lane = threadIdx.x % 32, half = p.s.dim / 2;
    if (i >= (long long)p.s.batch * p.s.seq * p.s.heads) return;
    const long long row = i / p.s.heads;
    const float* x = p.x + i * p.s.dim;
    float* y = p.y + head_at(p.s, row, int(i % p.s.heads));
    const float2* turn = p.cos_sin + (long long)(p.s.position + row % p.s.seq) * half;
    float inv = 1.f;
    if (p.gain) {
        float sum = 0.f;
        for (int d = lane; d < p.s.dim; d += 32) sum = fmaf(x[d], x[d], sum);
        inv = rsqrtf(warp_sum(sum) / p.s.dim + p.eps);
    }
    for (int d = lane; d < half; d += 32) {
        const float a = x[d] * inv * (p.gain ? p.gain[d] : 1.f), b = x[d + half] * inv * (p.gain ? p.gain[d + half] : 1.f);
        y[d] = a * turn[d].x - b * turn[d].y;
        y[d + half] = b * turn[d].x + a * turn[d].y;
    }
    if (lane == 0) p.inv[i] = inv;
}

// The gradient before the rotation, rows again: the rotation's transpose. A head of a row a warp.
struct GradTurnBackArgs {
    const float* dy;         // head-major
    const float2* cos_sin;
    float* dx;               // rows
    Heads s;
};

extern "C" __global__ void grad_turn_back(const __grid_constant__ GradTurnBackArgs p) {
    const long long i = row_index();
    const int lane = threadIdx.x % 32, half = p.s.dim / 2;
    if (i >= (long long)p.s.batch * p.s.seq * p.s.heads) return;
    const long long row = i / p.s.heads;
    const float* dy = p.dy + head_at(p.s, row, int(i % p.s.heads));
    const float2* turn = p.cos_sin + (long long)(p.s.position + row % p.s.seq) * half;
    for (int d = lane; d < half; d += 32) {
        p.dx[i * p.s.dim + d] = dy[d] * turn[d].x + dy[d + half] * turn[d].y;
        p.dx[i * p.s.dim + d + half] = dy[d + half] * turn[d].x - dy[d] * turn[d].y;
    }
}

// Rows to head-major, or back. One value of the rows' side a thread.
struct GradHeadsArgs {
    const float* x;
    float* y;
    Heads s;
    int to_rows;
    int pad;
};

extern "C" __global__ void grad_heads(const __grid_constant__ GradHeadsArgs p) {
    const long long i = value_index();
    if (i >= (long long)p.s.batch * p.s.seq * p.s.heads * p.s.dim) return;
    const long long h = i / p.s.dim;
    const long long j = head_at(p.s, h / p.s.heads, int(h % p.s.heads)) + i % p.s.dim;
    if (p.to_rows)
        p.y[i] = p.x[j];
    else
        p.y[j] = p.x[i];
}

// Softmax of the first r % seq + 1 scores of row r in place, zeros after them. A row a warp.
struct GradSoftmaxArgs {
    float* s;          // [rows][seq]
    const float* p;    // of the gradient: the weights
    long long rows;
    int seq;
    int pad;
};

extern "C" __global__ void grad_softmax(const __grid_constant__ GradSoftmaxArgs p) {
    const long long r = row_index();
    const int lane = threadIdx.x % 32;
    if (r >= p.rows) return;
    float* s = p.s + r * p.seq;
    const int seen = int(r % p.seq) + 1;
    float top = -INFINITY, sum = 0.f;
    for (int i = lane; i < seen; i += 32) top = fmaxf(top, s[i]);
    top = warp_max(top);
    for (int i = lane; i < seen; i += 32) sum += expf(s[i] - top);
    const float scale = 1.f / warp_sum(sum);
    for (int i = lane; i < p.seq; i += 32) s[i] = i < seen ? expf(s[i] - top) * scale : 0.f;
}

// s holds the gradient at the weights and gets that at the scores: p (s - sum(p s)).
extern "C" __global__ void grad_softmax_grad(const __grid_constant__ GradSoftmaxArgs p) {
    const long long r = row_index();
    const int lane = threadIdx.x % 32;
    if (r >= p.rows) return;
    float* s = p.s + r * p.seq;
    const float* w = p.p + r * p.seq;
    float dot = 0.f;
    for (int i = lane; i < p.seq; i += 32) dot = fmaf(w[i], s[i], dot);
    dot = warp_sum(dot);
    for (int i = lane; i < p.seq; i += 32) s[i] = w[i] * (s[i] - dot);
}

// out = silu(gate) up. One value a thread.
struct GradSiluArgs {
    float* gate;
    float* up;
    const float* dout;
    float* out;
    long long n;
};

extern "C" __global__ void grad_silu(const __grid_constant__ GradSiluArgs p) {
    const long long i = value_index();
    if (i < p.n) p.out[i] = p.gate[i] / (1.f + expf(-p.gate[i])) * p.up[i];
}

// The gradients in place of gate and up.
extern "C" __global__ void grad_silu_grad(const __grid_constant__ GradSiluArgs p) {
    const long long i = value_index();
    if (i >= p.n) return;
    const float g = p.gate[i], u = p.up[i], d = p.dout[i], sigmoid = 1.f / (1.f + expf(-g));
    p.gate[i] = d * u * sigmoid * (1.f + g * (1.f - sigmoid));
    p.up[i] = d * g * sigmoid;
}

// x *= sigmoid(gate). One value a thread.
struct GradGateArgs {
    float* gate;
    const float* x;   // of the gradient
    float* to;        // x; or the gradient at the product, which becomes that at x
    long long n;
};

extern "C" __global__ void grad_gate(const __grid_constant__ GradGateArgs p) {
    const long long i = value_index();
    if (i < p.n) p.to[i] *= 1.f / (1.f + expf(-p.gate[i]));
}

// The gradients in place of gate and of that at the product.
extern "C" __global__ void grad_gate_grad(const __grid_constant__ GradGateArgs p) {
    const long long i = value_index();
    if (i >= p.n) return;
    const float open = 1.f / (1.f + expf(-p.gate[i])), d = p.to[i];
    p.gate[i] = d * p.x[i] * open * (1.f - open);
    p.to[i] = d * open;
}

// loss = sum(p (ln p - ln q)) of a row, p the teacher's softmax and q that of the logits, whose
// place the gradient (q - p) * weight takes. A row a block.
struct GradKlArgs {
    const float* teacher;   // [rows][vocab]
    float* logits;
    float* loss;            // [rows]
    int vocab;
    float weight;
};

extern "C" __global__ void grad_kl(const __grid_constant__ GradKlArgs p) {
    __shared__ float part[32];
    const float* t = p.teacher + (long long)blockIdx.x * p.vocab;
    float* l = p.logits + (long long)blockIdx.x * p.vocab;
    float top_t = -INFINITY, top_l = -INFINITY;
    for (int i = threadIdx.x; i < p.vocab; i += blockDim.x) {
        top_t = fmaxf(top_t, t[i]);
        top_l = fmaxf(top_l, l[i]);
    }
    top_t = block_reduce<true>(top_t, part);
    top_l = block_reduce<true>(top_l, part);
    float sum_t = 0.f, sum_l = 0.f;
    for (int i = threadIdx.x; i < p.vocab; i += blockDim.x) {
        sum_t += expf(t[i] - top_t);
        sum_l += expf(l[i] - top_l);
    }
    const float total_t = top_t + logf(block_reduce<false>(sum_t, part));
    const float total_l = top_l + logf(block_reduce<false>(sum_l, part));
    float loss = 0.f;
    for (int i = threadIdx.x; i < p.vocab; i += blockDim.x) {
        const float lt = t[i] - total_t, ll = l[i] - total_l, q = expf(lt);
        loss += q * (lt - ll);
        l[i] = (expf(ll) - q) * p.weight;
    }
    loss = block_reduce<false>(loss, part);
    if (threadIdx.x == 0) p.loss[blockIdx.x] = loss;
}
