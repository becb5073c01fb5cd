// y = x w^T in tiles of 64 rows of x and 64 rows of w, a unit of inputs at a time: 64 invocations compute 8 x 8 outputs
// each. Of a stack of experts, a tile has the rows that are routed to one of them.

@group(0) @binding(4) var<uniform> step: Step;
#if INT8
@group(0) @binding(5) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read> x_scales: array<vec2<f32>>;
var<workgroup> x_tile: array<vec4<u32>, 8 * 16>;
var<workgroup> w_tile: array<vec4<u32>, 8 * 16>;
var<workgroup> x_scale: array<vec4<f32>, 2 * 16>;
var<workgroup> w_scale: array<vec4<f32>, 2 * 16>;
#else
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> x_scales: array<vec2<f32>>;
var<workgroup> x_tile: array<vec4<f32>, 32 * 16>;
var<workgroup> w_tile: array<vec4<f32>, 32 * 16>;
#end
@group(0) @binding(7) var<storage, read_write> y: array<f32>;
#if EXPERTS
@group(0) @binding(8) var<storage, read> groups: array<u32>; // route.wgsl says what it holds

// Routes of the tile.
var<workgroup> tile_routes: array<u32, 64>;
#end

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
#if EXPERTS
    let m0 = 0u;
#else
    let m0 = group.y * 64u;
#end
    let n0 = group.x * 64u;
    // Rows past the end are computed as the last one, and not written.
#if EXPERTS
    let tile = 1u + 3u * group.y;
    let expert = groups[tile] - slice.expert0;
    if (group.y >= groups[0] || expert >= slice.rows / slice.expert_rows) {
        return;
    }
    let rows = groups[tile + 2u];
    let route = groups[LIST_AT + groups[tile + 1u] + min(index, rows - 1u)];
    tile_routes[index] = route;
    let w_row = expert * slice.expert_rows + min(n0 + index, slice.expert_rows - 1u);
#if SPREAD
    let x_row = route / ROUTES;
#else
    let x_row = route;
#end
#else
    let rows = step.rows;
    let x_row = min(m0 + index, rows - 1u);
    let w_row = min(n0 + index, slice.rows - 1u);
#end
    let tm = index / 8u;
    let tn = index % 8u;
#for m in 8
    var low$m = vec4<f32>();
    var high$m = vec4<f32>();
#end
    for (var unit = 0u; unit < slice.units; unit++) {
        let raw = raw_unit(w_row, unit);
        let a = scale_of(w_row, unit, 0u);
#if INT8
        let at = x_row * slice.units + unit;
        let lower = x[2u * at];
        let upper = x[2u * at + 1u];
        let scale = x_scales[at];
        workgroupBarrier();
#for c in 4
        x_tile[16u * $cu + index / 4u][index % 4u] = lower[$c];
        x_tile[16u * (4u + $cu) + index / 4u][index % 4u] = upper[$c];
#end
#for j in 8
        w_tile[16u * $ju + index / 4u][index % 4u] = raw[$j] ^ FLIP;
#end
        x_scale[index / 4u][index % 4u] = scale.x;
        x_scale[16u + index / 4u][index % 4u] = scale.y;
        w_scale[index / 4u][index % 4u] = a.x;
        w_scale[16u + index / 4u][index % 4u] = a.y + FLIPPED * a.x;
        workgroupBarrier();
#for m in 8
        var dots_low$m = vec4<i32>();
        var dots_high$m = vec4<i32>();
#end
#for k in 8
        {
            let xa = x_tile[16u * $ku + 2u * tm];
            let xb = x_tile[16u * $ku + 2u * tm + 1u];
            let wa = w_tile[16u * $ku + 2u * tn];
            let wb = w_tile[16u * $ku + 2u * tn + 1u];
#for m in 4
#for n in 4
            dots_low$m[$n] += dot4I8Packed(xa[$m], wa[$n]);
            dots_high$m[$n] += dot4I8Packed(xa[$m], wb[$n]);
#end
#end
#for m in 4
#for n in 4
            dots_low@m4[$n] += dot4I8Packed(xb[$m], wa[$n]);
            dots_high@m4[$n] += dot4I8Packed(xb[$m], wb[$n]);
#end
#end
        }
#end
        {
            let sa = w_scale[2u * tn];
            let sb = w_scale[2u * tn + 1u];
            let oa = w_scale[16u + 2u * tn];
            let ob = w_scale[16u + 2u * tn + 1u];
#for m in 8
            let s$m = x_scale[2u * tm + $mu / 4u][$m % 4];
            let t$m = x_scale[16u + 2u * tm + $mu / 4u][$m % 4];
            low$m += sa * s$m * vec4<f32>(dots_low$m) + oa * t$m;
            high$m += sb * s$m * vec4<f32>(dots_high$m) + ob * t$m;
#end
        }
#else
        let at = 8u * (x_row * slice.units + unit);
#for j in 8
        let x$j = x[at + $ju];
#end
#if SMALL_GROUPS
        let b = scale_of(w_row, unit, 1u);
#else
        let b = a;
#end
        workgroupBarrier();
#for j in 8
        {
#if FLOATS
            let w = quad(raw, $ju);
#else
            let s = select(a, b, $j > 3);
            let w = fma(quad(raw, $ju), vec4<f32>(s.x), vec4<f32>(s.y));
#end
#for c in 4
            x_tile[16u * (4u * $ju + $cu) + index / 4u][index % 4u] = x$j[$c];
            w_tile[16u * (4u * $ju + $cu) + index / 4u][index % 4u] = w[$c];
#end
        }
#end
        workgroupBarrier();
        for (var first = 0u; first < 32u; first += 8u) {
#for k in 8
            let xa$k = x_tile[16u * (first + $ku) + 2u * tm];
            let xb$k = x_tile[16u * (first + $ku) + 2u * tm + 1u];
            let wa$k = w_tile[16u * (first + $ku) + 2u * tn];
            let wb$k = w_tile[16u * (first + $ku) + 2u * tn + 1u];
#for m in 4
            low$m = fma(vec4<f32>(xa$k[$m]), wa$k, low$m);
            high$m = fma(vec4<f32>(xa$k[$m]), wb$k, high$m);
            low@m4 = fma(vec4<f32>(xb$k[$m]), wa$k, low@m4);
            high@m4 = fma(vec4<f32>(xb$k[$m]), wb$k, high@m4);
#end
#end
        }
#end
    }
#for m in 8
    put(rows, m0 + 8u * tm + $mu, n0 + 8u * tn, low$m);
    put(rows, m0 + 8u * tm + $mu, n0 + 8u * tn + 4u, high$m);
#end
}

// Writes four outputs of row m, from row n of w on.
fn put(rows: u32, of_tile: u32, n: u32, four: vec4<f32>) {
    if (of_tile >= rows) {
        return;
    }
#if EXPERTS
    let m = tile_routes[of_tile];
    let outputs = slice.expert_rows;
#else
    let m = of_tile;
    let outputs = slice.rows;
#end
#if GATED
#for h in 2
    if (n + 2u * $hu < outputs) {
        let gate = four[2 * $h];
        y[m * slice.stride + (slice.row0 + n) / 2u + $hu] = gate / (1.0 + exp(-gate)) * four[2 * $h + 1];
    }
#end
#else
#for c in 4
    if (n + $cu < outputs) {
#if ADDED
        y[m * slice.stride + slice.row0 + n + $cu] += four[$c];
#else
        y[m * slice.stride + slice.row0 + n + $cu] = four[$c];
#end
    }
#end
#end
}
