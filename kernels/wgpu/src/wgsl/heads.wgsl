// A head of a row's queries, keys or values: biases, norms of heads, rotation; keys and values go to their page.

@group(0) @binding(0) var<uniform> step: Step;
@group(0) @binding(1) var<storage, read> batch: array<u32>;
@group(0) @binding(2) var<storage, read> vectors: array<f32>;       // biases of all heads; gains of q and k
@group(0) @binding(3) var<storage, read_write> qkv: array<f32>;
@group(0) @binding(4) var<storage, read_write> keys: array<u32>;    // pages.wgsl says how they lie
@group(0) @binding(5) var<storage, read_write> values: array<u32>;
@group(0) @binding(6) var<storage, read_write> scales: array<f32>; // [pages, KV_HEADS, PAGE, 2], of a key and its value

var<workgroup> head_values: array<f32, DIM>;
var<workgroup> sums: array<f32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let row = group.x;
    let head = group.y;
    let is_key = head >= HEADS && head < HEADS + KV_HEADS;
    let is_value = head >= HEADS + KV_HEADS;
    // Where it is among a row's heads, of which a gate may stand behind each query.
    let head_at = select(KEYS_AT + (head - HEADS) * DIM, head * QUERY_STEP, head < HEADS);
    let at = row * STRIDE + head_at;
    var sum = 0.0;
    for (var i = index; i < DIM; i += 64u) {
        var value = qkv[at + i];
#if BIASES
        value += vectors[head_at + i];
#end
        head_values[i] = value;
        sum += value * value;
    }
#if NORMS
    sums[index] = sum;
    for (var width = 32u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if (index < width) {
            sums[index] += sums[index + width];
        }
    }
    workgroupBarrier();
    if (!is_value) {
        let scale = 1.0 / sqrt(sums[0] / f32(DIM) + EPS);
        let gains = NORMS_AT + select(0u, DIM, is_key);
        for (var i = index; i < DIM; i += 64u) {
            head_values[i] *= scale * vectors[gains + i];
        }
    }
#end
    workgroupBarrier();
    if (!is_value) {
        for (var i = index; i < TURNED / 2u; i += 64u) {
            let at = step.turns_at + row * TURNED + 2u * i;
            let turn = vec2<f32>(bitcast<f32>(batch[at]), bitcast<f32>(batch[at + 1u]));
            let a = head_values[i];
            let b = head_values[i + TURNED / 2u];
            head_values[i] = a * turn.x - b * turn.y;
            head_values[i + TURNED / 2u] = b * turn.x + a * turn.y;
        }
    }
    workgroupBarrier();
    if (head < HEADS) {
        for (var i = index; i < DIM; i += 64u) {
            qkv[at + i] = head_values[i];
        }
        return;
    }
    let position = batch[4u * row];
    let page = batch[step.tables_at + batch[4u * row + 1u] + position / PAGE];
    let kv_head = (head - HEADS) % KV_HEADS;
    let place = (page * KV_HEADS + kv_head) * PAGE + position % PAGE;
#if INT8
    var greatest = 0.0;
    // What is no number is lost in the maximum, and kept in the scale.
    var nothing = 0.0;
    for (var i = 0u; i < DIM; i++) {
        greatest = max(greatest, abs(head_values[i]));
        nothing += head_values[i] - head_values[i];
    }
    let scale = scale_for(greatest);
    if (index == 0u) {
        scales[2u * place + select(0u, 1u, is_value)] = scale.x + nothing;
    }
#end
    for (var i = index; i < VALUE_WORDS; i += 64u) {
#if INT8
        let four = vec4<f32>(head_values[4u * i], head_values[4u * i + 1u], head_values[4u * i + 2u], head_values[4u * i + 3u]);
        let word = pack4xI8Clamp(vec4<i32>(round(four * scale.y)));
#else
        let word = pack2x16float(vec2<f32>(head_values[2u * i], head_values[2u * i + 1u]));
#end
        if (is_value) {
            values[place * VALUE_WORDS + i] = word;
        } else {
            keys[place * VALUE_WORDS + i] = word;
        }
    }
}
