// Adds up the parts that attention.wgsl leaves of a row's heads.

@group(0) @binding(0) var<uniform> step: Step;
@group(0) @binding(1) var<storage, read> qkv: array<f32>;
@group(0) @binding(2) var<storage, read_write> attended: array<f32>; // [rows, HEADS, DIM]
@group(0) @binding(3) var<storage, read> parts: array<f32>;          // [rows, HEADS, splits, DIM + 2]

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
