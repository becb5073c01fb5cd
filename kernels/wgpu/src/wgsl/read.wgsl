// Reads all of x once, and leaves a sum of it where no compiler can tell that nobody reads it.

@group(0) @binding(0) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> sums: array<u32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    var sum = vec4<u32>();
    let first = group.x * 256u * EACH + index;
#for i in EACH
    sum += x[first + $iu * 256u];
#end
    if (sum.x + sum.y + sum.z + sum.w == 1u) {
        sums[0] = 1u;
    }
}
