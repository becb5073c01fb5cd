// What happens to rows between products, a row by workgroup.

#if NORM
// y = x / sqrt(mean(x^2) + EPS) * gains. With GATHER, row i of y is made of the row of x that the batch wants i-th.
// With ROUND, y is rounded to bytes instead.
@group(0) @binding(0) var<uniform> step: Step;
@group(0) @binding(1) var<storage, read> batch: array<u32>;
@group(0) @binding(2) var<storage, read> gains: array<f32>;
@group(0) @binding(3) var<storage, read> x: array<f32>;
#if ROUND
@group(0) @binding(4) var<storage, read_write> rounded: array<u32>;
@group(0) @binding(5) var<storage, read_write> scales: array<vec2<f32>>;
#else
@group(0) @binding(4) var<storage, read_write> y: array<f32>;
#end
var<workgroup> sums: array<f32, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
#if GATHER
    let row = batch[step.wanted_at + group.x];
#else
    let row = group.x;
#end
    var sum = 0.0;
    for (var i = index; i < HIDDEN; i += 256u) {
        let value = x[row * HIDDEN + i];
        sum += value * value;
    }
    sums[index] = sum;
    for (var width = 128u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if (index < width) {
            sums[index] += sums[index + width];
        }
    }
    workgroupBarrier();
    let scale = 1.0 / sqrt(sums[0] / f32(HIDDEN) + EPS);
#if ROUND
    for (var unit = index; unit < HIDDEN / 32u; unit += 256u) {
        var values: array<vec4<f32>, 8>;
        for (var j = 0u; j < 8u; j++) {
            let g = 32u * unit + 4u * j;
            let i = row * HIDDEN + g;
            values[j] = vec4<f32>(x[i], x[i + 1u], x[i + 2u], x[i + 3u]) * scale
                * vec4<f32>(gains[g], gains[g + 1u], gains[g + 2u], gains[g + 3u]);
        }
        round_unit(group.x * (HIDDEN / 32u) + unit, values);
    }
#else
    for (var i = index; i < HIDDEN; i += 256u) {
        y[group.x * HIDDEN + i] = x[row * HIDDEN + i] * scale * gains[i];
    }
#end
}
#else
#if ROUND
// Inputs as signed bytes with a scale for each unit: codes, and scale and scale times the sum of codes.
@group(0) @binding(0) var<uniform> step: Step;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> rounded: array<u32>;
@group(0) @binding(3) var<storage, read_write> scales: array<vec2<f32>>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    for (var unit = index; unit < UNITS; unit += 64u) {
        let at = group.x * UNITS + unit;
        var values: array<vec4<f32>, 8>;
        for (var j = 0u; j < 8u; j++) {
            values[j] = x[8u * at + j];
        }
        round_unit(at, values);
    }
}
#end
#end

#if ROUND
// Writes the codes, scale, and scale times the sum of codes of unit `at`.
fn round_unit(at: u32, values: array<vec4<f32>, 8>) {
    var most = vec4<f32>();
#for j in 8
    most = max(most, abs(values[$j]));
#end
    let greatest = max(max(most.x, most.y), max(most.z, most.w));
    let inverse = select(0.0, 127.0 / greatest, greatest > 0.0);
    var sum = 0;
#for j in 8
    let word$j = pack4xI8Clamp(vec4<i32>(round(values[$j] * inverse)));
    sum += dot4I8Packed(word$j, 0x01010101u);
    rounded[8u * at + $ju] = word$j;
#end
    let scale = greatest / 127.0;
    scales[at] = vec2<f32>(scale, scale * f32(sum));
}
#end

#if SILU
// y = silu(gate) * up, for gates and what they multiply in weights of different kinds.
@group(0) @binding(0) var<uniform> step: Step;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    for (var i = index; i < WIDTH; i += 256u) {
        let gate = x[group.x * 2u * WIDTH + i];
        y[group.x * WIDTH + i] = gate / (1.0 + exp(-gate)) * x[(group.x * 2u + 1u) * WIDTH + i];
    }
}
#end
