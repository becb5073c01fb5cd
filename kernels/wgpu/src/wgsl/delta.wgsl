// A gated DeltaNet (arXiv 2412.06464). A head of values has a state S [KEY_DIM, VALUE_DIM]; a row with key k, query q
// (both of length 1, q then divided by the root of KEY_DIM), value v, decay g and gate b makes
//     S = g S;  S = S + k (b (v - S^T k))^T;  o = S^T q,
// where q, k and v are SiLUs of a causal convolution, and o is normalized and multiplied by SiLU or sigmoid of z.
// S^T q of the new S is g S^T q + (k . q) b (v - g S^T k) of the old one, so that both products read S once.
//
// STEP does all of it for sequences of one row each, a workgroup for each head of values: one launch, which costs more
// than the time in which so few workgroups read a state. Prompts take CONV, a workgroup for each row and head; RECUR,
// one for each sequence and COLUMNS values of a head; and GATE, one for each row and head of values.
//
// A state holds S as [VALUE_HEADS, VALUE_DIM, KEY_DIM], and behind it the last CONV inputs of the convolution, that of
// position p in row p % CONV: a step's workgroups write one row while others of the same channels read the other rows.
// Nothing is read of a sequence without rows, so that its state needs no zeros.

@group(0) @binding(0) var<uniform> step: Step;
@group(0) @binding(1) var<storage, read> batch: array<u32>;
@group(0) @binding(2) var<storage, read> vectors: array<vec4<f32>>; // taps [CONV, CHANNELS]; gains [VALUE_DIM]; rates of decay, biases of a [VALUE_HEADS]
@group(0) @binding(3) var<storage, read> qkvz: array<vec4<f32>>;    // [rows, CHANNELS + VALUES]
@group(0) @binding(4) var<storage, read> ba: array<f32>;            // [rows, 2, VALUE_HEADS]
@group(0) @binding(5) var<storage, read_write> states: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> mixed: array<vec4<f32>>; // [rows, CHANNELS]
@group(0) @binding(7) var<storage, read_write> out: array<f32>;         // [rows, VALUES]

const KEY_QUADS = KEY_DIM / 4u;
const VALUE_QUADS = VALUE_DIM / 4u;
const KEYS = KEY_HEADS * KEY_QUADS;
const VALUES = VALUE_HEADS * VALUE_QUADS;
const CHANNELS = 2u * KEYS + VALUES;
const MATRICES = VALUES * KEY_DIM;
const STATE = MATRICES + CONV * CHANNELS;
const GAINS_AT = CONV * CHANNELS;
const VECTORS_AT = GAINS_AT + VALUE_QUADS;

// Where a sequence stands.
struct Span {
    first: u32,    // its first row in the pass
    position: u32, // of that row
    place: u32,    // of its state
}

fn span_of(row: u32) -> Span {
    let first = batch[4u * row + 2u];
    return Span(first, batch[4u * first], batch[4u * row + 3u] * STATE);
}

fn ring(span: Span, position: u32) -> u32 {
    return span.place + MATRICES + position % CONV * CHANNELS;
}

// Four channels of a row after the convolution and SiLU.
fn convolved(span: Span, row: u32, quad: u32) -> vec4<f32> {
    let position = span.position + row - span.first;
    var sum = vec4<f32>();
#for j in CONV
    if (position >= $ju) {
        var x: vec4<f32>;
        if (row - span.first >= $ju) {
            x = qkvz[(row - $ju) * (CHANNELS + VALUES) + quad];
        } else {
            x = states[ring(span, position - $ju) + quad];
        }
        sum += x * vectors[(CONV - 1u - $ju) * CHANNELS + quad];
    }
#end
    return sum / (1.0 + exp(-sum));
}

// Keeps four channels of a row for the rows behind it.
fn keep(span: Span, row: u32, quad: u32) {
    let to = ring(span, span.position + row - span.first);
    states[to + quad] = qkvz[row * (CHANNELS + VALUES) + quad];
}

#if TILED
fn key_head(head: u32) -> u32 {
    return head % KEY_HEADS;
}
#else
fn key_head(head: u32) -> u32 {
    return head / (VALUE_HEADS / KEY_HEADS);
}
#end

// The decay of a row's head, and the gate of what it adds.
fn rates(row: u32, head: u32) -> vec2<f32> {
    let decay = VECTORS_AT * 4u + head;
    let bias = decay + VALUE_HEADS;
    let a = ba[(2u * row + 1u) * VALUE_HEADS + head] + vectors[bias / 4u][bias % 4u];
    // ln(1 + e^a); from 20 on a, as the models were trained with.
    let softplus = select(log(1.0 + exp(min(a, 20.0))), a, a > 20.0);
    let b = ba[2u * row * VALUE_HEADS + head];
    return vec2<f32>(exp(vectors[decay / 4u][decay % 4u] * softplus), 1.0 / (1.0 + exp(-b)));
}

