// The greatest logit of a part of a row, and its token: of equal ones the first. What is not finite is told by a token
// of 0xffffffff.

@group(0) @binding(0) var<storage, read> logits: array<f32>;         // [rows, VOCAB]
@group(0) @binding(1) var<storage, read_write> best: array<vec2<u32>>; // [rows, DRAW_PARTS]: bits of the logit, token

var<workgroup> logit_of: array<f32, 256>;
var<workgroup> token_of: array<u32, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let begin = group.y * PER_PART;
    let end = min(begin + PER_PART, VOCAB);
    var most = LEAST;
    var token = min(begin + index, VOCAB - 1u);
    var broken = false;
    for (var i = begin + index; i < end; i += 256u) {
        let logit = logits[group.x * VOCAB + i];
        broken = broken || (bitcast<u32>(logit) & 0x7f800000u) == 0x7f800000u;
        if (logit > most) {
            most = logit;
            token = i;
        }
    }
    logit_of[index] = most;
    token_of[index] = select(token, 0xffffffffu, broken);
    for (var width = 128u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if (index < width) {
            let a = token_of[index];
            let b = token_of[index + width];
            let greater = logit_of[index + width] > logit_of[index];
            let first = logit_of[index + width] == logit_of[index] && b < a;
            let taken = greater || first;
            logit_of[index] = select(logit_of[index], logit_of[index + width], taken);
            token_of[index] = select(select(a, b, taken), 0xffffffffu, max(a, b) == 0xffffffffu);
        }
    }
    workgroupBarrier();
    if (index == 0u) {
        best[group.x * DRAW_PARTS + group.y] = vec2<u32>(bitcast<u32>(logit_of[0]), token_of[0]);
    }
}
