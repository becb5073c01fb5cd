// What happens to rows between products, a row by workgroup.

@group(0) @binding(0) var<uniform> step: Step;
#if SILU
// y = silu(gate) * up, for gates and what they multiply in weights of different kinds.
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    for (var i = index; i < WIDTH; i += 256u) {
        let gate = x[group.x * 2u * WIDTH + i];
        y[group.x * WIDTH + i] = gate / (1.0 + exp(-gate)) * x[(group.x * 2u + 1u) * WIDTH + i];
    }
}
#else
// With NORM, y = x / sqrt(mean(x^2) + EPS) * gains. With GATHER, row i of y is made of the row of x that the batch wants
// i-th. With ROUND, y is signed bytes with a scale for each unit: codes, and scale and scale times the sum of codes.
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
#if NORM
@group(0) @binding(2) var<storage, read> batch: array<u32>;
@group(0) @binding(3) var<storage, read> gains: array<vec4<f32>>;
#if ROUND
@group(0) @binding(4) var<storage, read_write> rounded: array<u32>;
@group(0) @binding(5) var<storage, read_write> scales: array<vec2<f32>>;
#else
@group(0) @binding(4) var<storage, read_write> y: array<vec4<f32>>;
#end
#else
@group(0) @binding(2) var<storage, read_write> rounded: array<u32>;
@group(0) @binding(3) var<storage, read_write> scales: array<vec2<f32>>;
#end

var<workgroup> sums: array<f32, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
#if GATHER
    let row = batch[step.wanted_at + group.x];
#else
    let row = group.x;
#end
    var factor = 1.0;
#if NORM
    var sum = 0.0;
    for (var i = index; i < 8u * UNITS; i += 256u) {
        let four = x[row * 8u * UNITS + i];
        sum += dot(four, four);
    }
    sums[index] = sum;
    for (var width = 128u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if (index < width) {
            sums[index] += sums[index + width];
        }
    }
    workgroupBarrier();
    factor = 1.0 / sqrt(sums[0] / f32(32u * UNITS) + EPS);
#end
    for (var unit = index; unit < UNITS; unit += 256u) {
        let at = group.x * UNITS + unit;
        var most = vec4<f32>();
#for j in 8
        var value$j = x[8u * (row * UNITS + unit) + $ju] * factor;
#if NORM
        value$j *= gains[8u * unit + $ju];
#end
        most = max(most, abs(value$j));
#end
#if ROUND
        let greatest = max(max(most.x, most.y), max(most.z, most.w));
        let inverse = select(0.0, 127.0 / greatest, greatest > 0.0);
        var codes = 0;
#for j in 8
        let word$j = pack4xI8Clamp(vec4<i32>(round(value$j * inverse)));
        codes += dot4I8Packed(word$j, 0x01010101u);
        rounded[8u * at + $ju] = word$j;
#end
        scales[at] = vec2<f32>(greatest / 127.0, greatest / 127.0 * f32(codes));
#else
#for j in 8
        y[8u * at + $ju] = value$j;
#end
#end
    }
}
#end