// The output of column i of a head, whose mean square is given.
fn gated(row: u32, head: u32, i: u32, o: f32, square: f32) -> f32 {
    let at = (row * (CHANNELS + VALUES) + CHANNELS + head * VALUE_QUADS) * 4u + i;
    let z = qkvz[at / 4u][at % 4u];
    let gain = vectors[GAINS_AT + i / 4u][i % 4u];
    let gate = 1.0 / (1.0 + exp(-z));
#if SIGMOID
    return o / sqrt(square + EPS) * gain * gate;
#else
    return o / sqrt(square + EPS) * gain * gate * z;
#end
}

#if CONV_HEADS
var<workgroup> squares: array<f32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let row = group.x;
    let span = span_of(row);
    let normed = group.y < 2u * KEY_HEADS;
    let first = select(2u * KEYS + (group.y - 2u * KEY_HEADS) * VALUE_QUADS, group.y * KEY_QUADS, normed);
    let quads = select(VALUE_QUADS, KEY_QUADS, normed);
    // At most 64 quads: heads of up to 256 values.
    var value = vec4<f32>();
    if (index < quads) {
        value = convolved(span, row, first + index);
    }
    squares[index] = dot(value, value);
    workgroupBarrier();
    if (normed) {
        var sum = 0.0;
        for (var i = 0u; i < KEY_QUADS; i++) {
            sum += squares[i];
        }
        value *= select(1.0, QUERY_LENGTH, group.y < KEY_HEADS) / sqrt(sum + UNIT_EPS);
    }
    if (index < quads) {
        mixed[row * CHANNELS + first + index] = value;
    }
}
#end

#if GATE
var<workgroup> squares: array<f32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let at = (group.x * VALUE_HEADS + group.y) * VALUE_DIM;
    var sum = 0.0;
    for (var i = index; i < VALUE_DIM; i += 64u) {
        sum += out[at + i] * out[at + i];
    }
    squares[index] = sum;
    workgroupBarrier();
    sum = 0.0;
    for (var i = 0u; i < 64u; i++) {
        sum += squares[i];
    }
    for (var i = index; i < VALUE_DIM; i += 64u) {
        out[at + i] = gated(group.x, group.y, i, out[at + i], sum / f32(VALUE_DIM));
    }
}
#end

#if RECUR
// COLUMNS columns of S, each in the registers of PARTS neighbours, which have every PARTS-th quad of it.
#if STEP
// Query, key and value of the head, and sums of their squares.
var<workgroup> heads: array<vec4<f32>, 2u * KEY_QUADS + VALUE_QUADS>;
var<workgroup> squares: array<f32, 2u * KEY_QUADS>;
var<workgroup> outputs: array<f32, COLUMNS>;
var<workgroup> partial: array<f32, 16>;
#end
#if SUBGROUPS
#else
var<workgroup> shared_values: array<vec3<f32>, COLUMNS * PARTS>;
#end

