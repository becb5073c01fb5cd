// y = x w^T for up to ROWS rows of x: 32 lanes go through the units of TOGETHER rows of w, and a workgroup of 128 has
// four times as many rows. UNROLLED units are on their way at once. Every output is summed in the same order whatever
// ROWS is. With NORM, the one row of x is normalized on the way: the factor of its root mean square multiplies the sums.

@group(0) @binding(4) var<uniform> step: Step;
#if INT8
@group(0) @binding(5) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read> x_scales: array<vec2<f32>>;
#else
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> gains: array<vec4<f32>>;
#end
@group(0) @binding(7) var<storage, read_write> y: array<f32>;

var<workgroup> totals: array<f32, TOTALS>;
#if SUBGROUPS
#else
var<workgroup> partial: array<f32, 128 * TOGETHER>;
#end

@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32,
#if SUBGROUPS
        @builtin(subgroup_id) subgroup: u32, @builtin(subgroup_invocation_id) invocation: u32,
#end
        ) {
#if SUBGROUPS
    let part = subgroup;
    let lane = invocation;
#else
    let part = index / 32u;
    let lane = index % 32u;
#end
    find_experts(group.z, index, group.x + group.y == 0u);
    let first = (group.x + group.y * GRID) * (4u * TOGETHER);
#for i in TOGETHER
    // Rows past the end are computed as the last one, and not written.
    let row$i = row_of(min(first + part * TOGETHER + $iu, outputs_of_row() - 1u));
#for r in ROWS
    var sum$i_$r = 0.0;
#end
#end
#if NORM
    var square = 0.0;
#end
    for (var next = lane; next < units_of_row(); next += 32u * UNROLLED) {
#for u in UNROLLED
        {
            // Units past the end repeat the last one, times 0.
            let unit = min(next + 32u * $uu, units_of_row() - 1u);
            let inside = select(0.0, factor_at(unit), next + 32u * $uu < units_of_row());
#for i in TOGETHER
            let raw$i = raw_unit(row_at(row$i, unit), unit_at(unit));
            let a$i = scale_of(row_at(row$i, unit), unit_at(unit), 0u);
#if SMALL_GROUPS
            let b$i = scale_of(row_at(row$i, unit), unit_at(unit), 1u);
#end
#end
#for r in ROWS
            {
                // Rows that the pass does not have repeat the last one.
                let at = (group.z + min($ru, step.rows - 1u)) * units_of_row() + unit;
#if INT8
                let low = x[2u * at];
                let upper = x[2u * at + 1u];
                let scale = x_scales[at] * inside;
#for i in TOGETHER
                var dot$i = 0;
#for c in 4
                dot$i += dot4I8Packed(raw$i[$c] ^ FLIP, low[$c]);
#end
#for c in 4
                dot$i += dot4I8Packed(raw$i[4 + $c] ^ FLIP, upper[$c]);
#end
                sum$i_$r += a$i.x * scale.x * f32(dot$i) + (a$i.y + FLIPPED * a$i.x) * scale.y;
#end
#else
#for j in 8
                var x$j = x[8u * at + $ju] * inside;
#if NORM
                square += dot(x$j, x$j);
                x$j *= gains[8u * unit + $ju];
#end
#end
#for i in TOGETHER
#for j in 8
#if SMALL_GROUPS
                let s$i_$j = select(a$i, b$i, $j > 3);
#else
                let s$i_$j = a$i;
#end
#if FLOATS
                sum$i_$r += dot(quad(raw$i, $ju), x$j);
#else
                sum$i_$r += dot(fma(quad(raw$i, $ju), vec4<f32>(s$i_$j.x), vec4<f32>(s$i_$j.y)), x$j);
#end
#end
#end
#end
            }
#end
        }
#end
    }
    var factor = 1.0;
#if NORM
#if SUBGROUPS
    square = subgroupAdd(square);
#else
    partial[index] = square;
    workgroupBarrier();
    square = 0.0;
    for (var l = 0u; l < 32u; l++) {
        square += partial[part * 32u + l];
    }
#end
    factor = 1.0 / sqrt(square / f32(32u * slice.units) + EPS);
#end
#for r in ROWS
#if SUBGROUPS
#for i in TOGETHER
    {
        let all = subgroupAdd(sum$i_$r) * factor;
        if (lane == 0u) {
            totals[(part * TOGETHER + $iu) * ROWS + $ru] = all;
        }
    }
#end
#else
    workgroupBarrier();
#for i in TOGETHER
    partial[(part * TOGETHER + $iu) * 32u + lane] = sum$i_$r;
#end
    workgroupBarrier();
    if (index < 4u * TOGETHER) {
        var all = 0.0;
        for (var l = 0u; l < 32u; l++) {
            all += partial[index * 32u + (l + index) % 32u];
        }
        totals[index * ROWS + $ru] = all * factor;
    }
#end
#end
    workgroupBarrier();
#if GATED
    let outputs = 2u * TOGETHER;
#else
    let outputs = 4u * TOGETHER;
#end
    for (var o = index; o < outputs * ROWS; o += 128u) {
        let r = o / outputs;
        let n = o % outputs;
#if GATED
        let gate = totals[2u * n * ROWS + r];
        let value = gate / (1.0 + exp(-gate)) * totals[(2u * n + 1u) * ROWS + r];
        let output = first + 2u * n;
#else
        let value = totals[n * ROWS + r];
        let output = first + n;
#end
        if (is_here(output) && r < step.rows) {
            let at = place_of(group.z + r, output);
#if ADDED
            y[at] += value;
#else
            y[at] = value;
#end
        }
    }
}
