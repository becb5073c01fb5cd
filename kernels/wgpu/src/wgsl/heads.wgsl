// Heads of a row that share one of keys and values: up to QUERIES of queries, and behind them the key and the value, to
// which biases are added, which are normalized and turned. PREPARE does nothing else: queries go back to where they were,
// keys and values to their page. A step in which every sequence has one row prepares its heads within attention.wgsl.

@group(0) @binding(0) var<uniform> step: Step;
@group(0) @binding(1) var<storage, read> batch: array<u32>;
#if PREPARE
@group(0) @binding(2) var<storage, read_write> qkv: array<f32>;
#else
@group(0) @binding(2) var<storage, read> qkv: array<f32>;
#end
@group(0) @binding(3) var<storage, read> vectors: array<f32>;          // biases of all heads; gains of q and k
@group(0) @binding(4) var<storage, read_write> keys: array<KeyWords>;  // pages.wgsl says how they lie
@group(0) @binding(5) var<storage, read_write> values: array<u32>;
@group(0) @binding(6) var<storage, read_write> scales: array<f32>;     // [pages, KV_HEADS, PAGE, 2], of a key and its value

var<workgroup> heads: array<f32, (QUERIES + 2) * DIM>;
var<workgroup> sums: array<vec2<f32>, 256>;

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
fn pair_of(at: u32) -> u32 {
    return pack2x16float(vec2<f32>(heads[at], heads[at + 1u]));
}

fn new_key(i: u32) -> KeyWords {
    let at = QUERIES * DIM + 8u * i;
    return vec4<u32>(pair_of(at), pair_of(at + 2u), pair_of(at + 4u), pair_of(at + 6u));
}

fn new_value(word: u32) -> u32 {
    return pair_of((QUERIES + 1u) * DIM + 2u * word);
}
#end

// What a row's heads are made of: values, biases, gains, cosines and sines.
struct Loaded {
    values: array<f32, PER_HEADS>,
#if NORMS
    gains: array<f32, PER_HEADS>,
#end
    turns: array<vec2<f32>, PER_TURNS>,
}

fn load_heads(row: u32, kv_head: u32, first_query: u32, index: u32) -> Loaded {
    var loaded: Loaded;
#for n in PER_HEADS
    {
        let i = min(index + 256u * $nu, (QUERIES + 2u) * DIM - 1u);
        let head = i / DIM;
        let shared_at = KEYS_AT + (kv_head + select(0u, KV_HEADS, head > QUERIES)) * DIM;
        let query_at = (kv_head * GROUP + min(first_query + head, GROUP - 1u)) * QUERY_STEP;
        let at = select(query_at, shared_at, head >= QUERIES) + i % DIM;
        loaded.values[$n] = qkv[row * STRIDE + at];
#if BIASES
        loaded.values[$n] += vectors[at];
#end
#if NORMS
        loaded.gains[$n] = vectors[NORMS_AT + select(0u, DIM, head == QUERIES) + i % DIM];
#end
    }
#end
#for n in PER_TURNS
    {
        let pair = min(index + 256u * $nu, (QUERIES + 1u) * TURNED / 2u - 1u) % (TURNED / 2u);
        let at = step.turns_at + row * TURNED + 2u * pair;
        loaded.turns[$n] = vec2<f32>(bitcast<f32>(batch[at]), bitcast<f32>(batch[at + 1u]));
    }
#end
    return loaded;
}

// Makes the heads of a row, of which queries past the end of the group are its last one.
fn prepare_heads(row: u32, kv_head: u32, first_query: u32, index: u32, loaded: Loaded) {
#for n in PER_HEADS
    let i$n = min(index + 256u * $nu, (QUERIES + 2u) * DIM - 1u);
    heads[i$n] = loaded.values[$n];
#end
    workgroupBarrier();
    // Sixteen invocations for a head.
    let head = index / 16u;
#if NORMS
    var square = 0.0;
    if (head <= QUERIES) {
        for (var i = index % 16u; i < DIM; i += 16u) {
            square += heads[head * DIM + i] * heads[head * DIM + i];
        }
    }
    sums[index].x = square;
    workgroupBarrier();
#for n in PER_HEADS
    if (i$n / DIM <= QUERIES) {
        square = 0.0;
        for (var i = 0u; i < 16u; i++) {
            square += sums[16u * (i$n / DIM) + i].x;
        }
        heads[i$n] = loaded.values[$n] / sqrt(square / f32(DIM) + EPS) * loaded.gains[$n];
    }
#end
    workgroupBarrier();
#end
#for n in PER_TURNS
    if (index + 256u * $nu < (QUERIES + 1u) * TURNED / 2u) {
        let at = (index + 256u * $nu) / (TURNED / 2u) * DIM + (index + 256u * $nu) % (TURNED / 2u);
        let a = heads[at];
        let b = heads[at + TURNED / 2u];
        heads[at] = a * loaded.turns[$n].x - b * loaded.turns[$n].y;
        heads[at + TURNED / 2u] = b * loaded.turns[$n].x + a * loaded.turns[$n].y;
    }
#end
    workgroupBarrier();
#if INT8
    // What is no number is lost in a maximum, and kept in the scale.
    var most = vec2<f32>();
    if (head < 2u) {
        for (var i = index % 16u; i < DIM; i += 16u) {
            let value = heads[(QUERIES + head) * DIM + i];
            most = vec2<f32>(max(most.x, abs(value)), most.y + value - value);
        }
    }
    sums[index] = most;
    workgroupBarrier();
    if (head < 2u) {
        most = vec2<f32>();
        for (var i = 16u * head; i < 16u * head + 16u; i++) {
            most = vec2<f32>(max(most.x, sums[i].x), most.y + sums[i].y);
        }
        let scale = scale_for(most.x);
        for (var i = index % 16u; i < DIM / 4u; i += 16u) {
            let at = (QUERIES + head) * DIM + 4u * i;
            let four = vec4<f32>(heads[at], heads[at + 1u], heads[at + 2u], heads[at + 3u]);
            new_words[head * (DIM / 4u) + i] = pack4xI8Clamp(vec4<i32>(round(four * scale.y)));
        }
        if (index % 16u == 0u) {
            new_scales[head] = scale.x + most.y;
        }
    }
    workgroupBarrier();
#end
}

// Writes the key and the value to their place in a page. Workgroups with other queries of the group write the same.
fn keep_heads(table: u32, kv_head: u32, position: u32, index: u32) {
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

#if PREPARE
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let row = group.x;
    let kv_head = group.y / SHARES;
    let first_query = group.y % SHARES * QUERIES;
    prepare_heads(row, kv_head, first_query, index, load_heads(row, kv_head, first_query, index));
    for (var i = index; i < min(QUERIES, GROUP - first_query) * DIM; i += 256u) {
        let query = kv_head * GROUP + first_query + i / DIM;
        qkv[row * STRIDE + query * QUERY_STEP + i % DIM] = heads[i];
    }
    keep_heads(step.tables_at + batch[4u * row + 1u], kv_head, batch[4u * row], index);
}
#end