@compute @workgroup_size(COLUMNS * PARTS)
fn main(@builtin(workgroup_id) group: vec3<u32>,
#if SUBGROUPS
        @builtin(subgroup_id) subgroup: u32, @builtin(subgroup_invocation_id) lane: u32) {
    let index = subgroup * LANES + lane;
#else
        @builtin(local_invocation_index) index: u32) {
#end
    let head = group.y / (VALUE_DIM / COLUMNS);
    let column = group.y % (VALUE_DIM / COLUMNS) * COLUMNS + index / PARTS;
    let part = index % PARTS;
    let q_quad = key_head(head) * KEY_QUADS;
    let v_quad = 2u * KEYS + head * VALUE_QUADS;
    // The first of the heads that share a key keeps its channels, and the first columns those of the head.
#if TILED
    let keeps_keys = head < KEY_HEADS;
#else
    let keeps_keys = head % (VALUE_HEADS / KEY_HEADS) == 0u;
#end
#if STEP
    let first = group.x;
    let rows = 1u;
#else
    let first = batch[4u * step.rows + 2u * group.x];
    let rows = batch[4u * step.rows + 2u * group.x + 1u];
#end
    let span = span_of(first);
    let at = span.place + (head * VALUE_DIM + column) * KEY_QUADS + part;
#for n in PER_PART
    var state$n = vec4<f32>();
#end
    if (span.position > 0u) {
#for n in PER_PART
        state$n = states[at + $nu * PARTS];
#end
    }
#if STEP
    for (var i = index; i < 2u * KEY_QUADS + VALUE_QUADS; i += COLUMNS * PARTS) {
        var quad = v_quad + i - 2u * KEY_QUADS;
        if (i < 2u * KEY_QUADS) {
            quad = i / KEY_QUADS * KEYS + q_quad + i % KEY_QUADS;
        }
        let value = convolved(span, first, quad);
        heads[i] = value;
        if (i < 2u * KEY_QUADS) {
            squares[i] = dot(value, value);
        }
        if (keeps_keys || i >= 2u * KEY_QUADS) {
            keep(span, first, quad);
        }
    }
    workgroupBarrier();
    var lengths = vec2<f32>();
    for (var i = 0u; i < KEY_QUADS; i++) {
        lengths += vec2<f32>(squares[i], squares[KEY_QUADS + i]);
    }
    lengths = vec2<f32>(QUERY_LENGTH, 1.0) / sqrt(lengths + UNIT_EPS);
#else
    if (group.y % (VALUE_DIM / COLUMNS) == 0u) {
        let kept = min(rows, CONV);
        for (var i = index; i < kept * (2u * KEY_QUADS + VALUE_QUADS); i += COLUMNS * PARTS) {
            let row = first + rows - kept + i / (2u * KEY_QUADS + VALUE_QUADS);
            let j = i % (2u * KEY_QUADS + VALUE_QUADS);
            if (j >= 2u * KEY_QUADS) {
                keep(span, row, v_quad + j - 2u * KEY_QUADS);
            } else if (keeps_keys) {
                keep(span, row, j / KEY_QUADS * KEYS + q_quad + j % KEY_QUADS);
            }
        }
    }
    // What the next row has is read before this one is computed.
    var next_value = mixed[first * CHANNELS + v_quad + column / 4u][column % 4u];
#for n in PER_PART
    var next_query$n = mixed[first * CHANNELS + q_quad + part + $nu * PARTS];
    var next_key$n = mixed[first * CHANNELS + KEYS + q_quad + part + $nu * PARTS];
#end
#end
    for (var row = first; row < first + rows; row++) {
#if STEP
        let value = heads[2u * KEY_QUADS + column / 4u][column % 4u];
#for n in PER_PART
        let query$n = heads[part + $nu * PARTS] * lengths.x;
        let key$n = heads[KEY_QUADS + part + $nu * PARTS] * lengths.y;
#end
#else
        let value = next_value;
        let next = min(row + 1u, first + rows - 1u) * CHANNELS;
        next_value = mixed[next + v_quad + column / 4u][column % 4u];
#for n in PER_PART
        let query$n = next_query$n;
        let key$n = next_key$n;
        next_query$n = mixed[next + q_quad + part + $nu * PARTS];
        next_key$n = mixed[next + KEYS + q_quad + part + $nu * PARTS];
#end
#end
        // S^T k, S^T q and k . q.
        var sums = vec3<f32>();
#for n in PER_PART
        sums += vec3<f32>(dot(state$n, key$n), dot(state$n, query$n), dot(key$n, query$n));
#end
#if SUBGROUPS
        for (var width = 1u; width < PARTS; width *= 2u) {
            sums += subgroupShuffleXor(sums, width);
        }
#else
        workgroupBarrier();
        shared_values[index] = sums;
        workgroupBarrier();
        sums = vec3<f32>();
#for p in PARTS
        sums += shared_values[index / PARTS * PARTS + $pu];
#end
#end
        let rate = rates(row, head);
        let added = rate.y * (value - rate.x * sums.x);
        let o = rate.x * sums.y + sums.z * added;
#for n in PER_PART
        state$n = rate.x * state$n + key$n * added;
#end
#if STEP
        if (part == 0u) {
            outputs[column] = o;
        }
#else
        if (part == 0u) {
            out[(row * VALUE_HEADS + head) * VALUE_DIM + column] = o;
        }
#end
    }
#for n in PER_PART
    states[at + $nu * PARTS] = state$n;
#end
#if STEP
    workgroupBarrier();
    for (var p = index; p < 16u; p += COLUMNS * PARTS) {
        var sum = 0.0;
        for (var i = p; i < VALUE_DIM; i += 16u) {
            sum += outputs[i] * outputs[i];
        }
        partial[p] = sum;
    }
    workgroupBarrier();
    var square = 0.0;
    for (var i = 0u; i < 16u; i++) {
        square += partial[i];
    }
    for (var i = index; i < VALUE_DIM; i += COLUMNS * PARTS) {
        out[(first * VALUE_HEADS + head) * VALUE_DIM + i] = gated(first, head, i, outputs[i], square / f32(VALUE_DIM));
    }
#end
}
#end
