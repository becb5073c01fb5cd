// Attention of a tile of rows of one sequence, for one head of keys and values: its queries are those of TILE rows
// times GROUP heads that share it. Keys are read 64 at a time with an online softmax (arXiv 2205.14135). A workgroup
// reads the pages of one part; if there are several parts, it leaves its sum and softmax to COMBINE.

@group(0) @binding(0) var<uniform> step: Step;
@group(0) @binding(1) var<storage, read> batch: array<u32>;
@group(0) @binding(2) var<storage, read_write> attended: array<f32>; // [rows, HEADS, DIM]
@group(0) @binding(3) var<storage, read_write> parts: array<f32>;    // [rows, HEADS, splits, DIM + 2]: sums, greatest score, sum of weights

#if COMBINE
@group(0) @binding(4) var<storage, read> qkv: array<f32>;
var<workgroup> weights: array<f32, SPLITS>;
var<workgroup> totals: array<f32, SPLITS>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let head = group.x * HEADS + group.y;
    let at = head * step.splits * (DIM + 2u);
    if (index < SPLITS) {
        // Parts behind the row's position hold nothing, with a sum of 0; so do those that do not exist.
        let part = at + min(index, step.splits - 1u) * (DIM + 2u) + DIM;
        weights[index] = select(NOTHING, parts[part], index < step.splits);
        totals[index] = select(0.0, parts[part + 1u], index < step.splits);
    }
    workgroupBarrier();
    var most = NOTHING;
    for (var s = 0u; s < SPLITS; s++) {
        most = max(most, weights[s]);
    }
    var sum = 0.0;
    for (var s = 0u; s < SPLITS; s++) {
        sum += totals[s] * exp(weights[s] - most);
    }
    workgroupBarrier();
    if (index < SPLITS) {
        weights[index] = select(0.0, exp(weights[index] - most) / sum, index < step.splits);
    }
    workgroupBarrier();
    for (var i = index; i < DIM; i += 64u) {
        var value = 0.0;
        for (var s = 0u; s < step.splits; s += 8u) {
            // Eight are on their way at once.
#for s in 8
            let value$s = parts[at + min(s + $su, step.splits - 1u) * (DIM + 2u) + i];
#end
#for s in 8
            value += value$s * weights[min(s + $su, SPLITS - 1u)];
#end
        }
#if GATED
        value /= 1.0 + exp(-qkv[group.x * STRIDE + group.y * QUERY_STEP + DIM + i]);
#end
        attended[head * DIM + i] = value;
    }
}
#else
@group(0) @binding(4) var<storage, read> qkv: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> keys: array<KeyWords>;
@group(0) @binding(6) var<storage, read> values: array<u32>;
@group(0) @binding(7) var<storage, read> scales: array<f32>; // [pages, KV_HEADS, PAGE, 2]

var<workgroup> q: array<vec4<f32>, QUERIES * DIM / 4>;

@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let split = group.x;
    let kv_head = group.y;
    let tile = step.tiles_at + 4u * group.z;
    let first_row = batch[tile];
    let rows = batch[tile + 1u];
    let position = batch[tile + 2u];
    let table = step.tables_at + batch[tile + 3u];
    for (var i = index; i < QUERIES * DIM / 4u; i += 128u) {
        let query = i / (DIM / 4u);
        let row = first_row + min(query / GROUP, rows - 1u);
        let head = kv_head * GROUP + query % GROUP;
        q[i] = qkv[(row * STRIDE + head * QUERY_STEP) / 4u + i % (DIM / 4u)];
    }
    if (index < QUERIES) {
        greatest[index] = NOTHING;
        total[index] = 0.0;
    }
    workgroupBarrier();
    let pair = index % PAIRS;
    let part = index / PAIRS;
    let takes_values = part < VALUE_PARTS;
#for j in PER_VALUE_PART
    var sum$j = vec2<f32>();
#end
    let begin = split * step.split_pages * PAGE;
    let end = min(position + rows, begin + step.split_pages * PAGE);
    for (var base = begin; base < end; base += 64u) {
        let page = batch[table + base / PAGE];
        let place = (page * KV_HEADS + kv_head) * PAGE + base % PAGE;
        let key = index % 64u;
        let half = index / 64u;
#for j in PER_HALF
        var score$j = 0.0;
#end
        if (base + key < end) {
            for (var i = 0u; i < DIM / 8u; i++) {
                let k = eight(keys[(place + key) * (DIM / 8u) + i]);
#for j in PER_HALF
                {
                    let at = min(half * PER_HALF + $ju, QUERIES - 1u) * (DIM / 4u) + 2u * i;
                    score$j += dot(q[at], k.low) + dot(q[at + 1u], k.high);
                }
#end
            }
        }
#if INT8
        let key_scale = scales[2u * (place + min(key, end - base - 1u))];
#for j in PER_HALF
        score$j *= key_scale;
#end
#end
#for j in PER_HALF
        {
            let query = half * PER_HALF + $ju;
            if (query < QUERIES) {
                let seen = base + key <= position + query / GROUP && base + key < end;
                scores[query * 64u + key] = select(NOTHING, score$j * SCALE, seen);
            }
        }
#end
        workgroupBarrier();
        soften(index);
        if (takes_values) {
#for j in PER_VALUE_PART
            sum$j *= shrunk[min(part * PER_VALUE_PART + $ju, QUERIES - 1u)];
#end
            let count = min(64u, end - base);
            for (var i = 0u; i < count; i++) {
#if INT8
                let value = two(values[(place + i) * VALUE_WORDS + word_of(pair)], pair) * scales[2u * (place + i) + 1u];
#else
                let value = two(values[(place + i) * VALUE_WORDS + word_of(pair)], pair);
#end
#for j in PER_VALUE_PART
                sum$j += value * scores[min(part * PER_VALUE_PART + $ju, QUERIES - 1u) * 64u + i];
#end
            }
        }
        workgroupBarrier();
    }
    if (takes_values) {
#for j in PER_VALUE_PART
        {
            let query = part * PER_VALUE_PART + $ju;
            let row = first_row + query / GROUP;
            let at = row * HEADS + kv_head * GROUP + query % GROUP;
            if (query < QUERIES && query / GROUP < rows) {
                if (step.splits == 1u) {
                    var both = sum$j / total[query];
#if GATED
                    let gate = row * STRIDE + (kv_head * GROUP + query % GROUP) * QUERY_STEP + DIM + 2u * pair;
                    both /= 1.0 + exp(-vec2<f32>(qkv[gate / 4u][gate % 4u], qkv[gate / 4u][gate % 4u + 1u]));
#end
                    attended[at * DIM + 2u * pair] = both.x;
                    attended[at * DIM + 2u * pair + 1u] = both.y;
                } else {
                    let to = (at * step.splits + split) * (DIM + 2u);
                    parts[to + 2u * pair] = sum$j.x;
                    parts[to + 2u * pair + 1u] = sum$j.y;
                    if (pair == 0u) {
                        parts[to + DIM] = greatest[query];
                        parts[to + DIM + 1u] = total[query];
                    }
                }
            }
        }
#end
    }
}
#end
