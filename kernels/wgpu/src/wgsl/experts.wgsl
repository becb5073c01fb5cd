// What the kernels of steps multiply with: the rows of a weight; or, of a stack of experts, rows of those that the row
// of the pass is routed to. SPREAD has the outputs of each expert behind one another; SUMMED reads the inputs of all
// experts as one row, a part of it with the row of each expert, so that a sum over the experts is one product.

#if EXPERTS
struct Route {
    expert: u32,
    weight: f32,
}

#if CHOOSE
// The first product of a step chooses by itself, each of its workgroups, which takes less time than a launch.
@group(0) @binding(8) var<storage, read> scores: array<f32>;         // [rows, COUNT]
@group(0) @binding(9) var<storage, read_write> routes: array<Route>; // [rows, ROUTES]
#else
@group(0) @binding(8) var<storage, read> routes: array<Route>;
#end

// The first row of each expert in the slice, the factor of its output, and whether the slice has it.
var<workgroup> bases: array<u32, ROUTES>;
var<workgroup> factors: array<f32, ROUTES>;
var<workgroup> present: array<u32, ROUTES>;

fn find_experts(row: u32, index: u32, first: bool) {
#if CHOOSE
    let weight = choose(row, index);
#end
    if (index < ROUTES) {
#if CHOOSE
        let route = Route(chosen[index], weight);
        if (first && slice.expert0 == 0u) {
            routes[row * ROUTES + index] = route;
        }
#else
        let route = routes[row * ROUTES + index];
#end
        // Of experts before the slice, this is a great number.
        let expert = route.expert - slice.expert0;
        let here = expert < slice.rows / slice.expert_rows;
        bases[index] = select(0u, expert * slice.expert_rows, here);
        factors[index] = select(0.0, route.weight, here);
        present[index] = select(0u, 1u, here);
    }
    workgroupBarrier();
}
#else
fn find_experts(row: u32, index: u32, first: bool) {
}
#end

#if SPREAD
fn outputs_of_row() -> u32 {
    return ROUTES * slice.expert_rows;
}

// The row of the slice that makes an output, and whether it has it.
fn row_of(output: u32) -> u32 {
    return bases[output / slice.expert_rows] + output % slice.expert_rows;
}

fn is_here(output: u32) -> bool {
    return output < outputs_of_row() && present[output / slice.expert_rows] == 1u;
}

// Where an output of a row of the pass is in y.
fn place_of(row: u32, output: u32) -> u32 {
    return row * ROUTES * slice.stride + output / 2u;
}
#else
#if SUMMED
fn outputs_of_row() -> u32 {
    return slice.expert_rows;
}
#else
fn outputs_of_row() -> u32 {
    return slice.rows;
}
#end

fn row_of(output: u32) -> u32 {
    return output;
}

fn is_here(output: u32) -> bool {
    return output < outputs_of_row();
}

fn place_of(row: u32, output: u32) -> u32 {
#if GATED
    return row * slice.stride + (slice.row0 + output) / 2u;
#else
    return row * slice.stride + slice.row0 + output;
#end
}
#end

#if SUMMED
fn units_of_row() -> u32 {
    return ROUTES * slice.units;
}

// Where a unit of the inputs has its weight, and the factor of that.
fn row_at(row: u32, unit: u32) -> u32 {
    return bases[unit / slice.units] + row;
}

fn unit_at(unit: u32) -> u32 {
    return unit % slice.units;
}

fn factor_at(unit: u32) -> f32 {
    return factors[unit / slice.units];
}
#else
fn units_of_row() -> u32 {
    return slice.units;
}

fn row_at(row: u32, unit: u32) -> u32 {
    return row;
}

fn unit_at(unit: u32) -> u32 {
    return unit;
}

fn factor_at(unit: u32) -> f32 {
    return 1.0;
}
#end
