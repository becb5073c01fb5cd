// y = x w^T for one row of x, in f32, which every workgroup rounds to bytes for itself, as long as the first units of
// its weights are on their way. LANES invocations go through the units of TOGETHER rows of w, in TURNS turns, and then
// through those of the next rows, of which there are EACH. With NORM, x is normalized first: the factor of its root
// mean square is the same for all inputs, changes no byte, and multiplies the sums.

@group(0) @binding(4) var<uniform> step: Step;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> gains: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> y: array<f32>;

// The bytes of x: first halves of all units, and then second ones, so that lanes read neighbours.
var<workgroup> bytes: array<vec4<u32>, 2 * UNITS>;
// A unit's scale, and scale times the sum of its bytes.
var<workgroup> scales: array<vec2<f32>, UNITS>;
#if NORM
var<workgroup> squares: array<f32, THREADS>;
#end
#if SUBGROUPS
#else
var<workgroup> shared_values: array<f32, THREADS * TOGETHER>;
#end

@compute @workgroup_size(THREADS)
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
    // Rows past the end are computed as the last one, and not written; units past the end repeat the last one, times 0.
    let last = outputs_of_row() - 1u;
#for u in UNROLLED
    let unit$u = min(lane + LANES * $uu, UNITS - 1u);
#end
#for i in TOGETHER
    var row$i = row_of(min((group.x * PARTS + part) * TOGETHER + $iu, last));
#for u in UNROLLED
    var words$i_$u = unit_words(row_at(row$i, unit$u), unit_at(unit$u));
    var scale$i_$u = scale_of(row_at(row$i, unit$u), unit_at(unit$u), 0u);
#end
#end

#if NORM
    var square = 0.0;
#end
    // QUADS times four inputs for each invocation: half a unit whose other half a neighbour has, or a unit.
#for r in ROUNDS
    {
        let i = index + THREADS * $ru;
        let inside = i < 8u * UNITS / QUADS;
        let start = QUADS * min(i, 8u * UNITS / QUADS - 1u);
        var most = vec4<f32>();
#for j in QUADS
        var value$j = x[group.z * 8u * UNITS + start + $ju];
#if NORM
        square += select(0.0, dot(value$j, value$j), inside);
        value$j *= gains[start + $ju];
#end
        most = max(most, abs(value$j));
#end
        var greatest = max(max(most.x, most.y), max(most.z, most.w));
#if SUBGROUPS
        greatest = max(greatest, subgroupShuffleXor(greatest, 1u));
#end
        let inverse = select(0.0, 127.0 / greatest, greatest > 0.0);
        var sum = 0;
#for j in QUADS
        let word$j = pack4xI8Clamp(vec4<i32>(round(value$j * inverse)));
        sum += dot4I8Packed(word$j, 0x01010101u);
#end
#if SUBGROUPS
        sum += subgroupShuffleXor(sum, 1u);
        let unit = i / 2u;
        if (inside) {
            bytes[i % 2u * UNITS + unit] = vec4<u32>(word0, word1, word2, word3);
        }
#else
        let unit = i;
        if (inside) {
            bytes[unit] = vec4<u32>(word0, word1, word2, word3);
            bytes[UNITS + unit] = vec4<u32>(word4, word5, word6, word7);
        }
#end
        if (inside) {
            let scale = greatest / 127.0 * factor_at(unit);
            scales[unit] = vec2<f32>(scale, scale * f32(sum));
        }
    }
#end
    var factor = 1.0;
#if NORM
#if SUBGROUPS
    square = subgroupAdd(square);
    if (lane == 0u) {
        squares[part] = square;
    }
#else
    squares[index] = square;
    for (var width = THREADS / 2u; width >= PARTS; width /= 2u) {
        workgroupBarrier();
        if (index < width) {
            squares[index] += squares[index + width];
        }
    }
#end
#end
    workgroupBarrier();
#if NORM
    square = 0.0;
#for p in PARTS
    square += squares[$p];
#end
    factor = 1.0 / sqrt(square / f32(32u * UNITS) + EPS);
#end

#for i in TOGETHER
    var sum$i = 0.0;
#end
    for (var n = 0u; n < EACH * TURNS; n++) {
        let turn = n % TURNS;
        let first = ((n / TURNS * groups.x + group.x) * PARTS + part) * TOGETHER;
#if ADDED
        // What is added to is read early.
#for i in TOGETHER
        var old$i = 0.0;
        if (turn == TURNS - 1u && lane == 0u) {
            old$i = y[place_of(group.z, min(first + $iu, last))];
        }
#end
#end
#for i in TOGETHER
#for u in UNROLLED
        let now$i_$u = words$i_$u;
        let a$i_$u = scale$i_$u;
#end
#end
        if (n + 1u < EACH * TURNS) {
            // What comes next is read before this is used.
            let next = (((n + 1u) / TURNS * groups.x + group.x) * PARTS + part) * TOGETHER;
#for u in UNROLLED
            let unit$u = min(((n + 1u) % TURNS * UNROLLED + $uu) * LANES + lane, UNITS - 1u);
#end
#for i in TOGETHER
            row$i = row_of(min(next + $iu, last));
#for u in UNROLLED
            words$i_$u = unit_words(row_at(row$i, unit$u), unit_at(unit$u));
            scale$i_$u = scale_of(row_at(row$i, unit$u), unit_at(unit$u), 0u);
#end
#end
        }
#for u in UNROLLED
        {
            let at = (turn * UNROLLED + $uu) * LANES + lane;
            let unit = min(at, UNITS - 1u);
            let low = bytes[unit];
            let upper = bytes[UNITS + unit];
            let scale = scales[unit] * select(0.0, 1.0, at < UNITS);
#for i in TOGETHER
            {
                let raw = unpacked(now$i_$u);
                var dot = 0;
#for c in 4
                dot += dot4I8Packed(raw[$c] ^ FLIP, low[$c]) + dot4I8Packed(raw[@c4] ^ FLIP, upper[$c]);
#end
                let a = a$i_$u;
                sum$i += a.x * scale.x * f32(dot) + (a.y + FLIPPED * a.x) * scale.y;
            }
#end
        }
#end
        if (turn == TURNS - 1u) {
#for i in TOGETHER
#if SUBGROUPS
            let total$i = subgroupAdd(sum$i) * factor;
#else
            shared_values[THREADS * $iu + index] = sum$i;
            var total$i = 0.0;
#end
            sum$i = 0.0;
#end
#if SUBGROUPS
#else
            workgroupBarrier();
            if (lane == 0u) {
                for (var l = 0u; l < LANES; l++) {
#for i in TOGETHER
                    total$i += shared_values[THREADS * $iu + index + l] * factor;
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
