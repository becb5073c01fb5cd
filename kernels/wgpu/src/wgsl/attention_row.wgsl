// Attention of a row that is the last of its sequence, for up to QUERIES heads of queries that share one of keys and
// values: a step in which every sequence has one row. Every workgroup prepares its heads for itself: biases, norms of
// heads, rotation; and the one whose part holds the row's position keeps the key and the value there. It reads the pages of
// one part, 64 keys at a time with an online softmax (arXiv 2205.14135), the next ones always on their way. If there are several parts, sums
// and softmax are left to COMBINE of attention.wgsl.

@group(0) @binding(0) var<uniform> step: Step;
@group(0) @binding(1) var<storage, read> batch: array<u32>;
@group(0) @binding(2) var<storage, read_write> attended: array<f32>; // [rows, HEADS, DIM]
@group(0) @binding(3) var<storage, read_write> parts: array<f32>;    // [rows, HEADS, splits, DIM + 2]
@group(0) @binding(4) var<storage, read> qkv: array<f32>;
@group(0) @binding(5) var<storage, read> vectors: array<f32>;        // biases of all heads; gains of q and k
@group(0) @binding(6) var<storage, read_write> keys: array<KeyWords>; // pages.wgsl says how they lie
@group(0) @binding(7) var<storage, read_write> values: array<u32>;
@group(0) @binding(8) var<storage, read_write> scales: array<f32>;    // [pages, KV_HEADS, PAGE, 2]

// Queries, and behind them the key and the value of the row.
var<workgroup> heads: array<f32, (QUERIES + 2) * DIM>;
var<workgroup> queries: array<vec4<f32>, QUERIES * DIM / 4>;
// Sums of scores, by the four invocations that share a key.
var<workgroup> partial: array<f32, QUERIES * 256>;
var<workgroup> sums: array<vec2<f32>, 256>;

fn pair_of(at: u32) -> u32 {
    return pack2x16float(vec2<f32>(heads[at], heads[at + 1u]));
}

#if INT8
// The key and the value of the row in bytes, and their scales.
var<workgroup> new_words: array<u32, DIM / 2>;
var<workgroup> new_scales: array<f32, 2>;

fn new_key(i: u32) -> KeyWords {
    return KeyWords(new_words[2u * i], new_words[2u * i + 1u]);
}

fn new_value(word: u32) -> u32 {
    return new_words[DIM / 4u + word];
}
#else
fn new_value(word: u32) -> u32 {
    return pair_of((QUERIES + 1u) * DIM + 2u * word);
}

fn new_key(i: u32) -> KeyWords {
    let at = QUERIES * DIM + 8u * i;
    return vec4<u32>(pair_of(at), pair_of(at + 2u), pair_of(at + 4u), pair_of(at + 6u));
}
#end

// Where the keys from `base` on are; past the end of a part, where its first ones are.
fn place_of(table: u32, kv_head: u32, begin: u32, base: u32, end: u32) -> u32 {
    let first = select(begin, base, base < end);
    // A part behind the row's position reads the row's first page, and uses nothing of it.
    let page = select(0u, first / PAGE, first < end);
    return (batch[table + page] * KV_HEADS + kv_head) * PAGE + first % PAGE;
}

#if INT8
// The scale of the key, or of the value, at a position; the row's own may not be in its page yet.
fn scale_of_key(table: u32, kv_head: u32, at: u32, position: u32, which: u32) -> f32 {
    if (at == position) {
        return new_scales[which];
    }
    return scales[2u * ((batch[table + at / PAGE] * KV_HEADS + kv_head) * PAGE + at % PAGE) + which];
}
#end

