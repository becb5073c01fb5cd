// The online softmax of the kernels of attention (arXiv 2205.14135): of each query, scores of 64 keys become weights, and
// what shrinks the sums so far.

var<workgroup> scores: array<f32, QUERIES * 64>;
var<workgroup> reduced: array<f32, 256>;
var<workgroup> greatest: array<f32, QUERIES>;
var<workgroup> total: array<f32, QUERIES>;
var<workgroup> shrunk: array<f32, QUERIES>;

fn soften(index: u32) {
    // Eight invocations for each query.
    let query = min(index / 8u, QUERIES - 1u);
    var most = NOTHING;
    for (var i = 0u; i < 8u; i++) {
        most = max(most, scores[query * 64u + index % 8u * 8u + i]);
    }
    reduced[index] = most;
    workgroupBarrier();
    most = greatest[query];
    for (var i = 0u; i < 8u; i++) {
        most = max(most, reduced[index / 8u * 8u + i]);
    }
    workgroupBarrier();
    var sum = 0.0;
    if (index < 8u * QUERIES) {
        for (var i = 0u; i < 8u; i++) {
            let at = query * 64u + index % 8u * 8u + i;
            // Before the first key that a query sees, nothing counts.
            let weight = select(exp(scores[at] - most), 0.0, scores[at] == NOTHING);
            scores[at] = weight;
            sum += weight;
        }
    }
    reduced[index] = sum;
    workgroupBarrier();
    if (index < 8u * QUERIES && index % 8u == 0u) {
        let shrinks = exp(greatest[query] - most);
        var all = total[query] * shrinks;
        for (var i = 0u; i < 8u; i++) {
            all += reduced[index + i];
        }
        total[query] = all;
        shrunk[query] = shrinks;
        greatest[query] = most;
    }
    workgroupBarrier();
}
