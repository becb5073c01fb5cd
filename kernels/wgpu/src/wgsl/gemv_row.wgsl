// y = x w^T for one row of x, in f32, which every workgroup rounds to bytes for itself, as long as the first units of
// its weights are on their way. LANES invocations go through the units of TOGETHER rows of w. With NORM, x is
// normalized first: the factor of its root mean square is the same for all inputs, changes no byte, and multiplies the
// sums.

@group(0) @binding(4) var<uniform> step: Step;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> gains: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> y: array<f32>;

const QUADS = 8u * UNITS;

// The bytes of x, four to a word: the first words of all units, the second ones, and so on, so that lanes read
// neighbours.
var<workgroup> bytes: array<u32, 8 * UNITS>;
// A unit's scale, and scale times the sum of its bytes.
var<workgroup> scales: array<vec2<f32>, UNITS>;
#if NORM
var<workgroup> squares: array<f32, 256>;
#end
#if SUBGROUPS
#else
var<workgroup> shared_values: array<f32, 256 * TOGETHER>;
#end

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
#if SUBGROUPS
        @builtin(subgroup_id) part: u32, @builtin(subgroup_invocation_id) lane: u32) {
    let index = part * LANES + lane;
#else
        @builtin(local_invocation_index) index: u32) {
    let part = index / LANES;
    let lane = index % LANES;
#end
    find_experts(group.z, index, group.x == 0u);
    let blocks = (outputs_of_row() + PARTS * TOGETHER - 1u) / (PARTS * TOGETHER);
    var block = group.x;
#for u in UNROLLED
    var unit$u = min(lane + LANES * $uu, UNITS - 1u);
#end
#for i in TOGETHER
    // Rows past the end are computed as the last one, and not written.
    var row$i = row_of(min((block * PARTS + part) * TOGETHER + $iu, outputs_of_row() - 1u));
#for u in UNROLLED
    var words$i_$u = unit_words(row_at(row$i, unit$u), unit_at(unit$u));
    var scale$i_$u = scale_of(row_at(row$i, unit$u), unit_at(unit$u), 0u);
#end
#end

#if NORM
    var square = 0.0;
#end
    // Inputs are on their way before those in front of them are rounded.
#for n in 4
    var quad$n = min(256u * $nu + index, QUADS - 1u);
    var next$n = x[group.z * QUADS + quad$n];
#if NORM
    var next_gain$n = gains[quad$n];
#end
#end
    for (var base = 0u; base < QUADS; base += 1024u) {
#for n in 4
        let now$n = quad$n;
        var value$n = next$n;
#if NORM
        let gain$n = next_gain$n;
#end
        quad$n = min(base + 1024u + 256u * $nu + index, QUADS - 1u);
        next$n = x[group.z * QUADS + quad$n];
#if NORM
        next_gain$n = gains[quad$n];
#end
#end
#for n in 4
#if NORM
        square += select(0.0, dot(value$n, value$n), base + 256u * $nu + index < QUADS);
        value$n *= gain$n;
#end
        {
            let four = abs(value$n);
            var greatest = max(max(four.x, four.y), max(four.z, four.w));
            // Eight neighbours have a unit.
#if SUBGROUPS
            greatest = max(greatest, subgroupShuffleXor(greatest, 1u));
            greatest = max(greatest, subgroupShuffleXor(greatest, 2u));
            greatest = max(greatest, subgroupShuffleXor(greatest, 4u));
#else
            workgroupBarrier();
            shared_values[index] = greatest;
            workgroupBarrier();
#for j in 8
            greatest = max(greatest, shared_values[index / 8u * 8u + $ju]);
#end
#end
            let inverse = select(0.0, 127.0 / greatest, greatest > 0.0);
            if (base + 256u * $nu + index < QUADS) {
                let unit = now$n / 8u;
                bytes[now$n % 8u * UNITS + unit] = pack4xI8Clamp(vec4<i32>(round(value$n * inverse)));
                if (now$n % 8u == 0u) {
                    scales[unit].x = greatest / 127.0;
                }
            }
        }
#end
    }
#if NORM
#if SUBGROUPS
    square = subgroupAdd(square);
    if (lane == 0u) {
        squares[part] = square;
    }
#else
    squares[index] = square;
#end
#end
    workgroupBarrier();
    for (var unit = index; unit < UNITS; unit += 256u) {
        var sum = 0;
#for c in 8
        sum += dot4I8Packed(bytes[$cu * UNITS + unit], 0x01010101u);
#end
        scales[unit].x *= factor_at(unit);
        scales[unit].y = scales[unit].x * f32(sum);
    }
    var factor = 1.0;
#if NORM
#if SUBGROUPS
#else
    for (var width = 128u; width >= PARTS; width /= 2u) {
        if (index < width) {
            squares[index] += squares[index + width];
        }
        workgroupBarrier();
    }
#end
    square = 0.0;
    for (var p = 0u; p < PARTS; p++) {
        square += squares[p];
    }
    factor = 1.0 / sqrt(square / f32(32u * UNITS) + EPS);
#end
    workgroupBarrier();

#for i in TOGETHER
    var sum$i = 0.0;
#end
    var turn = 0u;
    while (block < blocks) {
        // What comes next is read before this is used.
        let at = turn * LANES * UNROLLED + lane;
        let first = (block * PARTS + part) * TOGETHER;
        turn++;
        let ends = turn == TURNS;
        if (ends) {
            turn = 0u;
            block += groups.x;
        }
#if ADDED
        // What is added to is read early, too.
#for i in TOGETHER
        var old$i = 0.0;
        if (ends && lane == 0u) {
            old$i = y[place_of(group.z, min(first + $iu, outputs_of_row() - 1u))];
        }
#end
#end
#for u in UNROLLED
        unit$u = min(turn * LANES * UNROLLED + lane + LANES * $uu, UNITS - 1u);
#end
#for i in TOGETHER
        row$i = row_of(min((block * PARTS + part) * TOGETHER + $iu, outputs_of_row() - 1u));
#for u in UNROLLED
        let now$i_$u = words$i_$u;
        let a$i_$u = scale$i_$u;
        words$i_$u = unit_words(row_at(row$i, unit$u), unit_at(unit$u));
        scale$i_$u = scale_of(row_at(row$i, unit$u), unit_at(unit$u), 0u);
#end
#end
#for u in UNROLLED
        {
            // Units past the end repeat the last one, times 0.
            let unit = min(at + LANES * $uu, UNITS - 1u);
#for c in 8
            let bytes$c = bytes[$cu * UNITS + unit];
#end
            let scale = scales[unit] * select(0.0, 1.0, at + LANES * $uu < UNITS);
#for i in TOGETHER
            {
                let raw = unpacked(now$i_$u);
                var dot = 0;
#for c in 8
                dot += dot4I8Packed(raw[$c] ^ FLIP, bytes$c);
#end
                let a = a$i_$u;
                sum$i += a.x * scale.x * f32(dot) + (a.y + FLIPPED * a.x) * scale.y;
            }
#end
        }
#end
        if (ends) {
#for i in TOGETHER
#if SUBGROUPS
            let total$i = subgroupAdd(sum$i) * factor;
#else
            shared_values[256u * $iu + index] = sum$i;
#end
            sum$i = 0.0;
#end
#if SUBGROUPS
#else
            workgroupBarrier();
#for i in TOGETHER
            var total$i = 0.0;
#end
            if (lane == 0u) {
                for (var l = 0u; l < LANES; l++) {
#for i in TOGETHER
                    total$i += shared_values[256u * $iu + index + l] * factor;
#end
                }
            }
            workgroupBarrier();
#end
            if (lane == 0u) {
#if GATED
                if (is_here(first)) {
                    y[place_of(group.z, first)] = total0 / (1.0 + exp(-total0)) * total1;
                }
#else
#for i in TOGETHER
                if (is_here(first + $iu)) {
#if ADDED
                    y[place_of(group.z, first + $iu)] = old$i + total$i;
#else
                    y[place_of(group.z, first + $iu)] = total$i;
#end
                }
#end
#end
            }
        }
    }
}
