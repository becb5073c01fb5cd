// The experts of rows.

#if ROUTE
@group(0) @binding(0) var<storage, read> scores: array<f32>;             // [rows, COUNT]
@group(0) @binding(1) var<storage, read_write> routes: array<vec2<u32>>; // [rows, ROUTES]: expert, bits of its weight

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let weight = choose(group.x, index);
    if (index < ROUTES) {
        routes[group.x * ROUTES + index] = vec2<u32>(chosen[index], bitcast<u32>(weight));
    }
}
#end

#if GROUP_ROUTES
// Sorts the routes of a prompt's rows by expert, in tiles of up to 64 that share one: one workgroup.
@group(0) @binding(0) var<uniform> step: Step;
@group(0) @binding(1) var<storage, read> routes: array<vec2<u32>>;
@group(0) @binding(2) var<storage, read_write> groups: array<u32>; // number of tiles; of each its expert, first route and routes; from LIST_AT on the routes

var<workgroup> counts: array<atomic<u32>, COUNT>;
var<workgroup> firsts: array<u32, COUNT>;

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) index: u32) {
    for (var i = index; i < COUNT; i += 256u) {
        atomicStore(&counts[i], 0u);
    }
    workgroupBarrier();
    for (var i = index; i < step.rows * ROUTES; i += 256u) {
        atomicAdd(&counts[min(routes[i].x, COUNT - 1u)], 1u);
    }
    workgroupBarrier();
    if (index == 0u) {
        var tiles = 0u;
        var first = 0u;
        for (var expert = 0u; expert < COUNT; expert++) {
            let count = atomicLoad(&counts[expert]);
            atomicStore(&counts[expert], 0u);
            firsts[expert] = first;
            for (var at = 0u; at < count; at += 64u) {
                groups[1u + 3u * tiles] = expert;
                groups[2u + 3u * tiles] = first + at;
                groups[3u + 3u * tiles] = min(64u, count - at);
                tiles++;
            }
            first += count;
        }
        groups[0] = tiles;
    }
    workgroupBarrier();
    for (var i = index; i < step.rows * ROUTES; i += 256u) {
        let expert = min(routes[i].x, COUNT - 1u);
        groups[LIST_AT + firsts[expert] + atomicAdd(&counts[expert], 1u)] = i;
    }
}
#end

#if SUM_ROUTES
// Adds the outputs of a row's experts, times their weights, to the row.
@group(0) @binding(0) var<storage, read> routes: array<vec2<u32>>;
@group(0) @binding(1) var<storage, read> outputs: array<f32>;         // [rows, ROUTES, HIDDEN]
@group(0) @binding(2) var<storage, read_write> stream: array<f32>;   // [rows, HIDDEN]

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    for (var i = index; i < HIDDEN; i += 256u) {
        var sum = stream[group.x * HIDDEN + i];
        for (var r = group.x * ROUTES; r < (group.x + 1u) * ROUTES; r++) {
            sum += bitcast<f32>(routes[r].y) * outputs[r * HIDDEN + i];
        }
        stream[group.x * HIDDEN + i] = sum;
    }
}
#end

#if WEIGH
// Multiplies the rows of an expert that all rows go through by the sigmoid of its score.
@group(0) @binding(0) var<storage, read> scores: array<f32>;       // [rows]
@group(0) @binding(1) var<storage, read_write> gated: array<f32>;  // [rows, WIDTH]

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let factor = 1.0 / (1.0 + exp(-scores[group.x]));
    for (var i = index; i < WIDTH; i += 256u) {
        gated[group.x * WIDTH + i] *= factor;
    }
}
#end