// The number of the last key of those from `base` on.
fn last_of(base: u32, end: u32) -> u32 {
    return select(0u, min(63u, end - base - 1u), base < end);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let split = group.x;
    let kv_head = group.y / SHARES;
    let first_query = group.y % SHARES * QUERIES;
    let row = group.z;
    let position = batch[4u * row];
    let table = step.tables_at + batch[4u * row + 1u];
    let begin = split * step.split_pages * PAGE;
    let end = min(position + 1u, begin + step.split_pages * PAGE);
    // Four neighbours share a key, and invocations that share values have some keys each.
    let key = index / 4u;
    let quarter = index % 4u;
    let pair = index % PAIRS;
    let share = index / PAIRS;
#for n in PER_QUARTER
    let vector$n = min(4u * $nu + quarter, DIM / 8u - 1u);
#end
    // Keys past the end are read as the last one, and do not count.
    var place = place_of(table, kv_head, begin, begin, end);
    var last = last_of(begin, end);
#for n in PER_QUARTER
    var key_words$n = keys[(place + min(key, last)) * (DIM / 8u) + vector$n];
#end
#for k in PER_SHARE
    var value_words$k = values[(place + min(share * PER_SHARE + $ku, last)) * VALUE_WORDS + word_of(pair)];
#end

    // Queries past the end of the group are computed as its last one, and not written.
    for (var i = index; i < (QUERIES + 2u) * DIM; i += 256u) {
        let query = i / DIM;
        let shared_at = KEYS_AT + (kv_head + select(0u, KV_HEADS, query > QUERIES)) * DIM;
        let query_at = (kv_head * GROUP + min(first_query + query, GROUP - 1u)) * QUERY_STEP;
        let at = select(query_at, shared_at, query >= QUERIES) + i % DIM;
        var value = qkv[row * STRIDE + at];
#if BIASES
        value += vectors[at];
#end
        heads[i] = value;
    }
    workgroupBarrier();
#if NORMS
    {
        // Sixteen invocations for each query and the key.
        let query = index / 16u;
        let normed = query <= QUERIES;
        var sum = 0.0;
        if (normed) {
            for (var i = index % 16u; i < DIM; i += 16u) {
                let value = heads[query * DIM + i];
                sum += value * value;
            }
        }
        reduced[index] = sum;
        workgroupBarrier();
        if (normed) {
            sum = 0.0;
            for (var i = 0u; i < 16u; i++) {
                sum += reduced[16u * query + i];
            }
            let scale = 1.0 / sqrt(sum / f32(DIM) + EPS);
            let gains = NORMS_AT + select(0u, DIM, query == QUERIES);
            for (var i = index % 16u; i < DIM; i += 16u) {
                heads[query * DIM + i] *= scale * vectors[gains + i];
            }
        }
        workgroupBarrier();
    }
#end
    for (var i = index; i < (QUERIES + 1u) * TURNED / 2u; i += 256u) {
        let at = i / (TURNED / 2u) * DIM + i % (TURNED / 2u);
        let turn = step.turns_at + row * TURNED + 2u * (i % (TURNED / 2u));
        let cosine = bitcast<f32>(batch[turn]);
        let sine = bitcast<f32>(batch[turn + 1u]);
        let a = heads[at];
        let b = heads[at + TURNED / 2u];
        heads[at] = a * cosine - b * sine;
        heads[at + TURNED / 2u] = b * cosine + a * sine;
    }
    workgroupBarrier();
#if INT8
    {
        // Sixteen invocations each for the key and the value.
        let which = index / 16u;
        var greatest = 0.0;
        var nothing = 0.0;
        if (which < 2u) {
            for (var i = index % 16u; i < DIM; i += 16u) {
                let value = heads[(QUERIES + which) * DIM + i];
                greatest = max(greatest, abs(value));
                nothing += value - value;
            }
        }
        // What is no number is lost in a maximum, and kept in the scale.
        reduced[index] = greatest;
        partial[index] = nothing;
        workgroupBarrier();
        if (which < 2u) {
            nothing = 0.0;
            for (var i = 16u * which; i < 16u * which + 16u; i++) {
                greatest = max(greatest, reduced[i]);
                nothing += partial[i];
            }
            let scale = scale_for(greatest);
            for (var i = index % 16u; i < DIM / 4u; i += 16u) {
                let at = (QUERIES + which) * DIM + 4u * i;
                let four = vec4<f32>(heads[at], heads[at + 1u], heads[at + 2u], heads[at + 3u]);
                new_words[which * (DIM / 4u) + i] = pack4xI8Clamp(vec4<i32>(round(four * scale.y)));
            }
            if (index % 16u == 0u) {
                new_scales[which] = scale.x + nothing;
            }
        }
        workgroupBarrier();
    }
#end
    if (end == position + 1u && begin <= position) {
        // Workgroups with other queries of the group write the same.
        let to = (batch[table + position / PAGE] * KV_HEADS + kv_head) * PAGE + position % PAGE;
        for (var i = index; i < DIM / 8u; i += 256u) {
            keys[to * (DIM / 8u) + i] = new_key(i);
        }
        for (var i = index; i < VALUE_WORDS; i += 256u) {
            values[to * VALUE_WORDS + i] = new_value(i);
        }
#if INT8
        if (index < 2u) {
            scales[2u * to + index] = new_scales[index];
        }
#end
    }
    for (var i = index; i < QUERIES * DIM / 4u; i += 256u) {
        queries[i] = vec4<f32>(heads[4u * i], heads[4u * i + 1u], heads[4u * i + 2u], heads[4u * i + 3u]) * SCALE;
    }
    if (index < QUERIES) {
        greatest[index] = NOTHING;
        total[index] = 0.0;
    }
    workgroupBarrier();

#for q in QUERIES
    var sum$q = vec2<f32>();
#end
    for (var base = begin; base < end; base += 64u) {
        let count = min(64u, end - base);
#for n in PER_QUARTER
        var now_key$n = key_words$n;
#end
#for k in PER_SHARE
        var now_value$k = value_words$k;
#end
        place = place_of(table, kv_head, begin, base + 64u, end);
        last = last_of(base + 64u, end);
#for n in PER_QUARTER
        key_words$n = keys[(place + min(key, last)) * (DIM / 8u) + vector$n];
#end
#for k in PER_SHARE
        value_words$k = values[(place + min(share * PER_SHARE + $ku, last)) * VALUE_WORDS + word_of(pair)];
#end
        // The row's own were read before they were written; what stands in for those behind must be finite, too.
        if (base + key >= position) {
#for n in PER_QUARTER
            now_key$n = new_key(vector$n);
#end
        }
#for k in PER_SHARE
        if (base + share * PER_SHARE + $ku >= position) {
            now_value$k = new_value(word_of(pair));
        }
#end
#for q in QUERIES
        var score$q = 0.0;
#end
#for n in PER_QUARTER
        if (4u * $nu + quarter < DIM / 8u) {
            let at = 2u * (4u * $nu + quarter);
            let k = eight(now_key$n);
#for q in QUERIES
            score$q += dot(queries[$qu * (DIM / 4u) + at], k.low) + dot(queries[$qu * (DIM / 4u) + at + 1u], k.high);
#end
        }
#end
#for q in QUERIES
        partial[256u * $qu + index] = score$q;
#end
        workgroupBarrier();
        for (var i = index; i < QUERIES * 64u; i += 256u) {
            var score = partial[4u * i] + partial[4u * i + 1u] + partial[4u * i + 2u] + partial[4u * i + 3u];
#if INT8
            score *= scale_of_key(table, kv_head, base + min(i % 64u, count - 1u), position, 0u);
#end
            scores[i] = select(NOTHING, score, i % 64u < count);
        }
        workgroupBarrier();
        soften(index);
#for q in QUERIES
        sum$q *= shrunk[$q];
#end
#for k in PER_SHARE
        if (share * PER_SHARE + $ku < 64u) {
            var value = two(now_value$k, pair);
#if INT8
            let seen = base + min(share * PER_SHARE + $ku, count - 1u);
            value *= scale_of_key(table, kv_head, seen, position, 1u);
#end
#for q in QUERIES
            sum$q += value * scores[$qu * 64u + share * PER_SHARE + $ku];
#end
        }
#end
        workgroupBarrier();
    }
#for q in QUERIES
    sums[index] = sum$q;
    workgroupBarrier();
    if (index < PAIRS && first_query + $qu < GROUP) {
        var both = vec2<f32>();
        for (var s = 0u; s < VALUE_SHARES; s++) {
            both += sums[s * PAIRS + index];
        }
        let at = row * HEADS + kv_head * GROUP + first_query + $qu;
        if (step.splits == 1u) {
            both /= total[$q];
#if GATED
            let gate = row * STRIDE + (kv_head * GROUP + first_query + $qu) * QUERY_STEP + DIM + 2u * index;
            both /= 1.0 + exp(-vec2<f32>(qkv[gate], qkv[gate + 1u]));
#end
            attended[at * DIM + 2u * index] = both.x;
            attended[at * DIM + 2u * index + 1u] = both.y;
        } else {
            let to = (at * step.splits + split) * (DIM + 2u);
            parts[to + 2u * index] = both.x;
            parts[to + 2u * index + 1u] = both.y;
            if (index == 0u) {
                parts[to + DIM] = greatest[$q];
                parts[to + DIM + 1u] = total[$q];
            }
        }
    }
    workgroupBarrier();
#end
}
